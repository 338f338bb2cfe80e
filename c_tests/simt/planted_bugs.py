#!/usr/bin/env python3
"""Shows that the tests of the kernels on the CPU can fail: each of a list of bugs is planted in a
copy of cuda/, and a program of c_tests that passes without it must then fail.

Usage: planted_bugs.py TARGET [NAME...]: cargo's target folder, with everything built; without names
all bugs. A bug whose text is no longer in the sources counts as a failure: it has to be written anew
or to go. planted_bugs.py --texts only looks for the texts. Ends with "N passed, N failed".
"""

from __future__ import annotations

import concurrent.futures
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

from bugs import BUGS
from bugs_mapped import BUGS as MAPPED_BUGS
from planting import Bug, Change

C_TESTS = pathlib.Path(__file__).resolve().parents[1]
KERNELS = C_TESTS.parent / "cuda"
LIST = C_TESTS / "simt" / "kernel_list.cpp"
ENVIRONMENT = {"EP_TEST_DEADLINE": "60", "NCCLEP_HOSTSIM_WITH_GPU": "1"}
# With a bug one failure says enough, and what never comes must not be waited for long.
IMPATIENT = {"NCCL_EP_TIMEOUT_MS": "2000", "NCCLEP_SIMT_HANG_SECONDS": "5", "EP_TEST_FIRST_FAILURE": "1"}
SECONDS = 90
TRIES = 10
LINES_SHOWN = 12
# What runs of these programs must have in their text to launch certain kernels, by a part of the file's name. Kernels
# that a run does not launch are not compiled, which halves the work. A line too many shows: its bugs are not noticed.
KNOWN_PROGRAMS = ("test_ll", "test_ht", "test_staged")
LAUNCHED_WITH = {"_few": "MULTIPROCESSORS", "rank_": "rank_major|views", "view": "views", "nodes": "NODES",
                 "pack": "NODES", "zones": "by_expert", "direct": "MEMORY", "pull": "MEMORY", "offer": "MEMORY"}


class Wrong(Exception):
    """Why a bug is not shown to be noticed."""


def main() -> int:
    every = (*BUGS, *MAPPED_BUGS)
    if sys.argv[1:] == ["--texts"]:
        return find_texts(every)
    target = pathlib.Path(sys.argv[1]).resolve()
    names = sys.argv[2:]
    if unknown := set(names) - {bug.name for bug in every}:
        sys.exit(f"no such bugs: {', '.join(unknown)}")
    bugs = [bug for bug in every if not names or bug.name in names]
    # Without a bug every program of the list passes; or a failure would say nothing.
    sound = [Bug(f"no bug: {run}{', lied to' if lie else ''}{', in its setting' if beside else ''}",
                 "", "", "", run, lie=lie, beside=beside)
             for run, lie, beside in dict.fromkeys((bug.run, bug.lie, bug.beside) for bug in bugs)]
    failed = 0
    with (tempfile.TemporaryDirectory() as work, concurrent.futures.ThreadPoolExecutor(max_workers=2) as executor):
        workshop = Workshop(target, pathlib.Path(work))
        judged = {bug: executor.submit(judge, bug, workshop) for bug in (*sound, *bugs)}
        for bug, future in judged.items():
            problem = future.exception()
            if problem and not isinstance(problem, Wrong):
                raise problem
            failed += problem is not None
            said = f"FAILED: {problem}" if problem else f"ok, {future.result():.1f} s"
            print(f"{bug.name}: {said}", flush=True)
    print(f"{len(judged) - failed} passed, {failed} failed")
    return 1 if failed else 0


def find_texts(bugs: Sequence[Bug]) -> int:
    """Whether each change finds its text in the kernels."""
    failed = 0
    for bug in bugs:
        try:
            for change in filter(None, (bug, bug.lie, *bug.beside)):
                planted(change, (KERNELS / change.file).read_text())
        except Wrong as wrong:
            failed += 1
            print(f"{bug.name}: FAILED: {wrong}")
    print(f"{len(bugs) - failed} passed, {failed} failed")
    return 1 if failed else 0


