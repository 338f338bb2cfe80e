// Objects of new memory: numbers, offsets, what peers see, how they end.
#include "suites/memory/memory.h"

enum { kObjects = 5 };

GROUP_TEST(each_rank_sees_the_memory_of_its_node) {
    uint8_t* memory[kObjects];
    for (unsigned i = 0; i < kObjects; ++i) {
        const size_t bytes = bytes_of(env, i);
        memory[i] = new_memory(group, bytes);
        EP_CHECK(memory[i] != NULL && (uintptr_t)memory[i] % 256 == 0);
        fill(env, memory[i], bytes, i);
    }
    for (unsigned i = 0; i < kObjects; ++i) {
        check_peers(env, group, memory[i], i);
        EP_CHECK_EQ_I64(object_at(group, memory[i]), i);
        EP_CHECK_EQ_U64(info_of(group, memory[i]).bytes, bytes_of(env, i));
    }
    for (unsigned i = 0; i < kObjects; ++i) EP_CHECK_NCCL(ncclEpMemFree(group, memory[i]));
}

// Every byte of an object is known, and none beside it.
GROUP_TEST(an_address_has_an_object_and_an_offset) {
    const size_t bytes = bytes_of(env, 0);
    uint8_t* memory = new_memory(group, bytes);
    const size_t offsets[] = {0, 1, 16, bytes - 1};
    for (size_t i = 0; i < COUNT(offsets); ++i) {
        const ncclEpMemInfo_t info = info_of(group, memory + offsets[i]);
        EP_CHECK_EQ_U64(info.offset, offsets[i]);
        EP_CHECK_EQ_U64(info.bytes, bytes);
        EP_CHECK_EQ_U64(info.size, sizeof(info));
    }
    EP_CHECK_EQ_I64(object_at(group, memory + bytes), -1);
    EP_CHECK_EQ_I64(object_at(group, memory - 1), -1);
    EP_CHECK_EQ_I64(object_at(group, NULL), -1);
    EP_CHECK_NCCL(ncclEpMemFree(group, memory));
    EP_CHECK_EQ_I64(object_at(group, memory), -1);
}

// The lowest free number serves next, on all ranks, whatever they have done elsewhere.
GROUP_TEST(numbers_serve_again) {
    uint8_t* memory[kObjects];
    for (unsigned i = 0; i < kObjects; ++i) memory[i] = new_memory(group, bytes_of(env, i));
    static const unsigned kFreed[] = {3, 1};
    for (unsigned i = 0; i < 2; ++i) EP_CHECK_NCCL(ncclEpMemFree(group, memory[kFreed[i]]));
    for (unsigned i = 0; i < 2; ++i) {
        const unsigned number = 1 + 2 * i;
        memory[number] = new_memory(group, bytes_of(env, 7 + i));
        EP_CHECK_EQ_I64(object_at(group, memory[number]), number);
        fill(env, memory[number], bytes_of(env, 7 + i), 7 + i);
        check_peers(env, group, memory[number], 7 + i);
    }
    for (unsigned i = 0; i < kObjects; ++i) EP_CHECK_NCCL(ncclEpMemFree(group, memory[i]));
}

// Objects of a group are its own, and two groups count theirs apart.
EP_TEST(groups_have_objects_of_their_own) {
    ncclEpGroup_t groups[2] = {open_group(env), open_group(env)};
    uint8_t* memory[2];
    for (unsigned i = 0; i < 2; ++i) {
        memory[i] = new_memory(groups[i], bytes_of(env, i));
        EP_CHECK_EQ_I64(object_at(groups[i], memory[i]), 0);
        EP_CHECK_EQ_I64(object_at(groups[1 - i], memory[i]), -1);
        fill(env, memory[i], bytes_of(env, i), 50 + i);
    }
    close_group(env, groups[0]);
    check_peers(env, groups[1], memory[1], 51);
    close_group(env, groups[1]);
}
