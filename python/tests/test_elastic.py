"""`nccl_ep.deep_ep.ElasticBuffer`, of DeepEP V2, against the tokens of all ranks."""

import pytest
import torch
import torch.distributed as dist

from nccl_ep import deep_ep
from problems import captured
from test_deep_ep import check_arguments

pytestmark = pytest.mark.high_throughput
_MOST = 32


@pytest.fixture(scope="module")
def buffer():
    made = deep_ep.ElasticBuffer(dist.group.WORLD, num_max_tokens_per_rank=_MOST, hidden=256, explicitly_destroy=True)
    yield made
    made.destroy()
    with pytest.raises(RuntimeError, match="destroyed"):
        made.shared


def dispatched(buffer, problem, x=None, **how):
    return buffer.dispatch(problem.tokens if x is None else x, problem.topk_idx, problem.weights,
                           num_experts=problem.num_experts, **how)


def test_signatures():
    event = "previous_event previous_event_before_epilogue async_with_compute_stream allocate_on_comm_stream"
    check_arguments(deep_ep.ElasticBuffer, {
        "__init__": "group num_bytes num_cpu_bytes num_max_tokens_per_rank hidden num_topk use_fp8_dispatch "
                    "deterministic allow_hybrid_mode allow_multiple_reduction prefer_overlap_with_compute sl_idx "
                    "num_allocated_qps num_cpu_timeout_secs num_gpu_timeout_secs explicitly_destroy",
        "dispatch": "x topk_idx topk_weights cumulative_local_expert_recv_stats num_experts num_max_tokens_per_rank "
                    f"expert_alignment num_sms num_qps {event} handle do_handle_copy do_cpu_sync do_expand "
                    "do_zero_padding use_tma_aligned_col_major_sf",
        "combine": f"x handle topk_weights bias num_sms num_qps {event}"})


