// Rank-major dispatches that leave their rows in memory of the library: views. What they hold is compared as elsewhere;
// here banks of views are filled, cleaned, skipped and taken in turns in every order.
#include "harness/graphs.h"
#include "suites/ll/shapes.h"

static void open_view(RefRun* run, const EpEnv* env, const Shape* shape, uint64_t seed) {
    open_by_rank(run, env, shape, seed);
    run->as_view = true;
}

// Dispatches without a combine between them, so that banks are to be cleaned; pairs; combines that come again; and
// staged ones, whose combines clean nothing.
static void in_every_order(RefRun* run) {
    for (unsigned i = 0; i < 4; ++i) {
        run->in_place = i % 2 == 0;
        ref_pair(run);
    }
    for (unsigned i = 0; i < 3; ++i) ref_dispatch(run);
    ref_combine(run);
    ref_combine(run);
    ref_pair(run);
    pair_in_stages(run);
    ref_pair(run);
    run->as_view = false;
    ref_pair(run);
    run->as_view = true;
    ref_pair(run);
}

EP_TEST(views_shapes) {
    static const Shape kShapes[] = {
        {2, 16, 4, ncclBfloat16, 64, kRefMessy, true},     {4, 16, 3, ncclFloat16, 1000, kRefSkewed, false},
        {2, 16, 4, ncclBfloat16, 64, kRefNowhere, false},  {1, 1, 1, ncclBfloat16, 32, kRefDistinct, true},
        {3, 17, 5, ncclBfloat16, 8, kRefMessy, true},      {4, 9, 32, ncclFloat32, 24, kRefOneExpert, true},
        {2, 9, 8, ncclBfloat16, 7168, kRefDistinct, true}, {8, 300, 3, ncclBfloat16, 8, kRefMessy, true},
    };
    for (size_t i = 0; i < COUNT(kShapes); ++i) {
        REF_SCOPED RefRun run;
        open_view(&run, env, &kShapes[i], 700 + i);
        in_every_order(&run);
    }
}

EP_TEST(views_without_tokens) {
    REF_SCOPED RefRun run = open_without_tokens(env);
    run.by_rank = run.as_view = true;
    in_every_order(&run);
}

// Casts stay, or are copied where their scales are many, as are all rows whose scales are forwarded: between the former,
// so that banks stay as they were. Lengths change, and combines have rows of another one.
EP_TEST(views_formats) {
    enum { kFormats = 12, kMostBytes = 4096 };
    const Shape shape = {2, 7, 4, ncclBfloat16, kMostBytes / 2, kRefMessy, true};
    REF_SCOPED RefRun run;
    open_view(&run, env, &shape, 720);
    run.shape.hidden = 64;  // of combines
    for (unsigned i = 0; i < kFormats; ++i) {
        RefFormat format = ref_format_draw(820 + i, kMostBytes);
        // Rows as long as those of combines: these leave own ones, among which longer ones come then.
        if (i % 2 == 0) format = ref_format_opaque(ncclUint8, i % 4 == 0 ? 128 : kMostBytes);
        ref_run_set_format(&run, &format);
        ref_dispatch(&run);  // compared before anything else can bring late rows
        for (unsigned turn = 0; turn < 3; ++turn) ref_pair(&run);
        if (i % 3 == 0) pair_in_stages(&run);
    }
}

enum { kBatches = 3 };

// Handles of one group, of which each has a batch.
typedef struct {
    ncclEpGroup_t group;
    RefRun runs[kBatches];
} Batches;

static void open_batches(Batches* batches, const EpEnv* env, uint64_t seed) {
    const RefShape shape = {2 * (unsigned)env->size, 11, 4, ncclBfloat16, 520};
    batches->group = ref_group_new(env, NCCL_EP_ALGO_LOW_LATENCY, &shape);
    for (unsigned i = 0; i < kBatches; ++i) {
        RefRun* run = &batches->runs[i];
        *run = ref_run_open_with(env, batches->group, &shape, kRefMessy, true, ref_ll(seed + 20 * i));
        run->by_rank = run->as_view = true;
    }
}

