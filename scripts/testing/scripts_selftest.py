"""Tests of the scripts for set-up and runs, on simulated machines: fake GPUs, MPI,
NCCL and tool kits in a temporary folder, without a network.

The step `scripts/self-test` runs them; by hand, `python3 -m unittest testing.scripts_selftest` in
scripts/.
"""

import hashlib
import os
import pathlib
import shutil
import subprocess
import unittest
import zipfile

import gpus
from testing.machine import NVCC, Machine
from testing.step import ROOT

_OPEN_MPI = "echo 'mpirun (Open MPI) 4.1.4'"
# Stands in for pip: `pip download --dest FOLDER` copies a wheel from beside it.
_PIP = """case "$*" in
    "-m pip --version") ;;
    "-m pip download"*)
        while [ "$1" != --dest ]; do shift; done
        mkdir -p "$2" && cp "$(dirname "$0")/nccl.whl" "$2/" ;;
    *) exec {python} "$@" ;;
esac"""


def _stamp(part: str) -> str:
    """What marks a part as installed."""
    return hashlib.sha256((ROOT / "scripts" / f"{part}-requirements.lock").read_bytes()).hexdigest()


class Gpus(unittest.TestCase):
    """The number of usable GPUs, and the place of their NCCL."""

    def test_visible_devices(self):
        for chosen, expected in ((None, "0 1 2 3"), ("", ""), ("2", "2"), ("0,1", "0 1"),
                                 (" 3 , 1", "3 1"), ("0,7,1", "0"), ("0,-1,1", "0"), ("-1", ""),
                                 ("GPU-a,MIG-b", "GPU-a MIG-b")):
            environment = {} if chosen is None else {"CUDA_VISIBLE_DEVICES": chosen}
            self.assertEqual(gpus.visible(4, environment), tuple(expected.split()), chosen)

    def test_count(self):
        machine = Machine(self)
        machine.gpus(8)
        self.assertEqual(machine.run("scripts/gpus.py", "count").stdout, "8\n")
        machine.environment["CUDA_VISIBLE_DEVICES"] = "0,1"
        self.assertEqual(machine.run("scripts/gpus.py", "count").stdout, "2\n")
        machine.command("nvidia-smi", "exit 9")
        expected = "1\n" if os.path.exists("/dev/nvidiactl") else "0\n"
        self.assertEqual(machine.run("scripts/gpus.py", "count").stdout, expected)

    def test_nccl_is_found_in_order(self):
        machine = Machine(self)
        if machine.run("scripts/gpus.py", "nccl").stdout == f"{gpus.SYSTEM}\n":
            self.skipTest("the loader of this machine has an NCCL")
        # Last choice first; each later one takes precedence over those before.
        for folder, variable in ((".deps/nccl-library/nvidia/nccl/lib", ""),
                                 ("beside/nccl-library/nvidia/nccl/lib", "NCCL_EP_DEPS"),
                                 ("wheels/nvidia/nccl/lib", "PYTHONPATH"),
                                 ("home/lib", "NCCL_HOME")):
            machine.write(f"{folder}/libnccl.so.2")
            if variable:
                machine.environment[variable] = str(machine.root / folder.split("/")[0])
            found = machine.run("scripts/gpus.py", "nccl")
            self.assertEqual((found.stdout, found.returncode), (f"{machine.root / folder}\n", 0))
        library = machine.root / "loaded" / "libnccl.so.2"
        library.parent.mkdir()
        subprocess.run(("gcc", "-shared", "-x", "c", "/dev/null", "-o", str(library)), check=True)
        machine.environment["LD_LIBRARY_PATH"] = str(library.parent)
        self.assertEqual(machine.run("scripts/gpus.py", "nccl").stdout, f"{gpus.SYSTEM}\n")


