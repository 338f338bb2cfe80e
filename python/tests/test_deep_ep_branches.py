"""What the branches of DeepEP that engines install add to a `Buffer`, the SMs of a configuration, and ids in place."""

import weakref

import pytest
import torch
import torch.distributed as dist

from nccl_ep import deep_ep
from test_deep_ep import dispatched, there_and_back

pytestmark = pytest.mark.high_throughput
_MOST = 32


@pytest.fixture(scope="module")
def buffer():
    """As SGLang makes it with CUDA 13, where GPUs have fabric handles."""
    made = deep_ep.Buffer(dist.group.WORLD, low_latency_mode=True, allow_mnnvl=True, use_fabric=True,
                          explicitly_destroy=True)
    yield made
    made.destroy()


def sent(buffer, problem):
    """Rows, their numbers and a handle of low latency."""
    rows, counts, handle, _, hook = buffer.low_latency_dispatch(
        problem.tokens, problem.topk_idx, _MOST, problem.num_experts, use_fp8=False, return_recv_hook=True)
    hook()
    return rows, counts, handle


@pytest.mark.parametrize("signals, is_dense", [("src_signals", True), ("comp_signal", False)])
def test_rows_that_are_computed_after_the_call(buffer, problem, device, signals, is_dense):
    """Nothing of them is read before the hook, wherever they lie; another dispatch may be in between."""
    want, _ = there_and_back(buffer, problem)
    rows, counts, handle = sent(buffer, problem)
    late = torch.full((*rows.shape[:2], rows.shape[2] * (1 if is_dense else 2)), float("nan"), dtype=rows.dtype,
                      device=device)[..., :rows.shape[2]]
    signal = torch.zeros(len(counts), dtype=torch.int32, device=device)
    names = {"src_signals": {"src_signals": signal, "src_signal_expect_value": 1},
             "comp_signal": {"comp_signal": signal, "packed_recv_count": counts, "block_m": 64, "threshold": 1,
                             "num_sms": 3}}
    sums, event, hook = buffer.low_latency_combine(
        x=late, topk_idx=problem.topk_idx, topk_weights=problem.weights, handle=handle, async_finish=False,
        return_recv_hook=True, overlap=True, **names[signals])
    assert event.event is None
    other, _, its_handle = sent(buffer, problem)
    late.copy_(rows)
    hook()
    hook()
    assert torch.equal(sums, want)
    assert torch.equal(buffer.low_latency_combine(other, problem.topk_idx, problem.weights, its_handle)[0], want)


def test_ids_are_read_where_they_lie(buffer, problem):
    """By few handles for any number of tokens, also where other ids lay; for the combine, too, whoever has them."""
    pool = buffer.shared.low_latency(problem.num_experts, problem.hidden, _MOST)

    def pair(ids, weights):
        given = ids.clone()
        address = given.data_ptr()
        rows, _, handle, _, _ = buffer.low_latency_dispatch(problem.tokens[:len(ids)], given, _MOST,
                                                            problem.num_experts, use_fp8=False)
        assert not pool.is_one_node or handle.handle.topk_idx.data_ptr() == address
        del given
        others = [torch.full_like(ids, -1) for _ in range(64)]
        sums = buffer.low_latency_combine(rows, ids, weights, handle)[0].float()
        return sums, ids.clone(), others

    ids, weights = problem.topk_idx, problem.weights
    factors = torch.where(ids >= 0, weights, 0.0).sum(dim=1, keepdim=True)
    want, kept = problem.tokens.float() * factors, []
    for _ in range(6):
        ids, weights = ids.flip(1), weights.flip(1)
        for few in (len(ids), 3, 0):
            sums, *others = pair(ids[:few], weights[:few])
            torch.testing.assert_close(sums, want[:few], rtol=0.1, atol=0.05)
            kept.append(others)
    assert 0 < len(pool._made) <= 8


def test_ids_are_the_callers_again(buffer, problem):
    """Once nobody has the handle, their memory is free, and the next ids there need no call of the library."""
    pool = buffer.shared.low_latency(problem.num_experts, problem.hidden, _MOST)
    if not pool.is_one_node:
        pytest.skip("handles have memory for ids over several nodes")
    seen = []
    for turn in range(3):
        ids = problem.topk_idx.clone()
        found = weakref.ref(ids)
        rows, _, handle, _, _ = buffer.low_latency_dispatch(problem.tokens, ids, _MOST, problem.num_experts,
                                                            use_fp8=False)
        seen.append(handle.handle)
        buffer.low_latency_combine(rows, ids, problem.weights, handle)
        del ids, handle
        assert found() is None and len(seen[-1].topk_idx) == 0
    assert len(pool._made) <= 8


