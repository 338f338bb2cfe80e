"""Where ranks meet: names of jobs, sockets, groups of torch.distributed."""

from __future__ import annotations

import os
import socket
import time
import types

import pytest
import torch
import torch.distributed as dist

from nccl_ep import EpGroup, rendezvous


@pytest.mark.parametrize("environment, job", [
    ({"PMIX_NAMESPACE": "17", "TORCHELASTIC_RUN_ID": "none"}, "17"),
    ({"TORCHELASTIC_RUN_ID": "abc", "MASTER_PORT": "29500"}, "abc"),
    ({"TORCHELASTIC_RUN_ID": "none", "MASTER_PORT": "29500"}, "port.29500"),
    ({"SLURM_JOB_ID": "5", "SLURM_STEP_ID": "1", "MASTER_PORT": "29500"}, "5.1"),
    ({"MASTER_PORT": "29500"}, str(os.getppid())),
    ({"TORCHELASTIC_RUN_ID": "none"}, str(os.getppid())),
])
def test_jobs_are_told_apart(monkeypatch, environment, job):
    for name in (*rendezvous._JOB_NAMES, "SLURM_JOB_ID", "SLURM_STEP_ID", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert rendezvous._job() == job


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


def test_a_group_of_some_ranks(world, device):
    """The last ranks exchange tokens among themselves; the first one gets a text."""
    rank, size = world
    members = list(range(1, size)) or [0]
    some = dist.new_group(members)
    if rank not in members:
        with pytest.raises(ValueError, match="group: this process is none of its ranks"):
            EpGroup(len(members), 8, comm=some)
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
