"""`nccl_ep.deep_ep`: what DeepEP's own tests check of a `Buffer`, against the tokens of all ranks."""

import copy
import inspect

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import BaseTorchDispatchMode

from nccl_ep import EpHandle, deep_ep
from nccl_ep.deep_ep import shared
from nccl_ep.deep_ep.utils import EventHandle, EventOverlap
from problems import Problem, plain

pytestmark = pytest.mark.high_throughput
_MOST = 32


@pytest.fixture(scope="module")
def buffer():
    """One Buffer of both modes, which the last test's end destroys."""
    made = deep_ep.Buffer(dist.group.WORLD, int(1e6), int(1e6), low_latency_mode=True,
                          explicitly_destroy=True)
    yield made
    made.destroy()
    assert not shared._SHARED


def dispatched(buffer, problem, x=None, **how):
    """A dispatch of high throughput with the layout's results."""
    ranks, nodes, experts, goes, _ = buffer.get_dispatch_layout(problem.topk_idx,
                                                                problem.num_experts)
    return buffer.dispatch(problem.tokens if x is None else x, num_tokens_per_rank=ranks,
                           num_tokens_per_rdma_rank=nodes, is_token_in_rank=goes,
                           num_tokens_per_expert=experts, topk_idx=problem.topk_idx,
                           topk_weights=problem.weights, **how)


def there_and_back(buffer, problem, hooks=False, first=None):
    """The sums and the counts of low latency, in two halves where there are hooks; of all tokens, or the first ones."""
    x, ids, weights = (each[:first] for each in (problem.tokens, problem.topk_idx, problem.weights))
    rows, counts, handle, _, hook = buffer.low_latency_dispatch(x, ids, _MOST, problem.num_experts, use_fp8=False,
                                                                return_recv_hook=hooks)
    if hooks:
        hook()
    sums, _, hook = buffer.low_latency_combine(rows, ids, weights, handle, return_recv_hook=hooks)
    if hooks:
        hook()
    return sums, counts


def check_arguments(kind: type, expected: dict[str, str]) -> None:
    """Names of methods, and of the arguments that have a place."""
    for method, words in expected.items():
        parameters = inspect.signature(getattr(kind, method)).parameters
        positional = [name for name, each in parameters.items() if each.kind is each.POSITIONAL_OR_KEYWORD]
        assert positional == ["self", *words.split()], method


def test_signatures():
    """Names, order and defaults of the arguments are DeepEP's."""
    stream = "previous_event async_finish allocate_on_comm_stream"
    check_arguments(deep_ep.Buffer, {
        "__init__": "group num_nvl_bytes num_rdma_bytes low_latency_mode num_qps_per_rank "
                    "allow_nvlink_for_low_latency_mode allow_mnnvl explicitly_destroy enable_shrink comm",
        "get_dispatch_layout": f"topk_idx num_experts {stream}",
        "dispatch": "x handle num_tokens_per_rank num_tokens_per_rdma_rank is_token_in_rank "
                    "num_tokens_per_expert topk_idx topk_weights expert_alignment num_worst_tokens "
                    f"config {stream}",
        "combine": f"x handle topk_weights bias config {stream}",
        "low_latency_dispatch": "x topk_idx num_max_dispatch_tokens_per_rank num_experts "
                                "cumulative_local_expert_recv_stats dispatch_wait_recv_cost_stats "
                                "use_fp8 round_scale use_ue8m0 async_finish return_recv_hook",
        "low_latency_combine": "x topk_idx topk_weights handle use_logfmt zero_copy async_finish "
                               "return_recv_hook out combine_wait_recv_cost_stats",
        "get_next_low_latency_combine_buffer": "handle",
        "clean_low_latency_buffer": "num_max_dispatch_tokens_per_rank hidden num_experts"})
    defaults = inspect.signature(deep_ep.Buffer).parameters
    assert defaults["num_qps_per_rank"].default == 24
    assert inspect.signature(deep_ep.Buffer.low_latency_dispatch).parameters["use_fp8"].default is True


