"""How ranks meet: names of jobs, sockets, groups of torch.distributed."""

import os
import socket
import time
import types

import pytest
import torch
import torch.distributed as dist

from nccl_ep import EpGroup, rendezvous


def only(monkeypatch, environment):
    """Removes all launchers' variables from the environment except these."""
    launchers = ("OMPI_", "PMIX_", "PMI_", "MPI_", "MPIRUN_", "MV2_", "SLURM_", "TORCHELASTIC_", "MASTER_")
    numbers = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    for name in tuple(os.environ):
        if name.startswith(launchers) or name in numbers:
            monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)


_OF_PARENT = f"{os.getppid()}.{os.stat('/proc/self/ns/pid').st_ino}"


@pytest.mark.parametrize("environment, job", [
    ({"PMIX_NAMESPACE": "17", "TORCHELASTIC_RUN_ID": "none"}, "17"),
    ({"TORCHELASTIC_RUN_ID": "abc", "MASTER_PORT": "29500"}, "abc"),
    ({"TORCHELASTIC_RUN_ID": "none", "MASTER_PORT": "29500"}, "port.29500"),
    ({"SLURM_JOB_ID": "5", "SLURM_STEP_ID": "1", "MASTER_PORT": "29500"}, "5.1"),
    ({"MASTER_PORT": "29500"}, _OF_PARENT),
    ({"TORCHELASTIC_RUN_ID": "none"}, _OF_PARENT),
])
def test_jobs_are_told_apart(monkeypatch, environment, job):
    only(monkeypatch, environment)
    assert rendezvous._job() == job


