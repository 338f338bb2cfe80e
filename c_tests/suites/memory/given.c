// Objects of the caller's memory.
#include "suites/memory/memory.h"

enum { kBytes = 4096 };

// Two pieces of one allocation, registered again, beside memory of the group's.
EP_TEST(pieces_of_one_allocation) {
    ncclEpGroup_t group = open_group(env);
    uint8_t* memory = ep_device_alloc(2 * kBytes);
    uint8_t* own = new_memory(group, kBytes);
    uint8_t* pieces[] = {memory, memory + kBytes};
    for (unsigned i = 0; i < 2; ++i) {
        EP_CHECK_NCCL(ncclEpMemRegister(group, pieces[i], kBytes, NULL));
        fill(env, pieces[i], kBytes, 40 + i);
    }
    for (unsigned i = 0; i < 2; ++i) check_peers(env, group, pieces[i], 40 + i);
    EP_CHECK_NCCL(ncclEpMemDeregister(group, pieces[0]));
    check_peers(env, group, pieces[1], 41);
    EP_CHECK_NCCL(ncclEpMemRegister(group, pieces[0], kBytes, NULL));
    EP_CHECK_EQ_I64(object_at(group, pieces[0]), 1);
    check_peers(env, group, pieces[0], 40);
    EP_CHECK_NCCL(ncclEpMemFree(group, own));
    // What is left is the caller's again when the group ends.
    close_group(env, group);
    fill(env, memory, 2 * kBytes, 43);
    ep_device_free(memory);
}

// One range is an object of two groups, and one of them has made it.
EP_TEST(groups_share_memory) {
    ncclEpGroup_t groups[2] = {open_group(env), open_group(env)};
    const size_t bytes = bytes_of(env, 1);
    uint8_t* memory = new_memory(groups[0], bytes);
    fill(env, memory, bytes, 60);
    EP_CHECK_NCCL(ncclEpMemRegister(groups[1], memory, bytes, NULL));
    for (unsigned i = 0; i < 2; ++i) check_peers(env, groups[i], memory, 60);
    EP_CHECK_NCCL(ncclEpMemDeregister(groups[1], memory));
    check_peers(env, groups[0], memory, 60);
    close_group(env, groups[1]);
    close_group(env, groups[0]);
}
