"""The runs of programs.py on GPUs, in three variants, and small ones under compute-sanitizer.

gpu       rank i on GPU i, over NCCL; every process sees all GPUs. Also python/tests, the examples,
          gpu/rust, the Rust tests that need a GPU, and gpu/nodes, programs over several nodes
isolated  the same, but each process sees only one GPU, as under many job schedulers
onegpu    all ranks on one GPU, which NCCL refuses, so over c_tests/fake_nccl. Kernels of different
          processes take turns there, so operations take milliseconds.

Of the first there are runs on several nodes, too: each rank takes itself for one of another host.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from testing import counts, engine_steps, gpu_nodes, nodes, programs, python_steps
from testing.gpu_machine import MPIRUN, Machine
from testing.programs import Run
from testing.step import Counts, Step

_ONE_GPU_RANKS = (2, 4, 8)
_ISOLATED = ("capabilities", "test_ll", "test_graph", "example_staged", "ep_test/ll-default")

# For --quick and one GPU: ep_test's whole matrix of options would repeat the same kernels.
_FEW_EP_TESTS = tuple(f"ep_test/{label}" for label in programs.FEW_EP_TESTS)

# Operations of test_stress; the program's default is for the CPU.
_STRESS_OPS = {"gpu": 20000, "isolated": 2000, "onegpu": 2000}
_QUICK_STRESS_OPS = 400
_RANDOM_GRAPHS = ("--configs", "200", "--seed", "45", "--graphs")

_LIMIT_SECONDS = {"gpu": 240, "isolated": 240, "onegpu": 300}

# racecheck traces every access to shared memory, which is slow. It knows barriers only and reports
# the release and acquire by which warps of HT kernels synchronise as a race.
_SANITIZED = (("memcheck", "test_ll"), ("memcheck", "test_staged"),
              ("racecheck", "test_ll", "routing_styles"), ("racecheck", "test_staged"),
              ("memcheck", "test_ht"))

# The deadline of a rank in test_death: kernels of several processes take turns on one GPU.
_DEATH_TIMEOUT_MS = {"gpu": 1000, "onegpu": 4000}


def all_steps(machine: Machine, quick: bool, has_ht: bool) -> list[Step]:
    """All runs on this machine; without high throughput, its runs are listed as skipped."""
    steps = [_nccl_step(machine), _rust_step(machine)]
    for variant in ("gpu", "isolated", "onegpu"):
        for index, run in enumerate(_runs(variant, machine, quick)):
            step = _step(machine, variant, _with_more_work(variant, run, quick), index)
            steps.append(step if has_ht or not run.needs_ht else step.skipped("no high throughput on GPUs"))
    steps += gpu_nodes.steps(machine, quick)
    python_step = python_steps.on_gpus(machine)
    steps += python_steps.gpu_steps(machine, python_step, quick, has_ht)
    steps += engine_steps.gpu_steps(machine, python_step) if has_ht else []
    return [*steps, *_sanitizer_steps(machine)]


def _rust_step(machine: Machine) -> Step:
    """The tests that `make test` ignores, as a release build, which shares the compiled kernels."""
    words = ("cargo", "test", "--release", "--locked", "-p", "nccl-ep-core", "--lib",
             "backend::cuda::gpu_tests", "--",
             "--include-ignored")
    step = Step("gpu/rust", words, counts.cargo_test, cores=len(machine.devices), timeout=600,
                environment=(("NCCL_EP_CUDA", "require"),))
    if not machine.builds:
        return step.skipped("the package brings no Rust sources")
    return step if machine.has_cargo else step.skipped("no cargo")


def _sanitizer_steps(machine: Machine) -> Iterator[Step]:
    """Programs under compute-sanitizer, if it is installed: two ranks on one GPU."""
    for tool, program, *options in _SANITIZED:
        watched = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9",
                   str(machine.programs / "onegpu" / program), *options]
        step = Step(f"sanitizer/{tool}/{program}", (*MPIRUN, "-np", "2", *watched),
                    counts.closing_line, timeout=_LIMIT_SECONDS["onegpu"],
                    environment=(("CUDA_VISIBLE_DEVICES", machine.devices[0]),))
        yield step if machine.has_sanitizer else step.skipped("no compute-sanitizer")


def _runs(variant: str, machine: Machine, quick: bool) -> Iterator[Run]:
    gpus = len(machine.devices)
    ranks = [count for count in programs.RANKS if count <= gpus]
    if variant == "onegpu":
        ranks = [4] if quick else list(_ONE_GPU_RANKS)
    elif quick or variant == "isolated":
        ranks = ranks[-1:]
    if variant == "isolated" and gpus < 2:
        return
    # The CPU backend cannot be captured.
    graphs = Run("test_random/graphs", "test_random", _RANDOM_GRAPHS, ranks[-1])
    for run in (*programs.all_runs(ranks, ranks[-1]), graphs):
        if run.cpu_only or (variant == "isolated" and run.label not in _ISOLATED):
            continue
        few = quick or variant == "onegpu"
        if few and run.program == "ep_test" and run.label not in _FEW_EP_TESTS:
            continue
        yield run


def _with_more_work(variant: str, run: Run, quick: bool) -> Run:
    if run.program != "test_stress":
        return run
    ops = _QUICK_STRESS_OPS if quick else _STRESS_OPS[variant]
    return dataclasses.replace(run, options=("--ops", str(ops)))


def _step(machine: Machine, variant: str, run: Run, index: int) -> Step:
    folder = "onegpu" if variant == "onegpu" else "gpu"
    words = (str(machine.programs / folder / run.program), *run.options)
    limit = _LIMIT_SECONDS[variant]
    # The program's own deadline is shorter, because it says where each rank was.
    environment = {"EP_TEST_DEADLINE": str(limit - 30), **dict(run.environment)}
    if run.forks:
        environment["NCCL_EP_TIMEOUT_MS"] = str(_DEATH_TIMEOUT_MS[variant])
    elif variant == "isolated":
        words = (*MPIRUN, *nodes.contexts(
            ((f"CUDA_VISIBLE_DEVICES={device}",) for device in machine.devices[:run.ranks]), words))
    else:
        words = (*MPIRUN, "-np", str(run.ranks), *words)
    gpus = len(machine.devices)
    # The many runs of ep_test mostly start up, so they share the GPUs.
    alone = variant != "onegpu" and run.program != "ep_test"
    if variant == "onegpu":
        # Several of these run in parallel on machines with several GPUs.
        environment["CUDA_VISIBLE_DEVICES"] = machine.devices[index % gpus]
    return Step(f"{variant}/{run.name}", words, run.read,
                () if variant == "onegpu" else ("setup/nccl",),
                cores=gpus if alone else 1, timeout=limit,
                environment=tuple(environment.items()))


def _nccl_step(machine: Machine) -> Step:
    def check() -> tuple[Counts, str]:
        if machine.nccl:
            return Counts(1, 0), ""
        return (Counts(0, 1, "no libnccl.so.2"),
                "neither the loader nor Python's nvidia-nccl wheel has it; set NCCL_HOME")

    return Step("setup/nccl", check)
