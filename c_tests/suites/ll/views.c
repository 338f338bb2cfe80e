// Rank-major dispatches that leave their rows in memory of the library: views. What they hold is compared as elsewhere;
// here banks of views are filled, cleaned, skipped and taken in turns in every order.
#define _GNU_SOURCE  // usleep
#include <unistd.h>

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

// Rows with scales stay, or are copied where scales are many; the copied ones come in between, so that banks stay as
// they were. Lengths change, and combines have rows of another length.
static void in_all_formats(const EpEnv* env, unsigned max_tokens, uint64_t seed) {
    enum { kFormats = 12, kMostBytes = 4096 };
    const Shape shape = {2, max_tokens, 4, ncclBfloat16, kMostBytes / 2, kRefMessy, true};
    REF_SCOPED RefRun run;
    open_view(&run, env, &shape, seed);
    run.shape.hidden = 64;  // of combines
    for (unsigned i = 0; i < kFormats; ++i) {
        RefFormat format = ref_format_draw(820 + i, kMostBytes);
        // Rows as long as those of combines, which leave own rows: longer rows then arrive among these.
        if (i % 2 == 0) format = ref_format_opaque(ncclUint8, i % 4 == 0 ? 128 : kMostBytes);
        ref_run_set_format(&run, &format);
        ref_dispatch(&run);  // compared before anything else can bring late rows
        for (unsigned turn = 0; turn < 3; ++turn) ref_pair(&run);
        if (i % 3 == 0) pair_in_stages(&run);
    }
}

EP_TEST(views_formats) { in_all_formats(env, 7, 720); }

// Some of a bank's first rows arrive before a block begins, which must not take them for rows of another length. Before
// rows of another length arrive the bank is cleaned, by all blocks.
EP_TEST(views_beside_a_late_block) {
    enum { kRounds = 12, kStepMicroseconds = 60, kLengths = 5 };
    const Shape shape = {2, 5, 4, ncclBfloat16, 1200, kRefDistinct, false};
    for (unsigned round = 0; round < kRounds; ++round) {
        REF_SCOPED RefRun run;
        open_view(&run, env, &shape, 880 + round);
        for (unsigned i = 0; i < kLengths; ++i) {
            const RefFormat format = ref_format_forward(ncclFloat8e4m3, 2048 - i / 2 * 512, ncclFloat32, 16);
            ref_run_set_format(&run, &format);
            ref_prepare_dispatch(&run);
            ep_sync(env);
            const bool is_late = (unsigned)env->rank == round % (unsigned)env->size && ep_hold_block(1);
            EP_CHECK_NCCL(ref_launch_dispatch(&run, kRefWhole, env->stream));
            if (is_late) {
                usleep(round * kStepMicroseconds);
                ep_release_block();
            }
            ref_check_dispatch(&run);
        }
    }
}

// On GPUs rows are copied where there are few: up to 128 pairs of a token and a rank.
EP_TEST(views_formats_of_many) { in_all_formats(env, 65, 724); }

// The rows of few tokens are taken in more parts, by blocks that do not do the same beside it.
EP_TEST(views_of_one_token) {
    enum { kFormats = 12, kMostBytes = 16384 };
    static const unsigned kTokens[] = {1, 1, 3, 0};
    const RefShape shape = {2 * (unsigned)env->size, 65, 8, ncclBfloat16, kMostBytes / 2};
    REF_SCOPED RefRun run = open_by_turns(env, &shape, kTokens, COUNT(kTokens));
    run.by_rank = run.as_view = true;
    in_every_order(&run);
    for (unsigned i = 0; i < kFormats; ++i) {
        const RefFormat format = ref_format_draw(840 + i, kMostBytes);
        ref_run_set_format(&run, &format);
        for (unsigned turn = 0; turn < 3; ++turn) ref_pair(&run);
    }
}

enum { kBatches = 3 };

// Handles of one group, of which each has a batch.
static void open_batches(RefRun* batches, const EpEnv* env, uint64_t seed) {
    // So many that rows of two and of four ranks stay.
    const RefShape shape = {2 * (unsigned)env->size, 33, 4, ncclBfloat16, 520};
    ref_runs_open(batches, kBatches, env, &shape, kRefMessy, true, ref_ll(seed));
    for (unsigned i = 0; i < kBatches; ++i) batches[i].by_rank = batches[i].as_view = true;
}

