#!/usr/bin/env python3
"""Runs ep_bench over ranks, tokens, SMs and routings and writes bench/results/NAME.json.

git ignores that folder: rows.py turns a file into rows of results.csv. Needs Python's standard library, mpirun and
the programs, no compiler: --prebuilt takes them from a directory made elsewhere (DIR/gpu/ep_bench, libraries in
DIR/lib). The file is written after each run, so a run that fails or hangs costs only itself.
"""

import argparse
import dataclasses
import datetime
import json
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from typing import Any

from rows import BENCH, OURS, ROOT, tokens_name, value_at

sys.path.append(str(ROOT / "scripts"))
try:
    import gpus
except ModuleNotFoundError:
    # bench/ was copied alone: --ranks must name the number of GPUs, the loader must find NCCL.
    gpus = None

_SWEEPS = {"ll": "1..1024", "ht": "512..16384"}
_ITERATIONS = {"ll": 201, "ht": 51}

# One rank has many tokens and all others one of these numbers, or the reverse.
_UNEVEN = "uneven"
_MANY_TOKENS = 128
_FEW_TOKENS = (64, 32, 16, 8, 4, 2, 1, 0)

# The default matrix of high throughput: every number of tokens with 24 SMs, with all SMs, and with
# skewed experts; other numbers of SMs with one number of tokens.
_USUAL_CHANNELS = "12"
_HT_SWEEPS = (("uniform", _USUAL_CHANNELS), ("uniform", "all"), ("zipf", _USUAL_CHANNELS))
_HT_OTHER_CHANNELS = ("4", "8", "16")
_HT_OTHER_TOKENS = "4096"

_WAYS = ("idle", "queued", "graph")  # of timing an operation
_OPERATIONS = ("dispatch", "combine", "pair")
_WITH_CAST = ("alone", "dispatch", "pair")  # of the times with ep_bench --cast outside

# As in scripts/env.sh: containers run as root, and ranks may outnumber cores.
_OPEN_MPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "OMPI_MCA_hwloc_base_binding_policy": "none",
    "OMPI_MCA_btl_vader_single_copy_mechanism": "none",
}


@dataclasses.dataclass(frozen=True)
class Job:
    """One run of ep_bench."""

    algorithm: str
    ranks: int
    tokens: str  # as ep_bench --sweep
    routing: str = ""  # as ep_bench --routing; empty: the mode's own
    channels: str = ""  # as ep_bench --channels; empty: the library's choice

    def __str__(self) -> str:
        parts = [self.algorithm, f"{self.ranks} ranks", f"{self.tokens} tokens", self.routing,
                 self.channels and f"{self.channels} channels"]
        return ", ".join(filter(None, parts))


def main() -> int:
    arguments = _parse_arguments()
    available = gpus.count(os.environ) if gpus else 0
    ranks = arguments.ranks or [count for count in (2, 4, 8) if count <= available]
    if not ranks:
        print("fewer than two GPUs on this machine: nothing to run (--ranks 1 runs on one)")
        return 0
    program = _find_program(arguments)
    environment = _environment(arguments)
    jobs = [job for algorithm in arguments.algorithm for count in ranks for job in jobs_of(algorithm, count, arguments)]
    runs: list[dict[str, Any]] = []
    failures = 0
    started = time.monotonic()
    for number, job in enumerate(jobs, 1):
        print(f"[{number}/{len(jobs)}, {time.monotonic() - started:.0f} s] {job}", flush=True)
        run, problem = _run(job, program, environment, arguments)
        if run:
            runs.append(run)
            _print_table(run)
            print(f"-> {_write(runs, arguments)}\n", flush=True)
        if problem:
            failures += 1
            print(f"FAILED: {problem}\n", flush=True)
    print(f"{len(jobs) - failures} runs passed, {failures} failed ({time.monotonic() - started:.0f} s)")
    return 1 if failures else 0


def jobs_of(algorithm: str, ranks: int, arguments: argparse.Namespace) -> list[Job]:
    """The default matrix on this number of ranks, or every combination of what was chosen."""
    tokens = arguments.tokens or _SWEEPS[algorithm]
    if tokens == _UNEVEN:
        tokens = uneven_sweep(ranks)
    if algorithm == "ll":
        jobs = [Job(algorithm, ranks, tokens, routing, channels)
                for routing in arguments.routing or [""] for channels in arguments.channels or [""]]
        if ranks > 1 and not (arguments.routing or arguments.channels or arguments.tokens):
            jobs.append(Job(algorithm, ranks, uneven_sweep(ranks)))
        return jobs
    if arguments.routing or arguments.channels or arguments.tokens:
        return [Job(algorithm, ranks, tokens, routing, channels)
                for routing in arguments.routing or ["uniform"]
                for channels in arguments.channels or [_USUAL_CHANNELS]]
    sweeps = [Job(algorithm, ranks, tokens, routing, channels) for routing, channels in _HT_SWEEPS]
    return sweeps + [Job(algorithm, ranks, _HT_OTHER_TOKENS, "uniform", channels) for channels in _HT_OTHER_CHANNELS]


