#!/usr/bin/env python3
"""Makes PyTorch's wheel for CUDA importable without 2 GB of CUDA libraries that a CPU never calls.

PyPI has no CPU-only wheel of PyTorch for Linux on x86. The wheel for CUDA can do all that the tests
need, but the loader requires the libraries that it is linked with. This script writes a placeholder
for each: a shared library with the names that PyTorch looks up and no functions, so that a call
ends the process. Only the CUDA runtime is real, because it registers kernels on loading. Takes the
folder of the wheels.
"""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys

# Loaded on demand, only with a GPU.
_OPTIONAL = ("libtorch_cuda_linalg.so", "libcaffe2_nvrtc.so")
_REAL = "libcudart.so.13"
_CUDA_LIBRARY = re.compile(r"lib(cu|nccl|nvshmem|nvrtc|nvjitlink)")
_CUDA_NAME = re.compile(r"(cu|nccl|nvshmem)")


def main() -> None:
    wheels = pathlib.Path(sys.argv[1])
    # PyTorch's libraries search here, and the wheel of the CUDA runtime installs here.
    target = wheels / "nvidia" / "cu13" / "lib"
    libraries = [path for path in sorted((wheels / "torch" / "lib").glob("*.so")) if path.name not in _OPTIONAL]
    wanted = sorted({name for path in libraries for name in _needed(path) if _CUDA_LIBRARY.match(name)} - {_REAL})
    versions = {version: soname for path in libraries for soname, version in _versions(path)}
    names: dict[str, set[str]] = {soname: set() for soname in wanted}
    for path in libraries:
        for name, version in _undefined(path):
            if version:
                names.get(versions.get(version, ""), set()).add(name)
            elif _CUDA_NAME.match(name):
                # The loader finds names without a version in any loaded library.
                names["libcufile.so.0"].add(name)
    for soname in wanted:
        version = next((each for each, of in versions.items() if of == soname), "")
        _write(target / soname, sorted(names[soname]), version)


def _lines(*command: str) -> list[str]:
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return done.stdout.splitlines()


def _needed(path: pathlib.Path) -> list[str]:
    return re.findall(r"NEEDED.*\[(.*)\]", "\n".join(_lines("readelf", "-dW", str(path))))


def _versions(path: pathlib.Path) -> list[tuple[str, str]]:
    """Pairs of a library and a version name that `path` needs from it."""
    pairs, soname = [], ""
    for line in _lines("readelf", "-VW", str(path)):
        if found := re.search(r"File: (\S+)", line):
            soname = found[1]
        elif (found := re.search(r"Name: (\S+)", line)) and _CUDA_LIBRARY.match(soname):
            pairs.append((soname, found[1]))
    return pairs


def _undefined(path: pathlib.Path) -> list[tuple[str, str]]:
    symbols = (line.split()[-1] for line in _lines("nm", "-D", "--undefined-only", "--with-symbol-versions", str(path)))
    return [(name, version) for name, _, version in (each.partition("@") for each in symbols)]


def _write(path: pathlib.Path, names: list[str], version: str) -> None:
    source = "".join(f"void {name}(void) {{ __builtin_trap(); }}\n" for name in names)
    script = path.with_suffix(".version")
    command = ["gcc", "-w", "-shared", "-fPIC", "-fno-builtin", "-nostdlib", "-x", "c", "-",
               f"-Wl,-soname,{path.name}", "-o", str(path)]
    if version:
        script.write_text(f"{version} {{ *; }};\n")
        command.append(f"-Wl,--version-script={script}")
    subprocess.run(command, input=source, text=True, check=True)
    script.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
