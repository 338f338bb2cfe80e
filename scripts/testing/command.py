"""Runs one command to its end or its time limit and leaves no process behind.

A command has its own process group, so that its children end with it: first by SIGTERM, which
mpirun passes on to its ranks, then by SIGKILL.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping

from testing.step import ROOT, Finished

_GRACE_SECONDS = 10

_running: set[subprocess.Popen] = set()
_lock = threading.Lock()


def build_environment() -> dict[str, str]:
    """The environment after env.sh, which chooses CUDA, NCCL and MPI."""
    done = subprocess.run(["bash", "-c", ". scripts/env.sh && env -0"], cwd=ROOT, check=False, stdout=subprocess.PIPE)
    if done.returncode != 0:
        sys.exit(done.returncode)  # env.sh printed why
    return dict(entry.split("=", 1) for entry in done.stdout.decode().split("\0") if "=" in entry)


def slowness() -> float:
    """How many times as long as on an idle machine things may take now: processes for each core."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def idle_seconds() -> float:
    """How long the cores of this machine have idled since its start, all of them together."""
    with open("/proc/stat", encoding="ascii") as stat:
        idle, waiting = stat.readline().split()[4:6]
    return (int(idle) + int(waiting)) / os.sysconf("SC_CLK_TCK")


def run(command: tuple[str, ...], environment: Mapping[str, str], timeout: float | None) -> Finished:
    """Runs a command in the repository's root; output and errors are merged."""
    # A file, not a pipe, which a grandchild that outlives the command would keep open.
    with tempfile.TemporaryFile() as log, mpi_sessions() as sessions:
        try:
            process = subprocess.Popen(command, cwd=ROOT, env={**environment, **sessions},
                                       stdout=log, stderr=subprocess.STDOUT,
                                       stdin=subprocess.DEVNULL, start_new_session=True)
        except OSError as error:
            return Finished(127, f"{command[0]}: {error}")
        with _lock:
            _running.add(process)
        timed_out = False
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            timed_out = True
        finally:
            _end(process)
            with _lock:
                _running.discard(process)
        log.seek(0)
        return Finished(process.returncode, log.read().decode(errors="replace"), timed_out)


@contextlib.contextmanager
def mpi_sessions() -> Iterator[dict[str, str]]:
    """The environment of a command whose MPI jobs have their own folder for files.

    In a shared folder, a job that ends removes files that another still needs.
    """
    with tempfile.TemporaryDirectory(prefix="ep-mpi-", ignore_cleanup_errors=True) as folder:
        yield {"OMPI_MCA_orte_tmpdir_base": folder}


def stop_all() -> None:
    """Ends all running commands, when the run is interrupted."""
    with _lock:
        processes = list(_running)
    for process in processes:
        _end(process)


def _end(process: subprocess.Popen) -> None:
    if process.poll() is None:
        _signal(process, signal.SIGTERM)
        try:
            process.wait(_GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            pass
    _signal(process, signal.SIGKILL)
    process.wait()


def _signal(process: subprocess.Popen, number: signal.Signals) -> None:
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:
        pass
