"""vLLM's own files over `deep_ep`, unchanged: managers, the choice of a backend, prepare and finalize, the steps of its
modular kernel, and two micro-batches in threads. What they import of the rest of vLLM is a stand-in."""

import importlib.util
import threading

import pytest
import torch
import torch.distributed as dist

from loading import FP8
from problems import captured, plain, weighted
from vllm_files import named, quantized_input, vllm

pytestmark = pytest.mark.high_throughput
_MOST, _TOP_K, _LOCAL = 64, 3, 4
_MANAGERS = {"ht": "DeepEPHT", "ll": "DeepEPLL", "v2": "DeepEPV2"}


@pytest.fixture(scope="module")
def engine(deep_ep, world, device):
    yield from vllm(world, device)


class Layer:
    """One MoE layer: what vLLM chooses and makes for `backend`, and experts that scale and bend."""

    def __init__(self, engine, world, device, backend, hidden, **quantization):
        self.engine, self.world, self.device, self.backend, self.hidden = engine, world, device, backend, hidden
        self.experts, self.first = _LOCAL * world[1], _LOCAL * world[0]
        quant = dict(quant_dtype=None, block_shape=None, is_block_quantized=False, a1_scale=None, a1_gscale=None,
                     a2_scale=None, per_act_token_quant=False, is_scale_swizzled=False, mx_alignment=0) | quantization
        packed = quant.pop("packed", False)
        group = dist.group.WORLD
        self.manager = getattr(engine.all2all, f"{_MANAGERS[backend]}All2AllManager")(group)
        self.manager._gin_checked = device.type == "cpu"  # or it asks NCCL
        moe = named(moe_parallel_config=named(use_passthrough_all2all=False, use_all2all_kernels=True, sp_size=1,
                                              dp_size=world[1], use_ep=True),
                    dp_size=world[1], num_local_experts=_LOCAL, num_experts=self.experts, max_num_tokens=_MOST,
                    hidden_dim=hidden, experts_per_token=_TOP_K,
                    **{f"use_deepep_{each}_kernels": each == backend for each in _MANAGERS})
        self.quant = named(**quant)
        self.steps = engine.all2all_utils.maybe_make_prepare_finalize(moe, self.quant, all2all_manager=self.manager)
        reduce = engine.topk_weight_and_reduce.TopKWeightAndReduceDelegate
        experts = named(quant_config=self.quant, moe_config=moe, expects_unquantized_inputs=False,
                        output_hidden_dim=lambda width: width, finalize_weight_and_reduce_impl=reduce,
                        supports_packed_ue8m0_act_scales=lambda: packed)
        self.steps.post_init_setup(experts)
        self.kernel = type("Kernel", (engine.modular_kernel.FusedMoEKernelModularImpl,),
                           {"_fused_experts": self.compute})(self.steps, experts)

    @staticmethod
    def expert(number, rows):
        return torch.tanh(rows * (1 + number) / 4)

    def compute(self, *, a1q, a1q_scale, topk_ids, topk_weights, expert_tokens_meta, **others):
        """Weighted and summed later: [L, R*M, H] of blocks, [n, K, H] of rows by their ids, [n, H] of none."""
        x = plain(a1q, a1q_scale)
        if self.backend == "ll":
            return torch.stack([self.expert(self.first + each, x[each]) for each in range(_LOCAL)]).bfloat16()
        counts = None if expert_tokens_meta is None else expert_tokens_meta.expert_num_tokens
        result = torch.zeros((*topk_ids.shape, self.hidden), device=x.device)
        for each in range(_LOCAL):
            mine = topk_ids == self.first + each
            assert counts is None or int(counts[each]) == int(mine.sum())
            result += torch.where(mine[..., None], self.expert(self.first + each, x)[:, None], 0.0)
        return result.bfloat16() if len(x) else x.bfloat16()

    def batch(self, seed, most=_MOST):
        """Tokens, ids (repeated ones, and -1) and weights of this rank; how many differs by rank, and may be none."""
        rank, size = self.world
        sizes = [(17 * seed + 29 * each) % (most + 1) if each != seed % (size + 1) else 0 for each in range(size)]
        self.engine.options.sizes.copy_(torch.tensor(sizes))
        random = torch.Generator().manual_seed(100 * seed + rank)
        ids = torch.randint(-1, self.experts, (sizes[rank], _TOP_K), generator=random)
        made = (torch.randn((sizes[rank], self.hidden), generator=random).bfloat16(), ids,
                torch.rand(ids.shape, generator=random))
        return [each.to(self.device) for each in made]

    def run(self, tokens, ids, weights):
        return self.kernel.apply(tokens, torch.empty(_LOCAL), None, ids, weights, global_num_experts=self.experts)

    def run_at_once(self, tokens, ids, weights):
        """The same by the calls that wait for each result."""
        rows, scales, meta, its, factors = self.steps.prepare(tokens, weights, ids, self.experts, None, False,
                                                              self.quant)
        its, factors = ids if its is None else its, weights if factors is None else factors
        results = self.compute(a1q=rows, a1q_scale=scales, topk_ids=its, topk_weights=factors, expert_tokens_meta=meta)
        output = torch.empty_like(tokens)
        self.steps.finalize(output, results, factors, its, False,
                            self.engine.topk_weight_and_reduce.TopKWeightAndReduceDelegate())
        return output

    def check(self, batch, output):
        """Against the same computation of this rank's tokens, quantized likewise where they are."""
        tokens, ids, weights = batch
        x = plain(*quantized_input(tokens, quant_dtype=self.quant.quant_dtype))
        want = weighted(x, ids, weights, self.experts, self.expert)
        limit = 5e-2 if self.quant.quant_dtype is None else 0.25
        torch.testing.assert_close(output.float(), want, rtol=limit, atol=limit)


