// Objects that buffers are cut from; see mapped.h.
#include "reference/mapped.h"

#include "reference/buffer.h"

// A library of the first release alone, which has no such function, links this file as well.
#pragma weak ncclEpMemAlloc

enum { kObjects = 3, kObjectBytes = 1 << 20, kAlign = 256 };

// Memory is cut from the front, and whole again when no buffer is left.
typedef struct {
    unsigned char* base;
    size_t bytes;
    size_t used;
} Object;

static struct {
    bool all;
    unsigned rank;
    uint64_t seed;
    uint64_t taken;  // buffers that asked so far
    unsigned live;
    Object objects[kObjects];
} g_mapped;

static bool is_wanted(const char* where) {
    const char* memory = getenv("EP_TEST_MEMORY");
    return memory != NULL && strcmp(memory, where) == 0;
}

bool ref_mapped_is_wanted(void) { return is_wanted("mapped") || is_wanted("mixed"); }

// The ranks differ in every second buffer.
static bool is_mapped(uint64_t number) {
    if (g_mapped.all || ep_mix(g_mapped.seed, number, 1) % 2 == 0) return true;
    return ep_mix(g_mapped.seed, number, 2 + g_mapped.rank) % 3 != 0;
}

static unsigned char* take(size_t bytes) {
    const uint64_t number = g_mapped.taken++;
    if (!is_mapped(number)) return NULL;
    if (g_mapped.live == 0) {
        for (unsigned i = 0; i < kObjects; ++i) g_mapped.objects[i].used = 0;
    }
    const uint64_t first = ep_mix(g_mapped.seed, number, 100 + g_mapped.rank);
    for (unsigned i = 0; i < kObjects; ++i) {
        Object* object = &g_mapped.objects[(first + i) % kObjects];
        // Gaps, so that offsets differ.
        const size_t begin = object->used + first / kObjects % 4 * 16;
        if (begin + bytes > object->bytes) continue;
        object->used = (begin + bytes + kAlign - 1) / kAlign * kAlign;
        ++g_mapped.live;
        return object->base + begin;
    }
    return NULL;
}

static void give_back(void) {
    if (g_mapped.live > 0) --g_mapped.live;
}

static const RefElsewhere kMapped = {take, give_back};

void ref_mapped_open(const EpEnv* env, ncclEpGroup_t group, uint64_t seed) {
    if (!ref_mapped_is_wanted()) return;
    memset(&g_mapped, 0, sizeof(g_mapped));
    g_mapped.all = is_wanted("mapped");
    g_mapped.rank = (unsigned)env->rank;
    g_mapped.seed = seed;
    for (unsigned i = 0; i < kObjects; ++i) {
        Object* object = &g_mapped.objects[i];
        void* memory = NULL;
        object->bytes = kObjectBytes + (size_t)kAlign * ep_mix(seed, g_mapped.rank, i) % 64;
        EP_REQUIRE_NCCL(ncclEpMemAlloc(group, &memory, object->bytes));
        object->base = memory;
    }
    ref_elsewhere = &kMapped;
}

void ref_mapped_close(void) { ref_elsewhere = NULL; }
