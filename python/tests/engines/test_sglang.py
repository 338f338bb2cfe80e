"""SGLang's dispatchers and what uses them, as published, over `deep_ep`."""

from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist

from problems import Problem
from sglang_engine import sglang

pytestmark = pytest.mark.high_throughput
_MOST = 32


class TopK(NamedTuple):
    topk_weights: torch.Tensor
    topk_ids: torch.Tensor
    router_logits: None = None


@pytest.fixture
def engine(deep_ep, world, device, monkeypatch):
    monkeypatch.setenv("SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK", str(_MOST))
    monkeypatch.setenv("SGLANG_DEEPEP_V2_NUM_MAX_DISPATCH_TOKENS_PER_RANK", str(_MOST))
    yield from sglang(monkeypatch, device)


def problem_of(world, device, seed=1, hidden=128, masked=True) -> Problem:
    """Tokens that FP8 has exactly; if `masked`, some ids are -1, rank 1 has no tokens, the others unequally many."""
    problem = Problem(*world, hidden=hidden, dtype=torch.bfloat16, device=device, seed=seed, masked=masked)
    for part in problem._parts:
        part[0].mul_(4).round_().clamp_(-7, 7).div_(4)
        part[0][:, ::32] = 1.75
    problem.tokens = problem.part(world[0])[0].clone()
    return problem


@torch.inference_mode()
def layer(engine, dispatcher, problem):
    """What the experts get, and what comes home."""
    output = dispatcher.dispatch(hidden_states=problem.tokens, topk_output=topk(problem))
    return output, dispatcher.combine(combine_input=engine.experts(problem, output))


def topk(problem, part=slice(None)):
    return TopK(problem.weights[part], problem.topk_idx[part].to(torch.int32))


@pytest.mark.parametrize("dtype, exponents", [("fp8", False), ("fp8", True), ("bf16", False)])
def test_both_modes_in_turns(engine, world, device, dtype, exponents):
    """Prefill, decode, and again, with other ids each time; the layer's adapter for CUDA graphs between them."""
    engine.moe.deepep_dispatcher_output_dtype = dtype
    engine.gemm.DEEPGEMM_BLACKWELL = engine.gemm.DEEPGEMM_SCALE_UE8M0 = exponents
    hidden = 512 if exponents else 128
    dispatcher = engine.dispatcher(problem_of(world, device, hidden=hidden), "deepep")
    adapter = engine.adapter.DeepEPCudaGraphRunnerAdapter()
    for seed in range(4):
        problem = problem_of(world, device, seed, hidden)
        engine.forward.is_extend_in_batch = seed % 2 == 0
        output, result = layer(engine, dispatcher, problem)
        assert (output.hidden_states_scale is None) == (dtype == "bf16")
        adapter.capture(engine.forward.is_extend_in_batch)
        adapter.replay()
        problem.close(result, problem.dense().output)
    assert len(engine.recorder.seen) == 4


@pytest.mark.parametrize("prefill", [True, False])
def test_two_batches(engine, world, device, prefill):
    """Both are between two stages at once, through two layers."""
    engine.moe.tbo_enabled, engine.forward.is_extend_in_batch = True, prefill
    problems = [problem_of(world, device, seed, masked=False) for seed in (1, 2)]
    dispatcher = engine.dispatcher(problems[0], "deepep")
    wanted = [problem.dense().output for problem in problems]

    def batch(part, index):
        for problem, want in zip(problems, wanted):
            where = {"tbo_subbatch_index": index}
            dispatcher.dispatch_a(hidden_states=problem.tokens[part], topk_output=topk(problem, part), **where)
            yield
            output = dispatcher.dispatch_b(**where)
            dispatcher.combine_a(combine_input=engine.experts(problem, output), **where)
            yield
            problem.close(dispatcher.combine_b(**where), want[part])

    with torch.inference_mode():
        assert list(zip(batch(slice(5), 0), batch(slice(5, None), 1))) == [(None, None)] * 4


