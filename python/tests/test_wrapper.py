"""The C functions as methods: names, structures, errors, lifetimes."""

import ctypes
import gc
import inspect
import os
import pathlib
import re
import subprocess
import sys
import weakref

import pytest
import torch

import nccl_ep
from nccl_ep import NCCLLibrary, NcclEpError, library_search, nccl_wrapper, runtime
from nccl_ep.runtime import Runtime
from nccl_ep.tensors import Tag, TensorList, describe
from nccl_ep.types import (ncclDataTypeEnum, ncclEpAllocFn_t, ncclEpFreeFn_t, ncclEpGroupConfig_t,
                           ncclEpHandleConfig_t, ncclNDTensor_t)

ROOT = pathlib.Path(__file__).resolve().parents[2]
# The exports in section "Python" of the first release; scripts import these names.
FIRST_RELEASE = (
    "HAVE_NCCL_EP HAVE_TORCH __version__ NCCL_EP_ALGO_LOW_LATENCY NCCL_EP_ALGO_HIGH_THROUGHPUT "
    "NCCLLibrary get_nccl_comm_from_group ncclDataTypeEnum ncclEpAlgorithm_t "
    "ncclEpDispatchConfig_t ncclEpGroupConfig_t ncclEpHandleConfig_t ncclEpTensorTag_t "
    "ncclNDTensor_t ncclEpAllocFn_t ncclEpFreeFn_t CUDA_SUCCESS CUDA_ERROR_MEMORY_ALLOCATION")
IN_WRAPPER = ("ncclUniqueId ncclEpTensorFlags_t Function buffer_type ncclResult_t ncclComm_t "
              "ncclEpGroup_t ncclEpHandle_t cudaStream_t")

_OPERATION = ("handle inputs num_inputs outputs num_outputs local_tensors num_local_tensors "
              "send_only config stream")
FIRST_SIGNATURES = {
    "NCCL_CHECK": "result", "ncclGetVersion": "", "ncclGetUniqueId": "",
    "ncclCommInitRank": "world_size unique_id rank",
    "ncclAllReduce": "sendbuff recvbuff count datatype op comm stream",
    "ncclEpCreateGroup": "comm config stream alloc_fn free_fn",
    "ncclEpGroupDestroy": "group stream",
    "ncclEpCreateHandle": "group topk_tensor config stream local_tensors use_fp8",
    "ncclEpHandleDestroy": "handle", "ncclEpHandleGetNumRecvTokens": "handle",
    "ncclEpDispatch": _OPERATION, "ncclEpCombine": _OPERATION,
    "ncclEpComplete": "handle config stream",
}
MAY_BE_LEFT_OUT = {"alloc_fn": None, "free_fn": None, "use_fp8": False}


def config(size, **changes):
    settings = dict(version=1, algorithm=0, num_experts=size, max_tokens_per_rank=4,
                    token_size_bytes=32)
    return ncclEpGroupConfig_t(**{**settings, **changes})


def test_the_first_releases_names_are_there():
    for name in FIRST_RELEASE.split():
        assert hasattr(nccl_ep, name), name
    for name in IN_WRAPPER.split():
        assert hasattr(nccl_wrapper, name), name
    assert nccl_ep.HAVE_NCCL_EP is True


def test_the_first_releases_signatures():
    """The order of arguments, the names of those passed by name, and which may be omitted."""
    for name, arguments in FIRST_SIGNATURES.items():
        have = inspect.signature(getattr(NCCLLibrary, name)).parameters
        assert list(have)[1:] == arguments.split(), name
        left_out = {each: have[each].default for each in have if each in MAY_BE_LEFT_OUT}
        assert left_out == {each: MAY_BE_LEFT_OUT[each] for each in left_out}, name
    assert list(inspect.signature(nccl_ep.get_nccl_comm_from_group).parameters) == [
        "group", "nccl_lib"]


def test_structures_have_cs_layout():
    """Offsets and sizes as docs/abi.md lists them, one table for each structure."""
    text = (ROOT / "docs" / "abi.md").read_text()
    for structure in (ncclNDTensor_t, ncclEpGroupConfig_t):
        section = text.split(f"`{structure.__name__}`, ")[1]
        assert section.startswith(f"{ctypes.sizeof(structure)} bytes")
        rows = re.findall(r"^\| (\d+) \| (\d+) \| `(\w+)`", section.split("\n\n")[1], re.MULTILINE)
        have = [(str(getattr(structure, name).offset), str(getattr(structure, name).size), name)
                for name, *_ in structure._fields_]
        assert have == rows


def test_versions_agree(library):
    major, minor, patch = (int(part) for part in nccl_ep.__version__.split("."))
    assert library.ncclEpGetVersion() == major * 10000 + minor * 100 + patch
    assert re.fullmatch(r"2\.\d+\.\d+", library.ncclGetVersion())


