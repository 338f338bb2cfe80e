// Memory that peers map: what the cases share.
#pragma once

#include "harness/harness.h"
#include "harness/nodes.h"

// A group for any case, in low latency.
ncclEpGroup_t open_group(const EpEnv* env);
void close_group(const EpEnv* env, ncclEpGroup_t group);
// A case with such a `group`.
#define GROUP_TEST(name)                                    \
    static void name##_in(EpEnv* env, ncclEpGroup_t group); \
    EP_TEST(name) {                                         \
        ncclEpGroup_t group = open_group(env);              \
        name##_in(env, group);                              \
        close_group(env, group);                            \
    }                                                       \
    static void name##_in(__attribute__((unused)) EpEnv* env, ncclEpGroup_t group)

// This rank's bytes of an object, which differ between ranks.
size_t bytes_of(const EpEnv* env, size_t number);

// Memory of `bytes` in a new object, which must be made.
uint8_t* new_memory(ncclEpGroup_t group, size_t bytes);

// What the library knows of `ptr`; object 0 to 63, or -1 in no object.
int object_at(ncclEpGroup_t group, const void* ptr);
ncclEpMemInfo_t info_of(ncclEpGroup_t group, const void* ptr);

// Fills memory of this rank with what peers can tell from all other.
void fill(const EpEnv* env, uint8_t* memory, size_t bytes, uint64_t seed);
// Collective: each rank reads what the others of its node have filled theirs with, and finds that
// it maps no other node's. `memory` is this rank's of the object.
void check_peers(const EpEnv* env, ncclEpGroup_t group, const uint8_t* memory, uint64_t seed);
