"""Makes a wheel that carries the library one for its platform and any Python; see `make wheel`.

Everything else is in pyproject.toml.
"""

import pathlib
import re

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel

_PACKAGE = pathlib.Path(__file__).resolve().parent / "nccl_ep"
_LIBRARY = _PACKAGE / "lib" / "libnccl_ep.so"
# By e_machine of the ELF header: the library may be another machine's than this one.
_MACHINES = {62: "x86_64", 183: "aarch64"}
# The oldest glibc that a manylinux tag of this form can name.
_OLDEST_GLIBC = (2, 17)


def manylinux() -> str:
    """The tag of the oldest systems that have all functions of glibc that the libraries use.

    They need nothing else that manylinux leaves out (step abi/needed of the tests).
    """
    libraries = [path.read_bytes() for path in sorted(_LIBRARY.parent.glob("*.so"))]
    versions = re.findall(rb"GLIBC_(\d+)\.(\d+)", b"".join(libraries))
    major, minor = max([_OLDEST_GLIBC, *(tuple(map(int, version)) for version in versions)])
    return f"manylinux_{major}_{minor}_{_MACHINES[int.from_bytes(libraries[0][18:20], 'little')]}"


def version() -> str:
    """That of the package, with the CUDA that compiled the kernels inside, as 0.1.0+cu130; the wheel's name has it."""
    number = re.search(r'__version__ = "(.*)"', (_PACKAGE / "__init__.py").read_text())[1]
    built = _LIBRARY.exists() and re.search(rb"NCCL EP version [^+]+\+cuda([\d.]+)", _LIBRARY.read_bytes())
    return f"{number}+cu{built[1].decode().replace('.', '')}" if built else number


class Package(Distribution):
    """Python code, and possibly a library for one platform."""

    def has_ext_modules(self):
        return _LIBRARY.exists()


class Wheel(bdist_wheel):
    """The library is not an extension module: it works with any Python that loads it."""

    def get_tag(self):
        if self.root_is_pure:
            return super().get_tag()
        return "py3", "none", manylinux()


setup(distclass=Package, cmdclass={"bdist_wheel": Wheel}, version=version())