@pytest.mark.parametrize("waits", [True, False])
def test_rows_by_token(buffer, problem, size, waits):
    """As many as come or, without a wait of the host, as may; cached; with weights, bias, statistics."""
    of_expert, tokens = problem.by_expert(), [row for _, row, _ in problem.arrivals()]
    stats = torch.ones(len(of_expert), dtype=torch.int32, device=problem.tokens.device)
    rows, ids, weights, handle, event = dispatched(buffer, problem, do_cpu_sync=waits, expert_alignment=4,
                                                   cumulative_local_expert_recv_stats=stats, num_sms=8)
    counts = [len(each) for each in of_expert]
    assert event.event is None and stats.tolist() == [1 + count for count in counts]
    assert len(rows) == handle.num_recv_tokens == (len(tokens) if waits else size * _MOST)
    assert handle.psum_num_recv_tokens_per_scaleup_rank[-1] == len(tokens)
    assert handle.num_recv_tokens_per_expert_list == ([-(-count // 4) * 4 for count in counts] if waits else [])
    ends, end = [], 0
    for count in counts:
        end += -(-count // 4) * 4
        ends.append(end)
    assert handle.psum_num_recv_tokens_per_expert.tolist() == ends
    for row, want in zip(rows, tokens):
        assert torch.equal(row, want)
    used = len(tokens)
    assert bool((ids[used:] == -1).all()) and not weights[used:].any()
    assert [(ids == each).sum().item() for each in range(len(counts))] == counts
    again, _, more, same, _ = buffer.dispatch(problem.tokens, handle=handle, topk_weights=problem.weights)
    assert same is handle and torch.equal(again[:used], rows[:used]) and torch.equal(more[:used], weights[:used])
    bias = torch.ones_like(problem.tokens), 2 * torch.ones_like(problem.tokens)
    sums, home, _ = buffer.combine(rows, handle, weights, bias, num_sms=4)
    torch.testing.assert_close(home, problem.live_weights)
    torch.testing.assert_close(sums.float(), problem.tokens.float() * problem.ranks + 3, rtol=2e-2,
                               atol=2e-2)


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("scaled", [False, True])
def test_rows_by_expert(buffer, problem, waits, scaled):
    """Each expert's rows begin at a multiple of the alignment; those between are zeros if asked for."""
    of_expert = problem.by_expert()
    x = problem.tokens
    if scaled:
        numbers = torch.arange(len(x), device=x.device, dtype=torch.float32)
        x = (x.to(torch.float8_e4m3fn), numbers[:, None].expand(-1, 2).contiguous())
    how = {"do_zero_padding": True, "use_tma_aligned_col_major_sf": scaled}
    rows, ids, weights, handle, _ = dispatched(buffer, problem, x, do_cpu_sync=waits, do_expand=True,
                                               expert_alignment=8, **how)
    assert ids is None and handle.do_expand
    if scaled:
        rows, scales = rows
        assert scales.stride(0) == 1 and scales.shape == (len(rows), 2)
    ends, begin = handle.psum_num_recv_tokens_per_expert.tolist(), 0
    used = torch.zeros(len(rows), dtype=torch.bool)
    for expert, wanted in enumerate(of_expert):
        assert ends[expert] == begin + len(wanted)
        for at, (want, weight) in enumerate(wanted, begin):
            assert torch.equal(rows[at].float(), want.to(rows.dtype).float())
            assert weights[at].item() == pytest.approx(weight)
        used[begin:ends[expert]] = True
        begin = -(-ends[expert] // 8) * 8
    assert handle.num_unaligned_recv_tokens_per_expert.tolist() == [len(each) for each in of_expert]
    assert len(rows) % 8 == 0 and (begin == len(rows) if waits else begin <= len(rows))
    assert not rows[~used].float().any() and not weights[~used].any()
    again = buffer.dispatch(x, handle=handle, do_expand=True, **how)[0]
    assert torch.equal((again[0] if scaled else again).float(), rows.float())
    results = rows.to(torch.bfloat16)
    results[~used] = torch.nan  # which no sum has
    sums, home, _ = buffer.combine(results, handle, weights)
    torch.testing.assert_close(home, problem.live_weights)
    sent = (x[0] if scaled else x).float() * problem.experts
    torch.testing.assert_close(sums.float(), sent, rtol=2e-2, atol=2e-2)


def test_without_weights(buffer, problem):
    rows, ids, weights, handle, event = buffer.dispatch(
        problem.tokens, problem.topk_idx, num_experts=problem.num_experts, async_with_compute_stream=True,
        previous_event=deep_ep.ElasticBuffer.capture(), previous_event_before_epilogue=deep_ep.EventHandle(),
        allocate_on_comm_stream=True)
    event.current_stream_wait()
    assert weights is None and ids.shape == (len(rows), problem.top_k)
    sums, home, event = buffer.combine(rows, handle, async_with_compute_stream=True)
    event.current_stream_wait()
    assert home is None and sums.shape == problem.tokens.shape


def test_what_callers_ask_for(buffer, rank, size):
    assert (buffer.rank_idx, buffer.num_ranks, buffer.scaleup_rank_idx) == (rank, size, rank)
    assert buffer.get_logical_domain_size() == buffer.get_physical_domain_size() == (1, size)
    assert buffer.get_theoretical_num_sms(8, 2) > 0 and buffer.get_theoretical_num_qps(24) == 0
    hint = deep_ep.ElasticBuffer.get_buffer_size_hint(dist.group.WORLD, _MOST, 256)
    assert hint == buffer.num_bytes and hint % (2 << 20) == 0


def test_what_a_cached_dispatch_reads_is_kept(buffer, problem, monkeypatch):
    """For the Buffer's stream, on which statistics add the handle's counts."""
    *_, handle, _ = dispatched(buffer, problem)
    assert len({handle, dispatched(buffer, problem)[3]}) == 2
    stats, inputs = torch.zeros_like(handle.num_unaligned_recv_tokens_per_expert), []
    on = buffer._comm.on
    monkeypatch.setattr(buffer._comm, "on", lambda event, used, *how: inputs.extend(used) or on(event, used, *how))
    with pytest.raises(ValueError, match="^cumulative_local_expert_recv_stats: has shape"):
        buffer.dispatch(problem.tokens, handle=handle, cumulative_local_expert_recv_stats=stats[1:])
    buffer.dispatch(problem.tokens, handle=handle, cumulative_local_expert_recv_stats=stats)
    assert any(each is handle.num_unaligned_recv_tokens_per_expert for each in inputs)
    assert torch.equal(stats, handle.num_unaligned_recv_tokens_per_expert)


@pytest.mark.parametrize("expands", [False, True])
def test_bounds_of_batches(buffer, problem, world, expands):
    """An engine brings another bound with each size of a batch: there are as many rows, and few groups."""
    for most in (20, _MOST, 33, *(1 << power for power in range(6, 14))):
        rows, *_, handle, _ = dispatched(buffer, problem, do_cpu_sync=False, num_max_tokens_per_rank=most,
                                         do_expand=expands)
        assert len(rows) == handle.num_expanded_tokens if expands else len(rows) == handle.num_recv_tokens
        assert len(rows) == world[1] * most * (min(problem.top_k, 3) if expands else 1)
        expected = problem.tokens.float() * (problem.experts if expands else problem.ranks)
        torch.testing.assert_close(buffer.combine(rows, handle)[0].float(), expected, rtol=2e-2, atol=2e-2)
    assert len(buffer.shared._high) <= 4  # one of them without a bound


def test_a_bound_that_batches_share_is_not_too_large(world, device):
    """Where a dispatch's own has room for rows by expert the group's has, too."""
    tokens = torch.zeros((3, 16), dtype=torch.bfloat16, device=device)
    ids = torch.zeros((3, 1), dtype=torch.int64, device=device)
    fresh = deep_ep.ElasticBuffer(dist.new_group(), num_bytes=1 << 20, explicitly_destroy=True)
    try:
        rows, *_ = fresh.dispatch(tokens, ids, num_experts=world[1], num_max_tokens_per_rank=(1 << 20) // world[1],
                                  do_expand=True)
    finally:
        fresh.destroy()
    assert rows.shape == (3 * world[1] * (world[0] == 0), 16)


def test_memory_in_a_graph(captures, buffer, problem):
    """Rows of a layer take the memory of those before, which torch would keep from another stream until the end."""

    def layer():
        rows, *_, handle, _ = dispatched(buffer, problem, do_cpu_sync=False, num_max_tokens_per_rank=4096)
        return rows.data_ptr(), buffer.combine(rows, handle)[0]

    graph, ((first, _), (second, sums)) = captured(lambda: (layer(), layer()))
    assert first == second
    graph.replay()
    expected = problem.tokens.float() * problem.ranks
    torch.testing.assert_close(sums.float(), expected, rtol=2e-2, atol=2e-2)


def test_more_tokens_than_their_bound(buffer, problem, device):
    """Refused, although the group has room for more."""
    tokens = torch.zeros((41, 256), dtype=torch.bfloat16, device=device)
    ids = torch.zeros((41, 1), dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match="num_max_tokens_per_rank: is 40, but x has 41 tokens"):
        buffer.dispatch(tokens, ids, num_experts=problem.num_experts, num_max_tokens_per_rank=40, do_cpu_sync=False)


def test_groups_are_bounded(buffer, problem):
    """Each number of experts has memory of its own."""
    with pytest.raises(ValueError, match="num_max_tokens_per_rank, num_experts, hidden: 4 combinations of them are in"):
        for times in range(1, 6):
            buffer.dispatch(problem.tokens, problem.topk_idx, num_experts=times * problem.num_experts,
                            do_cpu_sync=False)
    dispatched(buffer, problem, do_cpu_sync=False)


@pytest.mark.parametrize("wrong", [{"num_max_tokens_per_rank": -1}, {"hidden": 1.5}])
def test_a_refused_buffer_is_none(buffer, wrong):
    """The last of the others still ends the groups."""
    users = buffer.shared.users
    with pytest.raises((TypeError, ValueError), match=next(iter(wrong))):
        deep_ep.ElasticBuffer(dist.group.WORLD, explicitly_destroy=True, **wrong)
    assert buffer.shared.users == users


def test_what_is_not_served(buffer, problem):
    """The text names the argument."""
    *_, handle, _ = dispatched(buffer, problem)
    tokens, ids = problem.tokens, problem.topk_idx
    for call, kind, text in (
            (lambda: deep_ep.ElasticBuffer(None, num_cpu_bytes=1), NotImplementedError, "num_cpu_bytes"),
            (lambda: buffer.engram_write(tokens), NotImplementedError, "engram_write"),
            (lambda: buffer.no_such_thing, AttributeError, "no_such_thing"),
            (lambda: handle.recv_src_metadata, NotImplementedError, "recv_src_metadata"),
            (lambda: buffer.dispatch(tokens, ids), ValueError, "num_experts"),
            (lambda: buffer.dispatch(tokens, ids, handle=handle), ValueError, "topk_idx"),
            (lambda: buffer.dispatch(tokens, handle=handle, do_cpu_sync=True), ValueError, "do_cpu_sync"),
            (lambda: buffer.dispatch(tokens, handle=handle, do_expand=True), ValueError, "do_expand"),
            (lambda: buffer.dispatch(tokens, handle=1), TypeError, "handle"),
            (lambda: buffer.combine(tokens, 1), TypeError, "handle")):
        with pytest.raises(kind, match=text):
            call()
    assert not hasattr(buffer, "barrier") and not hasattr(handle, "recv_src_metadata")
