"""Tests of build.rs on simulated machines: when it compiles which kernels, and when it does without.

The step `build-script/self-test` runs them; by hand, `python3 -m unittest testing.build_selftest` in
scripts/.
"""

import os
import pathlib
import subprocess
import tempfile
import unittest

from testing import architectures
from testing.machine import NVCC, Machine
from testing.step import ROOT

# One that works, and lists what it compiled.
_COMPILER = f"""case "$1" in --version) {NVCC}; exit ;; --list-gpu-arch) exit ;; esac
case "${{@: -1}}" in
*)
    while [ "$1" != -o ]; do shift; done
    echo > "$2"
    echo "${{@: -1}}" >> compiled ;;
esac"""


class BuildScript(unittest.TestCase):
    """build.rs builds without kernels only if there is no nvcc or nobody wants them."""

    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(cls.folder.cleanup)
        cls.program = pathlib.Path(cls.folder.name) / "build-script"
        subprocess.run(("rustc", "--edition", "2024", str(ROOT / "build.rs"), "-o",
                        str(cls.program)), check=True, cwd=ROOT)

    def build(self, nvcc: str, machine: Machine | None = None, fails: bool = False, **settings: str) -> str:
        """What build.rs says of a tree with one kernel; the shell script `nvcc` stands in for nvcc."""
        if machine is None:
            machine = Machine(self)
            machine.write("cuda/kernel.cu")
        if nvcc:
            machine.command("nvcc", nvcc)
        machine.environment.update(CARGO_MANIFEST_DIR=str(machine.root), OUT_DIR=str(machine.root), **settings)
        return (machine.fails if fails else machine.succeeds)(str(self.program))

    def test_no_compiler(self):
        if os.path.exists("/usr/local/cuda/bin/nvcc"):
            self.skipTest("this machine has a tool kit in the usual place")
        self.assertIn("cargo::warning=built without the CUDA backend: no nvcc", self.build(""))
        self.build("", fails=True, NCCL_EP_CUDA="require")

    def test_a_compiler_that_fails_is_an_error(self):
        failing = f'case "$1" in --version) {NVCC} ;; -*arch) ;; *) exit 1 ;; esac'
        said = self.build(failing, fails=True)
        self.assertIn("cargo::error=", said)
        self.assertIn("NCCL_EP_CUDA=off", said)
        self.build(failing, NCCL_EP_CUDA="off")
        self.build("exit 1", fails=True)
        # It shows the command, with the architectures that were asked for.
        asked = self.build(failing, fails=True, NCCL_EP_ARCHS="90 100+ptx,120?")
        self.assertIn("arch=compute_90,code=[sm_90]", asked)
        self.assertIn("arch=compute_100,code=[sm_100,compute_100]", asked)
        self.assertNotIn("120", asked)
        self.build("", fails=True, NVCC="/no/such/nvcc")

    def test_a_compiler_that_is_too_old_is_named(self):
        old = NVCC.replace("13.0", "12.6")
        self.assertIn("nvcc is of CUDA 12.6, and 12.8 is the oldest that suits",
                      self.build(f'case "$1" in --version) {old} ;; esac', fails=True))

    def test_a_compiler_that_works(self):
        self.assertIn("cargo::rustc-cfg=nccl_ep_cuda", self.build(_COMPILER))

    def test_cargo_looks_again_only_at_what_chooses_the_compiler(self):
        def watched(**settings: str) -> set[str]:
            mark = "cargo::rerun-if-env-changed="
            said = self.build(_COMPILER, **settings).splitlines()
            return {line.removeprefix(mark) for line in said if line.startswith(mark)}

        machine = Machine(self)
        machine.tool_kit()
        nvcc = machine.environment["CUDA_HOME"] + "/bin/nvcc"
        machine.command(nvcc, _COMPILER)
        self.assertEqual(watched(NCCL_EP_CUDA="off"), {"NCCL_EP_CUDA"})
        self.assertEqual(watched(NVCC=nvcc), {"NCCL_EP_CUDA", "NCCL_EP_ARCHS", "NVCC"})
        self.assertIn("PATH", watched())

    def test_kernels_are_compiled_again_only_if_they_or_the_compiler_change(self):
        machine = Machine(self)
        machine.write("cuda/base.cuh")
        machine.write("cuda/a/rows.cuh", '#include "../base.cuh"\n')
        machine.write("cuda/a/one.cu", '#include "rows.cuh"\n')
        machine.write("cuda/b/one.cu", "")
        log = machine.root / "compiled"

        def compiled(nvcc: str = _COMPILER, **settings: str) -> list[str]:
            log.unlink(missing_ok=True)
            self.build(nvcc, machine, **settings)
            units = log.read_text().splitlines() if log.exists() else []
            return sorted(str(pathlib.Path(unit).relative_to(machine.root)) for unit in units)

        both = ["cuda/a/one.cu", "cuda/b/one.cu"]
        self.assertEqual(compiled(), both)
        self.assertEqual(compiled(PATH=machine.environment["PATH"] + ":/more"), [])
        self.assertEqual(compiled(NCCL_EP_CUDA="require", VIRTUAL_ENV="/venv"), [])
        (machine.root / "cuda/base.cuh").touch()
        self.assertEqual(compiled(), [])
        machine.write("cuda/base.cuh", "// other words\n")
        self.assertEqual(compiled(), both[:1])
        (machine.root / "b_one.fatbin").unlink()
        self.assertEqual(compiled(), both[1:])
        self.assertEqual(compiled(NCCL_EP_ARCHS="90"), both)
        self.assertEqual(compiled(_COMPILER.replace("13.0.88", "13.0.99")), both)
        # One that fails leaves what the others made.
        machine.write("cuda/a/one.cu", "// a mistake")
        failing = _COMPILER.replace("*)", "*/a/one.cu) exit 1 ;; *)")
        machine.write("cuda/b/one.cu", "// another change")
        self.build(failing, machine, fails=True)
        self.assertEqual(compiled(), both[:1])
        fatbins = (machine.root / "kernels.rs").read_text()
        self.assertEqual([fatbins.count(f"{name}_one.fatbin") for name in "ab"], [1, 1])

    def test_several_kernels_are_compiled_at_a_time(self):
        machine = Machine(self)
        for name in ("one", "two"):
            machine.write(f"cuda/{name}.cu")
        # Each is ready as soon as the other one has begun.
        meets = _COMPILER.replace("*)", """*)
            touch "$PWD/begun.$(basename "${@: -1}")"
            for _ in $(seq 600); do [ $(ls begun.* | wc -l) = 2 ] && break; sleep 0.1; done
            [ $(ls begun.* | wc -l) = 2 ] || exit 1""")
        self.build(meets, machine, NUM_JOBS="2")


class OtherArchitectures(unittest.TestCase):
    """Those for which PTX of the library serves need no compiling."""

    def test_ptx_serves_those_for_which_sources_say_the_same(self):
        like_ptx = [(arch, made) for made in ("90+ptx", "90", "80+ptx") for arch in ("80", "89", "100")
                    if architectures.is_like_ptx(arch, made)]
        self.assertEqual(like_ptx, [("100", "90+ptx"), ("80", "80+ptx")])


if __name__ == "__main__":
    unittest.main()
