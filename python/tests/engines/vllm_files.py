"""Imports vLLM's own files, unchanged, with stand-ins for the other modules of vLLM that they import."""

import contextlib
import enum
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import os
import pathlib
import re
import sys
import threading
import types
from collections.abc import Iterator

import pytest
import torch

_MOE = "vllm.model_executor.layers.fused_moe"
_FILES = ("vllm.envs", "vllm.utils.import_utils", "vllm.utils.math_utils", "vllm.v1.worker.ubatching",
          "vllm.distributed.device_communicators.base_device_communicator",
          "vllm.distributed.device_communicators.all2all", f"{_MOE}.modular_kernel", f"{_MOE}.topk_weight_and_reduce",
          f"{_MOE}.all2all_utils", *(f"{_MOE}.prepare_finalize.deepep_{each}" for each in ("ht", "ll", "v2")))
_BLOCK = 128  # elements of a scale
FP8 = torch.float8_e4m3fn
named = types.SimpleNamespace


class StandIn(types.ModuleType):
    """A module that has a class of any name, unless it is told another thing."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        if f"{self.__name__}.{name}" in (*_FILES, "vllm.forward_context", "vllm._custom_ops"):
            return importlib.import_module(f"{self.__name__}.{name}")
        setattr(self, name, type(name, (), {}))
        return getattr(self, name)


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the engine's files, and a stand-in for each other module of it."""

    def __init__(self, folder, told):
        self.folder, self.told = folder, told

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] != "vllm":
            return None
        if name in _FILES:
            return importlib.util.spec_from_file_location(name, self.folder / f"{name.replace('.', '/')}.py")
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        return StandIn(spec.name)

    def exec_module(self, module):
        vars(module).update(self.told.get(module.__name__, {}))


class Silent:
    """A logger."""

    def __getattr__(self, name):
        return lambda *words, **settings: None