def test_layout(buffer, problem, size):
    ranks, nodes, experts, goes, event = buffer.get_dispatch_layout(problem.topk_idx,
                                                                    problem.num_experts)
    local = problem.num_experts // size
    ids = problem.topk_idx.tolist()
    want = [[any(each // local == other for each in row if each >= 0) for other in range(size)]
            for row in ids]
    assert goes.dtype == torch.bool and goes.tolist() == want and nodes is None
    assert ranks.tolist() == [sum(column) for column in zip(*want)] or not ids
    flat = [each for row in ids for each in row]
    assert experts.tolist() == [flat.count(each) for each in range(problem.num_experts)]
    assert ranks.dtype == experts.dtype == torch.int32 and event.event is None


def test_layout_over_nodes(device):
    """On GPUs by a kernel; also of ids that name no expert, which torch's operations count there, too."""
    from nccl_ep.deep_ep.layout import _counted_by_torch, layout

    ranks, nodes, _, goes = layout(torch.tensor([[0, 31], [7, 5], [-1, 17]], device=device), 32, 16)
    assert nodes.tolist() == [2, 2] and goes.sum().item() == 5
    assert ranks[[0, 15, 3, 2, 8]].tolist() == [1] * 5
    assert layout(torch.empty((0, 2), dtype=torch.int64, device=device), 32, 16)[1].tolist() == [0, 0]
    for tokens, num_ranks in ((1, 3), (33, 8), (500, 12)):
        ids = torch.randint(-3, 40, (tokens, 5), device=device, dtype=torch.int32)[:, 1:]
        num_experts = 36 // num_ranks * num_ranks
        ranks, _, experts, goes = layout(ids, num_experts, num_ranks)
        for have, want in zip((ranks, experts, goes), _counted_by_torch(ids.cpu().long(), num_experts, num_ranks)):
            assert torch.equal(have.cpu(), want) and have.dtype == want.dtype


@pytest.mark.parametrize("scaled", [False, True])
def test_high_throughput(buffer, problem, rank, scaled):
    """Rows by source rank and token, local ids, weights, counts; combine; the cached way."""
    x = problem.tokens
    if scaled:
        scales = torch.arange(2.0, device=x.device).expand(len(x), 2).contiguous() + rank
        x = (x.to(torch.float8_e4m3fn), scales.t().contiguous().t())
    rows, ids, weights, counts, handle, event = dispatched(buffer, problem, x, expert_alignment=4)
    assert event.event is None and ids.dtype == deep_ep.topk_idx_t
    order = problem.arrivals()
    if scaled:
        rows, scales = rows
        assert scales.is_contiguous()
        assert scales[:, 0].tolist() == [float(source) for source, _, _ in order]
    assert len(rows) == len(order)
    for row, its, factors, (_, expected, pairs) in zip(rows, ids.tolist(), weights.tolist(), order):
        assert torch.equal(row.float(), expected.to(rows.dtype).float())
        assert {each: factor for each, factor in zip(its, factors) if each >= 0} == pytest.approx(pairs)
    assert counts == [-(-len(each) // 4) * 4 for each in problem.by_expert()]

    cached, *nothing, event = buffer.dispatch(x, handle=handle)
    assert nothing == [None] * 4
    again = cached[0] if scaled else cached
    assert torch.equal(again.float(), rows.float())
    bias = torch.ones_like(problem.tokens), 2 * torch.ones_like(problem.tokens)
    sums, home, event = buffer.combine(rows.to(torch.bfloat16), handle, topk_weights=weights,
                                       bias=bias)
    torch.testing.assert_close(home, problem.live_weights)
    sent = (x[0] if scaled else x).float() * problem.ranks
    torch.testing.assert_close(sums.float(), sent + 3, rtol=2e-2, atol=2e-2)
    assert buffer.combine(rows.to(torch.bfloat16), handle)[1] is None


@pytest.mark.parametrize("step", [1, 2])
def test_wide_rows_bring_scales(buffer, problem, rank, step):
    """In any strides: a group has room for both."""
    ramp = torch.arange(8.0, device=problem.tokens.device)
    scales = (ramp + rank).expand(len(problem.tokens), -1)
    if step == 2:
        scales = scales.contiguous()[:, ::2]
    (rows, came), *_, handle, _ = dispatched(buffer, problem, (problem.tokens, scales))
    order = problem.arrivals()
    assert came.tolist() == [(ramp[::step] + source).tolist() for source, _, _ in order]
    assert all(torch.equal(row, want) for row, (_, want, _) in zip(rows, order))
    again = buffer.dispatch((problem.tokens, scales), handle=handle)[0]
    assert torch.equal(again[0], rows) and torch.equal(again[1], came)


def test_a_bound_of_rows(buffer, problem):
    """`num_worst_tokens`: so many rows, no list; beyond n ids are -1."""
    usual = dispatched(buffer, problem)
    most = _MOST * buffer.group_size
    rows, ids, weights, counts, handle, _ = dispatched(buffer, problem, num_worst_tokens=most)
    used = len(usual[0])
    assert counts == [] and len(rows) == most and torch.equal(rows[:used], usual[0])
    assert torch.equal(ids[:used], usual[1]) and bool((ids[used:] == -1).all())
    assert torch.equal(buffer.combine(rows, handle)[0], buffer.combine(usual[0], usual[4])[0])
    short = problem.tokens.to(torch.float8_e4m3fn)
    again = buffer.dispatch([short, problem.weights[:, :1].contiguous()], handle=handle)[0]
    assert len(again[0]) == len(again[1]) == most
    assert torch.equal(again[0][:used].float(), usual[0].to(short.dtype).float())


def test_wrong_tensors_take_nothing(buffer, problem):
    """The text names DeepEP's argument, and the handles stay."""
    x, ids, experts = problem.tokens, problem.topk_idx, problem.num_experts
    pool = buffer.shared.low_latency(experts, 256, _MOST)
    rows, _, handle, _, _ = buffer.low_latency_dispatch(x, ids, _MOST, experts, use_fp8=False)
    buffer.low_latency_combine(rows, ids, problem.weights, handle)
    before = {shape: len(free) for shape, free in pool._free.items()}
    more = x.new_zeros((len(x) + 1, 256))
    for tokens, routing, most, text in (
            (more, ids, _MOST, "topk_idx: has shape"), (x, ids.float(), _MOST, "topk_idx: has type"),
            (x[:, :100], ids, _MOST, "x: 100 bfloat16"), (x[0:0, 0], ids, _MOST, "x: has shape"),
            (x.new_zeros((99, 256)), ids.new_zeros((99, 2)), _MOST, "num_max_dispatch_tokens_per_rank"),
            (x, ids, 0, "num_max_dispatch_tokens_per_rank: must be")):
        with pytest.raises(ValueError, match=f"^{text}"):
            buffer.low_latency_dispatch(tokens, routing, most, experts)
    for tokens, routing, text in ((rows[:, 1:], ids, "x"), (rows, ids[:, 1:], "topk_idx")):
        with pytest.raises(ValueError, match=f"^{text}: has shape"):
            buffer.low_latency_combine(tokens, routing, problem.weights, handle)
    stats = torch.zeros(experts + 1, dtype=torch.int32, device=x.device)
    with pytest.raises(ValueError, match="^cumulative_local_expert_recv_stats: has shape"):
        buffer.low_latency_dispatch(x, ids, _MOST, experts, cumulative_local_expert_recv_stats=stats)
    assert {shape: len(free) for shape, free in pool._free.items()} == before
    with pytest.raises(ValueError, match="^topk_idx: has type"):
        buffer.get_dispatch_layout(ids.float(), experts)
    with pytest.raises(TypeError, match="^num_tokens_per_expert: must be a tensor"):
        buffer.dispatch(x, num_tokens_per_expert=[1], topk_idx=ids, topk_weights=problem.weights)
    with pytest.raises(ValueError, match="^topk_idx: has shape"):
        dispatched(buffer, problem, more)


def test_operators_of_a_dispatch_mode(buffer, problem, two_ranks):
    """As FlopCounterMode or selective checkpointing have one: the same results."""
    def step(hooks):
        rows, _, weights, counts, handle, _ = dispatched(buffer, problem)
        results = [rows, *buffer.combine(rows, handle, topk_weights=weights)[:2]]
        # A shape of which no handle is there yet.
        return [*results, *there_and_back(buffer, problem, hooks, 5 + hooks)], counts

    for hooks in (False, True):
        with BaseTorchDispatchMode():
            have, counts = step(hooks)
        want, expected = step(hooks)
        assert counts == expected and all(map(torch.equal, have, want))


@pytest.mark.parametrize("how", [{}, {"round_scale": True}, {"round_scale": True, "use_ue8m0": True},
                                 {"use_fp8": False}], ids=["fp8", "rounded", "ue8m0", "bf16"])
@pytest.mark.parametrize("hooks", [False, True])
def test_low_latency(buffer, size, world, device, how, hooks):
    """Rows, scales and their strides, counts, statistics, hooks, `out`; weighted sums."""
    problem = Problem(*world, hidden=512, dtype=torch.bfloat16, masked=True, device=device)
    stats = torch.ones(problem.num_experts // size, dtype=torch.int32, device=device)
    waits = torch.zeros(size, dtype=torch.int64, device=device)
    ids = problem.topk_idx.clone()  # combined with others that are equal
    rows, counts, handle, event, hook = buffer.low_latency_dispatch(
        problem.tokens, ids, _MOST, problem.num_experts, return_recv_hook=hooks,
        cumulative_local_expert_recv_stats=stats, **how)
    assert (hook is not None) == hooks and event.event is None
    if hooks:
        hook()
        hook()
    values = rows
    if how.get("use_fp8", True):
        packed = how.get("use_ue8m0", False)
        rows, scales = rows
        blocks = 1 if packed else 4
        assert scales.dtype == (torch.int32 if packed else torch.float32)
        assert scales.shape == (len(counts), size * _MOST, blocks)
        assert scales.stride() == (blocks * size * _MOST, 1, size * _MOST)
        values = plain(rows, scales)
    assert rows.shape == (len(counts), size * _MOST, 512)
    for block, want, count, total in zip(values, problem.by_expert(), counts.tolist(), stats.tolist()):
        assert count == len(want) == total - 1
        for row, (expected, _) in zip(block, want):
            torch.testing.assert_close(row.float(), expected.float(), rtol=0.07, atol=0.02)
    out = torch.empty_like(problem.tokens)
    sums, event, hook = buffer.low_latency_combine(
        values.to(torch.bfloat16), problem.topk_idx, problem.weights, handle, out=out,
        return_recv_hook=hooks, combine_wait_recv_cost_stats=waits)
    if hooks:
        hook()
    assert sums is out and waits.any() and waits.min() >= 0
    torch.testing.assert_close(sums.float(), problem.tokens.float() * problem.factors, rtol=0.1, atol=0.05)
    timed = waits.tolist()
    again = buffer.low_latency_combine(values.to(torch.bfloat16), problem.topk_idx, problem.weights,
                                       handle)[0]
    assert torch.equal(again, sums) and waits.tolist() == timed
    buffer.low_latency_dispatch(problem.tokens, ids, _MOST, problem.num_experts)
    with pytest.raises(RuntimeError, match="handle: it has been combined"):
        buffer.low_latency_combine(rows, problem.topk_idx, problem.weights, handle)


def test_other_ways_of_low_latency(buffer, problem, device):
    """Zero copy, LogFMT, events, 32-bit ids, another number of tokens; masks say that none is."""
    weights = problem.weights
    want = None
    for ids in (problem.topk_idx, problem.topk_idx.to(torch.int32)):
        rows, _, handle, event, _ = buffer.low_latency_dispatch(
            problem.tokens, ids, _MOST, problem.num_experts, use_fp8=False, async_finish=True)
        event.current_stream_wait()
        buffer.get_next_low_latency_combine_buffer(handle).copy_(rows)
        sums, event, _ = buffer.low_latency_combine(rows, ids, weights, handle, use_logfmt=True,
                                                    zero_copy=True, async_finish=True)
        event.current_stream_wait()
        assert want is None or torch.equal(sums, want)
        want = sums
    assert torch.equal(there_and_back(buffer, problem, first=3)[0], want[:3])
    buffer.clean_low_latency_buffer(_MOST, 256, problem.num_experts)
    status = torch.ones(buffer.group_size, dtype=torch.int32, device=device)
    buffer.low_latency_query_mask_buffer(status)
    buffer.low_latency_update_mask_buffer(0)
    buffer.low_latency_clean_mask_buffer()
    assert not status.any()


def test_padded_handles(buffer, problem, monkeypatch):
    """As over several nodes, where each handle has room for M tokens."""
    want = there_and_back(buffer, problem)[0]
    monkeypatch.setattr(buffer.shared.low_latency(problem.num_experts, 256, _MOST), "is_one_node", False)
    for hooks in (False, True):
        assert torch.equal(there_and_back(buffer, problem, hooks)[0], want)


def test_events(buffer):
    with deep_ep.Buffer.capture() as event:
        assert isinstance(event, EventOverlap) and isinstance(event.event, EventHandle)
    event.current_stream_wait()
    with pytest.raises(ValueError, match="event: there is none"):
        EventOverlap().current_stream_wait()


def test_settings(buffer):
    """What callers ask for before they make a Buffer, for any number of ranks."""
    config = deep_ep.Buffer.get_dispatch_config(7)
    assert isinstance(config, deep_ep.Config) and deep_ep.Buffer.is_sm90_compiled()
    assert config.get_nvl_buffer_size_hint(14336, 7) > 0
    assert deep_ep.Config(20, 6, 256, 6, 128).get_rdma_buffer_size_hint(14336, 16) == 0
    assert deep_ep.Buffer.get_low_latency_rdma_size_hint(128, 7168, 8, 256) > 128 * 8 * 14336
    deep_ep.Buffer.set_num_sms(24)
    assert buffer.num_sms == 24
    deep_ep.Buffer.set_num_sms(20)
    with pytest.raises(ValueError, match="new_num_sms: must be even"):
        deep_ep.Buffer.set_num_sms(7)


def test_what_is_not_served(buffer, problem, device):
    """The text names the argument."""
    rows, *_, handle, _ = dispatched(buffer, problem)
    tokens, ids, weights = problem.tokens, problem.topk_idx, problem.weights
    one = torch.zeros(1, dtype=torch.int32, device=device)
    for call, kind, text in (
            (lambda: buffer.dispatch(tokens, num_tokens_per_rank=one), NotImplementedError, "topk_idx"),
            (lambda: buffer.dispatch(tokens, handle=handle, topk_idx=ids), ValueError, "topk_idx"),
            (lambda: handle[0], NotImplementedError, "handle"),
            (lambda: buffer.combine(rows, (1, 2)), TypeError, "handle"),
            (lambda: buffer.low_latency_combine(rows, ids, weights, handle), TypeError, "handle"),
            (lambda: buffer.low_latency_dispatch(tokens, ids, 4, 8, use_ue8m0=True), ValueError,
             "use_ue8m0"),
            (lambda: buffer.low_latency_dispatch(tokens, ids, 4, 8, async_finish=True,
                                                 return_recv_hook=True), ValueError, "async_finish"),
            (lambda: buffer.low_latency_dispatch(tokens, ids, 4, 8, use_nvfp4=True), NotImplementedError,
             "use_nvfp4"),
            (lambda: buffer.get_local_buffer_tensor(torch.uint8), NotImplementedError, "get_local"),
            (lambda: buffer.low_latency_update_mask_buffer(0, True), NotImplementedError, "mask"),
            (lambda: buffer.get_dispatch_layout(ids, -1), ValueError, "num_experts")):
        with pytest.raises(kind, match=text):
            call()
    low = buffer.low_latency_dispatch(tokens, ids, _MOST, problem.num_experts)[2]
    for value in (handle, low):
        with pytest.raises(TypeError, match="cannot be copied or pickled; dispatch makes another"):
            copy.copy(value)
    for setting in ({"enable_shrink": True}, {"comm": object()}):
        with pytest.raises(NotImplementedError, match=next(iter(setting))):
            deep_ep.Buffer(None, **setting)


def test_what_other_ranks_would_wait_for(buffer, problem, device, monkeypatch):
    """Wrong values are refused before."""
    *_, handle, _ = dispatched(buffer, problem)
    tokens, weights = problem.tokens, problem.weights
    monkeypatch.setattr(EpHandle, "update", None)
    monkeypatch.setattr(EpHandle, "combine", None)
    routing = {"num_tokens_per_expert": torch.zeros(problem.num_experts, device=device), "topk_idx": problem.topk_idx}
    rows = torch.zeros((handle.rows, 256), device=device)
    for call, text in (
            (lambda: buffer.dispatch(tokens.flatten(), topk_weights=weights, **routing), "x: has shape"),
            (lambda: buffer.dispatch(tokens, topk_weights=weights.double(), **routing), "topk_weights: has type"),
            (lambda: buffer.dispatch((tokens, weights[:, :1].t()), topk_weights=weights, **routing),
             "scales: has shape"),
            (lambda: buffer.combine(rows, handle, bias=rows.new_ones(1, 256)), r"bias: has shape \[1, 256\]")):
        with pytest.raises(ValueError, match=text):
            call()


def test_buffers_share_their_groups(buffer, problem):
    """As many as a program makes: groups are made once, and closed with the last."""
    other = deep_ep.Buffer(group=dist.group.WORLD, num_nvl_bytes=1, explicitly_destroy=True)
    assert other.shared is buffer.shared
    dispatched(other, problem)
    groups = len(buffer.shared._high)
    other.destroy()
    other.destroy()
    dispatched(buffer, problem)
    assert len(buffer.shared._high) == groups
    with pytest.raises(RuntimeError, match="the Buffer is destroyed"):
        other.shared
