"""The tests and examples of the Python package: on the CPU stand-ins as steps of `make test`, and
on GPUs under the same names.

setup.sh pins PyTorch and pytest; on a machine with GPUs its own PyTorch is used.
"""

from __future__ import annotations

import os
import pathlib
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence

from testing import command, counts, python_types
from testing.gpu_machine import MPIRUN, Machine
from testing.step import BUILT, ROOT, SETUP, Counts, Finished, Places, Step, fetched

RANKS = (1, 2, 4)
# Without GPUs two ranks on a node would show nothing that four do not.
_HOST_RANKS = (1, 4)
# The node of each rank, which NCCL_HOSTID tells.
_SPLITS = ("0,1", "0,1,0,1", "0,0,0,1")
_EXAMPLE_RANKS = 2
# These load torch's compiler, which takes longest. The runs of all tests skip them.
_COMPILED = "compiled or test_operators"
_COMPILED_RANKS = 2
# Files of tests to which other ranks mean nothing, and those to which only their nodes do.
_OF_ONE_RANK = ("arguments", "bench", "demo", "doctor", "expand", "memory", "process", "rendezvous", "testing",
                "wrapper")
_OF_ONE_NODE = (*_OF_ONE_RANK, "documents", "tuning")
# Tests that run on nodes of equal size; the others on nodes of unequal size.
_ON_EQUAL_NODES = "test_nodes or test_layer or test_autograd"
# Examples that need high throughput.
_NEED_HT = ("03_high_throughput_training", "04_moe_layer")
_BENCH = ROOT / "bench" / "layer.py"
# Starts the ranks of a program, or of several in turn, most of whose time would go into loading PyTorch. All tests run
# under mpirun as well, on one node. Without the machine's own packages (-S), which hide what setup.sh does not fetch.
_FORKED = ("python3", "-S", str(ROOT / "scripts" / "testing" / "forked_ranks.py"))
# What is asked of an installed wheel, beside a run on two ranks.
_USE_WHEEL = """import ctypes, importlib.metadata, os, nccl_ep
stand_ins = os.path.join(os.path.dirname(nccl_ep.__file__), "lib", "libncclep_hostsim.so")
os.environ |= {"NCCL_EP_NCCL_LIBRARY": stand_ins, "NCCLEP_HOSTSIM_WITH_GPU": "1"}
library = nccl_ep.NCCLLibrary()
print(library.path)
print("version", library.ncclEpGetVersion(), library.ep_available)
print(importlib.metadata.version("nccl_ep"))"""
_BENCH_WORDS = ("bench", "--stand-ins", "--ranks", "2", "--tokens", "1,4", "--experts", "4", "--hidden", "64",
                "--top-k", "2", "--repetitions", "4")
_FIRST_RELEASE = "python/tests/scripts/first_release.py"
# setup.sh fetches what only these steps need beside the builds.
FETCHED = "setup/python"
NEEDS = (*BUILT, FETCHED)


def setup() -> Step:
    """Fetches PyTorch, pytest and mypy; after the other set-up, as two would fetch the same things."""
    return Step(FETCHED, ("scripts/setup.sh", "--python"), counts.build, (SETUP,), cores=0, timeout=None)


def examples(root: pathlib.Path = ROOT) -> list[pathlib.Path]:
    """The numbered programs, in order."""
    return sorted((root / "examples" / "python").glob("[0-9][0-9]_*.py"))


def pytest_words(tests: pathlib.Path, *options: str, root: pathlib.Path | None = None) -> tuple[str, ...]:
    """pytest on one rank, without a cache; its files go to the system's temporary folder."""
    program, _, *words = forked_pytest(tests, *options, root=root)
    return ("python3", "-m", program, *words)


def forked(ranks: int | str, *words: str) -> tuple[str, ...]:
    """Programs on so many ranks, or on one of each of these nodes."""
    return (*_FORKED, str(ranks), *words)


def forked_pytest(tests: pathlib.Path, *options: str, root: pathlib.Path | None = None) -> tuple[str, ...]:
    """The same for forked ranks; the tests may be a file below the root. Those of engines have steps of their own."""
    left_out = () if root else (f"--ignore={tests / 'engines'}",)
    return ("pytest", "--", "-q", "--no-header", "--color=no", "-p", "no:cacheprovider",
            f"--rootdir={root or tests}", str(tests), *left_out, *options)


