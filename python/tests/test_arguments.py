"""Arguments of a wrong Python type: errors that say what to pass instead."""

from __future__ import annotations

import pickle
import re

import pytest
import torch

import nccl_ep
from nccl_ep import EpGroup, NCCLLibrary
from nccl_ep.layers import EPAll2AllLayer, EPConfig
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
    ({"comm": 5}, r"comm: must be a torch.distributed group, .*not int 5; pass nccl_ep.ncclComm_t\(address\)"),
    ({"comm": "all"}, "comm: must be a torch.distributed group, .*not str 'all'")])
def test_settings_of_a_group(settings, text):
    """A refused group has nothing to close, so its end says nothing."""
    with pytest.raises(TypeError, match=text):
        EpGroup(**{"num_experts": 8, "hidden": 8, "max_tokens_per_rank": 1, **settings})


def test_a_communicator_that_is_not_there_yet():
    with pytest.raises(ValueError, match="comm: must not be NULL, as that of a torch.distributed"):
        EpGroup(8, 8, algorithm="ht", comm=nccl_ep.ncclComm_t())


def test_an_algorithm_of_any_type():
    for algorithm in (["ll"], None, b"ll"):
        with pytest.raises(ValueError, match="algorithm: must be 'll' or 'ht', not "):
            EpGroup(8, 8, algorithm=algorithm)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float64, torch.float8_e4m3fn, torch.complex64])
def test_types_that_no_operation_takes(rank, size, dtype):
    """Refused where the type is named, before ranks meet."""
    with pytest.raises(ValueError, match=f"dtype: must be one of torch.bfloat16, .*not {dtype}"):
        EpGroup(size, 8, dtype=dtype)
    with pytest.raises(ValueError, match="token_dtype: must be one of"):
        EPConfig(1, 8, 1, size, rank, size, size, token_dtype=dtype)
    with pytest.raises(ValueError, match="dtype: must be one of"):
        nccl_ep.tune("times.json", nccl_ep.MoeShape(size, 8, 1, 1, dtype))


def test_what_is_no_tensor(small, rank, size, device):
    ep, handle = small(2)
    for call, text in (
            (lambda: handle.dispatch([[0.0]]), "tokens: must be a tensor, not list; "
                                               r"torch.as_tensor\(tokens\) makes one"),
            (lambda: ep.create_handle(Array()), r"not Array; torch.as_tensor\(topk_idx\)"),
            (lambda: handle.dispatch(3), "tokens: must be a tensor, not int 3$"),
            (lambda: handle.dispatch(torch.zeros((2, 8), device=device), scales=[[1.0]]), "scales: must be a tensor"),
            (lambda: ep.set_selector(5), "select: must be a function of a Query, or None, not int 5"),
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


def test_a_result_is_not_its_tokens(small, device):
    _, handle = small(2)
    received = handle.dispatch(torch.zeros((2, 8), device=device))
    with pytest.raises(TypeError, match="tokens: must be a tensor, not LowLatencyResult; pass "
                                        "result.tokens$"):
        handle.combine(received, torch.ones((2, 1), device=device))


class Elsewhere(torch.Tensor):
    """A tensor whose elements another class keeps, as DTensor does."""

    @staticmethod
    def __new__(cls, local: torch.Tensor) -> Elsewhere:
        return torch.Tensor._make_wrapper_subclass(cls, local.shape, dtype=local.dtype,
                                                   device=local.device)

    @classmethod
    def __torch_dispatch__(cls, function, kinds, arguments=(), settings=None):
        raise AssertionError("not looked into")


class Distributed(Elsewhere):
    def to_local(self):
        return None


def test_tensors_without_memory_of_their_own(alone, group, device):
    """Their addresses are NULL, of which the library could only say that."""
    ep = group(num_experts=1, hidden=8, max_tokens_per_rank=2, dtype=torch.float32)
    ids = torch.zeros((2, 1), dtype=torch.int64, device=device)
    handle, tokens = ep.create_handle(ids), torch.ones((2, 8), device=device)
    for tensor, text in ((Distributed(tokens), "not Distributed; pass tokens.to_local()"),
                         (Elsewhere(tokens), "not Elsewhere; pass a plain tensor"),
                         (torch.nested.nested_tensor([tokens[0], tokens[1]]), "not a nested one"),
                         (tokens.to_sparse(), "must be a dense tensor, not one of torch.sparse_coo")):
        with pytest.raises(TypeError, match="^tokens: .*" + re.escape(text)):
            handle.dispatch(tensor)
        with pytest.raises(TypeError, match="^out: "):
            handle.dispatch(tokens, out=tensor)
        with pytest.raises(TypeError, match="^topk_idx: "):
            ep.create_handle(tensor)
    handle.dispatch(torch.nn.Parameter(tokens, requires_grad=False))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.uint32, torch.uint64,
                                   torch.int8, torch.int16, torch.int32])