class Kernel:
    """A small kernel in Triton's language, on the CPU; it is also that language. Pointers are (memory, offsets)."""

    constexpr = int

    def __init__(self, function=None):
        self.function = function

    jit = classmethod(lambda cls, function: cls(function))

    def __getitem__(self, grid):
        def run(*arguments, **settings):
            given = [Pointer(each.view(-1), 0) if isinstance(each, torch.Tensor) else each for each in arguments]
            for Kernel.number in range(grid[0]):
                self.function(*given, **settings)

        return run

    program_id = staticmethod(lambda axis: Kernel.number)
    arange, where = staticmethod(torch.arange), staticmethod(torch.where)
    cdiv = staticmethod(lambda a, b: -(-a // b))
    load = staticmethod(lambda at, mask=True, other=0: torch.where(
        torch.as_tensor(mask), at.memory[torch.as_tensor(at.offset).clamp(max=len(at.memory) - 1)], other))

    @staticmethod
    def store(at, value, mask):
        at.memory[at.offset[mask]] = value[mask]


class Pointer(named):
    def __init__(self, memory, offset):
        super().__init__(memory=memory, offset=offset)

    def __add__(self, offset):
        return Pointer(self.memory, self.offset + offset)

    def __sub__(self, offset):
        return self + -offset


def quantized(x, scale=None, quant_dtype=None, per_act_token_quant=False, block_shape=None, **how):
    """x with float32 scales of blocks, or with mxfp8's exponents of 1; as it is without a type."""
    if quant_dtype is None:
        return x, None
    if quant_dtype == "mxfp8":
        return x.to(FP8), torch.full((len(x), x.shape[1] // 32), 127, dtype=torch.uint8, device=x.device)
    blocks = x.float().unflatten(1, (-1, _BLOCK))
    scales = blocks.abs().amax(dim=2).clamp(min=1e-4) / 448
    return (blocks / scales[..., None]).flatten(1).to(FP8), scales


def plain(x, scales):
    """float32 rows again."""
    if scales is None or scales.dtype == torch.uint8:
        return x.float()
    if scales.dtype == torch.int32:  # four exponents each
        exponents = torch.stack([scales >> shift & 255 for shift in (0, 8, 16, 24)], dim=-1).flatten(-2)
        scales = torch.exp2(exponents.float() - 127)
    return (x.float().unflatten(-1, (scales.shape[-1], -1)) * scales[..., None]).flatten(-2)


def told(world, device, options):
    """What the stand-ins have that a class of that name is not enough for."""
    cpu = device.type == "cpu"
    language = Kernel() if cpu else importlib.import_module("triton.language")
    parallel = named(rank_in_group=world[0], world_size=world[1])
    config = named(parallel_config=options, model_config=options)
    platform = named(is_cuda=lambda: True, is_cuda_alike=lambda: True, is_rocm=lambda: False, is_xpu=lambda: False,
                     is_cpu=lambda: False, fp8_dtype=lambda: FP8)
    batch = named(num_tokens_across_dp_cpu=options.sizes)
    return {
        "vllm.logger": {"init_logger": lambda name: Silent()}, "vllm.platforms": {"current_platform": platform},
        "vllm.config": {"get_current_vllm_config": lambda: config},
        "vllm.distributed.parallel_state": {
            "get_dp_group": lambda: parallel, "get_tp_group": lambda: named(rank_in_group=0, world_size=1),
            "in_the_same_node_as": lambda group, source_rank: [True] * world[1]},
        "vllm.forward_context": {"_forward_context": None, "get_forward_context": lambda: named(dp_metadata=batch)},
        "vllm.triton_utils": {"tl": language, "triton": language if cpu else importlib.import_module("triton")},
        "vllm.utils.torch_utils": {"PIN_MEMORY": not cpu, "current_stream": lambda: torch.cuda.current_stream()},
        "vllm._custom_ops": {"moe_sum": lambda rows, out: torch.sum(rows, dim=1, out=out)},
        f"{_MOE}.activation": {"MoEActivation": enum.Enum("MoEActivation", "SILU")},
        f"{_MOE}.utils": {"moe_kernel_quantize_input": quantized,
                          "normalize_batched_scales_shape": lambda scales, experts: scales},
        "vllm.model_executor.layers.quantization.utils.mxfp8_utils": {"MXFP8_BLOCK_SIZE": 32}}


def vllm(world: tuple[int, int], device: torch.device) -> Iterator[named]:
    """Yields the files' modules by their short names; on the CPU streams and events do nothing. For a fixture."""
    root = pathlib.Path(os.environ.get("NCCL_EP_ENGINES", "/nowhere"))
    folder = next((each for each in (root, *sorted(root.glob("*/"))) if (each / "vllm" / "envs.py").exists()), None)
    if folder is None:
        pytest.skip("NCCL_EP_ENGINES names no folder with vLLM's sources")
    if world[1] == 1:
        pytest.skip("vLLM's ids for no expert mean one of another rank")
    options = named(enforce_eager=False, enable_fault_tolerance=False, sizes=torch.zeros(world[1], dtype=torch.int64))
    finder = Finder(folder, told(world, device, options))
    before = set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EP_DISABLE_GIN", "1")
        patch.setattr(sys, "meta_path", [finder, *sys.meta_path])
        patch.setattr(sys, "path", [str(pathlib.Path(__file__).parents[2] / "deep-ep"), *sys.path])
        if importlib.util.find_spec("regex") is None:
            sys.modules["regex"] = re
        if device.type == "cpu":
            streams = threading.local()
            patch.setattr(torch.cuda, "set_stream", functools.partial(setattr, streams, "now"))
            patch.setattr(torch.cuda, "current_stream", lambda: getattr(streams, "now", None))
            patch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
            patch.setattr(torch, "Event", lambda: named(record=lambda stream: None))
            patch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
        patch.setattr(importlib.import_module("vllm.utils.import_utils"), "_get_runtime_nccl_version", lambda: 23004)
        modules = {name.split(".")[-1]: importlib.import_module(name) for name in _FILES}
        yield named(folder=folder, options=options, **modules)
    for name in set(sys.modules) - before:
        if name.split(".")[0] in ("vllm", "deep_ep", "regex"):
            del sys.modules[name]