def example_counts(programs: int = 1):
    """An example checks itself, and rank 0 prints the result."""
    return counts.says(r"^PASSED: ", programs)


def _all_examples() -> tuple[Sequence[str], Callable[[Finished], Counts]]:
    programs = [str(path) for path in examples()]
    return programs, example_counts(len(programs))


def host_steps(places: Places) -> list[Step]:
    """All steps on the CPU stand-ins."""
    own = tuple(on_stand_ins(places).items())

    def step(name: str, words: Sequence[str], read) -> Step:
        return Step(f"python/{name}", tuple(words), read, NEEDS, timeout=240, environment=own)

    def on_ranks(name: str, ranks: int | str, words: Sequence[str], read) -> Step:
        return step(name, forked(ranks, *words), read)

    tests = ROOT / "python" / "tests"

    def without(names: Sequence[str], *options: str) -> tuple[str, ...]:
        return forked_pytest(tests, *(f"--ignore={tests}/test_{name}.py" for name in names), *options)

    # One rank under mpirun. Its ranks find each other in `first-release` and in C programs.
    steps = [step("tests/1", ("mpirun", "-np", "1", *pytest_words(tests)), counts.closing_line),
             on_ranks("tests/4", 4, without(_OF_ONE_RANK), counts.closing_line)]
    steps.append(on_ranks(f"compiled/{_COMPILED_RANKS}", _COMPILED_RANKS, forked_pytest(tests, "-k", _COMPILED),
                        counts.closing_line))
    # The examples, some tests and the other tests, each with ranks on nodes of another kind.
    some, others = forked_pytest(tests, "-k", _ON_EQUAL_NODES), without(_OF_ONE_NODE, "-k", f"not ({_ON_EQUAL_NODES})")
    of_nodes = (("examples", *_all_examples()), ("tests", some, counts.closing_line),
                ("tests", others, counts.closing_line))
    steps += [on_ranks(f"nodes-{split.replace(',', '')}/{name}", split, words, read)
              for split, (name, words, read) in zip(_SPLITS, of_nodes)]
    steps.append(on_ranks(f"examples/{_EXAMPLE_RANKS}", _EXAMPLE_RANKS, *_all_examples()))
    words = (str(_BENCH), "--", "--alternatives", "--deep-ep")
    steps.append(on_ranks(f"bench-layer/{_EXAMPLE_RANKS}", _EXAMPLE_RANKS, words, example_counts()))
    steps += list(_unchanged_script(places))
    steps.append(Step("python/types", lambda: python_types.check(places), needs=(FETCHED,)))
    steps.append(Step("python/wheel", lambda: _wheel(places), needs=NEEDS))
    return steps


def _on_nodes(split: str, words: Sequence[str]) -> tuple[str, ...]:
    """What follows `mpirun -np`."""
    return (str(split.count(",") + 1), str(ROOT / "scripts" / "on_nodes.sh"), split, *words)


def gpu_steps(machine: Machine, step: Callable[..., Step], quick: bool, has_ht: bool) -> list[Step]:
    """Over NCCL, rank i on GPU i; `step` is of `on_gpus`."""
    gpus = len(machine.devices)
    ranks = [count for count in RANKS if count <= gpus]
    options = () if has_ht else ("-m", "not high_throughput")
    runs = [(f"tests/{count}", count, pytest_words(ROOT / "python" / "tests", *options),
             counts.closing_line) for count in (ranks[-1:] if quick else ranks)]
    if has_ht:
        runs += [(f"nodes-{split.replace(',', '')}/tests", split,
                  pytest_words(ROOT / "python" / "tests"), counts.closing_line)
                 for split in _SPLITS if split.count(",") < gpus][:1 if quick else None]
    runs += [(f"{path.stem}/{ranks[-1]}", ranks[-1], ("python3", str(path)), example_counts())
             for path in examples() if has_ht or path.stem not in _NEED_HT]
    if has_ht:
        words = ("python3", str(_BENCH), "--deep-ep", "--iterations", "3")
        runs.append((f"bench-layer/{ranks[-1]}", ranks[-1], words, example_counts()))
    return [step(f"python/{name}", *run) for name, *run in runs]