def test_element_types():
    for dtype, number in ((torch.int64, 4), (torch.float32, 7), (torch.bfloat16, 9)):
        assert ncclDataTypeEnum.from_torch(dtype) == number
    with pytest.raises(ValueError, match="complex64"):
        ncclDataTypeEnum.from_torch(torch.complex64)


def test_tensors_are_made_by_the_groups_allocator(library, comm, world, cudart):
    """Also after the group is destroyed, and although nothing here holds the callbacks."""
    made, freed = [], []
    memory = cudart["cudaMalloc"], cudart["cudaFree"]

    def allocate(out, size):
        made.append(size)
        return memory[0](out, ctypes.c_size_t(size))

    def release(address):
        freed.append(address)
        return memory[1](ctypes.c_void_p(address))

    group = library.ncclEpCreateGroup(comm, config(world[1]), None,
                                      alloc_fn=ncclEpAllocFn_t(allocate),
                                      free_fn=ncclEpFreeFn_t(release))
    tensor = library.ncclEpTensorCreate(group, 2, ncclDataTypeEnum.ncclFloat32, Tag.TOKENS, 3, 5)
    assert made == [60] and list(tensor.sizes[:2]) == [3, 5] and tensor.data
    gc.collect()
    library.ncclEpGroupDestroy(group)
    library.ncclEpTensorDestroy(group, tensor)
    library.ncclEpTensorDestroy(group, tensor)
    assert len(freed) == 1 and tensor.data is None


def test_nothing_is_kept_by_pointer(library, comm, rank, size, device, cudart):
    """The descriptors of a handle's ids and of an operation may be freed once the call returns."""
    group = library.ncclEpCreateGroup(comm, config(size, token_size_bytes=64))
    ids = torch.full((2, 1), (rank + 1) % size, device=device)
    handle = library.ncclEpCreateHandle(group, describe(ids, Tag.TOPK_IDX),
                                        ncclEpHandleConfig_t(use_fp8=False))
    tokens = torch.full((2, 16), float(rank), device=device)
    out = torch.zeros((1, 4 * size, 16), device=device)
    lists = TensorList((Tag.TOKENS, tokens)), TensorList((Tag.TOKENS, out)), TensorList()
    library.ncclEpDispatch(handle, *[part for each in lists for part in (each.array, each.count)])
    del lists
    gc.collect()
    cudart["cudaDeviceSynchronize"]()
    assert torch.equal(out[0, :2], torch.full((2, 16), float((rank - 1) % size), device=device))
    library.ncclEpHandleDestroy(handle)
    library.ncclEpGroupDestroy(group)


def test_lists_of_tensors_are_accepted(library, comm, size, device):
    """Lists as well as ctypes arrays, and structures as well as byref()."""
    group = library.ncclEpCreateGroup(comm, config(size))
    ids = describe(torch.zeros((0, 1), dtype=torch.int64, device=device), Tag.TOPK_IDX)
    handle = library.ncclEpCreateHandle(group, ctypes.byref(ids), None, None, local_tensors=[])
    tokens = describe(torch.zeros((0, 8), device=device), Tag.TOKENS)
    out = describe(torch.zeros((1, 4 * size, 8), device=device), Tag.TOKENS)
    library.ncclEpDispatch(handle, [tokens], 1, [out], 1, (), 0)
    with pytest.raises(NcclEpError, match=r"outputs\[TOKENS\]"):
        library.ncclEpDispatch(handle, [tokens], 1, [], 0, [], 0)
    library.ncclEpHandleDestroy(handle)
    with pytest.raises(NcclEpError, match="destroyed already"):
        library.ncclEpHandleDestroy(handle)
    library.ncclEpGroupDestroy(group)


def test_lists_are_filled_again():
    """As soon as nobody has one any more, and with other tensors of its form; they keep none."""
    first, second = torch.zeros((3, 7), dtype=torch.float16), torch.zeros((3, 7), dtype=torch.float16)
    a_list, another = TensorList((Tag.TOKENS, first)), TensorList((Tag.TOKENS, second))
    array = a_list.array
    assert [each.array[0].contents.data for each in (a_list, another)] == [first.data_ptr(), second.data_ptr()]
    gone = weakref.ref(first)
    del first, a_list
    assert gone() is None
    again = TensorList((Tag.TOKENS, second))
    assert again.array is array and array[0].contents.data == second.data_ptr()
    assert TensorList((Tag.NONE, second)).array[0].contents.tag == Tag.NONE


