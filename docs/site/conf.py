"""The site of the documents, for Sphinx: `make docs`. Pages are the Markdown files where they are; the references of
the header and of the Python package are made from their sources, without a GPU and without PyTorch."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "python"))


def _with_marked_comments(header: str) -> str:
    """The header with its comments marked as documentation, which is what hawkmoth reads."""
    def marked(lines: re.Match[str]) -> str:
        text = re.sub(r"(?m)^ *// ?", " * ", lines[0])
        text = re.sub(r"(?m)^ \* @param +(\w+) +", r" * :param \1: ", text)
        return "/**\n" + re.sub(r"(?m)^ \* {6,}", " *     ", text) + " */\n"

    about, contract = header.split("#pragma once", 1)  # the page shows what the file says about itself
    return re.sub(r"(?m)(?:^ *//.*\n)+", marked, f"#pragma once{contract}")


_header = pathlib.Path(tempfile.mkdtemp(prefix="nccl_ep-docs"), "nccl_ep.h")
_header.write_text(_with_marked_comments((ROOT / "include" / "nccl_ep.h").read_text()))

project = "nccl-ep"
version = re.search(r'(?m)^version = "(.*)"', (ROOT / "Cargo.toml").read_text())[1]
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "hawkmoth", "sphinx_copybutton"]
root_doc = "docs/site/index"
include_patterns = ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "docs/**.md", "cuda/README.md",
                    "c_tests/README.md", "c_tests/*/README.md", "hostsim/README.md", "bench/README.md",
                    "examples/**.md", "python/README.md"]

# A link that leads nowhere is a warning, which fails the build; one to a file that is no page becomes a download.
myst_heading_anchors = 4
default_role = "code"  # comments of sources quote with single backticks, as Markdown does

autodoc_mock_imports = ["torch"]
autodoc_typehints = "description"
autodoc_member_order = "bysource"
hawkmoth_root = str(_header.parent)
hawkmoth_autoconf = []  # it would ask a clang, which is not needed
_compilers_own = subprocess.run(["gcc", "-print-file-name=include"], capture_output=True, text=True, check=True)
hawkmoth_clang = [f"-I{folder}" for folder in (
    _compilers_own.stdout.strip(), f"{os.environ['CUDA_HOME']}/include", os.environ["NCCL_INCLUDE"])]

html_theme = "furo"
html_title = f"nccl-ep {version}"
html_extra_path = ["index.html"]


def _with_field_lists(_app, _what, _name, _object, _options, lines: list[str]) -> None:
    """Docstrings list parameters in two columns; here each becomes a field."""
    for index, line in enumerate(lines):
        if found := re.match(r"(\S[^`]*?)  +(\S.*)$", line):
            lines[index] = f":{found[1]}: {found[2]}"
        elif re.match(r" {8,}\S", line):
            lines[index] = f"    {line.strip()}"


def setup(app) -> None:
    app.connect("autodoc-process-docstring", _with_field_lists)
