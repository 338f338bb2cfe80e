"""Arguments of a wrong Python type: errors that say what to pass instead."""

from __future__ import annotations

import pytest
import torch

import nccl_ep
from nccl_ep import EpGroup, NCCLLibrary
from nccl_ep.layers.layout import EPConfig
from nccl_ep.types import ncclDataTypeEnum


class Array:
    """Looks like NumPy's."""

    def __array__(self):
        return [0.0]


@pytest.mark.parametrize("settings, text", [
    ({"num_experts": "8"}, "num_experts: must be an integer, not str '8'"),
    ({"hidden": 8.0}, "hidden: must be an integer, not float 8.0"),
    ({"max_tokens_per_rank": None}, "max_tokens_per_rank: must be an integer, not NoneType"),
    ({"num_channels": [1]}, "num_channels: must be an integer, not list"),
    ({"dtype": "bfloat16"}, "dtype: must be a torch.dtype, not str 'bfloat16'; write torch.bfloat16"),
    ({"dtype": "torch.half"}, "write torch.float16"),
    ({"dtype": "brain"}, "dtype: must be a torch.dtype, not str 'brain'$"),
    ({"comm": 5}, r"comm: must be a torch.distributed group, .*not int 5; pass ncclComm_t\(address\)"),
    ({"comm": "all"}, "comm: must be a torch.distributed group, .*not str 'all'")])
def test_settings_of_a_group(settings, text):
    """A refused group has nothing to close, so its end says nothing."""
    with pytest.raises(TypeError, match=text):
        EpGroup(**{"num_experts": 8, "hidden": 8, **settings})


def test_an_algorithm_of_any_type():
    for algorithm in (["ll"], None, b"ll"):
        with pytest.raises(ValueError, match="algorithm: must be 'll' or 'ht', not "):
            EpGroup(8, 8, algorithm=algorithm)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float64, torch.float8_e4m3fn, torch.complex64])
def test_types_that_no_operation_takes(world, dtype):
    """Refused where the type is named, before ranks meet."""
    rank, size = world
    with pytest.raises(ValueError, match=f"dtype: must be one of torch.bfloat16, .*not {dtype}"):
        EpGroup(size, 8, dtype=dtype)
    with pytest.raises(ValueError, match="token_dtype: must be one of"):
        EPConfig(1, 8, 1, size, rank, size, size, token_dtype=dtype)
    with pytest.raises(ValueError, match="dtype: must be one of"):
        nccl_ep.tune("times.json", nccl_ep.MoeShape(size, 8, 1, 1, dtype))


def test_what_is_no_tensor(group, world, device):
    rank, size = world
    ep = group(num_experts=size, hidden=8, max_tokens_per_rank=2)
    handle = ep.create_handle(torch.zeros((2, 1), dtype=torch.int64, device=device))
    for call, text in (
            (lambda: handle.dispatch([[0.0]]), "tokens: must be a tensor, not list; "
                                               r"torch.as_tensor\(tokens\) makes one"),
            (lambda: ep.create_handle(Array()), r"not Array; torch.as_tensor\(topk_idx\)"),
            (lambda: handle.dispatch(3), "tokens: must be a tensor, not int 3$"),
            (lambda: nccl_ep.autograd.ht_combine(ep, None), "handle: must be an EpHandle"),
            (lambda: nccl_ep.tune("times.json", {"hidden": 8}), "shape: must be a MoeShape, not dict"),
            (lambda: ncclDataTypeEnum.from_torch("bfloat16"), "must be a torch.dtype"),
            (lambda: EPConfig(1, 8.5, 1, size, rank, size, size), "hidden: must be an integer"),
            (lambda: EPConfig(1, 8, 1, size, rank, size, size, weight_dtype="float32"),
             "weight_dtype: must be a torch.dtype, .*write torch.float32")):
        with pytest.raises(TypeError, match=text):
            call()
    if device.type == "cuda":
        for stream in (0, object()):
            with pytest.raises(TypeError, match="stream: must be a torch.cuda.Stream, not "):
                handle.complete(stream=stream)


def test_torch_tensors_for_c(library: NCCLLibrary):
    """The functions of C take structures, and say who takes tensors."""
    tensor = torch.zeros(1)
    with pytest.raises(TypeError, match="must be an ncclNDTensor_t, not Tensor; EpGroup"):
        library.ncclEpDispatch(None, [tensor], 1, [], 0, [], 0)
    with pytest.raises(TypeError, match="^ncclEpCreateHandle: .*EpGroup and EpHandle take torch"):
        library.ncclEpCreateHandle(None, tensor)


def test_what_things_are_called(group, world, device):
    """`repr` says what tells one from another; `dir` has what loads at first use."""
    rank, size = world
    ep = group(num_experts=2 * size, hidden=8, max_tokens_per_rank=2)
    handle = ep.create_handle(torch.zeros((2, 1), dtype=torch.int64, device=device))
    text = f"<EpGroup ll, rank {rank} of {size}, {2 * size} experts, hidden 8 torch.bfloat16, "
    assert repr(ep).startswith(text) and repr(ep).endswith(f"{device}>")
    assert repr(handle).startswith("<EpHandle of 2 tokens, top-1, <EpGroup ll")
    handle.close()
    assert "top-1, closed, " in repr(handle)
    assert repr(NCCLLibrary()).startswith("<NCCLLibrary /")
    names = {"EpGroup", "EpHandle", "MoeShape", "NCCLLibrary", "autograd", "layers", "tune"}
    assert names <= set(dir(nccl_ep))
    assert all(getattr(nccl_ep, name) is not None for name in nccl_ep.__all__)