def uneven_sweep(ranks: int) -> str:
    """The even batch for comparison, then uneven ones. On two ranks the reverse is the same."""
    items = [str(_MANY_TOKENS), *(f"{_MANY_TOKENS}/{few}" for few in _FEW_TOKENS)]
    if ranks > 2:
        items += [f"{few}/{_MANY_TOKENS}" for few in _FEW_TOKENS]
    return ",".join(items)


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        epilog="Arguments after -- go to ep_bench, for example -- --hidden 4096 --graph-ops 10")
    parser.add_argument("--prebuilt", metavar="DIR", type=pathlib.Path,
                        help="a directory of programs and libraries made elsewhere")
    parser.add_argument("--kind", choices=("gpu", "host"), default="gpu",
                        help="host: the programs on the CPU stand-ins, to try out this script")
    parser.add_argument("--ranks", type=_numbers, metavar="N,N", default=[],
                        help="numbers of ranks (2,4,8 as far as there are GPUs)")
    parser.add_argument("--algorithm", action="append", choices=sorted(_SWEEPS), default=[],
                        help="may be repeated (ll and ht)")
    parser.add_argument("--tokens", metavar="SWEEP", help="as ep_bench --sweep, or "
                        f"{_UNEVEN}: one rank {_MANY_TOKENS} and the others fewer, and so on "
                        f"(ll {_SWEEPS['ll']}, then {_UNEVEN}; ht {_SWEEPS['ht']})")
    parser.add_argument("--routing", type=_words, metavar="NAME,NAME", default=[],
                        help="as ep_bench --routing (ll its own; ht uniform and zipf)")
    parser.add_argument("--channels", type=_words, metavar="N,all", default=[],
                        help="as ep_bench --channels, 2 SMs each (ll its choice; ht "
                        f"{','.join((_USUAL_CHANNELS, 'all', *_HT_OTHER_CHANNELS))}, of which the "
                        f"last ones with {_HT_OTHER_TOKENS} tokens only)")
    parser.add_argument("--nodes", type=int, default=1, help="play so many nodes on this machine, "
                        "by NCCL_HOSTID; ep_bench then times NCCL alone, too (1)")
    parser.add_argument("--iters", type=int, help="measured iterations "
                        f"(ll {_ITERATIONS['ll']}, ht {_ITERATIONS['ht']})")
    parser.add_argument("--no-graph", action="store_true", help="without CUDA graphs")
    parser.add_argument("--no-validate", action="store_true",
                        help="without validation, for another library that orders rows otherwise")
    parser.add_argument("--name", help="of the result file (GPU, label, date)")
    parser.add_argument("--out", type=pathlib.Path, default=BENCH / "results", help="directory of results")
    parser.add_argument("--library", metavar="DIR", type=pathlib.Path,
                        help="measure the libnccl_ep.so of this directory instead")
    parser.add_argument("--label", default=OURS, help="name of the measured library")
    parser.add_argument("--mpirun", default="", help="command line that starts MPI (mpirun)")
    parser.add_argument("--timeout", type=int, default=480, help="seconds for a run (%(default)s)")
    parser.add_argument("extra", nargs="*", metavar="-- OPTION", help="options of ep_bench")
    arguments = parser.parse_args()
    arguments.algorithm = arguments.algorithm or ["ll", "ht"]
    return arguments


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _words(text: str) -> list[str]:
    return text.split(",")


def default_target() -> pathlib.Path:
    """Where the Makefile builds, as scripts/env.sh says."""
    return pathlib.Path(os.environ.get("NCCL_EP_TARGET", ROOT / "target"))


def _find_program(arguments: argparse.Namespace) -> pathlib.Path:
    if arguments.prebuilt:
        program = arguments.prebuilt.resolve() / arguments.kind / "ep_bench"
    else:
        program = default_target() / "c" / arguments.kind / "ep_bench"
    if not program.exists():
        sys.exit(f"{program} is missing: `make gpu-programs` builds it, --prebuilt takes another")
    return program


def _environment(arguments: argparse.Namespace) -> dict[str, str]:
    """The ranks' environment: it finds chosen libraries first, then the caller's, then NCCL."""
    folders = [arguments.library, arguments.prebuilt and arguments.prebuilt / "lib"]
    chosen = [str(folder.resolve()) for folder in folders if folder]
    if gpus:
        searched = gpus.library_path(os.environ, gpus.find_nccl(os.environ), *chosen)
    else:
        searched = ":".join(filter(None, [*chosen, os.environ.get("LD_LIBRARY_PATH")]))
    environment = {**_OPEN_MPI, **os.environ, "LD_LIBRARY_PATH": searched}
    environment.setdefault("EP_TEST_DEADLINE", str(arguments.timeout))
    return environment


