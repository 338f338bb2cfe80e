"""Every block of Python code in the documents runs as it stands, with names of an MoE layer."""

import os

import pytest
import torch
import torch.distributed as dist

from documents import NAMES, documents, snippets
from nccl_ep import EpGroup
from nccl_ep.layers import EPAll2AllLayer
from problems import Problem

pytestmark = pytest.mark.high_throughput

_COMPILER = "torch.compile"
_CASES = [pytest.param(code, id=f"{path.name}-{number}" + "-compiled" * (_COMPILER in code)) for path in documents()
          for number, code in enumerate(snippets(path), 1)]


def doubled(rows: torch.Tensor, scales: torch.Tensor | None = None) -> torch.Tensor:
    """What experts do; LL gives them counts instead of scales."""
    if rows.dtype == torch.float8_e4m3fn:
        rows = rows.float() * scales  # rows of one block
    return rows * 2


def values(problem: Problem, size: int) -> dict[str, object]:
    """What the names mean."""
    tokens, weights = problem.tokens, problem.weights
    same = {"topk": problem.top_k, "top_k": problem.top_k, "num_experts": problem.num_experts,
            "num_tot_experts": problem.num_experts, "tokens": tokens, "input": tokens,
            "weight": weights, "gate_weights": weights, "topk_weights": weights,
            **dict.fromkeys(("expert_ids", "exp_indices", "topk_idx"), problem.topk_idx)}
    return {"ep_group": None, "rank": problem.rank, "world_size": size, "local_world_size": size,
            "max_tokens": 32, "hidden": problem.hidden, "experts": doubled, **same}


@pytest.fixture
def as_launched(device, monkeypatch):
    """What torchrun tells a program; a default device that it sets ends with it."""
    monkeypatch.setenv("LOCAL_RANK", str(device.index or 0))
    yield
    torch.set_default_device(None)


@pytest.mark.parametrize("code", _CASES)
def test_a_documented_block(world, device, code, tmp_path, monkeypatch, request, as_launched):
    """In a folder of its own. What it leaves open is closed; an `output` has the right sums, and
    `sums` have them up to the rounding to 8 bits."""
    if _COMPILER in code:
        request.getfixturevalue("two_ranks")
    rank, size = world
    problem = Problem(rank, size, dtype=torch.bfloat16, device=device, seed=3)
    names = values(problem, size)
    assert names.keys() == NAMES.keys()
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "snippet", "exec"), names)
    torch.set_default_device(None)
    tokens, weights = problem.tokens, problem.weights
    if names["tokens"] is not tokens:  # a program on its own
        tokens, weights = names["tokens"], names["weights"]
    want = 2 * tokens.float() * weights.sum(dim=1, keepdim=True)
    if "output" in names:
        problem.close(names["output"], want)
    if "sums" in names:
        torch.testing.assert_close(names["sums"], want.to(torch.bfloat16), rtol=0.1, atol=0.02)
    if "shape" in names:
        assert os.listdir(tmp_path) == (["tuning.json"] if rank == 0 else [])
    for value in list(names.values()):
        if isinstance(value, EpGroup):
            value.close()
        elif isinstance(value, EPAll2AllLayer):
            value.finalize()
    dist.barrier()


def test_there_is_code_in_the_documents():
    assert {path.name for path in documents() if snippets(path)} >= {"README.md", "python.md"}
