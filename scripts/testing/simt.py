"""The GPU kernels on the CPU: programs of c_tests linked with the SIMT shim (c_tests/simt).

The programs are the same as elsewhere, but run on the CUDA backend with its kernels, grids and
layouts. Each run has its own schedule and number of multiprocessors.
"""

from __future__ import annotations

import itertools
import pathlib
import platform
from collections.abc import Iterator

from testing import counts, nodes
from testing.step import ODD_GRIDS, ON_STAND_INS, Places, Step

_EXACT = (("NCCL_EP_LL_COMBINE", "exact"),)
# Tensors in high throughput lie in memory that peers map: all, or on each rank others.
_MAPPED, _MIXED = ((("EP_TEST_MEMORY", where),) for where in ("mapped", "mixed"))
# Kernels wait for the one before them where they are launched.
_IN_ORDER = (("NCCL_EP_PROGRAMMATIC", "0"),)
# Options of ep_bench, with uneven tokens.
_UNEVEN = "--experts 24 --hidden 256 --masked 3 --warmup 0 --iters 1 --validate"

# A run's label and command, the number of ranks, each a GPU with so many multiprocessors, and settings. New rows go to
# the end, as the place of a row is its seed.
_RUNS = (
    ("test_random", "test_random --configs 70 --seed 11", 1, 3),
    ("test_random", "test_random --configs 50 --seed 10", 2, 2),
    ("test_random/exact", "test_random --configs 30 --seed 16", 3, 2, _EXACT),
    ("test_random/odd-grids", "test_random --configs 20 --seed 18", 3, 6, ODD_GRIDS),
    ("test_random", "test_random --configs 20 --seed 4", 5, 1, _IN_ORDER),
    ("test_random/exact", "test_random --configs 20 --seed 5", 8, 1, _EXACT),
    ("test_ll/every_top_k", "test_ll every_top_k", 2, 2),
    # With room for blocks of each kind, few tokens have kernels of their own.
    ("test_ll/few", "test_ll widths few_where_many", 3, 17),
    ("test_random/few", "test_random --configs 20 --seed 54", 2, 20),
    ("test_ll/widths/exact", "test_ll widths", 2, 6, _EXACT),
    ("test_ll/unordered_streams", "test_ll ll_unordered_streams", 2, 4),
    ("test_ll/permuted", "test_ll permuted", 3, 2),
    ("test_ll/permuted/exact", "test_ll permuted", 2, 3, _EXACT),
    ("test_ll/behind_a_failure", "test_ll is_sent", 2, 2),
    ("test_ll/handle_while_waiting", "test_ll ll_handle_while", 3, 2),
    ("test_ht/unordered_streams", "test_ht ht_unordered_streams", 2, 4),
    ("test_ht/routing_styles", "test_ht routing_styles", 4, 2),
    ("test_ht/widths", "test_ht widths", 2, 4),
    ("test_formats", "test_formats", 2, 2, _IN_ORDER),
    ("test_stress/two", "test_stress --ops 150 --seed 3", 2, 2),
    ("test_ht/by_expert", "test_ht rows_by_expert", 3, 2),
    ("test_ht/behind_a_failure", "test_ht behind_a_failure", 3, 4),
    ("test_errors/ht", "test_errors ht_ lists_of", 3, 2),
    ("test_errors/ll_different_calls", "test_errors ll_different_calls", 3, 2),
    ("test_errors/ll_rank_that_stops", "test_errors ll_rank_that_stops ll_group_behind", 3, 2),
    ("test_lifecycle/cannot_map", "test_lifecycle one_rank_cannot_map", 3, 2),
    ("test_lifecycle/threads", "test_lifecycle two_threads_make", 2, 2),
    ("test_staged", "test_staged", 2, 2, _IN_ORDER),
    ("test_stress", "test_stress --ops 100", 4, 1),
    ("test_graph", "test_graph", 2, 2, _IN_ORDER),
    ("test_fuzz/agree", "test_fuzz agree --calls 2500 --seed 6", 2, 2),
    ("test_fuzz/differ", "test_fuzz differ --calls 600 --seed 7", 3, 2),
    ("test_fuzz/threads", "test_fuzz --threads 2 --calls 600 --seed 8", 2, 2),
    ("test_second", "test_second", 2, 2),
    ("test_second/memory", "test_second memory", 3, 2),
    ("example_staged", "example_staged", 3, 2),
    ("moe_layer", "moe_layer --algorithm ll", 4, 1),
    ("ep_test/ll", "ep_test -a ll -s both -c -r -t 16 -d 512", 4, 2),
    ("ep_test/ht", "ep_test -a ht -s both -c -r -m -t 16 -d 512", 4, 2),
    ("ep_bench/ll-uneven", f"ep_bench {_UNEVEN} --sweep 32/1,1/32,0/16/0,9/7/1/0", 4, 4),
    ("ep_bench/ht-uneven", f"ep_bench -a ht {_UNEVEN} --sweep 8/1,0/8 --max-tokens 12", 3, 2),
    # Rows of three warps, the last of which has 16 elements.
    *((f"ep_bench/{mode}-cast-{format}", f"ep_bench -a {mode} {_UNEVEN} --hidden 1040 --sweep 9/0 "
       f"--dispatch {format} --cast outside --use-cuda-graph", 2, 2)
      for mode, format in (("ll", "fp8"), ("ht", "fp8-pow2"), ("ht", "ue8m0"), ("ll", "mxfp8"))),
    ("test_graph/open", "test_graph open", 3, 3),
    ("test_random/graphs", "test_random --configs 30 --seed 43 --graphs", 3, 2),
    ("example_cuda_graph", "example_cuda_graph", 2, 2),
    *((f"ep_bench/{mode}-graph", f"ep_bench -a {mode} {_UNEVEN} --tokens 9,0,4 --use-cuda-graph", 3, 2)
      for mode in ("ll", "ht")),
    ("test_errors/ll_unusual_numbers", "test_errors ll_unusual_numbers", 2, 2),
    ("test_errors/forked", "test_errors forked", 2, 2),
    ("test_errors/captures", "test_errors groups_in_a_capture", 2, 2),
    ("test_ll/weights", "test_ll weights_follow rows_are_counted waits_are", 2, 2),
    ("test_ht/gradients", "test_ht gradients_with rows_are waits_are", 2, 2),
    ("test_ll/rank_major", "test_ll rank_major", 2, 3),
    ("test_ll/rank_major/exact", "test_ll rank_major_shapes", 3, 2, _EXACT),
    ("test_errors/rank_major", "test_errors rank_major", 3, 2),
    ("test_ll/views", "test_ll views", 3, 2),
    ("test_random/choices", "test_random --configs 25 --seed 51 --choices", 3, 6),
    ("test_random/choices/graphs", "test_random --configs 12 --seed 52 --choices --graphs", 2, 4),
    ("test_random/choices/exact", "test_random --configs 10 --seed 53 --choices", 2, 3, _EXACT),
    ("test_ll/choices", "test_ll choices", 2, 2),
    ("test_ll/choices/exact", "test_ll choices", 2, 3, _EXACT),
    ("test_ht/choices", "test_ht choices", 2, 2),
    ("test_errors/choices", "test_errors choices_that_are", 1, 2),
    ("test_errors/other_variant", "test_errors other_variant", 3, 2),
    ("ep_bench/ll-rank", f"ep_bench {_UNEVEN} --layout rank --tokens 9,0,4 --use-cuda-graph", 3, 2),
    ("test_memory", "test_memory", 3, 2),
    ("test_random/mixed", "test_random --configs 40 --seed 31", 3, 2, _MIXED),
    ("test_random/mapped", "test_random --configs 20 --seed 32 --graphs", 2, 5, _MAPPED),
    ("test_ht/mapped", "test_ht ht_", 2, 2, _MAPPED),
    ("test_graph/mixed", "test_graph ht_", 3, 2, _MIXED),
    ("test_errors/mapped", "test_errors ht_", 2, 2, _MAPPED),
    ("test_errors/memory", "test_errors memory", 3, 2),
    ("test_ht/many_tokens", "test_ht many_tokens", 2, 2),
    ("test_ll/views/few", "test_ll views_of_one_token", 2, 28),
    ("test_formats/few", "test_formats casts forwarded columns", 2, 17),
    ("test_ll/rank_major/few", "test_ll rank_major", 3, 28),
    # Combines, too, poll several slots.
    ("test_ht/many_tokens", "test_ht many_tokens", 4, 2),
)
# On the kernels for chips without bulk copies, which we have no GPU for.
_PLAIN = (("test_ht/plain", "test_ht routing_styles", 3, 2),
          ("test_formats/plain", "test_formats formats_of_models", 3, 2))
