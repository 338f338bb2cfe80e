// What the examples share: ranks and GPUs by MPI, a check of every call, tensors, 16-bit numbers.
// A program of yours has its own ways to do this; what is about NCCL EP is in the .c files.
#pragma once

#include <cuda_runtime.h>
#include <mpi.h>
#include <nccl.h>
#include <nccl_ep.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// ---- Checks: a call that fails ends all ranks; one that left alone would keep the others waiting

static inline void example_fail(const char* call, const char* why) {
    int rank = 0;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    fprintf(stderr, "rank %d: %s: %s\n", rank, call, why);
    MPI_Abort(MPI_COMM_WORLD, 1);
}

static inline void example_cuda(const char* call, cudaError_t result) {
    if (result != cudaSuccess) example_fail(call, cudaGetErrorString(result));
}

static inline void example_nccl(const char* call, ncclResult_t result) {
    if (result != ncclSuccess) example_fail(call, ncclGetErrorString(result));
}

// The text says which argument broke which rule.
static inline void example_ep(const char* call, ncclResult_t result) {
    if (result != ncclSuccess) example_fail(call, ncclEpGetLastError());
}

#define TRY_CUDA(call) example_cuda(#call, (call))
#define TRY_NCCL(call) example_nccl(#call, (call))
#define TRY_EP(call) example_ep(#call, (call))
#define REQUIRE(condition) ((condition) ? (void)0 : example_fail(#condition, "does not hold"))

// ---- Ranks

typedef struct {
    int rank, size;
    ncclComm_t comm;
    cudaStream_t stream;
} Ranks;

// One process for each GPU: the i-th process of a machine takes GPU i of those that it sees.
static inline Ranks example_start(int* argc, char*** argv) {
    Ranks ranks;
    MPI_Comm machine;
    int local_rank = 0, devices = 0;
    memset(&ranks, 0, sizeof(ranks));
    MPI_Init(argc, argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &ranks.rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks.size);
    MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &machine);
    MPI_Comm_rank(machine, &local_rank);
    MPI_Comm_free(&machine);
    TRY_CUDA(cudaGetDeviceCount(&devices));
    REQUIRE(devices > 0);
    TRY_CUDA(cudaSetDevice(local_rank % devices));
    TRY_CUDA(cudaStreamCreate(&ranks.stream));

    ncclUniqueId id;
    memset(&id, 0, sizeof(id));
    if (ranks.rank == 0) TRY_NCCL(ncclGetUniqueId(&id));
    MPI_Bcast(&id, (int)sizeof(id), MPI_BYTE, 0, MPI_COMM_WORLD);
    TRY_NCCL(ncclCommInitRank(&ranks.comm, ranks.size, id, ranks.rank));
    return ranks;
}

// Counts the ranks whose results were right, and gives the exit status.
static inline int example_finish(Ranks* ranks, int right) {
    int passed = 0;
    MPI_Allreduce(&right, &passed, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
    const int failed = ranks->size - passed;
    if (ranks->rank == 0) printf("%d passed, %d failed\n", passed, failed);
    TRY_NCCL(ncclCommDestroy(ranks->comm));
    TRY_CUDA(cudaStreamDestroy(ranks->stream));
    MPI_Finalize();
    return failed == 0 ? 0 : 1;
}

// ---- Tensors in device memory

// With ndim 1 or 2 the sizes behind are not used.
static inline ncclNDTensor_t make_tensor(ncclEpGroup_t group, ncclEpTensorTag_t tag,
                                         ncclDataType_t type, unsigned ndim, unsigned size0,
                                         unsigned size1, unsigned size2) {
    ncclNDTensor_t tensor;
    TRY_EP(ncclEpTensorCreate(group, &tensor, ndim, type, tag, size0, size1, size2, 1, 1));
    return tensor;
}

static inline void destroy_tensors(ncclEpGroup_t group, ncclNDTensor_t* const* tensors,
                                   size_t count) {
    for (size_t i = 0; i < count; ++i) TRY_EP(ncclEpTensorDestroy(group, tensors[i]));
}

static inline void upload(const ncclNDTensor_t* tensor, const void* host, size_t bytes) {
    TRY_CUDA(cudaMemcpy(tensor->data, host, bytes, cudaMemcpyHostToDevice));
}

static inline void download(void* host, const ncclNDTensor_t* tensor, size_t bytes) {
    TRY_CUDA(cudaMemcpy(host, tensor->data, bytes, cudaMemcpyDeviceToHost));
}

// ---- bfloat16: the upper half of a float. The examples' numbers and their parts fit it exactly.

static inline uint16_t to_bf16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof(bits));
    return (uint16_t)(bits >> 16);
}

static inline float from_bf16(uint16_t upper) {
    const uint32_t bits = (uint32_t)upper << 16;
    float value;
    memcpy(&value, &bits, sizeof(value));
    return value;
}