def on_gpus(machine: Machine) -> Callable[..., Step]:
    """Makes steps with this machine's PyTorch; without one they are skipped."""
    # In a folder of `make gpu-package` the library is beside the programs.
    library = machine.programs / "lib" / "libnccl_ep.so"
    if not library.exists():
        library = pathlib.Path(machine.environment["NCCL_EP_RELEASE"]) / "libnccl_ep.so"
    environment = {"NCCL_EP_LIBRARY": str(library), "PYTHONDONTWRITEBYTECODE": "1",
                   "PYTHONPATH": gpu_path(machine, "pytest"), "GLOO_SOCKET_IFNAME": "lo", "NCCL_EP_TIMEOUT_MS": "30000"}
    reason = _no_torch(machine)

    def step(name: str, ranks_or_split: int | str, words: Sequence[str], read, own: Iterable[tuple[str, str]] = ()):
        nodes = isinstance(ranks_or_split, str)
        words = _on_nodes(ranks_or_split, words) if nodes else (str(ranks_or_split), *words)
        made = Step(f"gpu/{name}", (*MPIRUN, "-np", *words), read, ("setup/nccl",), cores=len(machine.devices),
                    timeout=480 if nodes else 240, environment=(*environment.items(), *own))
        return made.skipped(reason) if reason else made

    return step


def gpu_path(machine: Machine, *parts: str) -> str:
    """Where Python finds the package, and parts that setup.sh has fetched."""
    return os.pathsep.join(map(str, (ROOT / "python", *(fetched(machine.environment) / part for part in parts))))


def _no_torch(machine: Machine) -> str:
    """Why the package's tests cannot run on this machine's GPUs; empty if they can."""
    code = "import torch; assert torch.cuda.is_available()"
    path = {"PYTHONPATH": str(fetched(machine.environment) / "pytest")}
    found = command.run(("python3", "-c", f"{code}; import pytest"), {**machine.environment, **path}, 120)
    return "" if found.status == 0 else "no PyTorch for GPUs, or no pytest (setup.sh --pytest)"


def on_stand_ins(places: Places) -> dict[str, str]:
    """What the package needs over the stand-ins."""
    path = (ROOT / "python", places.deps / "torch", places.deps / "pytest")
    return {
        "NCCL_EP_LIBRARY": str(places.libraries / "libnccl_ep.so"),
        "NCCL_EP_NCCL_LIBRARY": str(places.libraries / "libncclep_hostsim.so"),
        "NCCLEP_HOSTSIM_WITH_GPU": "1",
        "PYTHONPATH": os.pathsep.join(map(str, path)),
        # PyTorch warns that NumPy is missing; nothing here needs it.
        "PYTHONWARNINGS": "ignore:Failed to initialize NumPy",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "NCCL_EP_TIMEOUT_MS": "30000",
    }


def _unchanged_script(places: Places) -> Iterator[Step]:
    """A script for the first release: by NCCL_HOME, and with the stand-ins preloaded."""
    ranks = 2

    def run(preload: bool) -> tuple[Counts, str]:
        with tempfile.TemporaryDirectory() as home:
            library = pathlib.Path(home) / "lib"
            library.mkdir()
            stand_ins = places.libraries / "libncclep_hostsim.so"
            (library / "libnccl_ep.so").symlink_to(places.libraries / "libnccl_ep.so")
            names = ("libcudart.so",) if preload else ("libcudart.so", "libnccl.so.2")
            for name in names:
                (library / name).symlink_to(stand_ins)
            environment = {**places.environment, "NCCL_HOME": home, "NCCLEP_HOSTSIM_WITH_GPU": "1",
                           "PYTHONPATH": str(ROOT / "python")}
            settings = ("-x", f"LD_PRELOAD={stand_ins}") if preload else ()
            finished = command.run(("mpirun", "-np", str(ranks), *settings, "python3",
                                    _FIRST_RELEASE), environment, 120)
        # mpirun may merge the output of two ranks into one line.
        return counts.says(r"rank \d+: ok", ranks)(finished), finished.output

    yield Step(f"python/first-release/{ranks}", lambda: run(False), needs=BUILT)
    yield Step(f"python/first-release-preload/{ranks}", lambda: run(True), needs=BUILT)


