"""SGLang's own modules between stand-ins.

Its files are as published: the dispatchers, what overlaps batches, the permutations around its grouped matrix products,
which run where Triton can. All others are stand-ins, also quantization and the products, in plain torch.
"""

import importlib
import importlib.util
import json
import os
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from loading import answer, folder, modules, quantized, without_gpu
from problems import Problem, plain, weighted

_MOE = "sglang.srt.layers.moe"
_DISPATCHERS = f"{_MOE}.token_dispatcher"
_GEMM = "sglang.srt.layers.deep_gemm_wrapper"
_USED = {"deepep": f"{_DISPATCHERS}.deepep", "v2": f"{_DISPATCHERS}.deepep_v2", "utils": f"{_MOE}.utils", "gemm": _GEMM,
         "two": "sglang.srt.batch_overlap.two_batch_overlap", "single": "sglang.srt.batch_overlap.single_batch_overlap",
         "adapter": "sglang.srt.model_executor.runner_utils.deepep_adapter"}
_PERMUTES = f"{_MOE}.moe_runner.deep_gemm"
_OWN = {*_USED.values(), "sglang.srt.environ", _MOE, _DISPATCHERS, f"{_DISPATCHERS}.base",
        "sglang.kernels.ops.moe.ep_moe_kernels", _PERMUTES} - {_GEMM}


class Recorder:
    """Of expert distributions: what its gatherers need of counts."""

    def __init__(self) -> None:
        self.seen: list = []

    def on_deepep_dispatch_normal(self, counts, num_tokens_per_rank, num_tokens_per_rdma_rank, num_tokens_per_expert):
        assert isinstance(counts, list)
        self.seen.append(torch.tensor(counts))

    def on_deepep_dispatch_low_latency(self, counts):
        self.seen.append(torch.zeros(len(counts), dtype=torch.int32, device=counts.device).add_(counts))