@pytest.mark.parametrize("signals", ["none", "src_signals", "comp_signal"])
def test_single_batch_overlap(engine, world, device, monkeypatch, signals):
    """A combine beside the shared expert, and one that is called before its rows are computed."""
    blackwell, late = signals != "comp_signal", signals != "none"
    for module in (engine.deepep, engine.single):
        monkeypatch.setattr(module, "is_blackwell", lambda: blackwell)
    backends = engine.utils.MoeRunnerBackend
    engine.moe.runner_backend = backends.FLASHINFER_CUTEDSL if late and blackwell else backends.DEEP_GEMM
    engine.moe.sbo_enabled, engine.forward.is_extend_in_batch = True, False
    engine.moe.deepep_dispatcher_output_dtype = "bf16"
    problem = problem_of(world, device)
    dispatcher = engine.dispatcher(problem, "deepep")
    for _ in range(2):
        with torch.inference_mode():
            output = dispatcher.dispatch(hidden_states=problem.tokens, topk_output=topk(problem))
            combine, product, meta = engine.single.compute_overlap_args(output, torch.cuda.Stream())
            dispatcher.set_overlap_args(combine_overlap_args=combine,
                                        meta_overlap_args=meta | {"block_m": 64, "threshold": 1})
            assert combine.overlap == late == (product is not None)
            combine.wait_event.record()
            given = engine.experts(problem, output)
            rows = given.hidden_states.clone() if late else given.hidden_states
            if late:
                given.hidden_states.fill_(float("nan"))
            else:
                combine.wait_event.record()
            dispatcher.combine_a(combine_input=given)
            given.hidden_states.copy_(rows)
            result = dispatcher.combine_b()
            dispatcher.clear_overlap_args()
        problem.close(result, problem.dense().output)


@pytest.mark.parametrize("dtype, exponents", [("fp8", False), ("fp8", True), ("bf16", False)])
@pytest.mark.parametrize("path", ["prefill", "expanded prefill", "decode"])
def test_v2(engine, world, device, monkeypatch, path, dtype, exponents):
    monkeypatch.setenv("SGLANG_DEEPEP_V2_ENABLE_PREFILL_EXPAND", str(int("expanded" in path)))
    engine.gemm.DEEPGEMM_BLACKWELL = engine.gemm.DEEPGEMM_SCALE_UE8M0 = exponents
    engine.forward.is_extend_in_batch = path != "decode"
    hidden = 512 if exponents else 128
    dispatcher = engine.dispatcher(problem_of(world, device, hidden=hidden), "deepep_v2",
                                   use_fp8_dispatch=dtype == "fp8")
    dispatcher.prebuild()
    for seed in range(3):
        problem = problem_of(world, device, seed, hidden)
        output, result = layer(engine, dispatcher, problem)
        assert output.is_expanded == (path != "prefill") and output.use_masked_gemm == (path == "decode")
        problem.close(result, problem.dense().output)


@pytest.mark.parametrize("backend", ["deepep", "deepep_v2"])
def test_decode_in_a_graph(engine, world, device, backend):
    """Captured after two calls, replayed with other tokens, ids and weights."""
    if device.type == "cpu" or engine.permutes is None:
        pytest.skip("needs a GPU and Triton")
    engine.forward.is_extend_in_batch = False
    problem = problem_of(world, device)
    dispatcher = engine.dispatcher(problem, backend, **({"use_fp8_dispatch": True} if backend == "deepep_v2" else {}))
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            layer(engine, dispatcher, problem)
        torch.cuda.synchronize()
        dist.barrier()
        with torch.cuda.graph(graph, stream=side):
            _, result = layer(engine, dispatcher, problem)
    for seed in range(3):
        other = problem_of(world, device, seed)
        for old, new in zip((problem.tokens, problem.topk_idx, problem.weights), other.part(world[0])):
            old.copy_(new)
        problem._experts.copy_(other._experts)
        graph.replay()
        torch.cuda.synchronize()
        problem.close(result, other.dense().output)
