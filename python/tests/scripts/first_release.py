"""A program for the first `nccl_ep` package, without torch: LL and HT round trips.

Run with NCCL_HOME pointing to a folder with lib/libnccl_ep.so, libnccl.so.2 and libcudart.so; the
test lets the last two be the CPU stand-ins. Each rank prints `rank N: ok`.
"""

import ctypes
import os
import struct

import nccl_ep
from nccl_ep import (CUDA_ERROR_MEMORY_ALLOCATION, CUDA_SUCCESS, HAVE_NCCL_EP,
                     NCCL_EP_ALGO_HIGH_THROUGHPUT, NCCL_EP_ALGO_LOW_LATENCY, NCCLLibrary,
                     get_nccl_comm_from_group, ncclDataTypeEnum, ncclEpAllocFn_t,
                     ncclEpDispatchConfig_t, ncclEpFreeFn_t, ncclEpGroupConfig_t, ncclNDTensor_t)
from nccl_ep.nccl_wrapper import ncclUniqueId

TOKENS, TOPK_IDX, TOPK_WEIGHTS, COUNTER = 1, 2, 3, 5
HIDDEN, ROWS = 512, 4
ELEMENT_BYTES = {ncclDataTypeEnum.ncclBfloat16: 2, ncclDataTypeEnum.ncclFloat32: 4,
                 ncclDataTypeEnum.ncclInt32: 4, ncclDataTypeEnum.ncclInt64: 8}

cudart = ctypes.CDLL(os.path.join(os.environ["NCCL_HOME"], "lib", "libcudart.so"))
cudart.cudaMalloc.argtypes = [ctypes.POINTER(ctypes.c_void_p), ctypes.c_size_t]
cudart.cudaFree.argtypes = [ctypes.c_void_p]
cudart.cudaMemcpy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
cudart.cudaStreamSynchronize.argtypes = [ctypes.c_void_p]


@ncclEpAllocFn_t
def allocate(out, size):
    return CUDA_SUCCESS if cudart.cudaMalloc(out, size) == 0 else CUDA_ERROR_MEMORY_ALLOCATION


@ncclEpFreeFn_t
def release(address):
    return cudart.cudaFree(address)


def tensor(datatype, tag, *sizes, data=None):
    """A descriptor with its own memory, built as scripts of that time do."""
    count = 1
    for size in sizes:
        count *= size
    size = count * ELEMENT_BYTES[datatype]
    made = ncclNDTensor_t()
    made.version, made.ndim, made.datatype, made.tag, made.flags = 1, len(sizes), datatype, tag, 0
    made.sizes = (ctypes.c_uint * len(sizes))(*sizes)
    made.strides = (ctypes.c_uint * len(sizes))(*[1] * len(sizes))
    address = ctypes.c_void_p()
    assert cudart.cudaMalloc(ctypes.byref(address), size) == 0
    made.data = address.value
    if data is not None:
        assert len(data) == size, (len(data), size)
        assert cudart.cudaMemcpy(made.data, data, size, 1) == 0
    return made


def read(made, size):
    data = ctypes.create_string_buffer(size)
    assert cudart.cudaMemcpy(data, made.data, size, 2) == 0
    return data.raw


def pointers(*tensors):
    kind = ctypes.POINTER(ncclNDTensor_t)
    return (kind * len(tensors))(*[ctypes.pointer(each) for each in tensors]), len(tensors)


def bfloat16(*values):
    return b"".join(struct.pack("<f", value)[2:] for value in values)


def make_group(lib, comm, algorithm, experts):
    config = ncclEpGroupConfig_t()
    config.version, config.algorithm, config.num_experts = 1, algorithm, experts
    config.max_tokens_per_rank, config.token_size_bytes = ROWS, 2 * HIDDEN
    config.rdma_buffer_size = config.num_qp_per_rank = config.num_channels = 0
    return lib.ncclEpCreateGroup(comm, config, None, alloc_fn=allocate, free_fn=release)


