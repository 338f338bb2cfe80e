"""Programs over `deep_ep.Buffer`: the order of the calls of SGLang and Megatron-Core, by hand."""

import time

import pytest
import torch
import torch.distributed as dist

from nccl_ep import NcclEpError
from problems import Problem, plain
from test_deep_ep import dispatched, there_and_back

pytestmark = pytest.mark.high_throughput
_MOST = 32


def experts_by_block(problem, rows, local):
    """Results of low latency: rows [L, R*M, H] of each expert."""
    return torch.stack([problem.expert(matrix, block) for matrix, block in
                        zip(problem.local_experts(local), rows)])


def halves(problem):
    """Two micro-batches: tokens, ids, weights."""
    middle = len(problem.tokens) // 2
    return [(part(problem.tokens), part(problem.topk_idx), part(problem.weights))
            for part in (lambda each: each[:middle], lambda each: each[middle:])]


def test_sglang_one_buffer_for_both_modes(deep_ep, world, device):
    """Prefill asynchronously behind a captured event; then two batches of decode in turns, with FP8.
    Received tensors are emptied in place, and the Buffer is never destroyed."""
    problem = Problem(*world, tokens=8, hidden=512, dtype=torch.bfloat16, device=device)
    config = deep_ep.Config(**{"num_sms": 20, "num_max_nvl_chunked_send_tokens": 8})
    hidden_bytes = 2 * problem.hidden
    size = max(config.get_nvl_buffer_size_hint(hidden_bytes, world[1]),
               deep_ep.Buffer.get_dispatch_config(world[1]).get_nvl_buffer_size_hint(hidden_bytes, 8))
    buffer = deep_ep.Buffer(dist.group.WORLD, size, 0, low_latency_mode=True, num_qps_per_rank=4)
    local = problem.num_experts // world[1]
    want = problem.dense().output

    previous = deep_ep.Buffer.capture()
    ranks, nodes, experts, goes, previous = buffer.get_dispatch_layout(
        problem.topk_idx, problem.num_experts, previous_event=previous, async_finish=True,
        allocate_on_comm_stream=True)
    rows, ids, weights, counts, handle, event = buffer.dispatch(
        problem.tokens, topk_idx=problem.topk_idx, topk_weights=problem.weights,
        num_tokens_per_rank=ranks, num_tokens_per_rdma_rank=nodes, is_token_in_rank=goes,
        num_tokens_per_expert=experts, previous_event=previous, async_finish=True,
        allocate_on_comm_stream=True, expert_alignment=128, config=config)
    event.current_stream_wait()
    assert all(each % 128 == 0 for each in counts)
    results = problem.mixed(rows, ids, weights, problem.local_experts(local)).to(torch.bfloat16)
    rows.set_(torch.empty(0, dtype=rows.dtype, device=device))
    output, _, event = buffer.combine(results, handle, previous_event=deep_ep.Buffer.capture(),
                                      async_finish=True, allocate_on_comm_stream=True, config=config)
    event.current_stream_wait()
    problem.close(output, want)

    buffer.clean_low_latency_buffer(_MOST, problem.hidden, problem.num_experts)
    batches, outputs, running = halves(problem), [], []
    for tokens, ids, weights in batches:
        running.append(buffer.low_latency_dispatch(
            tokens, ids, _MOST, problem.num_experts, use_fp8=True, return_recv_hook=True,
            round_scale=False, use_ue8m0=False))
    combining = []
    for ((rows, scales), _, handle, event, hook), (_, ids, weights) in zip(running, batches):
        hook()
        results = experts_by_block(problem, plain(rows, scales), local).to(torch.bfloat16)
        rows.set_(torch.empty(0, dtype=rows.dtype, device=device))
        combining.append(buffer.low_latency_combine(x=results, topk_idx=ids, topk_weights=weights,
                                                    handle=handle, async_finish=False,
                                                    return_recv_hook=True))
    for combined, _, hook in combining:
        hook()
        outputs.append(combined)
    torch.testing.assert_close(torch.cat(outputs).float(), want, rtol=0.2, atol=0.2)


def test_megatron_core(deep_ep, world, device):
    """What its autograd functions call: a combine with weights goes back from a dispatch, and the other way round. The
    Buffer is dropped without `destroy`."""
    problem = Problem(*world, hidden=64, dtype=torch.float32, masked=True, device=device)
    buffer = deep_ep.Buffer(dist.group.WORLD, 2 * problem.hidden, 0)
    rows, ids, factors, counts, handle, _ = dispatched(buffer, problem)
    assert sum(counts) == (ids >= 0).sum().item()
    results = problem.mixed(rows.requires_grad_(), ids, factors.requires_grad_(),
                            problem.local_experts(problem.num_experts // world[1]))
    output = buffer.combine(results.detach(), handle)[0]
    results.backward(buffer.dispatch(problem.grad, handle=handle)[0])
    problem.tokens.grad, problem.weights.grad, _ = buffer.combine(rows.grad, handle, topk_weights=factors.grad)
    problem.check(output)


@pytest.mark.parametrize("destroyed", [False, True])
def test_a_new_buffer_after_a_failure(deep_ep, closed_buffers, problem, rank, size, monkeypatch, destroyed):
    """Of one rank's groups it has others, on all ranks, also if a Buffer is never destroyed, or after later ones."""
    if size == 1:
        pytest.skip("no other rank")
    monkeypatch.setenv("NCCL_EP_TIMEOUT_MS", "1500")
    first = deep_ep.Buffer(dist.group.WORLD, explicitly_destroy=destroyed)
    there_and_back(first, problem)
    if rank:
        with pytest.raises(NcclEpError):
            there_and_back(first, problem)
            for _ in range(400):
                first.shared.groups[0].check()
                time.sleep(0.05)
    again, same = (deep_ep.Buffer(dist.group.WORLD, explicitly_destroy=destroyed) for _ in range(2))
    assert again.shared is same.shared is not first.shared
    there_and_back(again, problem)
    if not destroyed:
        first.shared.close()
        return
    again.destroy()
    there_and_back(same, problem)
    same.destroy()
    third = deep_ep.Buffer(dist.group.WORLD, explicitly_destroy=True)
    first.destroy()
    there_and_back(third, problem)
    assert deep_ep.Buffer(dist.group.WORLD, explicitly_destroy=True).shared is third.shared


def test_the_package(deep_ep):
    """What programs import, or find in it."""
    assert deep_ep.utils.EventOverlap is deep_ep.EventOverlap
    from deep_ep.utils import EventHandle, EventOverlap

    import nccl_ep.deep_ep

    assert deep_ep.Buffer is nccl_ep.deep_ep.Buffer and deep_ep.EventOverlap is EventOverlap
    assert isinstance(EventHandle, type) and isinstance(deep_ep.Config, type)
    assert deep_ep.ElasticBuffer is nccl_ep.deep_ep.ElasticBuffer
