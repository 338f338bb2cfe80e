"""SGLang's own modules between stand-ins.

Its files are as published: the dispatchers, what overlaps batches, the permutations around its grouped matrix products,
which run where Triton can. All others are stand-ins, also quantization and the products, in plain torch.
"""

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import pathlib
import sys
from types import ModuleType, SimpleNamespace

import torch
import torch.distributed as dist

from problems import Problem

_DISPATCHERS = "sglang.srt.layers.moe.token_dispatcher"
_OWN = {"sglang.srt.environ", "sglang.srt.layers.moe", "sglang.srt.layers.moe.utils", _DISPATCHERS,
        f"{_DISPATCHERS}.base", f"{_DISPATCHERS}.deepep", f"{_DISPATCHERS}.deepep_v2",
        "sglang.srt.batch_overlap.two_batch_overlap", "sglang.srt.batch_overlap.single_batch_overlap",
        "sglang.srt.model_executor.runner_utils.deepep_adapter",
        "sglang.kernels.ops.moe.ep_moe_kernels", "sglang.srt.layers.moe.moe_runner.deep_gemm"}


def engine_folder() -> pathlib.Path | None:
    """The folder that holds the package, at the top of NCCL_EP_ENGINES or one below."""
    top = pathlib.Path(os.environ.get("NCCL_EP_ENGINES", "/nowhere"))
    found = [each for each in (top, *sorted(top.glob("*"))) if (each / "sglang/srt/layers/moe").is_dir()]
    return found[0] if found else None


class Anything:
    """Any name of a stand-in: false, a base class, or a decorator with arguments."""

    def __init__(self, *_, **__): ...

    def __call__(self, function=None, *_, **__):
        return function

    def __bool__(self):
        return False


class Idle:
    """A stream or an event of the CPU."""

    def record(self): ...
    def wait_event(self, event): ...
    def wait_stream(self, stream): ...


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Modules of the engine: its own files, or modules that have any name."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] != "sglang":
            return None
        place = self.folder.joinpath(*name.split("."))
        if name in _OWN:
            file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
            return importlib.util.spec_from_file_location(name, file)
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        return None

    def exec_module(self, module: ModuleType) -> None:
        def any_name(word):
            if word.startswith("__"):
                raise AttributeError(word)
            return Anything

        module.__getattr__ = any_name


class Recorder:
    """Of expert distributions: what its gatherers need of counts."""

    def __init__(self) -> None:
        self.seen: list = []

    def on_deepep_dispatch_normal(self, counts, num_tokens_per_rank, num_tokens_per_rdma_rank, num_tokens_per_expert):
        assert isinstance(counts, list)
        self.seen.append(torch.tensor(counts))

    def on_deepep_dispatch_low_latency(self, counts):
        self.seen.append(torch.zeros(len(counts), dtype=torch.int32, device=counts.device).add_(counts))


