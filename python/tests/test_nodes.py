"""What is different where ranks are on several nodes. All other tests run there, too: the steps
python/tests/nodes-* of `make test` give each rank an NCCL_HOSTID."""

import pytest
import torch

from nccl_ep import NcclEpError


@pytest.fixture(autouse=True)
def _several_nodes(nodes):
    if len(set(nodes)) == 1:
        pytest.skip("all ranks are on one node")


@pytest.mark.high_throughput
def test_a_layer_spans_them(layered, rank, nodes):
    problem, ep = layered()
    assert ep.ep_config.local_world_size == nodes.count(nodes[rank]) < ep.ep_config.world_size
    assert not ep.ep_config.is_intra_node
    assert ep.dispatch(problem.tokens, problem.topk_idx)[2].send_reqs_for_nodes is None
    ep.ep_barrier_all(None, intra_node_only=True)


def test_sums_in_exact_order_are_refused(group, size, monkeypatch):
    monkeypatch.setenv("NCCL_EP_LL_COMBINE", "exact")
    with pytest.raises(NcclEpError, match="NCCL_EP_LL_COMBINE: is for groups on one node only"):
        group(num_experts=size, hidden=8, max_tokens_per_rank=1)


def test_handles_with_tokens_on_few_ranks(group, rank, size, device):
    """Ranks tell each other their tokens over the network, in the order of their handles."""
    ep = group(num_experts=size, hidden=8, max_tokens_per_rank=8, dtype=torch.float32)
    handles = []
    for tokens in (8 * (rank == 0), 8 * (rank == size - 1), 3):
        # Every expert for every token, so each row goes to every rank.
        ids = torch.arange(size, device=device).repeat(tokens, 1)
        handles.append((tokens, ep.create_handle(ids)))
    for tokens, handle in reversed(handles):
        rows = torch.arange(tokens * 8, device=device).reshape(tokens, 8).float() + rank
        received = handle.dispatch(rows)
        weights = torch.ones((tokens, size), device=device)
        assert torch.equal(handle.combine(received.tokens, weights), rows * size)
        handle.close()
