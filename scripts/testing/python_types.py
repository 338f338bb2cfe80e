"""Checks the types of the Python package, of the Python code in the documents, and what types tell of
results (python/tests/typing_cases.py), by mypy --strict.

PyTorch's interface is the short one of python/tests/typing_stubs: with PyTorch's own the check takes
most of a minute. Its answers have the type Any there, so returning Any is no error.
"""

from __future__ import annotations

import importlib.util
import os
import pathlib
import sys
import tempfile
from types import ModuleType

from testing import command, counts
from testing.step import ROOT, Counts, Places

_TESTS = ROOT / "python" / "tests"


def check(places: Places) -> tuple[Counts, str]:
    """One check: no complaint."""
    documents = _load(_TESTS / "documents.py")
    with tempfile.TemporaryDirectory() as folder:
        files = []
        for path in documents.documents():
            for number, code in enumerate(documents.snippets(path), 1):
                files.append(pathlib.Path(folder) / f"{path.stem.replace('-', '_')}_{number}.py")
                files[-1].write_text(documents.annotated(code))
        words = (sys.executable, "-m", "mypy", "--strict", "--no-warn-return-any", "--cache-dir",
                 os.devnull, str(ROOT / "python" / "nccl_ep"), str(_TESTS / "typing_cases.py"),
                 *map(str, files))
        environment = {**places.environment, "PYTHONPATH": str(places.deps / "mypy"),
                       "MYPYPATH": f"{ROOT / 'python'}:{_TESTS / 'typing_stubs'}"}
        finished = command.run(words, environment, 120)
    return counts.exit_status(finished), finished.output


def _load(path: pathlib.Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