def test_ids_of_any_integer_type(group, rank, size, device, dtype):
    """The largest number of an unsigned type takes no part, as -1 does not."""
    ep = group(num_experts=size, hidden=8, max_tokens_per_rank=3, dtype=torch.float32)
    none = -1 if dtype == torch.uint64 else torch.iinfo(dtype).max
    ids = torch.tensor([[0, size - 1], [none, 0], [none, none]], device=device)
    for given in (ids, ids.repeat(1, 2)[:, ::2][:, [0, 0]].t().contiguous().t()):
        handle = ep.create_handle(given.to(dtype))
        counts = handle.dispatch(torch.ones((3, 8), device=device)).counts
        taken = (given == rank).sum() * size
        assert counts.tolist() == [int(taken)]


@pytest.mark.parametrize("code, kind", [
    (1, "UnhandledCudaError"), (2, "NcclSystemError"), (3, "InternalError"),
    (4, "InvalidArgumentError"), (5, "InvalidUsageError"), (6, "RemoteError"), (9, "NcclEpError")])
def test_an_exception_for_each_kind(library, code, kind):
    """All are NcclEpErrors, and survive the way to another process."""
    with pytest.raises(nccl_ep.NcclEpError) as caught:
        library.NCCL_CHECK(code)
    assert type(caught.value) is getattr(nccl_ep, kind)
    again = pickle.loads(pickle.dumps(caught.value))
    assert (type(again), again.code, str(again)) == (type(caught.value), code, str(caught.value))


def test_the_text_begins_with_what_matters(library, comm, world):
    """And has no advice to look elsewhere, if it has the details."""
    config = nccl_ep.ncclEpGroupConfig_t(version=1, num_experts=world[1], max_tokens_per_rank=1,
                                         token_size_bytes=3)
    with pytest.raises(nccl_ep.InvalidArgumentError) as caught:
        library.ncclEpCreateGroup(comm, config)
    assert str(caught.value) == (
        "ncclEpCreateGroup: config.token_size_bytes: must be a positive multiple of 16 (got 3, "
        "expected a multiple of 16) [NCCL error 4, invalid argument]")
    with pytest.raises(RuntimeError) as caught:
        library.NCCL_CHECK(5)
    assert "token_size_bytes" not in str(caught.value), "the text of an earlier refusal"
    with pytest.raises(nccl_ep.InvalidArgumentError, match="^ncclCommCount .*NCCL error 4, inv.* .run with"):
        library.ncclCommCount(nccl_ep.ncclComm_t())


def test_texts_have_the_names_of_python(small, rank, size, device):
    for call, text in (
            (lambda: EpGroup(size + 1, 8, max_tokens_per_rank=1) if size > 1 else
             EpGroup(1, 8, algorithm="ht", max_tokens_per_rank=2**32 - 1),
             "ncclEpCreateGroup: (num_experts|max_tokens_per_rank): "),
            (lambda: EPConfig(1, 8, 1, size, size, size, size), f"rank: {size} is none of world_size"),
            (lambda: EPAll2AllLayer(None, 4, 8, 1, rank, 0, size, size),
             f"num_tot_experts: 0 is no multiple of world_size, {size}")):
        with pytest.raises((nccl_ep.NcclEpError, ValueError), match=text):
            call()
    _, handle = small(2)
    long = torch.zeros((2, 16), device=device)
    with pytest.raises(nccl_ep.InvalidArgumentError, match=r"ncclEpDispatch: tokens.shape\[1\]: "):
        handle.dispatch(long)


def test_torch_tensors_for_c(library: NCCLLibrary):
    """The functions of C take structures, and say who takes tensors."""
    tensor = torch.zeros(1)
    with pytest.raises(TypeError, match="must be an ncclNDTensor_t, not Tensor; EpGroup"):
        library.ncclEpDispatch(None, [tensor], 1, [], 0, [], 0)
    with pytest.raises(TypeError, match="^ncclEpCreateHandle: .*EpGroup and EpHandle take torch"):
        library.ncclEpCreateHandle(None, tensor)


def test_what_things_are_called(small, rank, size, device):
    """`repr` says what tells one from another; `dir` has what loads at first use."""
    ep, handle = small(2, num_experts=2 * size, dtype=torch.bfloat16)
    text = f"<EpGroup ll, rank {rank} of {size}, {2 * size} experts, hidden 8 torch.bfloat16, "
    assert repr(ep).startswith(text) and repr(ep).endswith(f"{device}>")
    assert repr(handle).startswith("<EpHandle of 2 tokens, top-1, <EpGroup ll")
    handle.close()
    assert "top-1, closed, " in repr(handle)
    assert repr(NCCLLibrary()).startswith("<NCCLLibrary /")
    names = {"EpGroup", "EpHandle", "MoeShape", "NCCLLibrary", "autograd", "layers", "tune"}
    assert names <= set(dir(nccl_ep)) == set(nccl_ep.__all__)
    assert all(getattr(nccl_ep, name) is not None for name in nccl_ep.__all__)
