// Operations that could not use a tensor where it lies, in memory that peers map, are counted.
#include "harness/nodes.h"
#include "reference/run.h"

enum { kBytes = 1 << 20, kAlign = 256 };

static struct {
    char* next;  // NULL: buffers lie elsewhere
} g_memory;

static unsigned char* take(size_t bytes) {
    char* at = g_memory.next;
    if (at != NULL) g_memory.next += (bytes + kAlign - 1) / kAlign * kAlign;
    return (unsigned char*)at;
}

static void give_back(void) {}

static uint64_t fallbacks_of(ncclEpGroup_t group, const void* memory) {
    ncclEpMemInfo_t info = {.size = sizeof(info)};
    EP_REQUIRE_NCCL(ncclEpMemInfo(group, memory, &info));
    return info.fallbacks;
}

EP_TEST(ht_fallbacks_are_counted) {
    static const RefElsewhere kMapped = {take, give_back};
    const RefElsewhere* before = ref_elsewhere;
    const RefShape shape = {2 * (unsigned)env->size, 8, 2, ncclBfloat16, 64};
    ncclEpGroup_t group = ref_group_new(env, NCCL_EP_ALGO_HIGH_THROUGHPUT, &shape);
    void* memory = NULL;
    EP_REQUIRE_NCCL(ncclEpMemAlloc(group, &memory, kBytes));
    const bool counts = !ep_on_host_backend() && ep_num_nodes() == 1 && env->rank != 0;
    uint64_t expected = 0;
    for (unsigned round = 0; round < 4; ++round) {
        // In every second round that of rank 0 lies elsewhere.
        const bool is_mapped = env->rank != 0 || round % 2 == 0;
        g_memory.next = is_mapped ? memory : NULL;
        ref_elsewhere = &kMapped;
        REF_SCOPED RefRun run = ref_run_open_with(env, group, &shape, kRefDistinct, false, ref_ht(91));
        ref_dispatch(&run);
        ep_sync(env);
        expected += counts && round % 2 == 1;
        EP_CHECK_EQ_U64(fallbacks_of(group, memory), expected);
    }
    ref_elsewhere = before;
    EP_CHECK_NCCL(ncclEpGroupDestroy(group, env->stream));
}