// Two batches overlap, of changing pairs of handles: both views are whole when their combines begin.
EP_TEST(views_of_two_batches) {
    enum { kRounds = 9 };
    RefRun batches[kBatches];
    open_batches(batches, env, 740);
    for (unsigned round = 0; round < kRounds; ++round) {
        RefRun* first = &batches[round % kBatches];
        RefRun* second = &batches[(round + 1) % kBatches];
        first->in_place = round % 2 == 0;
        second->in_place = round % 3 == 0;
        ref_dispatch(first);
        ref_dispatch(second);
        EP_CHECK(first->view != second->view);
        RefRun* combined_first = round % 4 == 3 ? second : first;
        ref_combine(combined_first);
        ref_combine(combined_first == first ? second : first);
    }
    ref_runs_close(batches, kBatches);
}

// A third dispatch takes the bank of the first, whose combine must not touch it then.
EP_TEST(views_that_are_overtaken) {
    enum { kRounds = 4 };
    RefRun batches[kBatches];
    open_batches(batches, env, 760);
    for (unsigned round = 0; round < kRounds; ++round) {
        for (unsigned i = 0; i < kBatches; ++i) ref_dispatch(&batches[i]);
        ref_combine(&batches[0]);
        batches[2].in_place = round % 2 == 0;
        RefRun* last = &batches[2];
        last->keeps_view = true;  // still what the dispatch left there?
        ref_keep_view(last, env->stream);
        ref_check_dispatch(last);
        for (unsigned i = 1; i < kBatches; ++i) ref_combine(&batches[i]);
    }
    ref_runs_close(batches, kBatches);
}

// A graph has its view at the same place in each replay, so the operation before the dispatch cleans its bank. Between
// replays others take banks, and leave them.
EP_TEST(views_in_graphs) {
    enum { kReplays = 6 };
    RefRun batches[kBatches];
    open_batches(batches, env, 780);
    RefRun* run = &batches[0];
    ref_pair(run);
    EpCaptured captured = ep_capture(env->stream, ref_play_pair, run);
    for (unsigned i = 0; i < kReplays; ++i) {
        ref_prepare(run);
        ref_routing_free(run->sent);  // what a replay sends
        run->sent = ref_routing_copy(run->now);
        ep_replay(&captured);
        ref_check(run);
        if (i % 3 == 1) ref_pair(&batches[1]);
        if (i % 3 == 2) ref_dispatch(&batches[2]);
    }
    ep_release_captured(&captured);
    ref_runs_close(batches, kBatches);
}

// Many operations back to back: ranks are as far apart as the protocol lets them.
EP_TEST(views_back_to_back) {
    enum { kOperations = 60 };
    RefRun batches[kBatches];
    open_batches(batches, env, 800);
    for (unsigned i = 0; i < 2; ++i) {
        ref_pair(&batches[i]);
        ref_prepare(&batches[i]);
    }
    ep_sync(env);
    for (unsigned i = 0; i < kOperations; ++i) {
        RefRun* run = &batches[i % 2];
        EP_CHECK_NCCL(ref_launch_dispatch(run, kRefWhole, env->stream));
        if (i % 7 != 6) EP_CHECK_NCCL(ref_launch_combine(run, kRefWhole, env->stream));
        if (i % 20 == 19) {
            EP_CHECK_NCCL(ref_launch_combine(run, kRefWhole, env->stream));
            ref_check(run);
        }
    }
    ref_runs_close(batches, kBatches);
}

// Between a dispatch that nobody combines and a combine come dispatches of the same handle whose rows are copied: the
// combine leaves the bank of the first one alone, as its rows are not those that came last.
EP_TEST(views_beside_copied_rows) {
    enum { kRounds = 4 };
    const Shape shape = {2, 65, 4, ncclBfloat16, 264, kRefDistinct, false};
    REF_SCOPED RefRun run;
    open_view(&run, env, &shape, 990);
    for (unsigned round = 0; round < kRounds; ++round) {
        ref_dispatch(&run);
        if (round % 2 == 0) ref_pair(&run);
        else ref_dispatch_as(&run, kRefStaged);
        ref_run_draw(&run, kRefNowhere, 5000 + round);
        ref_dispatch_as(&run, kRefStaged);
        ref_combine(&run);
        ref_run_draw(&run, kRefDistinct, 6000 + round);
        ref_pair(&run);
        ref_pair(&run);
    }
}

