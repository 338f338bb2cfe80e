"""The runs of C programs: which program, on how many ranks, with what options.

One table serves all kinds of run: this file makes steps of programs linked with the CPU stand-ins,
gpu_programs.py of those for GPUs.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence

from testing import counts, nodes
from testing.step import ON_STAND_INS, Counts, Finished, Places, Step

RANKS = (1, 2, 3, 4, 8)

# Programs without options that end with a line of counts.
TESTS = ("test_abi", "test_abi_cxx", "test_errors", "test_lifecycle", "test_ll", "test_ht",
         "test_formats", "test_staged", "test_random", "test_stress", "test_graph", "capabilities")

# Others that end with such a line, on few numbers of ranks: the examples, and nccl_ep.hpp by each standard.
FEW_RANKS = ("example_low_latency", "example_high_throughput", "example_staged",
            "example_cuda_graph", "example_several_nodes", "example_cxx_low_latency",
            "example_cxx_high_throughput", "test_cxx17", "test_cxx20", "test_cxx_status")

# Those that compare every bit of low-latency sums, with the options of a second run, whose sums are
# in exact order; by default they are rank-local.
_EXACT_SUMS = (("test_ll", ()), ("test_staged", ()), ("test_random", ("--configs", "300")),
               ("test_stress", ()), ("test_graph", ()))
_EXACT = (("NCCL_EP_LL_COMBINE", "exact"),)
# On CPUs, where twice as many take twice as long and show no other order.
_EXACT_RANKS = 4
# On CPUs not with the most ranks, which refuse calls and end groups as four do.
_OF_FEW_RANKS = ("test_abi", "test_abi_cxx", "test_errors", "test_lifecycle", "capabilities")

# Configurations of test_random where each is slow: with many ranks, or under a sanitizer.
_FEW_CONFIGS = ("--configs", "200")
_MANY_RANKS = 8

# Where all are quick, without a GPU; by default there are more.
_CPU_CONFIGS = ("--configs", "400")

# test_fuzz in `make test`; by hand it runs as long as wanted.
_FUZZ = (("agree", ("agree", "--calls", "12000", "--seed", "3")),
         ("differ", ("differ", "--calls", "2000", "--seed", "4")))
_SANITIZED_FUZZ = (("agree", ("agree", "--calls", "6000", "--seed", "6")),
                   ("differ", ("differ", "--calls", "1000", "--seed", "7")))
# Threads have no common order of operations, so on GPUs two groups could wait for each other's multiprocessors.
_FUZZ_THREADS = ("--threads", "2", "--calls", "3000", "--seed", "5")
# test_faults: a trial takes about a second.
_FAULTS = (("operations", ("--trials", "6", "--seed", "2", "--kinds", "ll,staged,ht")),
           ("creation", ("--trials", "6", "--seed", "3", "--kinds", "handles,groups")))

# Programs that need high throughput, and options by which others do.
_NEED_HT = ("test_ht", "test_second", "ep_bench_2", "example_high_throughput", "example_several_nodes",
            "example_cxx_high_throughput")
_OF_HT = {"ht", "--fp8"}
# Programs that start their ranks themselves, without mpirun.
_FORKING = ("test_death", "test_faults")

_EP_TEST_RANKS = (2, 4, 8)
_STAGING = ("none", "dispatch", "combine", "both")
# The matrix covers options with small rows; a few other runs have the default size.
_EP_TEST_SMALL = ("-t", "16", "-d", "512")
# Where the whole matrix runs; on other numbers of ranks these few do.
_EP_TEST_MATRIX_RANKS = 4
FEW_EP_TESTS = ("ll-default", "ll-both-c-r", "ht-default", "ht-both-c-r-m")

# --experts follows: this times the number of ranks.
_BENCH_EXPERTS_PER_RANK = 32
_BENCH_SMALL = ("--tokens", "32", "--hidden", "1024", "--warmup", "1", "--iters", "3", "--validate")
_BENCH_2_SMALL = ("--tokens", "16", "--hidden", "512", "--experts", "8", "--top-k", "2", "--iters", "2", "--ops", "2",
                  "--sms", "24", "--layouts", "ll-expert,ll-rank,ht-flat,ht-expert")
# Most tokens have the same few experts, and every SM may be used.
_BENCH_SKEWED = ("--routing", "zipf:2", "--channels", "all")
# Most tokens on the first rank; on the others; a group that allows more than any has.
_BENCH_UNEVEN = ("--sweep", "32/1,0/32", "--max-tokens", "48")
# With a kernel of the program's own.
_BENCH_CASTS = {"ll": "mxfp8", "ht": "fp8"}

# Sanitizers are slow and check the program's own code, which few ranks cover.
_SANITIZED_RANKS = 2
# With sanitizers fewer configurations, and no look at what the process keeps.
_LESS_SANITIZED = ("test_random", "test_lifecycle")


@dataclasses.dataclass(frozen=True)
class Run:
    """A program on a number of ranks, whatever starts it."""

    label: str
    program: str
    options: tuple[str, ...]
    ranks: int
    environment: tuple[tuple[str, str], ...] = ()
    cpu_only: bool = False

    @property
    def name(self) -> str:
        return f"{self.label}/{self.ranks}"

    @property
    def read(self) -> Callable[[Finished], Counts]:
        return counts.of_program(self.program, self.options)

    @property
    def needs_ht(self) -> bool:
        return self.program in _NEED_HT or not _OF_HT.isdisjoint(self.options)

    @property
    def forks(self) -> bool:
        return self.program in _FORKING


def all_runs(ranks: Sequence[int], exact_ranks: int) -> Iterator[Run]:
    """Every program with each set of options, on each suitable number of ranks; exact sums on `exact_ranks`."""
    for name, count in itertools.product(TESTS, ranks):
        few = name == "test_random" and count >= _MANY_RANKS
        yield Run(name, name, _FEW_CONFIGS if few else (), count)
    for name, count in itertools.product(FEW_RANKS, sorted({ranks[0], ranks[-1]})):
        yield Run(name, name, (), count)
    for name, options in _EXACT_SUMS:
        yield Run(f"{name}/exact", name, options, exact_ranks, environment=_EXACT)
    few = ranks[1] if len(ranks) > 1 else ranks[0]
    yield Run("test_random/choices", "test_random", ("--configs", "60", "--seed", "55", "--choices"), few)
    for label, options in _FUZZ:
        yield Run(f"test_fuzz/{label}", "test_fuzz", options, few)
    for count in ranks:
        if count in (1, 2, 4):
            yield Run("test_second", "test_second", (), count)
            yield Run("test_memory", "test_memory", (), count)
    yield Run("test_fuzz/threads", "test_fuzz", _FUZZ_THREADS, few, cpu_only=True)
    if few >= 2:
        yield from _failing_runs(few)
    for count in ranks:
        # Losses take their time; three ranks add no case to those of two and four.
        if count >= 2 and not (count == 3 and ranks[-1] > 3):
            yield Run("test_death", "test_death", ("--ranks", str(count)), count)
        if count in _EP_TEST_RANKS:
            whole = count == _EP_TEST_MATRIX_RANKS or _EP_TEST_MATRIX_RANKS not in ranks
            for label, options in _ep_test_matrix():
                if whole or label in FEW_EP_TESTS:
                    yield Run(f"ep_test/{label}", "ep_test", options, count)
        if count == 2:
            yield from _runs_of_two_ranks()
        for algorithm in ("ll", "ht"):
            yield from _mode_runs(algorithm, count)


def _failing_runs(ranks: int) -> Iterator[Run]:
    """What fails at some place of many, and a communicator that connects slowly."""
    for label, options in _FAULTS:
        yield Run(f"test_faults/{label}", "test_faults", ("--ranks", str(ranks), *options), ranks)
    yield Run("test_faults/connecting", "test_faults", ("--ranks", str(ranks), "--seed", "4", "--kinds", "first"),
              ranks, cpu_only=True, environment=nodes.CONNECTING)


def _runs_of_two_ranks() -> Iterator[Run]:
    """Formats and layouts of the benchmarks and the layer, for which two ranks are enough."""
    yield Run("ep_bench_2", "ep_bench_2", _BENCH_2_SMALL, 2)
    yield Run("moe_layer/fp8", "moe_layer", ("--fp8",), 2)
    for algorithm in ("ll", "ht"):
        for label, cast in (("fp8", ("fp8",)), ("cast", (_BENCH_CASTS[algorithm], "--cast", "outside"))):
            yield Run(f"ep_bench/{algorithm}-{label}", "ep_bench",
                      (*_bench_options(algorithm, 2), "--dispatch", *cast), 2)


def _mode_runs(algorithm: str, ranks: int) -> Iterator[Run]:
    """The layer and the benchmark in one mode."""
    yield Run(f"moe_layer/{algorithm}", "moe_layer", ("--algorithm", algorithm), ranks)
    ways = {"": (), "-zipf": _BENCH_SKEWED, **({"-uneven": _BENCH_UNEVEN} if ranks in _EP_TEST_RANKS else {})}
    for ending, more in ways.items():
        yield Run(f"ep_bench/{algorithm}{ending}", "ep_bench", (*_bench_options(algorithm, ranks), *more), ranks)


def host_steps(places: Places) -> list[Step]:
    """All programs on the CPU stand-ins, and a check that none is missing here."""
    needs = ("build/programs",)

    def step(run: Run) -> Step:
        program = places.programs / run.program
        options = run.options or (_CPU_CONFIGS if run.program == "test_random" else ())
        words = (str(program), *options) if run.forks else _mpirun(run.ranks, program, options)
        # Ranks mostly wait for each other, so two programs fit on two cores; those that lose a
        # rank sleep until a deadline passes.
        return Step(run.name, words, run.read, needs, cores=0 if run.forks else 1, timeout=240,
                    environment=ON_STAND_INS + run.environment, short_deadlines=run.forks)

    everything = Step("programs/complete", lambda: _complete(places), needs=needs)
    runs = (run for run in all_runs(RANKS, _EXACT_RANKS) if not _runs_sanitized(run)
            and not (run.program in _OF_FEW_RANKS and run.ranks >= _MANY_RANKS))
    return [everything, *map(step, runs), *nodes.host_steps(places), *_fake_nccl_steps(places, needs)]


def _runs_sanitized(run: Run) -> bool:
    """Whether sanitizer_steps have the same run; not those of which it does less."""
    return run.name in {f"{test}/{_SANITIZED_RANKS}" for test in TESTS if test not in _LESS_SANITIZED}


def _fake_nccl_steps(places: Places, needs: tuple[str, ...]) -> Iterator[Step]:
    """The test-only NCCL of the one-GPU runs in place of the stand-ins' NCCL."""
    library = places.target / "c" / "fake_nccl" / "host" / "libncclep_fake_nccl.so"
    for name, ranks in itertools.product(("capabilities", "example_high_throughput", "test_ll"), (1, 4)):
        words = _mpirun(ranks, places.programs / name, (), "-x", f"LD_PRELOAD={library}")
        yield Step(f"fake_nccl/{name}/{ranks}", words, counts.closing_line, needs, environment=ON_STAND_INS)


