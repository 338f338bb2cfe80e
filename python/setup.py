"""Names the platform in the wheel's file name if the wheel carries the library; see `make wheel`.

Everything else is in pyproject.toml.
"""

import pathlib
import sysconfig

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel

_LIBRARY = pathlib.Path(__file__).resolve().parent / "nccl_ep" / "lib" / "libnccl_ep.so"


class Wheel(bdist_wheel):
    """Python code for any Python 3, and possibly a library for one platform."""

    def finalize_options(self):
        super().finalize_options()
        self.root_is_pure = not _LIBRARY.exists()

    def get_tag(self):
        if self.root_is_pure:
            return super().get_tag()
        return "py3", "none", sysconfig.get_platform().replace("-", "_").replace(".", "_")


setup(cmdclass={"bdist_wheel": Wheel})
