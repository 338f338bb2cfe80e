// Handles that are opened first and routed by updates, in graphs, too: their rows lie by expert.
#include "harness/graphs.h"
#include "harness/nodes.h"
#include "reference/mapped.h"
#include "reference/run.h"

enum { kMost = 12, kTopK = 3, kExperts = 3, kHidden = 32, kReplays = 3, kSeed = 50 };

static RefShape shape_of(const EpEnv* env) {
    return (RefShape){kExperts * (unsigned)env->size, kMost, kTopK, ncclBfloat16, kHidden};
}

// An update, a forward dispatch and a combine with gradients.
static void play(void* context) {
    RefRun* run = context;
    ref_launch_update(run, run->env->stream);
    ref_play_pair(run);
}

static void check_bound(const RefRun* run) {
    unsigned told = 0;
    EP_CHECK_NCCL(ncclEpHandleGetNumRecvTokens(run->handle, &told));
    unsigned most = (unsigned)run->env->size * kMost * kTopK + kExperts * (run->alignment - 1);
    most = most / run->alignment * run->alignment;
    EP_CHECK_EQ_U64(told, run->most < most ? run->most : most);
    EP_CHECK(run->received <= told);
}

// Tensors have room for all that may come, or are refused: what they cannot hold would be lost without a word.
static void check_fewer_rows(RefRun* run) {
    unsigned told = 0;
    EP_CHECK_NCCL(ncclEpHandleGetNumRecvTokens(run->handle, &told));
    if (run->most == kRefUnbounded || told == 0) return;
    const unsigned rows = run->num_rows;
    run->num_rows = told;
    ref_prepare(run);
    play(run);
    ref_check(run);
    run->num_rows = told - 1;
    EP_CHECK_EQ_U64(ref_launch_dispatch(run, kRefWhole, run->env->stream), ncclInvalidUsage);
    EP_CHECK_EQ_U64(ref_launch_combine(run, kRefBackward, run->env->stream), ncclInvalidUsage);
    run->num_rows = rows;
}

static void check_updates(const EpEnv* env, ncclEpGroup_t group, const RefShape* shape, RefOpening opening) {
    REF_SCOPED RefRun run = ref_run_open_with(env, group, shape, kRefMessy, true, opening);
    for (unsigned i = 0; i < 2; ++i) {
        ref_run_draw(&run, kRefMessy, kSeed + 10 + i);
        ref_note_update(&run);
        ref_prepare(&run);
        play(&run);
        ref_check(&run);
        check_bound(&run);
    }
    check_fewer_rows(&run);
    // Over several nodes the host waits for a routing.
    if (ep_num_nodes() > 1) return;
    const EpCaptured captured = ep_capture(env->stream, play, &run);
    for (unsigned i = 0; i < kReplays; ++i) {
        ref_run_draw(&run, kRefMessy, kSeed + 20 + i);
        ref_note_update(&run);
        ref_prepare(&run);
        ep_replay(&captured);
        ref_check(&run);
    }
    ep_release_captured(&captured);
}

EP_TEST(rows_by_expert_and_updates) {
    const RefShape shape = shape_of(env);
    ncclEpGroup_t group = ref_group_new(env, NCCL_EP_ALGO_HIGH_THROUGHPUT, &shape);
    for (unsigned alignment = 1; alignment <= 16; alignment *= 4) {
        check_updates(env, group, &shape, ref_ht_by_expert(alignment, kRefUnbounded, kSeed));
    }
    // None, some, and more than can come, which is no bound.
    const unsigned bounds[] = {0, 13, (unsigned)env->size * kMost * kTopK * 2};
    for (size_t i = 0; i < COUNT(bounds); ++i) {
        check_updates(env, group, &shape, ref_ht_by_expert(4, bounds[i], kSeed));
    }
    ref_mapped_close();
    EP_CHECK_NCCL(ncclEpGroupDestroy(group, env->stream));
}

EP_TEST(scales_of_rows_by_expert) {
    static const struct {
        unsigned scales;
        RefOrder order;
    } kCases[] = {{1, kRefDense}, {9, kRefDense}, {9, kRefColumns}, {16, kRefDense}};
    RefShape shape = shape_of(env);
    shape.hidden *= 4;  // There is room for the scales.
    ncclEpGroup_t group = ref_group_new(env, NCCL_EP_ALGO_HIGH_THROUGHPUT, &shape);
    for (size_t i = 0; i < COUNT(kCases); ++i) {
        RefFormat format = ref_format_forward(ncclBfloat16, kHidden, ncclFloat32, kCases[i].scales);
        format.in_order = format.out_order = kCases[i].order;
        const RefOpening opening = ref_ht_by_expert(4, kRefUnbounded, kSeed);
        REF_SCOPED RefRun run = ref_run_open_with(env, group, &shape, kRefMessy, true, opening);
        ref_run_set_format(&run, &format);
        ref_prepare_dispatch(&run);
        ref_launch_update(&run, env->stream);
        EP_CHECK_NCCL(ref_launch_dispatch(&run, kRefCached, env->stream));
        ref_check_dispatch(&run);
    }
    ref_mapped_close();
    EP_CHECK_NCCL(ncclEpGroupDestroy(group, env->stream));
}