def sanitizer_steps(places: Places) -> list[Step]:
    """The tests, built with the address and undefined-behaviour sanitizers.

    Not the benchmark and the layer, whose C++ would be two fifths of what is compiled.
    """
    # The harness sets the options of AddressSanitizer and the leak check.
    environment = (*ON_STAND_INS, ("UBSAN_OPTIONS", "print_stacktrace=1"))

    def run(name: str, label: str, options: Sequence[str], ranks: int = _SANITIZED_RANKS) -> Step:
        return Step(f"sanitize/{label}/{ranks}", _mpirun(ranks, places.sanitized / name, options), counts.closing_line,
                    ("build/sanitizer",), timeout=300, environment=environment)

    return [*(run(name, name, _FEW_CONFIGS if name == "test_random" else ())
              for name in (*TESTS, *FEW_RANKS, "test_second")),
            *(run("test_fuzz", f"test_fuzz-{label}", options) for label, options in _SANITIZED_FUZZ),
            *(run("ep_test", f"ep_test-{algorithm}", ("-a", algorithm, "-s", "both", "-c", "-r", *_EP_TEST_SMALL), 4)
              for algorithm in ("ll", "ht"))]


def _ep_test_matrix() -> Iterator[tuple[str, tuple[str, ...]]]:
    """Every documented combination of ep_test's options, and the default size in each mode."""
    for algorithm in ("ll", "ht"):
        yield f"{algorithm}-default", ("-a", algorithm)
        extras = ("-c", "-r") if algorithm == "ll" else ("-c", "-r", "-m")
        for staging, chosen in itertools.product(_STAGING, _subsets(extras)):
            label = "".join([algorithm, "-", staging, *chosen])
            yield label, ("-a", algorithm, "-s", staging, *chosen, *_EP_TEST_SMALL)


def _bench_options(algorithm: str, ranks: int) -> tuple[str, ...]:
    return ("--algorithm", algorithm, "--experts", str(_BENCH_EXPERTS_PER_RANK * ranks), *_BENCH_SMALL)


def _subsets(options: Sequence[str]) -> Iterator[tuple[str, ...]]:
    for size in range(len(options) + 1):
        yield from itertools.combinations(options, size)


def _mpirun(ranks: int, program, options: Sequence[str], *settings: str) -> tuple[str, ...]:
    return ("mpirun", "-np", str(ranks), *settings, str(program), *options)


def _complete(places: Places):
    """Every built program is run by a step, and every step's program was built."""
    listed = {run.program for run in all_runs(RANKS, _EXACT_RANKS)}
    built = {path.name for path in places.programs.iterdir()}
    if built == listed:
        return Counts(1, 0), ""
    return (Counts(0, 1, "differs"), f"not run: {sorted(built - listed)}\nnot built: {sorted(listed - built)}")
