"""Whether the kernels compile for the architectures that the build of the library leaves out.

Continuous integration, whose machines have no GPU, makes machine code for one architecture
(NCCL_EP_ARCHS). For the others of build.rs every rule of the compiler and the assembler is asked here,
almost without optimising, in a fourteenth of the time; but not for those for which the sources say what they say for
the PTX that the library has, as all later chips run that. What it makes is held to budgets of code (cuda/budgets.csv).
"""

from __future__ import annotations

import pathlib
import re
import tempfile
from collections.abc import Mapping

from testing import command, counts
from testing.step import ROOT, Counts, Places, Step

_DEFAULT = re.compile(r'DEFAULT_ARCHS: &str = "(.*)"')
# Sources differ between architectures at these, in tens.
_BOUNDARY = re.compile(r"__CUDA_ARCH__ >= (\d+)0\b")


def steps(places: Places) -> list[Step]:
    """The steps; none if the build leaves nothing out."""
    environment = places.environment
    if environment.get("NCCL_EP_CUDA") == "off" or not {"NVCC", "NCCL_EP_ARCHS"} <= environment.keys():
        return []
    found = [Step("build/other-architectures", lambda: _compile(environment, places.libraries), needs=("build/lib",))]
    has_tool = (pathlib.Path(environment.get("CUDA_HOME", "")) / "bin" / "cuobjdump").exists()
    if has_tool and "90" in _named(environment["NCCL_EP_ARCHS"]):
        sizes = ("python3", "scripts/kernel_sizes.py", str(places.libraries.parent), "--check")
        found.append(Step("build/kernel-sizes", sizes, counts.closing_line, ("build/lib",)))
    return found


def _named(text: str) -> set[str]:
    return set(re.findall(r"\d+[a-z]?", text))


def is_like_ptx(arch: str, made: str) -> bool:
    """Whether the sources are, for an architecture, those of PTX among what was made, such as `90+ptx`."""
    text = "".join(file.read_text() for file in sorted((ROOT / "cuda").rglob("*.cu*")))
    boundaries = [int(each) for each in _BOUNDARY.findall(text)]
    return arch.isdigit() and any(
        int(ptx) <= int(arch) and not any(int(ptx) < each <= int(arch) for each in boundaries)
        for ptx in re.findall(r"(\d+)\+ptx", made))


def _compile(environment: Mapping[str, str], libraries: pathlib.Path) -> tuple[Counts, str]:
    [default] = _DEFAULT.findall((ROOT / "build.rs").read_text())
    nvcc = environment["NVCC"]
    known = command.run((nvcc, "--list-gpu-arch"), environment, 60).output
    made = environment["NCCL_EP_ARCHS"]
    left_out = {each for each in (_named(default) - _named(made)) & _named(known) if not is_like_ptx(each, made)}
    if not left_out:
        return Counts(0, 0, skipped="the library has all that this nvcc knows"), ""
    # Older ones cannot but leave out all of it, which keeps what debuggers want and takes twice as long.
    knows = "--Ofast-compile" in command.run((nvcc, "--help"), environment, 60).output
    quickly = ("-Ofc", "max") if knows else ("-G",)
    generate = [f"-gencode=arch=compute_{each},code=sm_{each}" for each in sorted(left_out)]
    with tempfile.TemporaryDirectory() as folder:
        # One unit, since each would parse CUDA's headers again.
        unit = pathlib.Path(folder) / "kernels.cu"
        unit.write_text("".join(f'#include "{file}"\n' for file in sorted((ROOT / "cuda").rglob("*.cu"))))
        words = (nvcc, "-std=c++17", *quickly, "--fatbin", f"-I{libraries}", *generate,
                 "-o", f"{unit}.fatbin", str(unit))
        finished = command.run(words, environment, None)
    return counts.exit_status(finished), finished.output