def test_the_search_for_the_library(tmp_path, monkeypatch):
    home = tmp_path / "home" / "lib"
    home.mkdir(parents=True)
    chosen = tmp_path / "libnccl_ep.so"
    chosen.touch()
    for name in (str(chosen), "libnccl_ep.so.of.the.loader"):
        monkeypatch.setenv("NCCL_EP_LIBRARY", name)
        assert library_search.find_library() == name
    monkeypatch.delenv("NCCL_EP_LIBRARY")
    monkeypatch.setenv("NCCL_HOME", str(home.parent))
    known = {"libnccl_ep.so", "libnccl_ep.so.0", "libnccl.so.2"}
    monkeypatch.setattr(library_search, "_loads", lambda name: name in known)
    monkeypatch.setattr(library_search.ctypes.util, "find_library", {"nccl": "libnccl.so.9"}.get)
    for name in ("libnccl.so", "libnccl_ep.so"):
        (home / name).touch()
    assert library_search.find_library() == str(home / "libnccl_ep.so")
    # An NCCL_HOME with NCCL alone does not hide a libnccl_ep.so that the loader finds.
    (home / "libnccl_ep.so").unlink()
    assert library_search.find_library() == "libnccl_ep.so"
    # NCCL alone is the last resort; the later generation's libnccl_ep.so.0 is not used.
    known.discard("libnccl_ep.so")
    assert library_search.find_library() == str(home / "libnccl.so")
    monkeypatch.delenv("NCCL_HOME")
    for found in ("libnccl.so.2", "libnccl.so.9"):
        assert library_search.find_library() == found
        known.discard(found)
    monkeypatch.setattr(library_search.ctypes.util, "find_library", lambda name: None)
    with pytest.raises(RuntimeError, match="NCCL_EP_LIBRARY"):
        library_search.find_library()


def test_the_search_for_nccl(tmp_path, monkeypatch):
    """PyTorch's copy, loaded or not, takes precedence over one that the loader would find."""
    home = tmp_path / "lib"
    home.mkdir()
    (home / "libnccl.so.2").touch()
    monkeypatch.setenv("NCCL_HOME", str(tmp_path))
    monkeypatch.setattr(library_search, "_nccl_of_wheel", lambda: "/wheel/libnccl.so.2")
    monkeypatch.setattr(library_search.ctypes.util, "find_library", {"nccl": "libnccl.so.2"}.get)
    assert list(library_search._nccl_candidates("libnccl_ep.so")) == [
        (str(home / "libnccl.so.2"), 0), ("libnccl.so.2", os.RTLD_NOLOAD),
        ("/wheel/libnccl.so.2", 0), ("libnccl.so.2", 0), ("libnccl.so.2", 0)]


def test_wrong_paths_are_told_with_the_name_of_their_setting(tmp_path, monkeypatch):
    nowhere = str(tmp_path / "libnccl_ep.so")
    with pytest.raises(RuntimeError, match=f"so_file: there is no file {nowhere}"):
        NCCLLibrary(nowhere)
    monkeypatch.setenv("NCCL_EP_LIBRARY", nowhere)
    with pytest.raises(RuntimeError, match=f"NCCL_EP_LIBRARY: there is no file {nowhere}"):
        NCCLLibrary()
    (tmp_path / "libnccl_ep.so").touch()
    monkeypatch.setenv("NCCL_EP_NCCL_LIBRARY", str(tmp_path / "libnccl.so.2"))
    with pytest.raises(RuntimeError, match="NCCL_EP_NCCL_LIBRARY: .*libnccl.so.2: cannot open"):
        NCCLLibrary()


def test_a_library_without_the_functions(tmp_path):
    missing = tmp_path / "libnccl_ep.so"
    missing.write_bytes(b"no library")
    with pytest.raises(RuntimeError, match="cannot be loaded"):
        NCCLLibrary(str(missing))
    base = os.environ.get("NCCL_EP_NCCL_LIBRARY")
    if base:
        only_nccl = NCCLLibrary(base)
        assert not only_nccl.ep_available and only_nccl.ncclGetVersion()
        with pytest.raises(RuntimeError, match="has no ncclEpGroupDestroy"):
            only_nccl.ncclEpGroupDestroy(None)
        with pytest.raises(RuntimeError, match=f"{base} is no libnccl_ep.so: .*set NCCL_EP_LIBRARY to"):
            Runtime(only_nccl)


def test_without_a_gpu_the_stand_ins_are_named(library, monkeypatch, tmp_path):
    monkeypatch.setattr(runtime, "uses_stand_ins", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(library, "path", str(tmp_path / "libnccl_ep.so"))
    for folder in ("", f"{tmp_path}/"):
        text = f"to run on the CPU set NCCL_EP_NCCL_LIBRARY to {folder}libncclep_hostsim.so"
        with pytest.raises(RuntimeError, match=f"^no GPU that PyTorch can use; {text}$"):
            Runtime(library)
        (tmp_path / "libncclep_hostsim.so").touch()


def test_importing_needs_neither_torch_nor_a_library(alone):
    code = ("import sys, nccl_ep; assert nccl_ep.HAVE_NCCL_EP and 'torch' not in sys.modules; "
            "nccl_ep.NCCLLibrary")
    environment = {**os.environ, "NCCL_EP_LIBRARY": "/nowhere"}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)


def test_everything_can_be_imported():
    names: dict[str, object] = {}
    exec("from nccl_ep import *", names)
    assert names["HAVE_TORCH"] and names["EpGroup"] and names["layers"].EPAll2AllLayer
