// Objects of new memory: what is known of their addresses, and of which groups they are.
#include "suites/memory/memory.h"

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