def quantized(x, group_size, column_major_scales=False, scale_tma_aligned=False, scale_ue8m0=False):
    """Rows in e4m3 with scales of groups: float32, or four exponents in one int32; columns begin at 16 bytes."""
    groups = x.float().unflatten(1, (-1, group_size))
    scales = groups.abs().amax(dim=2).clamp(min=1e-4) / 448
    if scale_ue8m0:
        scales = torch.exp2(torch.log2(scales).ceil())
    rows = (groups / scales[..., None]).flatten(1).to(torch.float8_e4m3fn)
    if scale_ue8m0:
        scales = ((scales.view(torch.int32) >> 23).to(torch.uint8)).view(torch.int32)
    if column_major_scales:
        stride = -(-len(x) // 4) * 4 if scale_tma_aligned else len(x)
        space = scales.new_empty((scales.shape[1], stride)).T[:len(x)]
        scales = space.copy_(scales)
    return rows, scales


def plain(rows, scales):
    """Float32 of rows [.., H] and scales [.., S], if there are any."""
    if scales is None:
        return rows.float()
    if scales.dtype == torch.int32:
        exponents = torch.stack([scales >> 8 * place & 255 for place in range(4)], dim=-1).flatten(-2)
        scales = torch.exp2(exponents.float() - 127)
    return (rows.float().unflatten(-1, (scales.shape[-1], -1)) * scales[..., None]).flatten(-2)


class Engine:
    """Its modules, and the settings that they read."""

    def __init__(self, folder: pathlib.Path, patch, device: torch.device) -> None:
        self.device, self.recorder, self.permutes = device, Recorder(), None
        self.moe = SimpleNamespace(a2a_backend=None, runner_backend=None, deepep_mode=None, deepep_config="",
                                   tbo_enabled=False, sbo_enabled=False, deepep_v2_mode="direct",
                                   deepep_dispatcher_output_dtype="auto")
        self.forward = SimpleNamespace(is_extend_in_batch=True)
        sys.meta_path.insert(0, Finder(folder))
        self.settings()
        self.functions()
        self.machine(patch)
        self.deepep, self.v2, self.utils, self.two, self.single, self.adapter = map(importlib.import_module, (
            f"{_DISPATCHERS}.deepep", f"{_DISPATCHERS}.deepep_v2", "sglang.srt.layers.moe.utils",
            "sglang.srt.batch_overlap.two_batch_overlap", "sglang.srt.batch_overlap.single_batch_overlap",
            "sglang.srt.model_executor.runner_utils.deepep_adapter"))
        if importlib.util.find_spec("triton") and (device.type == "cuda" or "TRITON_INTERPRET" in os.environ):
            self.permutes = importlib.import_module("sglang.srt.layers.moe.moe_runner.deep_gemm")
            self.permutes.copy_list_to_gpu_no_ce = lambda each: torch.tensor(each, dtype=torch.int32, device=device)

    def settings(self) -> None:
        """What the server's arguments and the current batch say."""
        group = SimpleNamespace(device_group=dist.group.WORLD, barrier=dist.barrier)
        context = {
            "exec": SimpleNamespace(moe=self.moe, deterministic=SimpleNamespace(enable_deterministic_inference=False)),
            "flags": SimpleNamespace(moe=self.moe), "forward": self.forward, "server_args": True,
            "parallel": SimpleNamespace(tp_group=group, attn_dp_size=1, attn_cp_size=1, tp_size=dist.get_world_size()),
            "resources": SimpleNamespace(buffers={})}
        self.stand_in("sglang.srt.runtime_context",
                      **{f"get_{name}": lambda value=value: value for name, value in context.items()})
        self.stand_in("sglang.srt.layers.dp_attention",
                      get_is_extend_in_batch=lambda: self.forward.is_extend_in_batch)
        self.gemm = self.stand_in("sglang.srt.layers.deep_gemm_wrapper", ENABLE_JIT_DEEPGEMM=True,
                                  DEEPGEMM_BLACKWELL=False, DEEPGEMM_SCALE_UE8M0=False,
                                  DEEPGEMM_NEED_TMA_ALIGNED_SCALES=True)

    def functions(self) -> None:
        self.stand_in("sglang.srt.utils", get_cuda_version=lambda: (13, 0), is_flashinfer_available=lambda: True,
                      ceil_div=lambda a, b: -(-a // b), load_json_config=json.loads,
                      dispose_tensor=lambda each: each.set_(each.new_empty(0)))
        self.stand_in("sglang.srt.utils.offloader",
                      get_offloader=lambda: SimpleNamespace(forbid_copy_engine_usage=True))
        self.stand_in("sglang.srt.eplb.expert_distribution",
                      get_global_expert_distribution_recorder=lambda: self.recorder)
        self.stand_in("sglang.kernels.ops.quantization.fp8_kernel", sglang_per_token_group_quant_fp8=quantized)

    def machine(self, patch) -> None:
        """One whose GPUs have fabric handles; without a GPU also what is asked of it beside the communication."""
        fabric = ModuleType("flashinfer.comm.mnnvl")
        fabric.is_mnnvl_fabric_supported = lambda device: True
        for name in ("flashinfer", "flashinfer.comm"):
            patch.setitem(sys.modules, name, ModuleType(name))
        patch.setitem(sys.modules, fabric.__name__, fabric)
        if self.device.type == "cpu":
            for name, value in {"get_device_properties": SimpleNamespace(multi_processor_count=132),
                                "current_device": 0, "is_current_stream_capturing": False,
                                "stream": contextlib.nullcontext(), "Stream": Idle(), "Event": Idle()}.items():
                patch.setattr(torch.cuda, name, lambda *_, value=value, **__: value)
            patch.setattr(torch, "get_device_module", lambda: SimpleNamespace(current_stream=Idle))

    @staticmethod
    def stand_in(name: str, **names) -> ModuleType:
        """A module with these names, and any others."""
        module = importlib.import_module(name)
        vars(module).update(names)
        parent, _, last = name.rpartition(".")
        setattr(importlib.import_module(parent), last, module)
        return module

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
            result.zero_()
        for expert, matrix in enumerate(matrices):
            if ids is None:
                end = int(output.psum_num_recv_tokens_per_expert[expert])
                result[start:end] = weights[start:end, None] * problem.expert(matrix, rows[start:end])
                start = -(-end // output.expert_alignment) * output.expert_alignment
            else:
                result += torch.where(ids == expert, weights, 0).sum(1)[:, None] * problem.expert(matrix, rows)
        if output.format.is_deepep_v2():
            return self.v2.DeepEPv2CombineInput(result.to(torch.bfloat16), None if ids is None else weights)
        return self.deepep.DeepEPNormalCombineInput(result.to(torch.bfloat16), ids, weights)
