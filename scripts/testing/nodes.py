"""Programs with ranks on several nodes, which one machine plays by NCCL_HOSTID, on the CPU.

A split names the node of each rank, by one character each: 0101 has two ranks on each of two
nodes, in turn.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

from testing import counts
from testing.step import ODD_GRIDS, ON_STAND_INS, Places, Step

# On the CPU backend every program runs in each of these splits.
_HOST_SPLITS = ("01", "0101", "0001")
_HOST_PROGRAMS = ("test_ll", "test_staged", "test_ht", "test_formats", "test_random --configs 200", "moe_layer")
# And these in some.
_TOOLS = tuple(itertools.chain.from_iterable(
    (f"ep_test -a {mode} -s both -c -r -t 16 -d 512",
     f"ep_bench -a {mode} --experts 256 --tokens 32 --hidden 1024 --warmup 1 --iters 3 --validate")
    for mode in ("ll", "ht")))
_HOST_MORE = (*itertools.product(("0101", "0001"), _TOOLS),
              *itertools.product(("00112233",), (
                  "test_ll", "test_staged", "test_ht routing_styles", "test_formats casts",
                  "test_random --configs 100", "moe_layer")),
              *itertools.product(("0123", "00001111"), ("test_staged", "test_ht routing_styles")),
              ("0123", "test_formats casts"), ("00001111", "test_formats casts_on"),
              ("0011", "test_stress"), ("0011", "test_fuzz agree --calls 1000 --seed 39"),
              *(("0011", command) for command in (
                  *(f"{tool} --dispatch fp8" for tool in _TOOLS if tool.startswith("ep_bench")),
                  "moe_layer --fp8")),
              ("0011", "test_random --configs 100 --seed 31"),
              ("0123", "test_random --configs 100 --seed 32"),
              ("00001111", "test_random --configs 60 --seed 33"),
              ("0011", "test_errors"), ("0101", "test_lifecycle group"),
              ("0001", "example_several_nodes"), ("0101", "example_staged"),
              ("0001", "test_fuzz differ --calls 1000 --seed 34"),
              ("0010", "test_memory"),
              ("0011", "test_second"))

# With the kernels on the CPU: which of the splits a program is worth its seconds in, and how many
# bytes an HT operation sends at a time, if that is not the default. Few bytes make many passes.
# New rows go to the end, as the place of a row is its seed. A word behind a - leaves out what runs on one node.
_SIMT = (("01", "", "test_ll -few_where -views_beside -views_of_a_captured -views_that_end"),
         ("01", "2000", "test_ht -every_top_k -many_tokens"),
         ("01", "1200", "test_graph"),
         ("001", "400", "test_ht uneven_tokens"), ("010", "300", "test_ht gradients_with rows_are_counted"),
         ("01", "300", "test_formats casts"), ("0120", "600", "test_formats long_rows"),
         ("0101", "", "test_staged"), ("0101", "", "test_stress --ops 100"),
         ("0101", "300", "test_random --configs 30 --seed 21"),
         ("0011", "", "test_ll ends_before"), ("0011", "", "test_errors over_nodes"),
         ("0011", "", "test_lifecycle group_ groups_take"), ("0011", "", "test_ht routing_styles"),
         ("0011", "", "test_fuzz agree --calls 500 --seed 35"),
         ("0110", "400", "test_stress --ops 60"),
         ("0001", "", "test_ll ids rows_are_counted"),
         ("0001", "2000", "test_random --configs 30 --seed 22"),
         ("0001", "", "test_fuzz differ --calls 700 --seed 36"),
         ("0001", "", "moe_layer --algorithm ll"), ("0010", "", "moe_layer --algorithm ht"),
         ("0123", "", "test_staged overlapping"), ("0123", "", "test_stress --ops 60"),
         ("0123", "", "test_random --configs 30 --seed 239"),
         ("012201", "600", "test_random --configs 15 --seed 24"),
         ("00112233", "", "test_ll routing"),
         ("00112233", "900", "test_random --configs 10 --seed 25"),
         ("00001111", "", "test_stress --ops 40"),
         ("01", "", "test_errors scales_that_differ ll_handle_refused"), ("01", "", "test_formats all_bfloat16"),
         ("0123", "", "test_staged in_flight"), ("00001111", "", "test_formats casts_on"),
         ("0110", "400", "test_graph two_handles two_open"), ("001", "", "example_cuda_graph"),
         ("012", "", "test_graph ht_"), ("0101", "300", "test_random --configs 10 --seed 44 --graphs"),
         *(("01", "500", f"ep_bench -a {mode} --experts 16 --tokens 6 --hidden 256 --warmup 0 --iters 1"
            " --validate --use-cuda-graph") for mode in ("ll", "ht")),
         ("01", "", "test_second memory"),
         ("0112", "", "test_ll rank_major_shapes"),
         ("0110", "", "test_memory"),
         # What refuses arguments, and whose memory a handle has, is as on one node.
         ("010", "900", "test_second delivers beyond turns routing window"),
         # Messages of more than 3 MiB, which two ranks exchange by broadcasts.
         ("01", "", "test_ht huge_rows"))

# On either backend, with sums that do not depend on a token's home.
_INVARIANT = (("host", "0012", "test_random --configs 100 --seed 45"), ("host", "0101", "test_ll routing"),
              ("simt", "0012", "test_random --configs 20 --seed 46"),
              ("simt", "012", "test_ht routing_styles"), ("simt", "0012", "test_ht rows_by_expert"))

# With messages of NCCL that are late at random, on either backend. The CPU backend moves rows
# without NCCL, so there only groups and handles are late.
_LATE = (("host", "0110", "test_random --configs 100 --seed 40"), ("host", "0110", "test_staged"),
         ("host", "0110", "test_stress --ops 100"),
         ("simt", "0110", "test_random --configs 25 --seed 385"),
         ("simt", "0110", "test_staged in_flight"), ("simt", "0101", "test_stress --ops 60"),
         ("simt", "001", "test_graph open"))
_LATE_MICROSECONDS = 1000

# The first call of a communicator blocks while a rank is lost, as NCCL's does.
CONNECTING = (("NCCLEP_HOSTSIM_CONNECT_SECONDS", "30"), ("NCCLEP_HOSTSIM_DELAY_US", "2000"))
# Programs that start their ranks themselves, and lose some: on either backend, with settings.
_FORKED = (("host", "test_death --nodes 0101"),
           ("host", "test_faults --nodes 0001 --trials 8 --seed 37"),
           ("simt", "test_death --nodes 0011"),
           ("simt", "test_faults --nodes 0101 --trials 8 --seed 38"),
           ("simt", "test_faults --nodes 0112 --trials 12 --seed 60 --kinds first", *CONNECTING))

_SIMT_MULTIPROCESSORS = ("NCCLEP_SIMT_MULTIPROCESSORS", "2")
# Of each backend, what its steps' names begin with, and the step that builds its programs.
_BACKENDS = {"host": ("", "build/programs"), "simt": ("simt/", "build/simt")}


def contexts(settings: Iterable[Sequence[str]], words: Sequence[str]) -> list[str]:
    """One application context of mpirun per rank, each with settings of its own."""
    together: list[str] = []
    for of_rank in settings:
        together += [":"] if together else []
        options = itertools.chain.from_iterable(("-x", setting) for setting in of_rank)
        together += ["-np", "1", *options, *words]
    return together


def host_ids(split: str) -> Iterator[Sequence[str]]:
    """For each rank the setting that puts it on its node."""
    return ((f"NCCL_HOSTID=node{node}",) for node in split)


def host_ids_on_one_gpu(split: str) -> Iterator[Sequence[str]]:
    """The same where all share a GPU, which NCCL lets ranks of different hosts do: it takes each for a host."""
    return ((f"NCCL_HOSTID=host{rank}", f"EP_TEST_NODE=node{node}") for rank, node in enumerate(split))


def host_steps(places: Places) -> Iterator[Step]:
    """On the CPU backend."""
    yield from _either(places, "host")
    for row in (*itertools.product(_HOST_SPLITS, _HOST_PROGRAMS), *_HOST_MORE):
        yield _step(places, "host", row)
    # `make run ARGS="--nodes 2"`.
    words = ("scripts/demo.sh", "--nodes", "2", "--built", str(places.programs))
    yield Step("nodes/run", words, counts.says("backend on 2 nodes and matched", 1), ("build/programs",), timeout=240,
               environment=(*ON_STAND_INS, ("CUDA_VISIBLE_DEVICES", "")))


def simt_steps(places: Places) -> Iterator[Step]:
    """On the CUDA backend with its kernels on the CPU."""
    yield from _either(places, "simt")
    # Groups over nodes leave half of so few multiprocessors to others.
    few = ("NCCLEP_SIMT_MULTIPROCESSORS", "12")
    yield _step(places, "simt", ("001", "test_random --configs 25 --seed 41"), "odd-grids/", (few, *ODD_GRIDS))
    yield _step(places, "simt", ("001", "test_random --configs 8 --seed 54 --choices"), "choices/", (few,))
    for seed, (split, chunk_bytes, command) in enumerate(_SIMT):
        chunks = (("NCCL_EP_HT_CHUNK_BYTES", chunk_bytes),) if chunk_bytes else ()
        yield _step(places, "simt", (split, command), "",
                    (("NCCLEP_SIMT_SEED", str(seed)), _SIMT_MULTIPROCESSORS, *chunks))


def _either(places: Places, backend: str) -> Iterator[Step]:
    """What either backend has, with rows of its own."""
    prefix, need = _BACKENDS[backend]
    for _, command, *settings in (row for row in _FORKED if row[0] == backend):
        program, *options = command.split()
        words = (str(places.programs.parent / backend / program), *options)
        yield Step(f"{prefix}nodes/{' '.join([program, *options[1:]])}", words,
                   counts.closing_line, (need,), cores=1 if backend == "simt" else 0, timeout=240,
                   environment=(*ON_STAND_INS, *settings), short_deadlines=True)
    for seed, (of, *row) in enumerate(_LATE):
        if of == backend:
            yield _step(places, backend, row, "late/",
                        (("NCCLEP_HOSTSIM_DELAY_US", str(_LATE_MICROSECONDS)),
                         ("NCCLEP_HOSTSIM_DELAY_SEED", str(seed)), ("NCCLEP_SIMT_SEED", str(seed)),
                         _SIMT_MULTIPROCESSORS))
    for of, *row in _INVARIANT:
        if of == backend:
            yield _step(places, backend, row, "invariant/",
                        (("NCCL_EP_NODE_SUMS", "invariant"), ("NCCL_EP_HT_CHUNK_BYTES", "600"),
                         _SIMT_MULTIPROCESSORS))


def _step(places: Places, backend: str, row: Sequence[str], kind: str = "",
          environment: tuple[tuple[str, str], ...] = ()) -> Step:
    """A row's command on the nodes of its split."""
    split, command = row
    prefix, need = _BACKENDS[backend]
    program, *options = command.split()
    words = contexts(host_ids(split), (str(places.programs.parent / backend / program), *options))
    return Step(f"{prefix}nodes/{kind}{label(command)}/{split}", ("mpirun", *words),
                counts.of_program(program, options), (need,), timeout=240, environment=ON_STAND_INS + environment)


def label(command: str) -> str:
    """The program, with the case, the way, the algorithm, the format or graphs if one is chosen."""
    program, *options = command.split()
    chosen = [option for option in options[:1] if not option.startswith("-")]
    for name in ("--algorithm", "-a", "--dispatch"):
        chosen += [options[options.index(name) + 1]] if name in options else []
    chosen += [option[2:] for option in ("--fp8", "--graphs") if option in options]
    return "/".join([program, *chosen])