// A combine in a graph of its own uses the bank that was filled when it was captured, which the handle's last dispatch
// need not have filled.
EP_TEST(views_of_a_captured_combine) {
    enum { kRounds = 3 };
    const Shape shape = {2, 65, 4, ncclBfloat16, 264, kRefDistinct, false};
    REF_SCOPED RefRun run;
    open_view(&run, env, &shape, 995);
    ref_dispatch(&run);
    ref_prepare_combine(&run);
    EpCaptured captured = ep_capture(env->stream, ref_play_combine, &run);
    ref_combine(&run);
    ref_pair(&run);
    for (unsigned round = 0; round < kRounds; ++round) {
        ref_dispatch(&run);  // the bank of the graph
        ref_run_draw(&run, kRefNowhere, 5000 + round);
        ref_dispatch(&run);
        ref_prepare_combine(&run);
        ep_replay(&captured);
        ref_check_combine(&run);
        ref_run_draw(&run, kRefDistinct, 6000 + round);
        ref_pair(&run);
        ref_pair(&run);
    }
    ep_release_captured(&captured);
}

// A receive phase runs late, on another stream. A dispatch of another handle waits for it if both have the same view.
EP_TEST(views_wait_for_late_receive_phases) {
    enum { kLateUs = 100000 };
    RefRun batches[kBatches];
    open_batches(batches, env, 1301);
    ref_pair(&batches[0]);  // makes the views' memory, for which no stream may be held up
    cudaStream_t late = NULL;
    EP_REQUIRE_CUDA(cudaStreamCreate(&late));
    for (unsigned i = 0; i < kBatches; ++i) ref_prepare_dispatch(&batches[i]);
    ep_sync(env);
    EP_CHECK_NCCL(ref_launch_dispatch(&batches[0], kRefStaged, env->stream));
    EpGate gate;
    ep_gate_close(&gate, late);
    EP_CHECK_NCCL(ncclEpComplete(batches[0].handle, NULL, late));
    for (unsigned i = 1; i < kBatches; ++i) EP_CHECK_NCCL(ref_launch_dispatch(&batches[i], kRefWhole, env->stream));
    usleep(kLateUs);
    ep_gate_open(&gate);
    EP_CHECK_CUDA(cudaStreamSynchronize(late));
    batches[2].keeps_view = true;  // still what the dispatch left there?
    ref_keep_view(&batches[2], env->stream);
    for (unsigned i = 1; i < kBatches; ++i) ref_check_dispatch(&batches[i]);
    EP_CHECK_CUDA(cudaStreamDestroy(late));
    ref_runs_close(batches, kBatches);
}

// A descriptor that a call has filled is destroyed as others are.
EP_TEST(views_outlive_their_descriptors) {
    static const Shape kShape = {3, 16, 4, ncclBfloat16, 64, kRefMessy, true};
    REF_SCOPED RefRun run;
    open_view(&run, env, &kShape, 1302);
    for (unsigned i = 0; i < 4; ++i) {
        ref_prepare_dispatch(&run);
        ep_sync(env);
        EP_CHECK_NCCL(ref_launch_dispatch(&run, kRefWhole, env->stream));
        EpView view;
        ep_view_1d(&view, run.view, ncclInt8, NCCL_EP_TENSOR_TAG_TOKENS, 1);
        view.tensor.sizes = NULL;
        view.tensor.strides = NULL;
        EP_CHECK_NCCL(ncclEpTensorDestroy(run.group, &view.tensor));
        EP_CHECK(view.tensor.data == NULL);
        ref_check_dispatch(&run);
        ref_combine(&run);
    }
}

// A staged dispatch is completed when another one has its view.
EP_TEST(views_that_end_before_they_are_complete) {
    RefRun batches[kBatches];
    open_batches(batches, env, 1300);
    for (unsigned i = 0; i < kBatches; ++i) ref_prepare_dispatch(&batches[i]);
    ep_sync(env);
    EP_CHECK_NCCL(ref_launch_dispatch(&batches[0], kRefStaged, env->stream));
    EP_CHECK_NCCL(ref_launch_dispatch(&batches[1], kRefWhole, env->stream));
    EP_CHECK_NCCL(ref_launch_dispatch(&batches[2], kRefStaged, env->stream));
    EP_CHECK_NCCL(ncclEpComplete(batches[2].handle, NULL, env->stream));
    EP_CHECK(batches[0].view == batches[2].view);
    EP_CHECK_NCCL(ncclEpComplete(batches[0].handle, NULL, env->stream));
    ref_check_dispatch(&batches[2]);
    ref_runs_close(batches, kBatches);
}
