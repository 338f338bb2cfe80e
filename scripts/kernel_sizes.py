#!/usr/bin/env python3
"""What each kernel takes on a GPU, for sm_90: bytes of code and, of these, of functions that are not inlined, which run
after a failure or seldom; registers, stack and static shared memory.

Usage: kernel_sizes.py TARGET [--check]: cargo's target folder, where a release was built with kernels. With --check,
each kernel must be within its budget of bytes in cuda/budgets.csv, as a kernel's code is a cost (cuda/README.md); that
of NAME_bf16 is also that of NAME_f16. Ends with "N passed, N failed" then.
"""

from __future__ import annotations

import argparse
import collections
import csv
import os
import pathlib
import re
import subprocess
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[1]
BUDGETS = ROOT / "cuda" / "budgets.csv"
ARCHITECTURE = "sm_90"
_USAGE = re.compile(r"Function (\w+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+)")
_CODE = re.compile(r"\[\s*(\d+)\] \.text\.(\w+)\s+PROGBITS\s+\S+\s+\S+\s+([0-9a-f]+)")
_FUNCTION = re.compile(r":\s+[0-9a-f]+\s+(\d+)\s+FUNC\s+\w+\s+\w+\s.*?\s(\d+) \$")


def run(*words: str | pathlib.Path, folder: str | None = None) -> str:
    return subprocess.run(words, cwd=folder, check=True, text=True, capture_output=True).stdout


def images(target: pathlib.Path) -> list[pathlib.Path]:
    """The newest build's images of kernels."""
    folders = {image.parent for image in target.glob("release/build/nccl-ep-core-*/out/*.fatbin")}
    if not folders:
        raise SystemExit(f"kernel_sizes.py: no kernels below {target}: build the library first")
    newest = max(folders, key=lambda folder: max(image.stat().st_mtime for image in folder.glob("*.fatbin")))
    # Those that the library embeds; others may be left of sources that have gone.
    return sorted(map(pathlib.Path, re.findall(r'"(.+?\.fatbin)"', (newest / "kernels.rs").read_text())))


def measure(cuobjdump: str, image: pathlib.Path) -> dict[str, tuple[int, ...]]:
    """By kernel: bytes of code, of functions among them, registers, stack, shared memory."""
    with tempfile.TemporaryDirectory() as folder:
        run(cuobjdump, "-xelf", ARCHITECTURE, image, folder=folder)
        [code] = pathlib.Path(folder).glob(f"*.{ARCHITECTURE}.cubin")
        sections = {name: (number, int(size, 16)) for number, name, size in _CODE.findall(run("readelf", "-SW", code))}
        called: collections.Counter[str] = collections.Counter()
        for size, section in _FUNCTION.findall(run("readelf", "-sW", code)):
            called[section] += int(size)
        usage = {name: tuple(map(int, rest)) for name, *rest in _USAGE.findall(run(cuobjdump, "-res-usage", code))}
    # Each section is a kernel's, with the functions that it calls.
    return {name: (size, called[section], *usage[name]) for name, (section, size) in sections.items()}


def check(kernels: dict[str, tuple[int, ...]]) -> int:
    failed = 0
    with BUDGETS.open() as file:
        budgets = {row["kernel"]: int(row["bytes"]) for row in csv.DictReader(file)}
    budgets |= {name.replace("_bf16", "_f16"): budget for name, budget in budgets.items()}
    for name, budget in budgets.items():
        size = kernels[name][0] if name in kernels else None
        if size is None or size > budget:
            failed += 1
            print(f"{name}: {'no such kernel' if size is None else f'{size} bytes of code'}, budget {budget}")
    for name in kernels.keys() - budgets.keys():
        failed += 1
        print(f"{name}: no budget in {BUDGETS.relative_to(ROOT)}")
    print(f"{len(budgets.keys() | kernels.keys()) - failed} passed, {failed} failed")
    return 1 if failed else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("target", type=pathlib.Path)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    cuobjdump = str(pathlib.Path(os.environ["CUDA_HOME"]) / "bin" / "cuobjdump")
    kernels: dict[str, tuple[int, ...]] = {}
    for image in images(arguments.target.resolve()):
        kernels |= measure(cuobjdump, image)
    print(f"{'kernel, for ' + ARCHITECTURE:34} {'bytes':>7} {'called':>7} {'registers':>9} {'stack':>6} {'shared':>7}")
    for name, row in sorted(kernels.items()):
        print(f"{name:34} {row[0]:7} {row[1]:7} {row[2]:9} {row[3]:6} {row[4]:7}")
    return check(kernels) if arguments.check else 0


if __name__ == "__main__":
    raise SystemExit(main())