class Setup(unittest.TestCase):
    """setup.sh fetches only what the build needs."""

    def test_the_library_needs_no_mpi(self):
        machine = Machine(self)
        machine.tool_kit()
        machine.succeeds("scripts/setup.sh", "--library")
        self.assertIn("missing: openmpi-bin libopenmpi-dev", machine.fails("scripts/setup.sh"))

    def test_another_mpi_is_no_obstacle_for_the_library(self):
        machine = Machine(self)
        machine.tool_kit()
        for command in ("mpirun", "mpicc", "pkg-config"):
            machine.command(command, "echo 'HYDRA build details'")
        machine.succeeds("scripts/setup.sh", "--library")
        self.assertIn("is not Open MPI's", machine.run("scripts/setup.sh").stdout)

    def test_a_library_without_kernels_needs_no_cuda(self):
        machine = Machine(self)
        machine.environment["NCCL_EP_CUDA"] = "off"
        done = machine.run("scripts/setup.sh", "--library")
        self.assertEqual((done.returncode, done.stdout), (0, ""))
        self.assertFalse((machine.root / ".deps").exists())

    def test_what_read_only_sources_need_lies_beside_the_build(self):
        machine = Machine(self)
        for path in (machine.root.parent, machine.root, *machine.root.rglob("*")):
            path.chmod(0o755)
        self.addCleanup(machine.root.chmod, 0o755)
        # Root may write everywhere.
        other = {"user": 65534, "group": 65534, "extra_groups": ()} if os.getuid() == 0 else {}

        for command in ("cargo", "python3"):
            machine.command(command, "")
        build = machine.root.parent / "build"
        build.mkdir()
        build.chmod(0o777)

        def said(command: str) -> str:
            try:
                return subprocess.run(
                    ("bash", "-c", f". scripts/env.sh && {command}"), cwd=machine.root,
                    env={"PATH": f"{machine.tools}:{os.defpath}", "CARGO_TARGET_DIR": str(build),
                         "NCCL_EP_CUDA": "off"},
                    stdout=subprocess.PIPE, text=True, check=True, **other).stdout
            except OSError:
                self.skipTest("nothing can run as another user here")

        machine.root.chmod(0o555)
        self.assertEqual(said("echo $NCCL_EP_DEPS"), f"{build}/deps\n")
        self.assertIn(f"\nNCCL_EP_DEPS={build}/deps\n", said("env"), "Python needs it, too")
        # What was fetched before is linked, what is missing comes beside it.
        machine.root.chmod(0o755)
        machine.write(".deps/wheel/.stamp", _stamp("wheel"))
        (machine.root / ".deps").chmod(0o555)
        machine.root.chmod(0o555)
        self.assertEqual(said("scripts/setup.sh --library --wheel"), "")
        self.assertEqual((build / "deps" / "wheel").readlink(), machine.root / ".deps" / "wheel")
        # A wheel is made in a copy, which goes.
        machine.root.chmod(0o755)
        machine.command("strip", "")
        machine.command("python3", 'for word; do [ "$before" != --wheel-dir ] || '
                                   'touch "$word"/nccl_ep{,_deep_ep}-1.whl; before=$word; done')
        older = f"nccl_ep-0-{os.uname().machine}.whl"
        made = (older, "nccl_ep-1.tar.gz", "libnccl_ep.so", "libncclep_hostsim.so")
        for path in ("LICENSE", "python/deep-ep/setup.py", *(build / "release" / name for name in made)):
            machine.write(path)
        (build / "release").chmod(0o777)
        (machine.root / "python" / "deep-ep").chmod(0o555)
        (build / "tmp").mkdir()
        (build / "tmp").chmod(0o777)
        said(f"TMPDIR={build}/tmp scripts/wheel.sh {build}/release")
        self.assertEqual(list((build / "tmp").iterdir()), [])
        self.assertEqual(sorted(path.name for path in (build / "release").glob("*.whl")),
                         ["nccl_ep-1.whl", "nccl_ep_deep_ep-1.whl"], "an older wheel has gone")

    def test_another_machine_needs_its_tools(self):
        machine = Machine(self)
        machine.tool_kit()
        machine.command("uname", "echo x86_64")
        machine.command("rustc", 'case "$*" in *aarch64*) echo "$PWD/std" ;; esac')
        machine.command("rustup", 'echo "$*"; mkdir std')
        machine.environment["CARGO_BUILD_TARGET"] = "aarch64-unknown-linux-gnu"
        self.assertIn("missing: gcc-aarch64-linux-gnu g++-aarch64-linux-gnu qemu-user",
                      machine.fails("scripts/setup.sh", "--library", "--emulator"))
        machine.command("aarch64-linux-gnu-gcc", "")
        self.assertIn("target add aarch64-unknown-linux-gnu", machine.succeeds("scripts/setup.sh", "--library"))
        self.assertEqual(machine.run("scripts/setup.sh", "--library").stdout, "", "once is enough")
        show = "echo $NCCL_EP_RELEASE $NCCL_EP_TOOLS $CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER"
        found = machine.run("bash", "-c", f". scripts/env.sh; {show}").stdout.split()
        self.assertEqual(found, [f"{machine.root}/target/aarch64-unknown-linux-gnu/release", "aarch64-linux-gnu-",
                                 "aarch64-linux-gnu-gcc"])
        shutil.copy(ROOT / "Makefile", machine.root)
        machine.write("c_tests/Makefile", "clean:\n\t@echo $(EP_LIBDIR)\n")
        machine.command("cargo", "")
        self.assertEqual(machine.run("make", "clean").stdout, f"{found[0]}\n", "programs are linked from there")
        machine.command("uname", "echo aarch64")
        self.assertEqual(machine.run("scripts/setup.sh", "--library").stdout, "", "its own tools serve")

    def test_a_tool_kit_that_is_not_used_is_named(self):
        machine = Machine(self)
        machine.environment["NCCL_EP_CUDA"] = "off"
        home = machine.root / "cuda"
        machine.environment["CUDA_HOME"] = str(home)
        for nvcc, said in (("", f"{home}/bin/nvcc is no program"),
                           (NVCC.replace("13.0", "11.8"), f"{home} has CUDA 11.8, and 12.8 is the oldest that suits")):
            if nvcc:
                machine.tool_kit()
                machine.command(home / "bin" / "nvcc", nvcc)
            done = machine.run("scripts/setup.sh", "--library")
            self.assertEqual(done.stdout, f"setup: CUDA_HOME is not used: {said}\n")
        machine.tool_kit()
        self.assertEqual(machine.run("scripts/setup.sh", "--library").stdout, "")

    def test_the_demonstration_without_a_gpu_needs_no_compiler_for_one(self):
        if os.path.exists("/usr/local/cuda/bin/nvcc") or os.path.exists("/dev/nvidiactl"):
            self.skipTest("this machine has CUDA")
        machine = self._with_mpi()
        python = pathlib.Path(shutil.which("python3")).resolve()
        machine.command("python3", f'case "$*" in *--version) ;; *install*) cat "${{@: -1}}" >> asked ;; '
                                   f'*) exec {python} "$@" ;; esac')
        machine.succeeds("scripts/setup.sh", "--demo")
        asked = (machine.root / "asked").read_text()
        self.assertIn("nvidia-cuda-runtime==", asked)
        self.assertNotIn("nvidia-cuda-nvcc", asked)
        self.assertNotIn("nvidia-nvvm", asked)
        self.assertTrue((machine.root / ".deps/cuda-headers").exists())
        self.assertEqual(machine.run("scripts/setup.sh", "--demo").stdout, "", "once is enough")

    def test_a_missing_rust_is_told_by_the_line_that_installs_it(self):
        machine = Machine(self)
        machine.environment["PATH"] = str(machine.tools)
        for command in ("bash", "dirname", "realpath", "sed", "readlink", "sort", "head", "env", "uname"):
            (machine.tools / command).symlink_to(shutil.which(command))
        said = machine.run("scripts/setup.sh").stdout
        self.assertIn("  curl --proto '=https' --tlsv1.2 -sSf https://sh.rustup.rs | sh", said)

    def _with_mpi(self) -> Machine:
        machine = Machine(self)
        machine.write("nccl/nccl.h")
        machine.environment["NCCL_INCLUDE"] = str(machine.root / "nccl")
        for command in ("mpirun", "mpicc", "cmake", "pkg-config"):
            machine.command(command, _OPEN_MPI)
        return machine

    def test_nccl_is_fetched_for_gpus_only_and_if_there_is_none(self):
        machine = self._with_mpi()
        machine.tool_kit()
        python = pathlib.Path(shutil.which("python3")).resolve()
        machine.command("python3", _PIP.format(python=python))
        with zipfile.ZipFile(machine.tools / "nccl.whl", "w") as wheel:
            for name in ("nvidia/nccl/lib/libnccl.so.2", "nvidia/nccl/include/nccl.h"):
                wheel.writestr(name, "")
        fetched = machine.root / ".deps/nccl-library/nvidia/nccl/lib/libnccl.so.2"

        def set_up(*options: str) -> bool:
            machine.succeeds("scripts/setup.sh", *options)
            return fetched.exists()

        if machine.run("scripts/gpus.py", "nccl").stdout == f"{gpus.SYSTEM}\n":
            self.skipTest("the loader of this machine has an NCCL")
        machine.gpus(2)
        self.assertFalse(set_up(), "only programs on GPUs need it")
        machine.environment["CUDA_VISIBLE_DEVICES"] = ""
        if not os.path.exists("/dev/nvidiactl"):
            self.assertFalse(set_up("--gpu"), "no GPU is used")
        del machine.environment["CUDA_VISIBLE_DEVICES"]
        home = machine.write("home/lib/libnccl.so.2")
        machine.environment["NCCL_HOME"] = str(machine.root / "home")
        self.assertFalse(set_up("--gpu"), "NCCL_HOME has one")
        home.unlink()
        self.assertTrue(set_up("--gpu"))
        self.assertFalse((machine.root / ".deps/nccl-library/nvidia/nccl/include").exists())
        self.assertEqual(machine.run("scripts/setup.sh", "--gpu").stdout, "", "once is enough")
        self.assertEqual(machine.run("scripts/gpus.py", "nccl").stdout, f"{fetched.parent}\n")