class Workshop:
    """Compiles kernels as the Makefile does, but quickly: the shim's headers once, and of the kernels only
    those files that a bug changes. The driver finds the others in the library of all."""

    def __init__(self, target: pathlib.Path, work: pathlib.Path) -> None:
        self.programs = target / "c" / "simt"
        libraries = os.environ.get("NCCL_EP_RELEASE", f"{target}/release")
        said = run("make", "-s", "--no-print-directory", "simt-compiler", f"EP_LIBDIR={libraries}").stdout
        compiler, *options = said.split()
        self._compiler = (compiler, f"-I{work}", *options, "-O0", "-g0", "-w", "-fno-sanitize=all")
        self._compile("-x", "c++-header", "simt/ptx_cpu.h", "-o", str(work / "ready.h.gch"))
        self._compiler += ("-include", "ready.h")

    def build(self, folder: pathlib.Path, changed: set[pathlib.Path], run: str) -> pathlib.Path:
        """The library of those kernels in `folder` that are made from files that have changed there, and that `run`
        launches."""
        stale = [file for file in sorted(folder.rglob("*.cu")) if changed & sources_of(file) and launches(run, file)]
        unit = folder / "kernels.cpp"
        unit.write_text("".join(f'#include "{file}"\n' for file in (LIST, *stale)))
        module = folder / "kernels.so"
        self._compile("-shared", "-o", str(module), str(unit), f"-L{self.programs / 'lib'}", "-lncclep_simt")
        return module

    def _compile(self, *words: str) -> None:
        made = run(*self._compiler, *words)
        if made.returncode != 0:
            raise Wrong(f"does not compile\n{shown(made)}")


def launches(run: str, file: pathlib.Path) -> bool:
    """Whether a run may launch kernels of a file."""
    if not any(program in run.split() for program in KNOWN_PROGRAMS):
        return True
    return all(part not in file.name or re.search(words, run) for part, words in LAUNCHED_WITH.items())


def sources_of(file: pathlib.Path) -> set[pathlib.Path]:
    """The kernels' files that one is made from, itself among them."""
    found: set[pathlib.Path] = set()
    left = [file]
    while left:
        file = left.pop()
        if file not in found and file.is_file():
            found.add(file)
            names = re.findall(r'^#include "(.*)"', file.read_text(), re.MULTILINE)
            left += [file.parent.joinpath(name).resolve() for name in names]
    return found


def judge(bug: Bug, workshop: Workshop) -> float:
    """Builds the kernels with the bug, runs its program, and raises unless that ends as it must.

    The result is how many seconds that took.
    """
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as liars_folder:
        modules = [build((*bug.beside, *((bug,) if bug.file else ())), bug.run, folder, workshop)]
        if bug.lie:
            modules.insert(0, build((*bug.beside, bug.lie), bug.run, liars_folder, workshop))
        # What happens between blocks is not the same every time; a bug may need luck to show.
        for seed in range(1, TRIES + 1 if bug.file else 2):
            ended = play(bug, workshop, modules, seed)
            if ended.returncode != 0:
                break
    if bug.file and ended.returncode == 0:
        raise Wrong(f"NOT noticed in {TRIES} runs")
    if not bug.file and ended.returncode != 0:
        raise Wrong(f"status {ended.returncode}\n{shown(ended)}")
    return time.monotonic() - start


def build(changes: Sequence[Bug | Change], run: str, folder: str, workshop: Workshop) -> pathlib.Path:
    """The library of the kernels of `run` with those changes, made in `folder`."""
    sources = pathlib.Path(folder, "cuda")
    shutil.copytree(KERNELS, sources)
    for change in changes:
        path = sources / change.file
        path.write_text(planted(change, path.read_text()))
    return workshop.build(sources, {sources / change.file for change in changes}, run)


def planted(change: Bug | Change, text: str) -> str:
    """The text of the change's file with the change."""
    if text.count(change.old) != 1:
        raise Wrong(f"its text is {text.count(change.old)} times in {change.file}")
    return text.replace(change.old, change.new)


def play(bug: Bug, workshop: Workshop, modules: list[pathlib.Path], seed: int) -> subprocess.CompletedProcess:
    """Runs the program; rank 0 has the first module, the others the last."""
    ranks, *words = bug.run.split()
    settings = dict(word.split("=") for word in words if "=" in word)
    program, *options = (word for word in words if "=" not in word)
    nodes = settings.pop("NODES", "0" * int(ranks))
    contexts: list[str] = []
    for rank, node in enumerate(nodes):
        module = modules[0 if rank == 0 else -1]
        contexts += [":"] if contexts else []
        contexts += ["-np", "1", "env", f"NCCLEP_SIMT_KERNELS={module}", f"NCCL_HOSTID=node{node}",
                     str(workshop.programs / program), *options]
    return run("mpirun", *contexts, NCCLEP_SIMT_SEED=str(seed), **settings, **(IMPATIENT if bug.file else {}))


def run(*command: str, **settings: str) -> subprocess.CompletedProcess:
    # Jobs of MPI that share a folder for their files remove what others are about to use.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as sessions:
        own = {**ENVIRONMENT, "OMPI_MCA_orte_tmpdir_base": sessions, **settings}
        return subprocess.run(("timeout", "-k", "5", str(SECONDS), *command), cwd=C_TESTS,
                              env={**os.environ, **own}, check=False, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, text=True, errors="replace")


def shown(ended: subprocess.CompletedProcess) -> str:
    return "\n".join(ended.stdout.splitlines()[:LINES_SHOWN])


if __name__ == "__main__":
    sys.exit(main())
