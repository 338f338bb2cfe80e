"""The steps that run C programs under mpirun: which program, on how many ranks, with what options.

The same table serves both kinds of run: the host links on a machine without a GPU, and the GPU
links on as many ranks as there are GPUs.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from testing import counts
from testing.step import Places, Step

RANKS = (1, 2, 3, 4, 8)

# Programs that close with a line of counts and take no options.
TESTS = ("test_abi", "test_abi_cxx", "test_errors", "test_lifecycle", "test_ll", "test_ht",
         "test_staged", "test_random", "example_ht", "example_ll_staged")

_EP_TEST_RANKS = (2, 4, 8)
_STAGING = ("none", "dispatch", "combine", "both")
# The matrix is about options, not sizes: small rows, and the default size in a few runs of its own.
_EP_TEST_SMALL = ("-t", "16", "-d", "512")

# --experts follows: a number that every count of ranks divides.
_BENCH_EXPERTS_PER_RANK = 32
_BENCH_SMALL = ("--tokens", "32", "--hidden", "1024", "--warmup", "1", "--iters", "3",
                "--validate")
_BENCH_PASSED = r"Global validation: Dispatch=PASSED, Combine=PASSED"

# The sanitizers slow a program down, and they look at its own code: few ranks show all of it.
_SANITIZED_RANKS = 2


def host_steps(places: Places) -> list[Step]:
    """All programs on the CPU stand-ins, and a check that no program was forgotten here."""
    # The stand-ins refuse where a GPU is, lest they hide it; here they are what is meant.
    environment = (("NCCLEP_HOSTSIM_WITH_GPU", "1"),)
    needs = ("build/programs",)
    everything = Step("programs/complete", lambda: _complete(places), needs=needs)
    return [everything, *_all_programs(places, RANKS, needs, environment)]


def gpu_steps(places: Places, needs: Sequence[str]) -> list[Step]:
    """All programs on the GPUs of this machine, one rank for each GPU."""
    ranks = tuple(count for count in RANKS if count <= places.gpus)
    return list(_all_programs(places, ranks, tuple(needs), ()))


def sanitizer_steps(places: Places) -> list[Step]:
    """The tests once more, built with the address and undefined-behaviour sanitizers."""
    # What AddressSanitizer and the leak check need is set in the harness.
    environment = (("NCCLEP_HOSTSIM_WITH_GPU", "1"), ("UBSAN_OPTIONS", "print_stacktrace=1"))

    def run(name: str, label: str, options: Sequence[str], ranks: int, read) -> Step:
        command = _mpirun(ranks, places.sanitized / name, options)
        return Step(f"sanitize/{label}/{ranks}", command, read, ("build/sanitizer",),
                    cores=_cores(ranks), timeout=300, environment=environment)

    steps = [run(name, name, (), _SANITIZED_RANKS, counts.closing_line)
             for name in (*TESTS, "moe_layer")]
    for algorithm in ("ll", "ht"):
        options = ("-a", algorithm, "-s", "both", "-c", "-r", *_EP_TEST_SMALL)
        steps.append(run("ep_test", f"ep_test-{algorithm}", options, 4, counts.closing_line))
        options = _bench_options(algorithm, _SANITIZED_RANKS)
        steps.append(run("ep_bench", f"ep_bench-{algorithm}", options, _SANITIZED_RANKS,
                         counts.says(_BENCH_PASSED, 1)))
    return steps


def _all_programs(places: Places, ranks: Sequence[int], needs: tuple[str, ...],
                  environment: tuple[tuple[str, str], ...]) -> Iterator[Step]:
    def run(name: str, label: str, options: Sequence[str], count: int, read) -> Step:
        return Step(f"{label}/{count}", _mpirun(count, places.programs / name, options), read,
                    needs, cores=_cores(count), timeout=240, environment=environment)

    for name, count in itertools.product(TESTS, ranks):
        yield run(name, name, (), count, counts.closing_line)
    for count in ranks:
        if count in _EP_TEST_RANKS:
            for label, options in _ep_test_matrix():
                yield run("ep_test", f"ep_test/{label}", options, count, counts.closing_line)
        yield run("moe_layer", "moe_layer", (), count, counts.closing_line)
        for algorithm in ("ll", "ht"):
            yield run("ep_bench", f"ep_bench/{algorithm}", _bench_options(algorithm, count), count,
                      counts.says(_BENCH_PASSED, 1))


def _ep_test_matrix() -> Iterator[tuple[str, tuple[str, ...]]]:
    """Every documented combination of ep_test's options, and the default size of each algorithm."""
    for algorithm in ("ll", "ht"):
        yield f"{algorithm}-default", ("-a", algorithm)
        extras = ("-c", "-r") if algorithm == "ll" else ("-c", "-r", "-m")
        for staging, chosen in itertools.product(_STAGING, _subsets(extras)):
            label = "".join([algorithm, "-", staging, *chosen])
            yield label, ("-a", algorithm, "-s", staging, *chosen, *_EP_TEST_SMALL)


def _bench_options(algorithm: str, ranks: int) -> tuple[str, ...]:
    return ("--algorithm", algorithm, "--experts", str(_BENCH_EXPERTS_PER_RANK * ranks),
            *_BENCH_SMALL)


def _subsets(options: Sequence[str]) -> Iterator[tuple[str, ...]]:
    for size in range(len(options) + 1):
        yield from itertools.combinations(options, size)


def _mpirun(ranks: int, program, options: Sequence[str]) -> tuple[str, ...]:
    return ("mpirun", "-np", str(ranks), str(program), *options)


def _cores(ranks: int) -> int:
    return 1 if ranks <= 2 else 2


def _complete(places: Places):
    """Every program that was built is run by some step, and the other way round."""
    listed = {*TESTS, "ep_test", "ep_bench", "moe_layer"}
    built = {path.name for path in places.programs.iterdir()}
    if built == listed:
        return counts.Counts(1, 0), ""
    return (counts.Counts(0, 1, "differs"),
            f"not run: {sorted(built - listed)}\nnot built: {sorted(listed - built)}")
