"""What the parts of the package on tensors say where PyTorch is missing."""

from __future__ import annotations

import importlib.util


def require_torch(what: str) -> None:
    """Raises ImportError, with what to install, if there is no PyTorch."""
    if importlib.util.find_spec("torch") is None:
        raise ImportError(f"{what} needs PyTorch 2.4 or newer, which is not installed: "
                          "pip install torch (or 'nccl_ep[torch]'). nccl_ep.NCCLLibrary works "
                          "without it.", name="torch")