class Runs(unittest.TestCase):
    """The other scripts on simulated machines."""

    def test_blanks_in_a_path_are_refused(self):
        # make would split the path, and `make clean` would remove the folder of its first word.
        machine = Machine(self, "tree of mine")
        done = machine.run("bash", "-ec", ". scripts/env.sh; echo too far")
        self.assertEqual((done.returncode, done.stdout.count("\n")), (1, 1), done.stdout)
        self.assertIn("tree of mine", done.stdout)
        machine = Machine(self)
        machine.environment["CARGO_TARGET_DIR"] = "a\tb"
        self.assertIn("without blanks", machine.run("bash", "-ec", ". scripts/env.sh").stdout)

    def test_cargo_builds_where_the_scripts_look(self):
        machine, other = Machine(self), Machine(self)
        for chosen, folder in (({"CARGO_TARGET_DIR": "a", "CARGO_BUILD_TARGET_DIR": "b"}, "a"),
                               ({"CARGO_BUILD_TARGET_DIR": "b"}, "b"), ({}, "target")):
            machine.environment = {**other.environment, **chosen}
            said = machine.run("bash", "-c", ". scripts/env.sh; . scripts/env.sh; echo $NCCL_EP_TARGET; "
                                             "printenv CARGO_TARGET_DIR").stdout
            self.assertEqual(said, f"{machine.root / folder}\n" * 2)
        both = f". scripts/env.sh; . {other.root}/scripts/env.sh; echo $CARGO_TARGET_DIR"
        self.assertEqual(machine.run("bash", "-c", both).stdout, f"{other.root}/target\n", "each tree has its own")

    def test_the_compiler_is_chosen_once(self):
        machine = Machine(self)

        def chosen(before: str = "") -> str:
            done = machine.run("bash", "-c", f"{before} . scripts/env.sh; . scripts/env.sh; "
                                             "echo ${NVCC:-none} ${NCCL_EP_CUDA:-unset}")
            return done.stdout.removeprefix(str(machine.root)).strip()

        if not os.path.exists("/usr/local/cuda/bin/nvcc"):
            self.assertEqual(chosen(), "none unset")
            self.assertEqual(chosen("NCCL_EP_CUDA=require;"), "none require")
        machine.tool_kit()
        self.assertEqual(chosen(), "/cuda/bin/nvcc require")
        self.assertEqual(chosen("PATH=/somewhere/shims:$PATH;"), "/cuda/bin/nvcc require")
        self.assertEqual(chosen("NCCL_EP_CUDA=off;"), "/cuda/bin/nvcc off")
        self.assertEqual(chosen("export NVCC=/my/nvcc;"), "/my/nvcc require")
        machine.command(machine.root / "newer" / "bin" / "nvcc", NVCC)
        machine.write("newer/include/cuda_runtime.h")
        self.assertEqual(chosen(". scripts/env.sh; CUDA_HOME=$PWD/newer;"), "/newer/bin/nvcc require")

    def test_clean_stops_at_a_refusal(self):
        machine = Machine(self, "tree of mine")
        shutil.copy(ROOT / "Makefile", machine.root)
        for command in ("cargo", "rm"):
            machine.command(command, f"echo {command} ran")
        self.assertNotIn("ran", machine.fails("make", "clean"))

    def test_the_demonstration_takes_the_chosen_gpus_and_an_nccl_from_anywhere(self):
        machine = Machine(self)
        machine.gpus(8)
        for command in ("cargo", "make"):
            machine.command(command, "")
        machine.command("mpirun", 'echo "$LD_LIBRARY_PATH: $*"')
        machine.write("home/lib/libnccl.so.2")
        machine.environment.update(NCCL_HOME=str(machine.root / "home"), LD_LIBRARY_PATH="/mine",
                                   CUDA_VISIBLE_DEVICES="4,5")
        nccl = machine.run("scripts/gpus.py", "nccl").stdout.strip()
        done = machine.run("scripts/demo.sh", "--long")
        searched = "/mine" if nccl == gpus.SYSTEM else f"/mine:{machine.root / 'home' / 'lib'}"
        self.assertEqual(done.returncode, 0, done.stdout)
        self.assertEqual(done.stdout.count(f"{searched}: -np 2 "), 3, done.stdout)
        if nccl != gpus.SYSTEM:
            del machine.environment["NCCL_HOME"]
            self.assertIn("no libnccl.so.2", machine.run("scripts/demo.sh").stdout)

    def test_the_demonstration_plays_nodes(self):
        machine = Machine(self)
        for command in ("cargo", "make"):
            machine.command(command, "")
        machine.command("mpirun", 'echo "$*"')
        machine.environment.update(NCCL_HOME=str(machine.root / "home"))
        machine.write("home/lib/libnccl.so.2")
        for gpus_here, ranks, kind in ((0, 8, "host"), (1, 8, "host"), (2, 2, "gpu"), (5, 4, "gpu")):
            machine.gpus(gpus_here)
            done = machine.succeeds("scripts/demo.sh", "--nodes", "2", "--long")
            started = f"-np {ranks} scripts/on_nodes.sh 2 "
            self.assertEqual(done.count(started), 3, done)
            place = "/c/gpu/" if kind == "gpu" else "/c-demo/host/"
            self.assertEqual(done.count(place), 3, done)
            self.assertIn("on 2 nodes and matched", done)
        for wrong in (("--nodes", "many"), ("--nodes",), ("--built", "/no/folder"), ("--short",)):
            self.assertIn("usage", machine.run("scripts/demo.sh", *wrong).stdout)

    def test_the_demonstration_without_a_gpu_is_short_and_builds_no_kernels(self):
        machine = Machine(self)
        machine.tool_kit()
        machine.command("cargo", 'echo "$NCCL_EP_CUDA: $*" > "$PWD/asked"')
        machine.command("make", "seq 50")
        machine.command("mpirun", """seq 40
            case "$*" in
            *moe_layer*) for i in 1 2; do printf '\\n  rows  to 0\\n  from 0  5\\n\\nmore\\n'; done ;;
            esac""")
        lines = machine.succeeds("scripts/demo.sh").splitlines()
        self.assertEqual([line[:2] for line in lines], ["=="] * 3 + ["  "] * 2 + [""] + ["=="] * 3)
        self.assertIn("building (about a minute", lines[1])
        asked = (machine.root / "asked").read_text()
        self.assertTrue(asked.startswith("off: build "), asked)
        self.assertNotIn("--release", asked)
        self.assertGreater(machine.run("scripts/demo.sh", "--long").stdout.count("\n"), 120)
        (machine.root / "asked").unlink()
        machine.write("there/host")
        machine.succeeds("scripts/demo.sh", "--built", "there")
        self.assertFalse((machine.root / "asked").exists())
        machine.command("mpirun", "echo it broke; exit 3")
        done = machine.run("scripts/demo.sh")
        self.assertEqual((done.returncode, done.stdout.splitlines()[-1]), (1, "it broke"))

    def test_ranks_are_put_on_nodes(self):
        machine = Machine(self)
        show = ("bash", "-c", "echo at $NCCL_HOSTID")

        def nodes(split: str, size: int) -> list[str]:
            found = []
            for rank in range(size):
                machine.environment.update(OMPI_COMM_WORLD_RANK=str(rank), OMPI_COMM_WORLD_SIZE=str(size))
                found.append(machine.run("scripts/on_nodes.sh", split, *show).stdout.strip())
            return found

        self.assertEqual(nodes("2", 4), ["at node0", "at node0", "at node1", "at node1"])
        self.assertEqual(nodes("3", 4), ["at node0", "at node0", "at node1", "at node2"])
        self.assertEqual(nodes("0,1,0", 3), ["at node0", "at node1", "at node0"])
        self.assertIn("the nodes of 2 ranks", nodes("0,1", 3)[0])
        self.assertIn("3 nodes need as many ranks or more, and there are 2", nodes("3", 2)[0])
        for wrong in ("0", "two", "-1"):
            self.assertIn(f"comes first, not {wrong}", nodes(wrong, 2)[0])
        del machine.environment["OMPI_COMM_WORLD_RANK"]
        self.assertIn("which rank", machine.run("scripts/on_nodes.sh", "2", *show).stdout)


if __name__ == "__main__":
    unittest.main()
