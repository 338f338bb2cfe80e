"""Imports vLLM's own files, unchanged, with stand-ins for the other modules of vLLM that they import."""

import enum
import importlib
import importlib.util
import re
import sys
import types
from collections.abc import Iterator
from unittest import mock

import pytest
import torch

from loading import FP8, folder, modules, quantized, without_gpu

_MOE = "vllm.model_executor.layers.fused_moe"
_FILES = ("vllm.envs", "vllm.utils.import_utils", "vllm.utils.math_utils", "vllm.v1.worker.ubatching",
          "vllm.distributed.device_communicators.base_device_communicator",
          "vllm.distributed.device_communicators.all2all", f"{_MOE}.modular_kernel", f"{_MOE}.topk_weight_and_reduce",
          f"{_MOE}.all2all_utils", *(f"{_MOE}.prepare_finalize.deepep_{each}" for each in ("ht", "ll", "v2")))
_BLOCK = 128  # elements of a scale
named = types.SimpleNamespace


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


def quantized_input(x, scale=None, quant_dtype=None, per_act_token_quant=False, block_shape=None, **how):
    """x with float32 scales of blocks, or with mxfp8's exponents of 1; as it is without a type."""
    if quant_dtype is None:
        return x, None
    if quant_dtype == "mxfp8":
        return x.to(FP8), torch.full((len(x), x.shape[1] // 32), 127, dtype=torch.uint8, device=x.device)
    return quantized(x, _BLOCK)


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
        "vllm.logger": {"init_logger": lambda name: mock.MagicMock()}, "vllm.platforms": {"current_platform": platform},
        "vllm.config": {"get_current_vllm_config": lambda: config},
        "vllm.distributed.parallel_state": {
            "get_dp_group": lambda: parallel, "get_tp_group": lambda: named(rank_in_group=0, world_size=1),
            "in_the_same_node_as": lambda group, source_rank: [True] * world[1]},
        "vllm.forward_context": {"_forward_context": None, "get_forward_context": lambda: named(dp_metadata=batch)},
        "vllm.triton_utils": {"tl": language, "triton": language if cpu else importlib.import_module("triton")},
        "vllm.utils.torch_utils": {"PIN_MEMORY": not cpu, "current_stream": lambda: torch.cuda.current_stream()},
        "vllm._custom_ops": {"moe_sum": lambda rows, out: torch.sum(rows, dim=1, out=out)},
        f"{_MOE}.activation": {"MoEActivation": enum.Enum("MoEActivation", "SILU")},
        f"{_MOE}.utils": {"moe_kernel_quantize_input": quantized_input,
                          "normalize_batched_scales_shape": lambda scales, experts: scales},
        "vllm.model_executor.layers.quantization.utils.mxfp8_utils": {"MXFP8_BLOCK_SIZE": 32}}


def vllm(world: tuple[int, int], device: torch.device) -> Iterator[named]:
    """Yields the files' modules by their short names. For a fixture."""
    place = folder("vllm/envs.py")
    if world[1] == 1:
        pytest.skip("vLLM's ids for no expert mean one of another rank")
    options = named(enforce_eager=False, enable_fault_tolerance=False, sizes=torch.zeros(world[1], dtype=torch.int64))
    has_regex = importlib.util.find_spec("regex") is not None
    with pytest.MonkeyPatch.context() as patch, modules(place, _FILES, told(world, device, options)):
        patch.setenv("EP_DISABLE_GIN", "1")
        if not has_regex:
            patch.setitem(sys.modules, "regex", re)
        without_gpu(patch, device)
        patch.setattr(importlib.import_module("vllm.utils.import_utils"), "_get_runtime_nccl_version", lambda: 23004)
        found = {name.split(".")[-1]: importlib.import_module(name) for name in _FILES}
        yield named(place=place, options=options, **found)
