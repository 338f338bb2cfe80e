"""Makes a wheel that carries the library one for its platform and any Python; see `make wheel`.

Everything else is in pyproject.toml.
"""

import pathlib
import sysconfig

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel

_LIBRARY = pathlib.Path(__file__).resolve().parent / "nccl_ep" / "lib" / "libnccl_ep.so"


class Package(Distribution):
    """Python code, and possibly a library for one platform."""

    def has_ext_modules(self):
        return _LIBRARY.exists()


class Wheel(bdist_wheel):
    """The library is not an extension module: it works with any Python that loads it."""

    def get_tag(self):
        if self.root_is_pure:
            return super().get_tag()
        return "py3", "none", sysconfig.get_platform().replace("-", "_").replace(".", "_")


setup(distclass=Package, cmdclass={"bdist_wheel": Wheel})
