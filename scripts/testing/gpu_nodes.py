"""GPUs of one machine as several nodes: by a NCCL_HOSTID of each process NCCL takes its network.

On one GPU NCCL takes each rank for a host of its own, and the library takes some of them for a node.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence

from testing import counts, nodes
from testing.gpu_machine import MPIRUN, Machine
from testing.step import Counts, Finished, Step

# By the number of GPUs that they need: the splits of programs with many cases, and of the others.
_SPLITS = {1: ("01",), 4: ("0101", "0001"), 8: ("00112233",)}
_MORE_SPLITS = {3: ("012",), 4: ("0123", "0011"), 8: ("00001111",)}
_PROGRAMS = ("test_ll", "test_staged", "test_graph", "test_stress --ops 2000", "test_lifecycle",
             "test_errors over_nodes", "test_errors scales_that_differ", "test_formats",
             "test_fuzz agree --calls 6000 --seed 41",
             "test_fuzz differ --calls 2000 --seed 42", "moe_layer --algorithm ll",
             "test_ht", "test_random --configs 60",
             "test_random --configs 40 --seed 44 --graphs", "moe_layer --algorithm ht", "moe_layer --fp8",
             "example_several_nodes", "example_cuda_graph",
             "ep_test -a ll -s both -c -r -t 16 -d 512", "ep_test -a ht -c -r -t 16 -d 512")
_MORE_PROGRAMS = ("test_ll", "test_random --configs 60", "test_stress --ops 500")
# Of two nodes that share a GPU, where the kernels of both take turns: what ends in time all the same.
_SHARING_PROGRAMS = ("test_staged", "test_graph", "test_lifecycle", "test_errors over_nodes",
                     "test_errors scales_that_differ", "test_random --configs 60",
                     "test_random --configs 40 --seed 44 --graphs")
# Of several ranks on a node, whose rail peers forward rows within it.
_SHARING_RELAYS = (("0011", "test_ll"), ("0011", "test_ht"), ("0110", "test_staged"),
                   ("0101", "test_random --configs 40"),
                   ("0011", "test_random --configs 25 --seed 44 --graphs"),
                   ("0001", "test_ll ids"))
_QUICK_PROGRAMS = ("test_ll", "test_staged", "test_errors over_nodes")
_FORKED = ("test_death --nodes {}", "test_faults --nodes {} --trials 15 --seed 43")

_LIMIT_SECONDS = 240
# A creation has three quarters of it to connect by NCCL, which once took more than 730 ms where two nodes shared a GPU.
_DEATH_TIMEOUT_MS = "2000"
# One machine has no network but this one, unless somebody says so.
_NETWORK = (("NCCL_IB_DISABLE", "1"), ("NCCL_SOCKET_IFNAME", "lo"),
            ("NCCL_SOCKET_NTHREADS", "4"), ("NCCL_NSOCKS_PERTHREAD", "4"))

# Over a third party's network plugin: rows enough to see in what the plugin has carried.
_PLUGIN_BENCH = ("ep_bench --algorithm ll --experts 64 --tokens 128 --hidden 7168 --warmup 1"
                 " --iters 5 --validate")
_PLUGIN_ROW_BYTES = 2 * 5 * 128 * 7168 * 2
_PLUGIN_SENT = re.compile(r"NET/EP-test: sent (\d+) bytes")


def steps(machine: Machine, quick: bool) -> Iterator[Step]:
    """Runs on several nodes; on one GPU, which NCCL lets ranks of different hosts share, a few."""
    gpus = len(machine.devices)
    shares = gpus == 1
    commands = _SHARING_PROGRAMS if shares else _QUICK_PROGRAMS if quick else _PROGRAMS
    splits = [split for least, all_of in _SPLITS.items() if least <= gpus for split in all_of]
    for split in splits[:1] if quick else splits:
        for command in commands:
            yield _step(machine, split, command)
        for pattern in _FORKED:
            program, *options = pattern.format(split).split()
            words = (str(machine.programs / "gpu" / program), *options)
            yield _as_step(machine, f"{program}/{split}", words, (("NCCL_EP_TIMEOUT_MS", _DEATH_TIMEOUT_MS),))
    for split, command in _SHARING_RELAYS if shares and not quick else ():
        yield _step(machine, split, command)
    more = [split for least, all_of in _MORE_SPLITS.items() if least <= gpus for split in all_of]
    for split in () if quick else more:
        for command in _MORE_PROGRAMS:
            yield _step(machine, split, command)
    yield _plugin_step(machine)


def _step(machine: Machine, split: str, command: str) -> Step:
    return _as_step(machine, f"{nodes.label(command)}/{split}", _launched(machine, split, command))


def _launched(machine: Machine, split: str, command: str) -> Sequence[str]:
    program, *options = command.split()
    words = (str(machine.programs / "gpu" / program), *options)
    host_ids = nodes.host_ids_on_one_gpu if len(machine.devices) == 1 else nodes.host_ids
    return (*MPIRUN, *nodes.contexts(host_ids(split), words))


def _as_step(machine: Machine, label: str, words: Sequence[str],
             environment: Sequence[tuple[str, str]] = (), read=counts.closing_line) -> Step:
    network = tuple((name, os.environ.get(name, value)) for name, value in _NETWORK)
    return Step(f"gpu/nodes/{label}", tuple(words), read, ("setup/nccl",),
                cores=len(machine.devices), timeout=_LIMIT_SECONDS,
                environment=(*network, ("EP_TEST_DEADLINE", str(_LIMIT_SECONDS - 30)), *environment))


def _plugin_step(machine: Machine) -> Step:
    plugin = machine.programs / "lib" / "libnccl-net-ep-test.so"
    environment = (("NCCL_NET_PLUGIN", str(plugin)), ("NCCL_NET", "EP-test"),
                   ("NCCL_DEBUG", "INFO"), ("NCCL_DEBUG_SUBSYS", "INIT,NET"))
    return _as_step(machine, "net_plugin/01", _launched(machine, "01", _PLUGIN_BENCH), environment, _rows_over_plugin)


def _rows_over_plugin(finished: Finished) -> Counts:
    """The benchmark's results are right, and the plugin's lines in NCCL's log show its rows."""
    sent = sum(map(int, _PLUGIN_SENT.findall(finished.output)))
    least = 2 * _PLUGIN_ROW_BYTES  # of two ranks
    if sent < least:
        return Counts(0, 1, f"the plugin has sent {sent} bytes, at least {least} expected")
    return counts.says(counts.BENCH_PASSED, 1)(finished)