_INHERITED = {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "OMPI_COMM_WORLD_RANK": "0",
              "OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
_WORKER = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"}


@pytest.mark.parametrize("environment, rank_and_size", [
    ({"RANK": "1", "WORLD_SIZE": "2"}, (1, 2)),
    ({"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "RANK": "0", "WORLD_SIZE": "1"}, (3, 4)),
    (_WORKER, (1, 2)),
    # torchrun started by srun or mpirun.
    ({**_WORKER, **_INHERITED}, (1, 2)),
    # MPICH within a task of Slurm, whose variables all processes inherit.
    ({"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "PMI_RANK": "1", "PMI_SIZE": "2"}, (1, 2)),
    # A terminal, or a notebook; also one in an allocation of Slurm.
    ({}, (0, 1)),
    ({"SLURM_JOB_ID": "5", "SLURM_NTASKS": "8"}, (0, 1)),
])
def test_which_launcher_numbers_the_ranks(monkeypatch, environment, rank_and_size):
    only(monkeypatch, environment)
    assert rendezvous.launched_rank() == rank_and_size


def test_half_of_what_a_launcher_says(monkeypatch):
    """It is no world of one: two of these would not find each other."""
    only(monkeypatch, {"RANK": "1"})
    with pytest.raises(RuntimeError, match="There is a RANK in the environment, but no WORLD_SIZE"):
        rendezvous.launched_rank()


@pytest.mark.parametrize("given, milliseconds", [
    ("250", 250), (" 70000 ", 70000), ("", 100000), ("abc", 100000), ("-5", 100000), ("0", 100000)])
def test_how_long_ranks_wait_for_each_other(monkeypatch, given, milliseconds):
    """As long as the library's calls do, which ignores the same values."""
    monkeypatch.setenv("NCCL_EP_TIMEOUT_MS", given)
    assert rendezvous._timeout_ms() == milliseconds


@pytest.mark.parametrize("mine, text", [
    (b"id", "rank 0 of 2 waited 200 ms .NCCL_EP_TIMEOUT_MS. for the others, and 0 of 1 came"),
    (None, "rank 1 of 2 waited 200 ms .NCCL_EP_TIMEOUT_MS. for rank 0 on this machine")])
def test_a_rank_that_does_not_come(monkeypatch, mine, text):
    """Each process of this run is a job of its own."""
    only(monkeypatch, {"PMIX_NAMESPACE": f"test.{os.getpid()}", "NCCL_EP_TIMEOUT_MS": "200"})
    began = time.monotonic()
    with pytest.raises(RuntimeError, match=text):
        rendezvous._share(mine, 0 if mine else 1, 2)
    assert 0.2 <= time.monotonic() - began < 20


def test_a_world_of_one_needs_no_place_to_meet(monkeypatch):
    only(monkeypatch, {"SLURM_NNODES": "2"})
    assert rendezvous._share(b"id", 0, 1) == b"id"


@pytest.mark.parametrize("environment, local_rank", [
    ({"RANK": "1", "WORLD_SIZE": "2"}, 1),
    ({"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1"}, 1),
    ({**_WORKER, **_INHERITED, "LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "3"}, 0),
])
def test_which_gpu_a_rank_may_take(monkeypatch, environment, local_rank):
    only(monkeypatch, environment)
    assert rendezvous.launched_local_rank() == local_rank


def test_ranks_of_several_machines_do_not_meet(monkeypatch):
    only(monkeypatch, {**_WORKER, **_INHERITED, "RANK": "0", "MASTER_PORT": f"test.{os.getpid()}"})
    monkeypatch.setattr(rendezvous, "_serve", lambda *arguments: 1)
    assert rendezvous._share(b"id", 0, 2) == b"id"
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    with pytest.raises(RuntimeError, match="ranks on several machines"):
        rendezvous._share(b"id", 0, 2)


@pytest.mark.parametrize("environment, on_one_machine", [
    ({}, True),
    ({"SLURM_NNODES": "1"}, True),
    ({"SLURM_NNODES": "2"}, False),
    ({"SLURM_NNODES": "2", "SLURM_STEP_NUM_NODES": "1"}, True),
    ({"SLURM_NNODES": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, True),
    ({"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, False),
])
def test_machines_that_a_launcher_tells_of(monkeypatch, environment, on_one_machine):
    only(monkeypatch, environment)
    assert rendezvous._on_one_machine(4) == on_one_machine


def test_a_meeting_place_in_use():
    address = f"\0nccl_ep.test.{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
        other.bind(address)
        with pytest.raises(RuntimeError, match=f"another job meet at 'nccl_ep.test.{os.getpid()}'"):
            rendezvous._serve(address, b"", 1, time.monotonic() + 1)


@pytest.mark.parametrize("backend, with_gpus, device", [
    ("gloo", True, "cpu"), ("mpi", True, "cpu"), ("nccl", True, "cuda"),
    ("cpu:gloo,cuda:nccl", True, "cuda"), ("undefined", True, "cuda"), ("undefined", False, "cpu")])
def test_where_collectives_take_tensors(monkeypatch, backend, with_gpus, device):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: with_gpus)
    distributed = types.SimpleNamespace(get_backend=lambda group: backend)
    assert rendezvous.collective_device(distributed, None) == device


def test_a_group_of_some_ranks(rank, size, device):
    """The last ranks exchange tokens among themselves; the first one gets an error text."""
    members = list(range(1, size)) or [0]
    some = dist.new_group(members)
    if rank not in members:
        with pytest.raises(ValueError, match="comm: this process is none of its ranks"):
            EpGroup(len(members), 8, max_tokens_per_rank=1, comm=some)
    else:
        with EpGroup(len(members), 8, max_tokens_per_rank=1, dtype=torch.float32,
                     comm=some) as group:
            assert (group.rank, group.world_size) == (members.index(rank), len(members))
            target = (group.rank + 1) % group.world_size
            handle = group.create_handle(torch.full((1, 1), target, device=device))
            tokens = torch.full((1, 8), float(rank), device=device)
            received = handle.dispatch(tokens)
            assert received.tokens[0, 0, 0] == members[group.rank - 1]
            weights = torch.ones((1, 1), device=device)
            assert torch.equal(handle.combine(received.tokens, weights), tokens)
    if rank in members:
        dist.destroy_process_group(some)
