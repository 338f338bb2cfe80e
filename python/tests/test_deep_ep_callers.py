"""Programs over `deep_ep.Buffer`: the order of the calls of vLLM, SGLang and Megatron-Core, by hand."""

import pytest
import torch
import torch.distributed as dist

from problems import Problem

pytestmark = pytest.mark.high_throughput
_MOST = 32


def experts_by_row(problem, rows, ids, weights, local):
    """Results of high throughput: each row's experts, weighted and summed, float32."""
    result = torch.zeros(rows.shape, device=rows.device)
    for expert, matrix in enumerate(problem.local_experts(local)):
        factor = torch.where(ids == expert, weights, 0.0).sum(dim=1, keepdim=True)
        result = result + factor * problem.expert(matrix, rows)
    return result


def experts_by_block(problem, rows, local):
    """Results of low latency: rows [L, R*M, H] of each expert."""
    return torch.stack([problem.expert(matrix, block) for matrix, block in
                        zip(problem.local_experts(local), rows)])


def halves(problem):
    """Two micro-batches: tokens, ids, weights."""
    middle = len(problem.tokens) // 2
    return [(part(problem.tokens), part(problem.topk_idx), part(problem.weights))
            for part in (lambda each: each[:middle], lambda each: each[middle:])]


def test_vllm_high_throughput(deep_ep, world, device):
    """One Buffer by keyword over the gloo group; layout, asynchronous dispatch, combine; ids become
    global; destroyed in the end."""
    problem = Problem(*world, hidden=64, dtype=torch.bfloat16, device=device)
    buffer = deep_ep.Buffer(group=dist.group.WORLD, num_nvl_bytes=1 << 20, num_rdma_bytes=0,
                            low_latency_mode=False, num_qps_per_rank=1, explicitly_destroy=True)
    deep_ep.Buffer.set_num_sms(20)
    local = problem.num_experts // world[1]
    with torch.inference_mode():
        ranks, nodes, experts, goes, event = buffer.get_dispatch_layout(
            topk_idx=problem.topk_idx, num_experts=problem.num_experts, previous_event=None,
            async_finish=False, allocate_on_comm_stream=False)
        rows, ids, weights, counts, handle, event = buffer.dispatch(
            x=problem.tokens, handle=None, num_tokens_per_rank=ranks, num_tokens_per_rdma_rank=nodes,
            is_token_in_rank=goes, num_tokens_per_expert=experts, topk_idx=problem.topk_idx,
            topk_weights=problem.weights, expert_alignment=1, config=None, previous_event=None,
            async_finish=True, allocate_on_comm_stream=False)
        if event.event is not None:
            event.current_stream_wait()
        assert sum(counts) == int((ids >= 0).sum())
        first = world[0] * local
        everywhere = torch.where(ids == -1, problem.num_experts - 1 if first == 0 else 0, ids + first)
        assert everywhere.shape == ids.shape
        results = experts_by_row(problem, rows, ids, weights, local).to(torch.bfloat16)
        output, _, event = buffer.combine(x=results, handle=handle, topk_weights=None, config=None,
                                          previous_event=None, async_finish=False,
                                          allocate_on_comm_stream=False)
    problem.close(output, problem.dense().output)
    buffer.destroy()


def test_vllm_two_micro_batches(deep_ep, world, device):
    """Low latency with hooks that run in the other micro-batch's time, ids in new tensors, `out`."""
    problem = Problem(*world, tokens=8, hidden=128, dtype=torch.bfloat16, device=device)
    buffer = deep_ep.Buffer(group=dist.group.WORLD, num_nvl_bytes=0, num_rdma_bytes=1 << 20,
                            low_latency_mode=True, num_qps_per_rank=3, explicitly_destroy=True,
                            allow_nvlink_for_low_latency_mode=True, allow_mnnvl=False)
    local = problem.num_experts // world[1]
    with torch.inference_mode():
        batches = halves(problem)
        outputs = [torch.empty_like(tokens) for tokens, _, _ in batches]
        sent = [buffer.low_latency_dispatch(tokens, ids.clone(), _MOST, problem.num_experts,
                                            use_fp8=False, round_scale=False, use_ue8m0=False,
                                            async_finish=False, return_recv_hook=True)
                for tokens, ids, _ in batches]
        hooks = []
        for (rows, counts, handle, _, hook), (_, ids, weights), out in zip(sent, batches, outputs):
            hook()
            results = experts_by_block(problem, rows, local).to(torch.bfloat16)
            _, _, hook = buffer.low_latency_combine(results, ids.clone(), weights, handle,
                                                    async_finish=False, zero_copy=False,
                                                    return_recv_hook=True, out=out)
            hooks.append(hook)
        for hook in hooks:
            hook()
    problem.close(torch.cat(outputs), problem.dense().output)
    buffer.destroy()


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
    results = experts_by_row(problem, rows, ids, weights, local).to(torch.bfloat16)
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
        values = (rows.float().unflatten(2, (4, -1)) * scales.unsqueeze(-1)).flatten(2)
        results = experts_by_block(problem, values, local).to(torch.bfloat16)
        rows.set_(torch.empty(0, dtype=rows.dtype, device=device))
        combining.append(buffer.low_latency_combine(x=results, topk_idx=ids, topk_weights=weights,
                                                    handle=handle, async_finish=False,
                                                    return_recv_hook=True))
    for combined, _, hook in combining:
        hook()
        outputs.append(combined)
    torch.testing.assert_close(torch.cat(outputs).float(), want, rtol=0.2, atol=0.2)