def low_latency(lib, comm, rank, size):
    """Each rank sends its tokens to the next one, whose expert returns them."""
    group = make_group(lib, comm, NCCL_EP_ALGO_LOW_LATENCY, size)
    target = (rank + 1) % size
    ids = tensor(ncclDataTypeEnum.ncclInt64, TOPK_IDX, ROWS, 1,
                 data=struct.pack("<4q", *[target] * ROWS))
    tokens = tensor(ncclDataTypeEnum.ncclBfloat16, TOKENS, ROWS, HIDDEN,
                    data=bfloat16(*[rank + 1] * (ROWS * HIDDEN)))
    received = tensor(ncclDataTypeEnum.ncclBfloat16, TOKENS, 1, size * ROWS, HIDDEN)
    counter = tensor(ncclDataTypeEnum.ncclInt32, COUNTER, 1)
    weights = tensor(ncclDataTypeEnum.ncclFloat32, TOPK_WEIGHTS, ROWS, 1,
                     data=struct.pack("<4f", *[0.5] * ROWS))
    combined = tensor(ncclDataTypeEnum.ncclBfloat16, TOKENS, ROWS, HIDDEN)
    handle = lib.ncclEpCreateHandle(group, ids, None, None, local_tensors=None, use_fp8=False)
    config = ncclEpDispatchConfig_t(round_scales=0)
    lib.ncclEpDispatch(handle, *pointers(tokens), *pointers(received), *pointers(counter), True,
                       config, None)
    lib.ncclEpComplete(handle, None, None)
    lib.ncclEpCombine(handle, *pointers(received), *pointers(combined), *pointers(weights), False,
                      None, None)
    lib.ncclEpComplete(handle, None, None)
    cudart.cudaStreamSynchronize(None)
    source = (rank - 1) % size
    assert struct.unpack("<i", read(counter, 4)) == (ROWS,)
    assert read(received, 2 * HIDDEN * ROWS) == bfloat16(*[source + 1] * (ROWS * HIDDEN))
    assert read(combined, 2 * HIDDEN * ROWS) == bfloat16(*[(rank + 1) / 2] * (ROWS * HIDDEN))
    lib.ncclEpHandleDestroy(handle)
    lib.ncclEpGroupDestroy(group, None)


def high_throughput(lib, comm, rank, size):
    """Every token goes to all ranks; each returns it unchanged."""
    group = make_group(lib, comm, NCCL_EP_ALGO_HIGH_THROUGHPUT, size)
    ids_of_token = list(range(size))
    ids = tensor(ncclDataTypeEnum.ncclInt64, TOPK_IDX, ROWS, size,
                 data=struct.pack(f"<{ROWS * size}q", *ids_of_token * ROWS))
    tokens = tensor(ncclDataTypeEnum.ncclBfloat16, TOKENS, ROWS, HIDDEN,
                    data=bfloat16(*[rank + 1] * (ROWS * HIDDEN)))
    weights = tensor(ncclDataTypeEnum.ncclFloat32, TOPK_WEIGHTS, ROWS, size,
                     data=struct.pack(f"<{ROWS * size}f", *[0.25] * (ROWS * size)))
    handle = lib.ncclEpCreateHandle(group, ctypes.byref(ids), None, None)
    rows = lib.ncclEpHandleGetNumRecvTokens(handle)
    assert rows == size * ROWS
    received = tensor(ncclDataTypeEnum.ncclBfloat16, TOKENS, rows, HIDDEN)
    received_weights = tensor(ncclDataTypeEnum.ncclFloat32, TOPK_WEIGHTS, rows, size)
    received_ids = tensor(ncclDataTypeEnum.ncclInt64, TOPK_IDX, rows, size)
    combined = tensor(ncclDataTypeEnum.ncclBfloat16, TOKENS, ROWS, HIDDEN)
    lib.ncclEpDispatch(handle, *pointers(tokens, weights, ids),
                       *pointers(received, received_weights, received_ids), None, 0, 0,
                       ncclEpDispatchConfig_t(0), None)
    lib.ncclEpCombine(handle, *pointers(received), *pointers(combined), None, 0, 0, None, None)
    cudart.cudaStreamSynchronize(None)
    first = struct.unpack(f"<{size}q", read(received_ids, 8 * size))
    assert first == (0, *[-1] * (size - 1)), first
    assert read(combined, 2 * HIDDEN) == bfloat16(*[(rank + 1) * size] * HIDDEN)
    lib.ncclEpHandleDestroy(handle)
    lib.ncclEpGroupDestroy(group, None)


def main():
    assert HAVE_NCCL_EP and nccl_ep.__version__
    lib = NCCLLibrary()
    assert lib.ep_available and lib.ncclGetVersion().startswith("2.")
    assert ctypes.sizeof(ncclUniqueId) == 128
    rank, size = int(os.environ["OMPI_COMM_WORLD_RANK"]), int(os.environ["OMPI_COMM_WORLD_SIZE"])
    comm = get_nccl_comm_from_group(None, lib)
    low_latency(lib, comm, rank, size)
    high_throughput(lib, comm, rank, size)
    try:
        lib.NCCL_CHECK(4)
    except RuntimeError as error:
        assert "invalid argument" in str(error), error
    else:
        raise AssertionError("NCCL_CHECK(4) passed")
    print(f"rank {rank}: ok", flush=True)


if __name__ == "__main__":
    main()