def _command(job: Job, program: pathlib.Path, arguments: argparse.Namespace) -> list[str]:
    mpirun = shlex.split(arguments.mpirun) or [_find_mpirun()]
    on_nodes = [str(ROOT / "scripts" / "on_nodes.sh"), str(arguments.nodes)]
    command = [*mpirun, "-np", str(job.ranks), *(on_nodes if arguments.nodes > 1 else []),
               str(program), "--algorithm", job.algorithm, "--sweep", job.tokens,
               "--iters", str(arguments.iters or _ITERATIONS[job.algorithm])]
    if job.routing:
        command += ["--routing", job.routing]
    if job.channels:
        command += ["--channels", job.channels]
    if not arguments.no_validate:
        command.append("--validate")
    if arguments.kind == "gpu" and not arguments.no_graph:
        command.append("--use-cuda-graph")
    return [*command, *arguments.extra]


def _find_mpirun() -> str:
    found = shutil.which("mpirun")
    if found is None:
        sys.exit("no mpirun in PATH: --mpirun names one")
    return found


def _run(job: Job, program: pathlib.Path, environment: dict[str, str],
         arguments: argparse.Namespace) -> tuple[dict[str, Any] | None, str]:
    """The results or None, and the text of a problem or nothing."""
    command = _command(job, program, arguments)
    shown = " ".join(_shorten(part) for part in command)
    print(f"$ {shown}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / "ep_bench.json"
        problem = _execute([*command, "--json", str(file)], environment, arguments.timeout)
        if not file.exists():
            return None, problem or "no results were written"
        content = json.loads(file.read_text())
    now = datetime.datetime.now(datetime.timezone.utc).replace(microsecond=0)
    return {"date": now.isoformat(), "command": shown, "machine": content["machine"],
            "config": content["config"], "first_use_bytes": content["first_use_bytes"],
            "results": content["results"]}, problem


def _execute(command: list[str], environment: dict[str, str], timeout: int) -> str:
    """Runs a command. On failure prints its output and returns what went wrong."""
    try:
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, text=True, timeout=timeout + 10,
                              check=False)
    except subprocess.TimeoutExpired as expired:
        print((expired.stdout or b"").decode(errors="replace"))
        return f"still running after {timeout + 10} s"
    if done.returncode == 0:
        return ""
    print(done.stdout)
    return f"exit status {done.returncode}"


def _shorten(part: str) -> str:
    """The last part of a path: paths of one machine are useless elsewhere."""
    return pathlib.Path(part).name if part.startswith("/") else part


def _write(runs: list[dict[str, Any]], arguments: argparse.Namespace) -> pathlib.Path:
    gpu = runs[0]["machine"]["gpu"] or "no GPU"
    label = "" if arguments.label == OURS else f" {arguments.label}"
    name = arguments.name or f"{gpu}{label} {runs[0]['date'][:16]}"
    name = re.sub(r"[^a-z0-9.-]+", "-", name.lower())
    content = {"name": name, "label": arguments.label, "runs": runs}
    arguments.out.mkdir(parents=True, exist_ok=True)
    file = arguments.out / f"{name}.json"
    file.write_text(json.dumps(content, indent=1) + "\n")
    return file


def _print_table(run: dict[str, Any]) -> None:
    config, machine = run["config"], run["machine"]
    print(f"{config['algorithm']}, {config['ranks']} ranks, {config['routing']}, "
          f"{config['channels'] or 'auto'} channels, {machine['gpu'] or 'no GPU'}, NCCL "
          f"{machine['nccl']}; medians of the slowest rank in us: dispatch combine pair")
    kind = config["usual_convention"]
    print(f"{'tokens':>8}  {'idle stream':^23}  {'queued':^23}  {'graph replay':^23}  "
          f"{'host D':>6} {'host C':>6}  {f'GB/s {kind} D':>12} {'C':>7}  {'max/mean':>8}  "
          f"{'wrong':>5}")
    for entry in run["results"]:
        timed = [_three(entry[how]) for how in _WAYS]
        host, rate = entry["host_call"], entry["gbps"]
        wrong = "-" if entry["wrong_rows"] is None else str(sum(entry["wrong_rows"].values()))
        print(f"{tokens_name(entry):>8}  {'  '.join(timed)}  "
              f"{host['dispatch']['median_us']:>6.2f} {host['combine']['median_us']:>6.2f}  "
              f"{rate['dispatch'][kind]:>12.1f} {rate['combine'][kind]:>7.1f}  "
              f"{entry['received_imbalance']:>8.3f}  {wrong:>5}")
        if value_at(entry, "idle.cast"):
            timed = [_three(entry[how] and entry[how]["cast"], _WITH_CAST) for how in _WAYS]
            print(f"{'cast':>8}  {'  '.join(timed)}  the cast outside: alone, and before the dispatch and the pair")
        if alone := value_at(entry, "network.nccl_alone"):
            timed, host = [_three(alone[how]) for how in _WAYS], alone["host_call"]
            print(f"{'NCCL':>8}  {'  '.join(timed)}  {host['dispatch']['median_us']:>6.2f} "
                  f"{host['combine']['median_us']:>6.2f}  alone, with the bytes between nodes")


def _three(times: dict[str, Any] | None, names: tuple[str, ...] = _OPERATIONS) -> str:
    if times is None:
        return f"{'-':^23}"
    return " ".join(f"{times[name]['median_us']:>7.1f}" for name in names)


if __name__ == "__main__":
    sys.exit(main())
