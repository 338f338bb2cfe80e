// The all-gather of the test-only NCCL: a copy to pinned memory, a host function that meets the
// other ranks, and copies back, all of it in the order of the caller's stream.
#include <stdlib.h>
#include <string.h>

#include "comm.h"

typedef struct {
    ncclComm_t comm;
    size_t bytes;
} Round;

// Runs between the copies. Without the other ranks' bytes the receive buffer gets zeros, and
// ncclCommGetAsyncError says why.
static void CUDART_CB meet(void* argument) {
    Round* round = argument;
    ncclComm_t comm = round->comm;
    unsigned char* all = comm->staged + kMeetingSlotBytes;
    if (atomic_load(&comm->failed) || !meeting_exchange(&comm->meeting, comm->staged, round->bytes,
                                                        all, kMeetingSlotBytes)) {
        atomic_store(&comm->failed, true);
        memset(all, 0, (size_t)comm->meeting.num_ranks * kMeetingSlotBytes);
    }
    atomic_fetch_sub(&comm->waiting, 1);
    free(round);
}

static cudaError_t launch_meeting(ncclComm_t comm, size_t bytes, cudaStream_t stream) {
    Round* round = malloc(sizeof(*round));
    if (round == NULL) return cudaErrorMemoryAllocation;
    round->comm = comm;
    round->bytes = bytes;
    atomic_fetch_add(&comm->waiting, 1);
    const cudaError_t result = cudaLaunchHostFunc(stream, meet, round);
    if (result == cudaSuccess) return cudaSuccess;
    atomic_fetch_sub(&comm->waiting, 1);
    free(round);
    return result;
}

// One round: `bytes` of each rank, at `offset` in a contribution of `stride` bytes.
static cudaError_t gather_part(ncclComm_t comm, const unsigned char* send, unsigned char* receive,
                               size_t stride, size_t offset, size_t bytes, cudaStream_t stream) {
    cudaError_t result = cudaMemcpyAsync(comm->staged, send + offset, bytes, cudaMemcpyDeviceToHost, stream);
    if (result == cudaSuccess) result = launch_meeting(comm, bytes, stream);
    for (int i = 0; result == cudaSuccess && i < comm->meeting.num_ranks; ++i) {
        const unsigned char* from = comm->staged + (size_t)(1 + i) * kMeetingSlotBytes;
        result = cudaMemcpyAsync(receive + (size_t)i * stride + offset, from, bytes, cudaMemcpyHostToDevice, stream);
    }
    return result;
}

static size_t size_of(ncclDataType_t datatype) {
    switch (datatype) {
        case ncclInt8:
        case ncclUint8: return 1;
        case ncclFloat16:
        case ncclBfloat16: return 2;
        case ncclInt32:
        case ncclUint32:
        case ncclFloat32: return 4;
        case ncclInt64:
        case ncclUint64:
        case ncclFloat64: return 8;
        default: return 0;
    }
}

FAKE_NCCL_EXPORT ncclResult_t ncclAllGather(const void* sendbuff, void* recvbuff, size_t sendcount,
                                            ncclDataType_t datatype, ncclComm_t comm, cudaStream_t stream) {
    const size_t stride = sendcount * size_of(datatype);
    if (comm == NULL || size_of(datatype) == 0) return ncclInvalidArgument;
    if (stride == 0) return ncclSuccess;
    if (sendbuff == NULL || recvbuff == NULL) return ncclInvalidArgument;
    cudaError_t result = cudaStreamWaitEvent(stream, comm->last, 0);
    for (size_t offset = 0; result == cudaSuccess && offset < stride;) {
        const size_t left = stride - offset;
        const size_t bytes = left < kMeetingSlotBytes ? left : kMeetingSlotBytes;
        result = gather_part(comm, sendbuff, recvbuff, stride, offset, bytes, stream);
        offset += bytes;
    }
    if (result == cudaSuccess) result = cudaEventRecord(comm->last, stream);
    return result == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError;
}
