#!/usr/bin/env python3
"""Runs the C programs on the GPUs of this machine and ends with the line `N passed, N failed`.

Runs one rank per GPU over NCCL, and several ranks on one GPU over a test-only NCCL. Needs Python's
standard library, a driver, Open MPI and an NCCL that gpus.py finds. With --prebuilt it builds
nothing; docs/testing.md says how to make such a folder.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
import time
from collections.abc import Sequence

from testing import catalogue, command, gpu_machine, gpu_programs, pool, report
from testing.pool import Outcome
from testing.step import Counts, Places, Step


def main() -> int:
    arguments = _parse_arguments()
    environment = command.build_environment()
    target = pathlib.Path(environment["NCCL_EP_TARGET"])
    prebuilt = arguments.prebuilt
    programs = prebuilt.resolve() if prebuilt else target / "c"
    machine = gpu_machine.find(environment, programs, builds=not prebuilt)
    if not machine.devices:
        print("no GPU on this machine, or CUDA_VISIBLE_DEVICES hides all: nothing to run")
        return 0

    outcomes: list[Outcome] = []
    start = time.monotonic()
    facts = {"gpus": machine.names, "nccl": machine.nccl, "quick": arguments.quick}

    def note(outcome: Outcome) -> None:
        outcomes.append(outcome)
        report.print_outcome(outcome, arguments.verbose)
        _write_log(arguments.log or target / "gpu-test.json", facts, outcomes)

    def finish() -> int:
        report.print_summary(outcomes, time.monotonic() - start)
        return 1 if any(not outcome.counts.ok for outcome in outcomes) else 0

    has_ht = True
    if not arguments.list:
        print(f"{len(machine.devices)} GPU(s): {', '.join(machine.names)}; NCCL: "
              f"{machine.nccl or 'none found'}")
        if not prebuilt:
            builds = catalogue.gpu_builds(Places(environment, target, target / "c" / "host"))
            pool.run_steps(builds, {**environment, "NCCL_EP_CUDA": "require"}, 2, note)
        capabilities = _ask(machine, note) if all(each.counts.ok for each in outcomes) else None
        if capabilities is None:
            return finish()
        facts.update(capabilities.values)
        has_ht = capabilities.has_high_throughput
    steps = report.select(gpu_programs.all_steps(machine, arguments.quick, has_ht), arguments.only)
    if not steps:
        sys.exit(f"no step matches {', '.join(arguments.only)}; --list shows all")
    if arguments.list:
        print("\n".join(step.name for step in steps))
        return 0
    pool.run_steps(steps, machine.environment, len(machine.devices), note)
    return finish()


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", metavar="WORD", action="append", default=[],
                        help="run the steps with a word in their name that starts with WORD, such "
                             "as onegpu, test_ll or onegpu/test_ll/4; may be repeated")
    parser.add_argument("--list", action="store_true", help="print the names of the steps")
    parser.add_argument("--quick", action="store_true",
                        help="fewer numbers of ranks and options, less work in test_stress")
    parser.add_argument("--prebuilt", metavar="DIR", type=pathlib.Path,
                        help="take the programs from DIR, made by `make gpu-package`")
    parser.add_argument("--log", metavar="FILE", type=pathlib.Path,
                        help="where the JSON log goes (gpu-test.json in cargo's target folder)")
    parser.add_argument("-v", "--verbose", action="store_true", help="show the output of every step")
    return parser.parse_args()


def _ask(machine: gpu_machine.Machine, note) -> gpu_machine.Capabilities | None:
    """What the library can do here; None if it cannot open a group."""
    start = time.monotonic()
    found = gpu_machine.ask(machine)
    counts = Counts(1, 0) if found.ok else Counts(0, 1, "no group can be opened on a GPU")
    if not machine.has_mpi:
        counts = Counts(0, 1, "no mpirun on this machine")
    step = Step("setup/capabilities", lambda: (counts, ""))
    note(Outcome(step, counts, time.monotonic() - start, found.finished.output))
    return found if counts.ok else None


def _write_log(path: pathlib.Path, facts: dict, outcomes: Sequence[Outcome]) -> None:
    """Writes the results so far; called after each step, so an interrupted run keeps them."""
    steps = [{
        "name": each.step.name,
        "passed": each.counts.passed,
        "failed": each.counts.failed,
        "not_run": each.counts.not_run,
        "skipped": each.counts.skipped,
        "problem": each.counts.problem,
        "seconds": round(each.seconds, 2),
        "output": "" if each.counts.ok else each.output,
    } for each in outcomes]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**facts, "steps": steps}, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