def _wheel(places: Places) -> tuple[Counts, str]:
    """Builds the wheels and the source distribution, installs them, and uses what is inside without any setting."""
    with tempfile.TemporaryDirectory() as folder:
        environment = places.environment
        built = command.run(("scripts/wheel.sh", folder), environment, 120)
        wheels = sorted(str(path) for path in pathlib.Path(folder).glob("*.whl"))
        sources = [str(path) for path in pathlib.Path(folder).glob("*.tar.gz")]
        if built.status != 0 or len(wheels) != 2 or len(sources) != 1:
            return Counts(0, 1, f"not two wheels and the sources: {wheels + sources}"), built.output
        installed, from_sources = (pathlib.Path(folder) / name for name in ("installed", "from-sources"))
        install = [command.run(
            ("python3", "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-build-isolation",
             "--target", str(where), *files), {**environment, "PYTHONPATH": str(places.deps / "wheel")}, 120)
            for where, files in ((installed, wheels), (from_sources, sources))]
        paths = on_stand_ins(places) | {"PYTHONPATH": f"{installed}{os.pathsep}{places.deps / 'torch'}"}
        used = command.run(("python3", "-c", _USE_WHEEL), {**_clean(places), **_named(paths, "PYTHONPATH")}, 60)
        ran = command.run(("python3", "-m", "nccl_ep", *_BENCH_WORDS), {
            **_clean(places), **_named(paths, "PYTHONPATH", "PYTHONWARNINGS", "NCCLEP_HOSTSIM_WITH_GPU")}, 120)
        facts = used.output.splitlines()
        checks = {
            "its name tells the platform": "-py3-none-manylinux_2_" in wheels[0],
            "the other is for all": "/nccl_ep_deep_ep-" in wheels[1] and "-none-any" in wheels[1],
            "and has both its modules": (installed / "deep_ep" / "utils" / "__init__.py").exists(),
            "it has the licence": any(installed.glob("nccl_ep-*.dist-info/**/LICENSE")),
            "it has those of its parts":
                any(installed.glob("nccl_ep-*.dist-info/**/NOTICE-THIRD-PARTY.txt")),
            "it is typed": (installed / "nccl_ep" / "py.typed").exists(),
            "it uses its own library": facts[:1] == [str(installed / "nccl_ep" / "lib" / "libnccl_ep.so")],
            "the library answers": used.status == 0 and "True" in used.output,
            "its version names the kernels' CUDA": [each.partition("+")[2] for each in facts[2:]] == [_cuda(places)],
            "it runs without a GPU": ran.status == 0 and "PASSED" in ran.output,
            "the sources have all of the package but the libraries":
                _modules(installed) == _modules(from_sources) and not list(from_sources.rglob("*.so")),
        }
    failed = [name for name, passed in checks.items() if not passed]
    text = "\n".join((built.output, *(each.output for each in install), used.output, ran.output, *failed))
    return Counts(len(checks) - len(failed), len(failed)), text


def _modules(folder: pathlib.Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.glob("nccl_ep/**/*.py")}


def _named(environment: dict[str, str], *names: str) -> dict[str, str]:
    return {name: environment[name] for name in names}


def _cuda(places: Places) -> str:
    """What the wheel's version says of the CUDA that its kernels were compiled with."""
    found = re.search(rb"NCCL EP version [^+]+\+cuda([\d.]+)", (places.libraries / "libnccl_ep.so").read_bytes())
    return f"cu{found[1].decode().replace('.', '')}" if found else ""


def _clean(places: Places) -> dict[str, str]:
    """The environment without any variable that names a library."""
    drop = ("NCCL_HOME", "NCCL_EP_LIBRARY", "LD_LIBRARY_PATH")
    return {name: value for name, value in places.environment.items() if name not in drop}
