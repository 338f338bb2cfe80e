// Memory that peers map: objects, what is in them, how they end.
#include "suites/memory/memory.h"

// Bytes that each rank has of any object.
enum { kHidden = 64, kLeastBytes = 1000 };

ncclEpGroup_t open_group(const EpEnv* env) {
    return ep_group_create(env, NCCL_EP_ALGO_LOW_LATENCY, 2u * (unsigned)env->size, 4, 2 * kHidden);
}

void close_group(const EpEnv* env, ncclEpGroup_t group) { EP_CHECK_NCCL(ncclEpGroupDestroy(group, env->stream)); }

size_t bytes_of(const EpEnv* env, size_t number) { return 1000 + 4096 * number + 16 * (size_t)env->rank; }

uint8_t* new_memory(ncclEpGroup_t group, size_t bytes) {
    void* memory = NULL;
    EP_REQUIRE_NCCL(ncclEpMemAlloc(group, &memory, bytes));
    return memory;
}

int object_at(ncclEpGroup_t group, const void* ptr) {
    ncclEpMemInfo_t info = {.size = sizeof(info)};
    const ncclResult_t result = ncclEpMemInfo(group, ptr, &info);
    EP_CHECK(result == ncclSuccess || result == ncclInvalidArgument);
    return result == ncclSuccess ? (int)info.object : -1;
}

ncclEpMemInfo_t info_of(ncclEpGroup_t group, const void* ptr) {
    ncclEpMemInfo_t info = {.size = sizeof(info)};
    EP_REQUIRE_NCCL(ncclEpMemInfo(group, ptr, &info));
    return info;
}

static void expected(uint8_t* to, size_t bytes, uint64_t seed, int rank) {
    for (size_t i = 0; i < bytes; ++i) to[i] = (uint8_t)ep_mix(seed, (uint64_t)rank, i);
}

void fill(const EpEnv* env, uint8_t* memory, size_t bytes, uint64_t seed) {
    EP_SCOPED uint8_t* host = malloc(bytes);
    EP_REQUIRE(host != NULL);
    expected(host, bytes, seed, env->rank);
    EP_REQUIRE_CUDA(cudaMemcpy(memory, host, bytes, cudaMemcpyDefault));
    // A copy of so few bytes may return before they are there.
    EP_REQUIRE_CUDA(cudaStreamSynchronize(NULL));
}

void check_peers(const EpEnv* env, ncclEpGroup_t group, const uint8_t* memory, uint64_t seed) {
    uint8_t found[kLeastBytes];
    uint8_t wanted[kLeastBytes];
    ep_barrier();
    const ncclEpMemInfo_t info = info_of(group, memory);
    unsigned peers = 0;
    EP_CHECK(info.peer_data[env->rank] == memory);
    for (int rank = 0; rank < env->size; ++rank) {
        const void* data = info.peer_data[rank];
        const bool is_near = ep_node_distance((unsigned)env->rank, (unsigned)rank) == 0;
        if (!EP_CHECK(is_near == (data != NULL)) || data == NULL) continue;
        peers += rank != env->rank;
        EP_REQUIRE_CUDA(cudaMemcpy(found, data, kLeastBytes, cudaMemcpyDefault));
        expected(wanted, kLeastBytes, seed, rank);
        EP_CHECK_EQ_BYTES(found, wanted, kLeastBytes);
    }
    EP_CHECK_EQ_U64(info.peers, peers);
    ep_barrier();
}