def quantized_rows(x, group_size, column_major_scales=False, scale_tma_aligned=False, scale_ue8m0=False):
    """Rows in e4m3 with scales of groups: float32, or four exponents in one int32; columns begin at 16 bytes."""
    rows, scales = quantized(x, group_size, powers=scale_ue8m0)
    if scale_ue8m0:
        scales = ((scales.view(torch.int32) >> 23).to(torch.uint8)).view(torch.int32)
    if column_major_scales:
        stride = -(-len(x) // 4) * 4 if scale_tma_aligned else len(x)
        space = scales.new_empty((scales.shape[1], stride)).T[:len(x)]
        scales = space.copy_(scales)
    return rows, scales


class Engine:
    """Its modules, and the settings that they read."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.recorder, self.permutes = device, Recorder(), None
        self.moe = SimpleNamespace(a2a_backend=None, runner_backend=None, deepep_mode=None, deepep_config="",
                                   tbo_enabled=False, sbo_enabled=False, deepep_v2_mode="direct",
                                   deepep_dispatcher_output_dtype="auto")
        self.forward = SimpleNamespace(is_extend_in_batch=True)

    def load(self) -> None:
        for name, module in _USED.items():
            setattr(self, name, importlib.import_module(module))
        if importlib.util.find_spec("triton") and (self.device.type == "cuda" or "TRITON_INTERPRET" in os.environ):
            self.permutes = importlib.import_module(_PERMUTES)
            self.permutes.copy_list_to_gpu_no_ce = lambda each: torch.tensor(each, dtype=torch.int32,
                                                                             device=self.device)

    def told(self) -> dict[str, dict]:
        """What the server's arguments and the current batch say, and functions of other modules."""
        group = SimpleNamespace(device_group=dist.group.WORLD, barrier=dist.barrier)
        context = {
            "exec": SimpleNamespace(moe=self.moe, deterministic=SimpleNamespace(enable_deterministic_inference=False)),
            "flags": SimpleNamespace(moe=self.moe), "forward": self.forward, "server_args": True,
            "parallel": SimpleNamespace(tp_group=group, attn_dp_size=1, attn_cp_size=1, tp_size=dist.get_world_size()),
            "resources": SimpleNamespace(buffers={})}
        return {
            "sglang.srt.runtime_context": {f"get_{name}": lambda value=value: value for name, value in context.items()},
            "sglang.srt.layers.dp_attention": {"get_is_extend_in_batch": lambda: self.forward.is_extend_in_batch},
            _GEMM: {"ENABLE_JIT_DEEPGEMM": True, "DEEPGEMM_BLACKWELL": False, "DEEPGEMM_SCALE_UE8M0": False,
                    "DEEPGEMM_NEED_TMA_ALIGNED_SCALES": True},
            "sglang.srt.utils": {
                "get_cuda_version": lambda: (13, 0), "is_flashinfer_available": lambda: True,
                "ceil_div": lambda a, b: -(-a // b), "load_json_config": json.loads,
                "dispose_tensor": lambda each: each.set_(each.new_empty(0))},
            "sglang.srt.utils.offloader": {
                "get_offloader": lambda: SimpleNamespace(forbid_copy_engine_usage=True)},
            "sglang.srt.eplb.expert_distribution": {
                "get_global_expert_distribution_recorder": lambda: self.recorder},
            "sglang.kernels.ops.quantization.fp8_kernel": {"sglang_per_token_group_quant_fp8": quantized_rows}}

    def dispatcher(self, problem: Problem, backend: str, **settings):
        """As its layer makes one."""
        self.moe.a2a_backend = self.utils.MoeA2ABackend(backend)
        given = {"group": dist.group.WORLD, "router_topk": problem.top_k, "num_experts": problem.num_experts,
                 "num_local_experts": problem.num_experts // dist.get_world_size(), "hidden_size": problem.hidden,
                 "params_dtype": torch.bfloat16, **settings}
        if backend == "deepep_v2":
            return self.v2.DeepEPv2Dispatcher(**given)
        self.moe.deepep_mode = self.moe.deepep_mode or self.utils.DeepEPMode.AUTO
        made = self.two.MaybeTboDeepEPDispatcher(permute_fusion=True, deepep_mode=self.moe.deepep_mode,
                                                  async_finish=True, return_recv_hook=True, **given)
        made.set_quant_config({})
        return made

    def experts(self, problem: Problem, output):
        """The combine input, by the engine's permutations or in plain torch."""
        kind = output.format.value
        matrices = problem.local_experts(problem.num_experts // dist.get_world_size())
        if self.permutes is None:
            return self.without_kernels(problem, output, matrices)
        state, config = {}, SimpleNamespace(activation="silu", no_combine=False)
        given = getattr(self.permutes, f"pre_permute_{kind}_to_deep_gemm")(output, None, config, state)
        rows = plain(given.hidden_states, given.hidden_states_scale if output.hidden_states_scale is not None else None)
        if given.use_masked_gemm:
            result = torch.stack([problem.expert(matrix, block) for matrix, block in zip(matrices, rows)])
            place = torch.arange(rows.shape[1], device=rows.device)
            result.masked_fill_((place >= given.masked_m[:, None])[..., None], float("nan"))
        else:
            result = torch.full(rows.shape, float("nan"), device=rows.device)
            for expert, matrix in enumerate(matrices):
                mine = given.m_indices == expert
                result[mine] = problem.expert(matrix, rows[mine])
        result = SimpleNamespace(hidden_states=result.to(torch.bfloat16))
        return getattr(self.permutes, f"post_permute_deep_gemm_to_{kind}")(result, None, config, state)

    def without_kernels(self, problem, output, matrices):
        rows = plain(output.hidden_states, output.hidden_states_scale)
        ids, weights = output.topk_ids, output.topk_weights
        result, start = torch.full(rows.shape, float("nan"), device=rows.device), 0
        if rows.ndim == 3:
            for block, out, matrix, count in zip(rows, result, matrices, output.masked_m.tolist()):
                out[:count] = problem.expert(matrix, block[:count])
            return self.deepep.DeepEPLLCombineInput(result.to(torch.bfloat16), ids, weights)
        if ids is not None:
            result = weighted(rows, ids, weights, len(matrices),
                              lambda expert, rows: problem.expert(matrices[expert], rows))
        for expert, matrix in enumerate(matrices if ids is None else ()):
            end = int(output.psum_num_recv_tokens_per_expert[expert])
            result[start:end] = weights[start:end, None] * problem.expert(matrix, rows[start:end])
            start = -(-end // output.expert_alignment) * output.expert_alignment
        if output.format.is_deepep_v2():
            return self.v2.DeepEPv2CombineInput(result.to(torch.bfloat16), None if ids is None else weights)
        return self.deepep.DeepEPNormalCombineInput(result.to(torch.bfloat16), ids, weights)


def sglang(patch: pytest.MonkeyPatch, device: torch.device):
    """Yields the engine, on a machine whose GPUs have fabric handles. For a fixture."""
    place, made = folder("sglang/srt/layers/moe"), Engine(device)
    for name in ("flashinfer", "flashinfer.comm", "flashinfer.comm.mnnvl"):
        patch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["flashinfer.comm.mnnvl"].is_mnnvl_fabric_supported = lambda device: True
    if without_gpu(patch, device):
        answer(patch, torch.cuda, get_device_properties=SimpleNamespace(multi_processor_count=132))
        answer(patch, torch, get_device_module=torch.cuda)
    with modules(place, _OWN, made.told()):
        made.load()
        yield made