def test_hooks_that_nobody_calls(buffer, problem):
    """Of a step that has failed, in a dispatch or a combine: the next one has its place."""
    pool = buffer.shared.low_latency(problem.num_experts, problem.hidden, _MOST)
    if not pool.is_one_node:
        pytest.skip("over several nodes all ranks must have dropped the same")
    want, _ = there_and_back(buffer, problem, hooks=True)
    handles = len(pool._made)
    ids, kept = problem.topk_idx, []
    for fails in ("dispatch", "combine", "dispatch", "dispatch", "combine"):
        rows, _, handle, _, hook = buffer.low_latency_dispatch(problem.tokens, ids, _MOST, problem.num_experts,
                                                               use_fp8=False, return_recv_hook=True)
        if fails == "combine":
            hook()
            hook = buffer.low_latency_combine(rows, ids, problem.weights, handle, return_recv_hook=True)[2]
        kept.append(handle)  # as engines do
        del rows, handle, hook
        # Of the two operations that may be in flight at most one is left.
        assert torch.equal(there_and_back(buffer, problem, hooks=True)[0], want)
    with pytest.raises(RuntimeError, match="handle: nobody called its hook"):
        buffer.low_latency_combine(want, ids, problem.weights, kept[0])
    kept.clear()
    free = [place for places in pool._free.values() for place in places]
    assert len(pool._made) <= handles + 2
    assert not any(place.handle.staged_outputs or place.is_given_up for place in free)


def test_on_another_stream(on_gpu, buffer, problem):
    """The hook comes behind the stream that calls it, and runs on that of the combine."""
    want, _ = there_and_back(buffer, problem)
    rows, _, handle = sent(buffer, problem)
    late, side = torch.full_like(rows, float("nan")), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        sums, _, hook = buffer.low_latency_combine(late, problem.topk_idx, problem.weights, handle,
                                                   return_recv_hook=True, overlap=True)
    torch.cuda._sleep(10_000_000)
    late.copy_(rows)
    hook()
    torch.cuda.current_stream().wait_stream(side)
    assert torch.equal(sums, want)


@pytest.mark.parametrize("overlap", [False, True])
def test_hooks_outside_of_inference_mode(buffer, problem, device, overlap):
    """Of calls inside; statistics, too."""
    stats = torch.zeros(problem.num_experts // problem.size, dtype=torch.int32, device=device)
    with torch.inference_mode():
        of_inference = stats.clone()
    for counted in (stats, of_inference):
        with torch.inference_mode():
            rows, counts, handle, _, hook = buffer.low_latency_dispatch(
                problem.tokens, problem.topk_idx, _MOST, problem.num_experts, use_fp8=False, return_recv_hook=True,
                cumulative_local_expert_recv_stats=counted)
        hook()
        with torch.inference_mode():
            sums, _, hook = buffer.low_latency_combine(rows, problem.topk_idx, problem.weights, handle,
                                                       return_recv_hook=True, overlap=overlap)
        hook()
        assert torch.equal(counted, counts)
        torch.testing.assert_close(sums.float(), problem.tokens.float() * problem.factors, rtol=0.05, atol=0.05)


def test_a_combine_that_fails(buffer, problem, nodes, monkeypatch):
    """It gives its handle back. On one node one that was not combined before waits for another try."""
    rows, _, handle = sent(buffer, problem)
    one_node = len(set(nodes)) == 1

    def fails(**late):
        with monkeypatch.context() as patch:
            patch.setattr(type(handle.handle), "combine", None)
            with pytest.raises(TypeError):
                buffer.low_latency_combine(rows, problem.topk_idx, problem.weights, handle, **late)[2]()

    fails(overlap=True, return_recv_hook=True)
    assert handle._is_held == one_node
    fails()
    assert handle._is_held == one_node
    buffer.low_latency_combine(rows, problem.topk_idx, problem.weights, handle)
    assert not handle._is_held
    fails()
    assert not handle._is_held


def test_without_overlap(buffer, problem):
    """The keywords alone change nothing; rows that come late need a hook."""
    want, _ = there_and_back(buffer, problem)
    rows, _, handle = sent(buffer, problem)
    with pytest.raises(NotImplementedError, match="overlap: needs return_recv_hook"):
        buffer.low_latency_combine(rows, problem.topk_idx, problem.weights, handle, overlap=True)
    sums, _, hook = buffer.low_latency_combine(rows, problem.topk_idx, problem.weights, handle, return_recv_hook=True,
                                               overlap=False, src_signals=None, src_signal_expect_value=0)
    hook()
    assert torch.equal(sums, want)


def test_sms_of_a_configuration(buffer, problem):
    """That of the first dispatch has effect, as nobody else may have said how many."""
    for given, channels in ((deep_ep.Config(8), 4), (None, 4)):
        *_, handle, _ = dispatched(buffer, problem, config=given)
        assert handle.handle.group.num_channels == channels
        rows = problem.tokens.new_empty((handle.rows, problem.hidden))
        assert buffer.combine(rows, handle, config=given)[0].shape == problem.tokens.shape