# These programs start their own ranks.
_FORKING = ("test_death --ranks 3 dies_while_others_wait", "test_death --ranks 3 dies_before_an_ht",
            "test_death --ranks 3 creation", "test_death --ranks 3 replay", "test_death --ranks 3 many_operations",
            "test_death --ranks 2 stalls", "test_death --ranks 3 before_memory", "test_death --ranks 2 with_memory",
            "test_death --ranks 3 mapped",
            "test_faults --ranks 3 --trials 8 --seed 4 --kinds ll,staged,ht,handles",
            "test_faults --ranks 3 --trials 4 --seed 5 --kinds groups")


def steps(places: Places) -> list[Step]:
    """The steps; none if the library has no kernels or the shim does not support this CPU."""
    without_kernels = places.environment.get("NCCL_EP_CUDA") == "off"
    if without_kernels or platform.machine() != "x86_64":
        return []
    programs = places.target / "c" / "simt"
    build = ("make", "-j2", "--no-print-directory", "-C", "c_tests", "simt",
             f"EP_LIBDIR={places.libraries}", f"OUT={places.target}/c")
    bugs = ("python3", "c_tests/simt/planted_bugs.py")
    return [
        # After the other links, which share objects. One core, since it mostly waits for one compiler.
        Step("build/simt", build, counts.build, ("build/programs",), timeout=None),
        Step("simt/self-test", (str(programs / "lib" / "selftest"),), counts.closing_line, ("build/simt",)),
        Step("simt/host-path", (str(programs / "host_path"),), counts.closing_line,
             ("build/simt",), environment=ON_STAND_INS),
        Step("simt/memory", ("python3", "c_tests/simt/memory_check.py", str(places.target)),
             counts.closing_line, ("build/simt",)),
        *_program_steps(programs),
        *nodes.simt_steps(places),
        Step("simt/texts-of-planted-bugs", (*bugs, "--texts"), counts.closing_line),
        # Two bugs at a time, but their ranks wait for each other.
        Step("simt/planted-bugs", (*bugs, str(places.target)), counts.closing_line, ("build/simt",), timeout=3600),
    ]


def _program_steps(programs: pathlib.Path) -> Iterator[Step]:
    plain = (("NCCLEP_SIMT_KERNELS", str(programs / "lib" / "libncclep_simt_plain.so")),)
    rows = (*_RUNS, *((*row, plain) for row in _PLAIN))
    for seed, (label, command, ranks, multiprocessors, *settings) in enumerate(rows):
        name, *options = command.split()
        environment = (*ON_STAND_INS, *itertools.chain(*settings), ("NCCLEP_SIMT_SEED", str(seed)),
                       ("NCCLEP_SIMT_MULTIPROCESSORS", str(multiprocessors)))
        yield Step(f"simt/{label}/{ranks}", ("mpirun", "-np", str(ranks), str(programs / name), *options),
                   counts.of_program(name, options), ("build/simt",), timeout=300, environment=environment)
    for words in _FORKING:
        name, *options = words.split()
        yield Step(f"simt/{name}/{options[-1]}", (str(programs / name), *options),
                   counts.closing_line, ("build/simt",), environment=ON_STAND_INS,
                   short_deadlines=True)
