"""The Python code in the documents, and the names that it may use without defining them."""

import pathlib
import re

ROOT = pathlib.Path(__file__).resolve().parents[2]

# Name -> type. test_documents.py gives the values; the type checker gets these annotations.
NAMES = {
    "ep_group": "dist.ProcessGroup | None",
    **dict.fromkeys(("rank", "world_size", "local_world_size", "max_tokens", "hidden", "topk",
                     "top_k", "num_experts", "num_tot_experts"), "int"),
    **dict.fromkeys(("tokens", "input", "expert_ids", "exp_indices", "topk_idx", "gate_weights",
                     "weight", "topk_weights"), "torch.Tensor"),
    "experts": "Callable[..., torch.Tensor]",
}


def documents() -> list[pathlib.Path]:
    """Those whose Python code runs as it stands; a package for a machine with GPUs has few."""
    return [path for path in (ROOT / "README.md", ROOT / "docs" / "python.md",
                              *sorted((ROOT / "docs" / "guide").glob("*.md"))) if path.exists()]


def snippets(document: pathlib.Path) -> list[str]:
    """The blocks of Python code in a document, in order."""
    return re.findall(r"^```python\n(.*?)^```", document.read_text(), re.M | re.S)


def annotated(code: str) -> str:
    """A module that declares the names and has the code, for a type checker."""
    declared = "\n".join(f"{name}: {kind}" for name, kind in NAMES.items())
    return ("from collections.abc import Callable\nimport torch\nimport torch.distributed as dist\n"
            f"{declared}\n\n{code}")
