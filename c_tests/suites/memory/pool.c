// Pieces that allocators of others cut from memory that peers map.
#include "suites/memory/memory.h"

enum { kPiece = 4096, kPieces = 4, kBytes = kPieces * kPiece };

static void* alloc_without(void* found) {
    *(void**)found = ncclEpPoolAlloc(16, 0, NULL);
    return NULL;
}

EP_TEST(pieces_of_a_pool) {
    ncclEpGroup_t group = open_group(env);
    uint8_t* memory = new_memory(group, 2 * kBytes);
    uint8_t* pieces[kPieces];
    EP_CHECK(ncclEpPoolAlloc(16, 0, env->stream) == NULL);
    for (int use = 0; use < 2; ++use) {
        // The second use finds what the first has left.
        EP_CHECK_NCCL(ncclEpPoolUse(group, memory + kBytes, kBytes));
        const int first = use == 0 ? 0 : 2;
        for (int i = first; i < first + 2; ++i) {
            pieces[i] = ncclEpPoolAlloc(kPiece - 1, 0, env->stream);
            EP_CHECK(pieces[i] == memory + kBytes + i * kPiece);
            EP_CHECK_EQ_U64(info_of(group, pieces[i]).offset, (size_t)(kBytes + i * kPiece));
        }
        EP_CHECK_NCCL(ncclEpPoolUse(group, NULL, 0));
        EP_CHECK(ncclEpPoolAlloc(16, 0, env->stream) == NULL);
    }
    EP_CHECK_NCCL(ncclEpPoolUse(group, memory + kBytes, kBytes));
    EP_CHECK(ncclEpPoolAlloc(1, 0, env->stream) == NULL);
    // Another thread has no pool of its own.
    void* found = &found;
    ep_in_threads(alloc_without, &found, sizeof(found), 1);
    EP_CHECK(found == NULL);
    ncclEpPoolFree(pieces[1], kPiece, 0, env->stream);
    ncclEpPoolFree(memory, kPiece, 0, env->stream);
    EP_CHECK(ncclEpPoolAlloc(kPiece, 0, env->stream) == pieces[1]);
    // Nothing comes of memory that is gone, and nothing happens to what goes later.
    EP_CHECK_NCCL(ncclEpMemFree(group, memory));
    EP_CHECK(ncclEpPoolAlloc(1, 0, env->stream) == NULL);
    close_group(env, group);
    EP_CHECK(ncclEpPoolAlloc(1, 0, env->stream) == NULL);
    for (int i = 0; i < kPieces; ++i) ncclEpPoolFree(pieces[i], kPiece, 0, env->stream);
}

// Torch frees segments late: what a group before has cut is not cut again until then.
EP_TEST(pieces_outlive_their_group) {
    uint8_t* memory = ep_device_alloc(kBytes);
    void *pieces[2], *late = NULL;
    for (int i = 0; i < 2; ++i) {
        ncclEpGroup_t group = open_group(env);
        EP_CHECK_NCCL(ncclEpMemRegister(group, memory, kBytes, NULL));
        EP_CHECK_NCCL(ncclEpPoolUse(group, memory, kBytes));
        pieces[i] = ncclEpPoolAlloc(kPiece, 0, env->stream);
        EP_CHECK(pieces[i] == memory + i * kPiece);
        if (i == 1) {
            ncclEpPoolFree(pieces[0], kPiece, 0, env->stream);
            late = ncclEpPoolAlloc(kPiece, 0, env->stream);
            EP_CHECK(late == pieces[0]);
        }
        close_group(env, group);
    }
    ncclEpPoolFree(pieces[1], kPiece, 0, env->stream);
    ncclEpPoolFree(late, kPiece, 0, env->stream);
    ep_device_free(memory);
}
