// A user of an installed library that makes a group of one rank, on the CPU stand-ins for CUDA and
// NCCL: the library that the package files lead to is complete and works.
#include <nccl_ep.h>
#include <stdio.h>

#define TRY(call)                                                       \
    do {                                                                \
        const int result = (int)(call);                                 \
        if (result != 0) {                                              \
            printf("%s: %d %s\n", #call, result, ncclEpGetLastError()); \
            return 1;                                                   \
        }                                                               \
    } while (0)

int main(void) {
    ncclUniqueId id;
    ncclComm_t comm;
    cudaStream_t stream;
    TRY(cudaSetDevice(0));
    TRY(cudaStreamCreate(&stream));
    TRY(ncclGetUniqueId(&id));
    TRY(ncclCommInitRank(&comm, 1, id, 0));

    const ncclEpGroupConfig_t config = {.version = 1,
                                        .algorithm = NCCL_EP_ALGO_LOW_LATENCY,
                                        .num_experts = 4,
                                        .max_tokens_per_rank = 8,
                                        .token_size_bytes = 256};
    ncclEpGroup_t group;
    ncclNDTensor_t tensor;
    TRY(ncclEpCreateGroup(&group, comm, &config, stream, NULL, NULL));
    TRY(ncclEpTensorCreate(group, &tensor, 2, ncclBfloat16, NCCL_EP_TENSOR_TAG_TOKENS, 8, 128, 1, 1, 1));
    TRY(ncclEpTensorDestroy(group, &tensor));
    TRY(ncclEpGroupDestroy(group, stream));

    TRY(ncclCommDestroy(comm));
    TRY(cudaStreamDestroy(stream));
    printf("a group of one rank works\n");
    return 0;
}