@pytest.fixture
def layer(engine, world, device):
    """Makes layers, whose managers are destroyed after the test."""
    made = []

    def make(backend, hidden, **quantization):
        made.append(Layer(engine, world, device, backend, hidden, **quantization))
        return made[-1]

    with torch.inference_mode():
        yield make
    for each in made:
        each.manager.destroy()


_BLOCKS = {"quant_dtype": FP8, "block_shape": [128, 128], "is_block_quantized": True}
_V2 = [("v2", 512, {}), ("v2", 512, _BLOCKS), ("v2", 512, {"quant_dtype": "mxfp8"})]
_HT = [("ht", 512, {}), ("ht", 512, _BLOCKS)]
_LL = [("ll", 2048, {}), ("ll", 2048, _BLOCKS), ("ll", 2048, {**_BLOCKS, "packed": True})]


@pytest.mark.parametrize("backend, hidden, quantization, eager", [
    *((*each, True) for each in _HT + _LL + _V2), *((*each, False) for each in _V2)])
def test_steps(layer, engine, backend, hidden, quantization, eager):
    """Several batches; vLLM's V2 takes rows by expert if it runs eagerly, else all that may come, without a wait."""
    engine.options.enforce_eager = eager
    made = layer(backend, hidden, **quantization)
    for seed in range(1, 9):
        batch = made.batch(seed, most=min(1 << seed, _MOST))
        made.check(batch, made.run(*batch))
    made.check(batch, made.run_at_once(*batch))


@pytest.mark.parametrize("backend, hidden, quantization", _LL + _V2)
def test_graph(on_gpu, layer, engine, backend, hidden, quantization):
    """Two layers in a graph, whose replays route by the ids of each step."""
    engine.options.enforce_eager = False
    made = layer(backend, hidden, **quantization)
    batch = made.batch(5)
    graph, outputs = captured(lambda: [made.run(*batch) for _ in range(2)])
    for seed in range(3):
        batch[1].copy_(batch[1].roll(1 + seed, dims=0))
        batch[2].mul_(0.5)
        graph.replay()
        for output in outputs:
            made.check(batch, output)


def in_turns(engine, device, layer, batches):
    """Two layers over each of two batches in threads that hand over to each other."""
    streams = [torch.cuda.Stream() for _ in range(2)]
    if device.type == "cuda":
        torch.cuda.synchronize()
    contexts = engine.ubatching.make_ubatch_contexts(2, *streams, [named(), named()], threading.Barrier(3))
    outputs, errors = [[], []], []

    def work(which):
        try:
            if device.type == "cuda":
                torch.cuda.set_device(device)
            with torch.inference_mode(), contexts[which]:
                outputs[which] += [layer.run(*batches[which]) for _ in range(2)]
        except BaseException as error:
            errors.append(error)
            raise

    threads = [threading.Thread(target=work, args=(which,), daemon=True) for which in range(2)]
    for each in threads:
        each.start()
    contexts[0].ready_barrier.wait()
    contexts[0].cpu_wait_event.set()
    while any(each.is_alive() for each in threads) and not errors:  # an error leaves the other waiting
        threads[0].join(0.1)
    assert not errors
    if device.type == "cuda":
        torch.cuda.synchronize()
    return outputs


@pytest.mark.parametrize("backend, hidden, quantization", _HT + _LL)
def test_two_micro_batches(layer, engine, device, backend, hidden, quantization):
    """Dual-batch overlap: hooks that the other batch's thread runs, events captured before a switch of streams."""
    made = layer(backend, hidden, **quantization)
    if backend == "ht":
        made.manager.set_num_sms(20)
    for seed in (1, 2, 3):
        batches = [made.batch(2 * seed + each) for each in range(2)]
        for batch, outputs in zip(batches, in_turns(engine, device, made, batches)):
            for output in outputs:
                made.check(batch, output)


def test_what_is_not_served(layer, engine, monkeypatch):
    """The error names the argument."""
    monkeypatch.setenv("VLLM_DEEPEPLL_NVFP4_DISPATCH", "1")
    made = layer("ll", 2048, quant_dtype="nvfp4")
    with pytest.raises(NotImplementedError, match="use_nvfp4"):
        made.run(*made.batch(1))
    monkeypatch.setattr(engine.options, "enable_fault_tolerance", True)
    with pytest.raises(NotImplementedError, match="enable_shrink"):
        layer("ll", 2048)


def test_its_own_contract(engine):
    """vLLM's test of when its V2 steps wait, where its sources have their tests."""
    file = engine.place / "tests" / "kernels" / "moe" / "test_deepep_v2_async_finalize.py"
    if not file.exists():
        pytest.skip("there are no tests of vLLM")
    spec = importlib.util.spec_from_file_location("test_of_vllm", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with pytest.MonkeyPatch.context() as patch:
        module.test_finalize_async_defers_join_to_receiver()
        module.test_finalize_sync()
        module.test_finalize_async_under_dbo_uses_sync_combine(patch)