static void close_batches(Batches* batches, const EpEnv* env) {
    ref_runs_close(batches->runs, kBatches);
    EP_CHECK_NCCL(ncclEpGroupDestroy(batches->group, env->stream));
}

// Two batches overlap, of changing pairs of handles: both views are whole when their combines begin.
EP_TEST(views_of_two_batches) {
    enum { kRounds = 9 };
    Batches batches;
    open_batches(&batches, env, 740);
    for (unsigned round = 0; round < kRounds; ++round) {
        RefRun* first = &batches.runs[round % kBatches];
        RefRun* second = &batches.runs[(round + 1) % kBatches];
        first->in_place = round % 2 == 0;
        second->in_place = round % 3 == 0;
        ref_dispatch(first);
        ref_dispatch(second);
        EP_CHECK(first->view != second->view);
        RefRun* combined_first = round % 4 == 3 ? second : first;
        ref_combine(combined_first);
        ref_combine(combined_first == first ? second : first);
    }
    close_batches(&batches, env);
}

// A third dispatch takes the bank of the first, whose combine must not touch it then.
EP_TEST(views_that_are_overtaken) {
    enum { kRounds = 4 };
    Batches batches;
    open_batches(&batches, env, 760);
    for (unsigned round = 0; round < kRounds; ++round) {
        for (unsigned i = 0; i < kBatches; ++i) ref_dispatch(&batches.runs[i]);
        ref_combine(&batches.runs[0]);
        batches.runs[2].in_place = round % 2 == 0;
        RefRun* last = &batches.runs[2];
        last->keeps_view = true;  // still what the dispatch left there?
        ref_keep_view(last, env->stream);
        ep_sync(env);
        ref_check_dispatch(last);
        for (unsigned i = 1; i < kBatches; ++i) ref_combine(&batches.runs[i]);
    }
    close_batches(&batches, env);
}

static void play_pair(void* context) {
    Batches* batches = context;
    RefRun* run = &batches->runs[0];
    const cudaStream_t stream = run->env->stream;
    EP_CHECK_NCCL(ref_launch_dispatch(run, kRefWhole, stream));
    EP_CHECK_NCCL(ref_launch_combine(run, kRefWhole, stream));
}

// A graph has its view at the same place in each replay, so the operation before the dispatch cleans its bank. Between
// replays others take banks, and leave them.
EP_TEST(views_in_graphs) {
    enum { kReplays = 6 };
    Batches batches;
    open_batches(&batches, env, 780);
    RefRun* run = &batches.runs[0];
    ref_pair(run);
    EpCaptured captured = ep_capture(env->stream, play_pair, &batches);
    for (unsigned i = 0; i < kReplays; ++i) {
        ref_prepare(run);
        ref_routing_free(run->sent);  // what a replay sends
        run->sent = ref_routing_copy(run->now);
        ep_replay(&captured);
        ep_sync(env);
        ref_check(run);
        if (i % 3 == 1) ref_pair(&batches.runs[1]);
        if (i % 3 == 2) ref_dispatch(&batches.runs[2]);
    }
    ep_release_captured(&captured);
    close_batches(&batches, env);
}

// Many operations back to back: ranks are as far apart as the protocol lets them.
EP_TEST(views_back_to_back) {
    enum { kOperations = 60 };
    Batches batches;
    open_batches(&batches, env, 800);
    for (unsigned i = 0; i < 2; ++i) {
        ref_pair(&batches.runs[i]);
        ref_prepare(&batches.runs[i]);
    }
    ep_sync(env);
    for (unsigned i = 0; i < kOperations; ++i) {
        RefRun* run = &batches.runs[i % 2];
        EP_CHECK_NCCL(ref_launch_dispatch(run, kRefWhole, env->stream));
        if (i % 7 != 6) EP_CHECK_NCCL(ref_launch_combine(run, kRefWhole, env->stream));
        if (i % 20 == 19) {
            EP_CHECK_NCCL(ref_launch_combine(run, kRefWhole, env->stream));
            ep_sync(env);
            ref_check(run);
        }
    }
    close_batches(&batches, env);
}