def megatron_functions(get_buffer):
    """Megatron-Core's two autograd functions: backward of a dispatch is a combine with weights and the other way round;
    the handle goes through autograd as it is."""

    class FusedDispatch(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, ids, weights, num_experts, group):
            buffer = get_buffer(group, x.shape[1] * 2)
            ranks, nodes, experts, goes, event = buffer.get_dispatch_layout(
                ids, num_experts, previous_event=None, async_finish=False,
                allocate_on_comm_stream=False)
            rows, row_ids, row_weights, counts, handle, event = buffer.dispatch(
                x, topk_idx=ids, topk_weights=weights, num_tokens_per_rank=ranks,
                num_tokens_per_rdma_rank=nodes, is_token_in_rank=goes,
                num_tokens_per_expert=experts, previous_event=None, async_finish=False,
                allocate_on_comm_stream=False)
            ctx.group, ctx.handle = group, handle
            return rows, row_ids, row_weights, torch.tensor(counts), handle

        @staticmethod
        def backward(ctx, grad, _ids, grad_weights, _counts, _handle):
            buffer = get_buffer(ctx.group, grad.shape[1] * 2)
            home, weights, _ = buffer.combine(grad.contiguous(), ctx.handle,
                                              topk_weights=grad_weights.float(), previous_event=None,
                                              async_finish=False, allocate_on_comm_stream=False)
            return home, None, weights, None, None

    class FusedCombine(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, group, handle):
            combined, _, _ = get_buffer(group, x.shape[1] * 2).combine(
                x, handle=handle, async_finish=False, previous_event=None,
                allocate_on_comm_stream=False)
            ctx.group, ctx.handle = group, handle
            return combined

        @staticmethod
        def backward(ctx, grad):
            rows, *_ = get_buffer(ctx.group, grad.shape[1] * 2).dispatch(
                grad.contiguous(), handle=ctx.handle, previous_event=None, async_finish=False,
                allocate_on_comm_stream=False)
            return rows, None, None

    return FusedDispatch, FusedCombine


def test_megatron_core(deep_ep, world, device):
    """A layer's forward and backward. The Buffer is dropped without `destroy`."""
    problem = Problem(*world, hidden=64, dtype=torch.float32, masked=True, device=device)
    made: list = []

    def get_buffer(group, hidden_bytes):
        if not made or made[-1].group != group or made[-1].num_nvl_bytes < hidden_bytes:
            made[:] = [deep_ep.Buffer(group, hidden_bytes, 0)]
        return made[-1]

    fused_dispatch, fused_combine = megatron_functions(get_buffer)
    tokens, weights = problem.tokens.requires_grad_(), problem.weights.requires_grad_()
    local = problem.num_experts // world[1]
    rows, ids, factors, counts, handle = fused_dispatch.apply(
        tokens, problem.topk_idx, weights, problem.num_experts, dist.group.WORLD)
    assert counts.sum().item() == (ids >= 0).sum().item()
    results = experts_by_row(problem, rows, ids, factors, local)
    output = fused_combine.apply(results, dist.group.WORLD, handle)
    problem.backward(output)
    problem.check(output)


def test_the_package(deep_ep):
    """What programs import."""
    from deep_ep.utils import EventHandle, EventOverlap

    import nccl_ep.deep_ep

    assert deep_ep.Buffer is nccl_ep.deep_ep.Buffer and deep_ep.EventOverlap is EventOverlap
    assert isinstance(EventHandle, type) and isinstance(deep_ep.Config, type)
    assert deep_ep.ElasticBuffer is nccl_ep.deep_ep.ElasticBuffer
