"""EPAll2AllLayer: order of rows, layout, results and gradients against dense torch."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch.autograd import forward_ad
from torch.utils._python_dispatch import BaseTorchDispatchMode

from nccl_ep.layers import EPAll2AllLayer, EPConfig
from problems import Problem, without_waiting

pytestmark = pytest.mark.high_throughput


def pairs_of(problem: Problem) -> list[tuple[int, int, int]]:
    """(expert, token number over all ranks, k) of all pairs, sorted by expert, then token."""
    return sorted((expert, token, k) for token, row in enumerate(problem.of_all(1).tolist())
                  for k, expert in enumerate(row) if expert >= 0)


def reversing(problem: Problem) -> torch.Tensor:
    """Scatter indices of all tokens that reverse each expert's rows relative to dispatch's own order."""
    pairs = sorted(pairs_of(problem), key=lambda pair: (pair[0], -pair[1]))
    indices = torch.full_like(problem.of_all(1), len(pairs))
    for number, (_, token, k) in enumerate(pairs):
        indices[token, k] = number
    return indices


@pytest.mark.parametrize("masked", [False, True])
def test_rows_are_sorted_by_expert(layered, rank, size, masked):
    problem, ep = layered(masked=masked)
    output, weights, layout = ep.dispatch(problem.tokens, problem.topk_idx.to(torch.int32),
                                          problem.weights)
    local = ep.num_experts_per_rank
    pairs = pairs_of(problem)
    mine = [pair for pair in pairs if pair[0] // local == rank]
    tokens, factors = problem.of_all(0), problem.of_all(2)
    assert layout.num_dispatch_token_cur_rank == len(mine) == output.shape[0]
    assert torch.equal(output, tokens[[token for _, token, _ in mine]])
    assert torch.equal(weights, factors[[token for _, token, _ in mine], [k for *_, k in mine]])
    counts = [sum(pair[0] == rank * local + each for pair in mine) for each in range(local)]
    assert layout.num_recv_tokens_per_expert.tolist() == counts
    assert layout.num_recv_tokens_per_expert_list == counts
    lengths = [len(problem.part(each)[0]) for each in range(size)]
    assert layout.num_input_tokens_per_rank.tolist() == lengths
    assert torch.equal(layout.topk_indices_tensor.long(), problem.topk_idx)
    for token, row in enumerate(layout.token_dst_scatter_idx.tolist()):
        for k, position in enumerate(row):
            expert = int(problem.topk_idx[token, k])
            want = -1
            if expert >= 0:
                there = [pair for pair in pairs if pair[0] // local == expert // local]
                want = there.index((expert, problem.place.start + token, k))
            assert position == want


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("masked, repeated", [(False, False), (True, False), (True, True)])
def test_moe_matches_dense_torch(layered, dtype, masked, repeated):
    """Forward and backward; the experts apply the weights."""
    problem, ep = layered(dtype=dtype, masked=masked, repeated=repeated, seed=7)
    tokens, weights = problem.tokens.requires_grad_(), problem.weights.requires_grad_()
    experts = problem.local_experts(ep.num_experts_per_rank).requires_grad_()
    rows, factors, layout = ep.dispatch(tokens, problem.topk_idx, weights)
    blocks = rows.split(layout.num_recv_tokens_per_expert.tolist())
    results = torch.cat([problem.expert(matrix, block) for matrix, block in zip(experts, blocks)])
    with without_waiting(problem.device):
        output = ep.combine((results * factors.unsqueeze(1)).to(dtype), layout)
        problem.backward(output)
    problem.check(output, experts)


@pytest.mark.parametrize("whole", [False, True])
def test_given_scatter_indices_decide_the_order(layered, whole):
    problem, ep = layered(masked=True)
    usual, _, _ = ep.dispatch(problem.tokens, problem.topk_idx)
    indices = reversing(problem)[slice(None) if whole else problem.place]
    rows, _, layout = ep.dispatch(problem.tokens, problem.topk_idx, full_scatter_indices=indices.to(torch.int32))
    blocks = usual.split(layout.num_recv_tokens_per_expert.tolist())
    assert torch.equal(rows, torch.cat([block.flip(0) for block in blocks]))
    torch.testing.assert_close(ep.combine(rows, layout), problem.tokens * problem.experts)


def test_an_id_that_a_token_repeats(layered, rank, size, device):
    """It is one row with the sum of its weights, which both get the gradient of. Ids from E on do
    not count."""
    problem, ep = layered()
    ids, weights = problem.topk_idx.clone(), problem.weights.requires_grad_()
    ids[:, 1], ids[:, 2] = ids[:, 0], problem.num_experts + 7
    rows, factors, layout = ep.dispatch(problem.tokens, ids, weights)
    scatter = layout.token_dst_scatter_idx
    assert torch.equal(scatter >= 0, torch.tensor([[False, True, False]],
                                                  device=device).expand_as(scatter))
    output = ep.combine(rows * factors.unsqueeze(1), layout)
    torch.testing.assert_close(output, problem.tokens * weights[:, :2].sum(dim=1, keepdim=True))
    output.sum().backward()
    gradient = torch.zeros_like(weights)
    gradient[:, :2] = problem.tokens.sum(dim=1, keepdim=True)
    torch.testing.assert_close(weights.grad, gradient)
    # Positions that the caller chooses travel as weights do.
    usual, _, _ = ep.dispatch(problem.tokens, ids)
    indices = torch.zeros_like(ids)
    pairs = [(int(ids_of[0]), owner, token) for owner in range(size)
             for token, ids_of in enumerate(problem.part(owner)[1])]
    for number, (_, owner, token) in enumerate(sorted(pairs)):
        if owner == rank:
            indices[token] = number
    rows, _, _ = ep.dispatch(problem.tokens, ids, full_scatter_indices=indices)
    assert torch.equal(rows, usual)


def test_arguments_are_checked(layered, device):
    problem, ep = layered()
    for change, text in (
            ({"exp_indices": problem.topk_idx[:, :1]}, "exp_indices: has shape"),
            ({"exp_indices": problem.topk_idx.to("meta")}, "exp_indices: is on meta"),
            ({"weight": problem.weights[1:]}, "weight: has shape"),
            ({"exp_indices": problem.topk_idx.float()}, "exp_indices: has type torch.float32"),
            ({"input": problem.tokens.to("meta")}, "input: is on meta"),
            ({"input": None}, "input: must be a tensor, not NoneType"),
            ({"exp_indices": [[0]]}, "exp_indices: must be a tensor, not list"),
            ({"weight": [[1.0]]}, "weight: must be a tensor, not list"),
            ({"input": problem.tokens.double()}, "input: has type torch.float64"),
            ({"input": problem.tokens[:, 1:]}, "input: has shape"),
            ({"input": torch.tensor(1.0, device=device)}, "input: has shape"),
            ({"full_scatter_indices": problem.weights}, "full_scatter_indices: has type"),
            ({"full_scatter_indices": problem.topk_idx.to("meta")},
             "full_scatter_indices: is on meta"),
            ({"full_scatter_indices": problem.topk_idx[:, 1:]},
             "full_scatter_indices: has shape")):
        arguments = {"input": problem.tokens, "exp_indices": problem.topk_idx, **change}
        with pytest.raises((TypeError, ValueError), match=text):
            ep.dispatch(**arguments)


def test_more_tokens_than_max_tokens(layer, rank, size, device):
    """max_tokens is a hint: later exchanges may be larger, even on one rank only."""
    small = Problem(rank, size, device=device, tokens=2)
    ep = layer(small, max_tokens=2)
    for tokens in (2, 40, 3):
        problem = Problem(rank, size, device=device, tokens=tokens)
        rows, weights, layout = ep.dispatch(problem.tokens, problem.topk_idx)
        assert weights is None
        torch.testing.assert_close(ep.combine(rows, layout), problem.tokens * problem.top_k)


def test_two_layouts_at_a_time_and_barrier(layer, world, device):
    first, second = (Problem(*world, device=device, seed=seed) for seed in (1, 2))
    ep = layer(first)
    rows, _, layout = ep.dispatch(first.tokens, first.topk_idx)
    other_rows, _, other_layout = ep.dispatch(second.tokens, second.topk_idx)
    ep.ep_barrier_all(None, intra_node_only=True)
    torch.testing.assert_close(ep.combine(other_rows, other_layout), second.tokens * second.top_k)
    torch.testing.assert_close(ep.combine(rows, layout), first.tokens * first.top_k)
    with pytest.raises(ValueError, match="input: has shape"):
        ep.combine(rows[:0], layout)


def test_gradients_of_any_order(layered):
    problem, ep = layered(masked=True)
    along = torch.randn_like(problem.tokens)

    def layer(tokens):
        return ep(tokens, problem.topk_idx, problem.weights, lambda rows, _: rows.square())

    def dense(tokens):
        return tokens.square() * problem.factors

    for have, want in zip(*(torch.autograd.functional.hvp(lambda tokens: function(tokens).square().sum(),
                                                          problem.tokens, along) for function in (layer, dense))):
        torch.testing.assert_close(have, want, rtol=1e-4, atol=1e-4)
    with forward_ad.dual_level():
        have, want = (forward_ad.unpack_dual(function(forward_ad.make_dual(problem.tokens, along))).tangent
                      for function in (layer, dense))
        torch.testing.assert_close(have, want, rtol=1e-4, atol=1e-4)


def test_what_torch_func_cannot_transform(layered):
    problem, ep = layered(latency_tokens=16)
    for mode in (torch.enable_grad, torch.no_grad):
        with mode(), pytest.raises(RuntimeError, match="dispatch: torch.func cannot transform a layer; use a handle"):
            torch.func.grad(lambda tokens: ep.dispatch(tokens, problem.topk_idx)[0].sum())(problem.tokens)


def test_configurations_that_make_no_sense(rank, size):
    good = dict(max_tokens=1, hidden=8, topk=1, num_experts=size, rank=rank, world_size=size,
                local_world_size=size)
    assert EPConfig(**good).num_experts_per_rank == 1 and EPConfig(**good).is_intra_node
    over_nodes = EPConfig(**{**good, "world_size": 2 * size, "num_experts": 2 * size})
    assert not over_nodes.is_intra_node
    for change in ({"num_experts": 0}, {"rank": size}, {"hidden": 0},
                   {"local_world_size": size + 1}, {"local_world_size": 0}):
        with pytest.raises(ValueError):
            EPConfig(**{**good, **change})
    with pytest.raises(ValueError, match="ep_group"):
        EPAll2AllLayer(None, 1, 8, 1, rank, size + 1, size + 1, size + 1)
    with pytest.raises(ValueError, match="num_sm"):
        EPAll2AllLayer(None, 1, 8, 1, rank, size, size, size, num_sm=-1)
    dist.barrier()


def test_operators_of_a_mode_that_looks_on(layered, two_ranks):
    """The layout is the same, with its list."""
    problem, ep = layered()
    want = ep.dispatch(problem.tokens, problem.topk_idx, problem.weights)
    tokens = problem.tokens.requires_grad_()
    # Hooks may save copies.
    with BaseTorchDispatchMode(), torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda copy: copy):
        have = ep.dispatch(tokens, problem.topk_idx, problem.weights)
        sums = ep.combine(have[0], have[2])
    assert have[2].num_recv_tokens_per_expert_list == want[2].num_recv_tokens_per_expert_list
    assert torch.equal(have[2].token_dst_scatter_idx, want[2].token_dst_scatter_idx)
    assert torch.equal(sums, ep.combine(want[0], want[2]))
    del have
    sums.sum().backward()


def test_a_dispatch_mode_that_begins_between(layered):
    """As where only the experts and the combine are checkpointed selectively."""
    problem, ep = layered()

    def step(mode):
        rows, weights, layout = ep.dispatch(problem.tokens, problem.topk_idx, problem.weights)
        with mode:
            return ep.combine(rows * weights[:, None], layout)

    assert torch.equal(step(BaseTorchDispatchMode()), step(contextlib.nullcontext()))
