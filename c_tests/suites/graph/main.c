// CUDA graphs: sequences of operations are captured once and replayed, with new tokens, ids and weights in the same
// memory before each replay; in high throughput, whose handles fix the routing, results and gradients are new, too.
// Covers blocking and staged operations, completion on a second stream, branches of a graph, odd numbers of operations,
// several handles, rows with scales, and operations outside the graph between its replays.
//
// The CPU backend captures nothing. There the same sequences run directly, which checks this
// program's expectations, and the replays are reported as skipped.
#include "harness/graphs.h"
#include "reference/run.h"

enum { kMaxRuns = 2, kReplays = 5, kHidden = 256, kLateReplays = 7 };

static const ncclDataType_t kE4m3 = (ncclDataType_t)10;

// What one step of a sequence does with its handle.
typedef enum {
    kEnd,
    kDispatch,
    kCombine,
    kCached,         // a dispatch of high throughput without ids and weights
    kBackward,       // a combine of high throughput with gradients
    kSendDispatch,   // staged
    kSendCombine,    // staged
    kComplete,       // on the captured stream
    kCompleteAside,  // on a second stream, forked and joined by events
    kCompleteApart,  // the same without a fork: refused
    kFork,           // the second stream goes on from here ...
    kDispatchAside,
    kCombineAside,
    kJoin,  // ... to here
} Action;

typedef struct {
    Action action;
    unsigned run;
} Step;

typedef struct {
    const EpEnv* env;
    RefRun runs[kMaxRuns];
    unsigned num_runs;
    uint64_t seed;
    cudaStream_t aside;
    cudaEvent_t fork, join;
} Fixture;

static Fixture open_fixture(const EpEnv* env, bool ht, unsigned num_runs) {
    const RefShape shape = {2 * (unsigned)env->size, 16, 4, ncclBfloat16, kHidden};
    Fixture fixture = {.env = env, .num_runs = num_runs, .seed = 1};
    const RefOpening opening = ht ? ref_ht_as(kHtRowsExact, kHtNoCounter, 1) : ref_ll(1);
    ref_runs_open(fixture.runs, num_runs, env, &shape, ht ? kRefMessy : kRefDistinct, true, opening);
    ep_open_streams(&fixture.aside, 1);
    EP_REQUIRE_CUDA(cudaEventCreateWithFlags(&fixture.fork, cudaEventDisableTiming));
    EP_REQUIRE_CUDA(cudaEventCreateWithFlags(&fixture.join, cudaEventDisableTiming));
    return fixture;
}

static void close_fixture(Fixture* fixture) {
    EP_REQUIRE_CUDA(cudaEventDestroy(fixture->join));
    EP_REQUIRE_CUDA(cudaEventDestroy(fixture->fork));
    EP_REQUIRE_CUDA(cudaStreamDestroy(fixture->aside));
    ref_runs_close(fixture->runs, fixture->num_runs);
}

// The rows of one handle are cast, those of the other have their scales already.
static void give_scales(Fixture* fixture) {
    const bool ht = fixture->runs[0].ht;
    const RefFormat cast = ref_format_cast(ncclBfloat16, kHidden, ncclFloat32, 128);
    const RefFormat forward = ht ? ref_format_forward(kE4m3, kHidden, ncclFloat32, kHidden / 128)
                                 : ref_format_forward(kE4m3, kHidden, ncclUint8, kHidden / 32);
    ref_run_set_format(&fixture->runs[0], &cast);
    ref_run_set_format(&fixture->runs[1], &forward);
}

// ---- A sequence --------------------------------------------------------------------------------

static void fork_aside(Fixture* fixture) {
    EP_CHECK_CUDA(cudaEventRecord(fixture->fork, fixture->env->stream));
    EP_CHECK_CUDA(cudaStreamWaitEvent(fixture->aside, fixture->fork, 0));
}

static void join_aside(Fixture* fixture) {
    EP_CHECK_CUDA(cudaEventRecord(fixture->join, fixture->aside));
    EP_CHECK_CUDA(cudaStreamWaitEvent(fixture->env->stream, fixture->join, 0));
}

static bool is_captured(cudaStream_t stream) {
    enum cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    EP_REQUIRE_CUDA(cudaStreamIsCapturing(stream, &status));
    return status != cudaStreamCaptureStatusNone;
}

static void play_step(Fixture* fixture, const Step* step) {
    RefRun* run = &fixture->runs[step->run];
    const cudaStream_t stream = fixture->env->stream;
    switch (step->action) {
        case kDispatch: EP_CHECK_NCCL(ref_launch_dispatch(run, kRefWhole, stream)); break;
        case kCached: EP_CHECK_NCCL(ref_launch_dispatch(run, kRefCached, stream)); break;
        case kSendDispatch: EP_CHECK_NCCL(ref_launch_dispatch(run, kRefStaged, stream)); break;
        case kCombine: EP_CHECK_NCCL(ref_launch_combine(run, kRefWhole, stream)); break;
        case kBackward: EP_CHECK_NCCL(ref_launch_combine(run, kRefBackward, stream)); break;
        case kSendCombine: EP_CHECK_NCCL(ref_launch_combine(run, kRefStaged, stream)); break;
        case kComplete: EP_CHECK_NCCL(ncclEpComplete(run->handle, NULL, stream)); break;
        case kCompleteAside:
            fork_aside(fixture);
            EP_CHECK_NCCL(ncclEpComplete(run->handle, NULL, fixture->aside));
            join_aside(fixture);
            break;
        case kCompleteApart:
            if (!is_captured(stream)) break;  // then it would be valid
            EP_CHECK_RESULT(ncclEpComplete(run->handle, NULL, fixture->aside), ncclInvalidUsage);
            break;
        case kFork: fork_aside(fixture); break;
        case kDispatchAside: EP_CHECK_NCCL(ref_launch_dispatch(run, kRefWhole, fixture->aside)); break;
        case kCombineAside: EP_CHECK_NCCL(ref_launch_combine(run, kRefWhole, fixture->aside)); break;
        case kJoin: join_aside(fixture); break;
        case kEnd: break;
    }
}

typedef struct {
    Fixture* fixture;
    const Step* steps;
} Sequence;

static void play(void* context) {
    const Sequence* sequence = context;
    for (const Step* step = sequence->steps; step->action != kEnd; ++step) play_step(sequence->fixture, step);
}

static bool contains(const Step* steps, unsigned run, Action action) {
    for (; steps->action != kEnd; ++steps) {
        if (steps->action == action && steps->run == run) return true;
    }
    return false;
}

static bool dispatches(const Step* steps, unsigned run) {
    return contains(steps, run, kDispatch) || contains(steps, run, kCached) || contains(steps, run, kSendDispatch) ||
           contains(steps, run, kDispatchAside);
}

static bool combines(const Step* steps, unsigned run) {
    return contains(steps, run, kCombine) || contains(steps, run, kBackward) || contains(steps, run, kSendCombine) ||
           contains(steps, run, kCombineAside);
}

// Writes new contents to all memory that the sequence reads. A replay makes no call of the library, so this function
// records what low latency sends. High throughput sends by its handle, whatever ids and weights a dispatch gets.
static void renew(Fixture* fixture, const Step* steps) {
    for (unsigned i = 0; i < fixture->num_runs; ++i) {
        RefRun* run = &fixture->runs[i];
        if (dispatches(steps, i)) {
            const RefStyle style = (RefStyle)(fixture->seed % kRefNumStyles);
            ref_run_draw(run, style, ++fixture->seed);
            if (!run->ht) {
                ref_routing_free(run->sent);
                run->sent = ref_routing_copy(run->now);
            }
            ref_prepare_dispatch(run);
        }
        if (combines(steps, i)) ref_prepare_combine(run);
    }
}

static void check(Fixture* fixture, const Step* steps) {
    for (unsigned i = 0; i < fixture->num_runs; ++i) {
        if (dispatches(steps, i)) ref_check_dispatch(&fixture->runs[i]);
        if (combines(steps, i)) ref_check_combine(&fixture->runs[i]);
    }
}

// ---- A captured sequence -----------------------------------------------------------------------

typedef enum { kLl, kHt, kLlScaled, kHtScaled } Kind;

// Captures; then some replays with new data each; then replays back to back.
static void capture_and_replay(EpEnv* env, unsigned num_runs, Kind kind, const Step* steps) {
    Fixture fixture = open_fixture(env, kind == kHt || kind == kHtScaled, num_runs);
    if (kind == kLlScaled || kind == kHtScaled) give_scales(&fixture);
    Sequence sequence = {&fixture, steps};
    renew(&fixture, steps);  // a capture reads no data, but a direct call does
    const EpCaptured captured = ep_capture(env->stream, play, &sequence);
    for (unsigned i = 0; i < kReplays; ++i) {
        renew(&fixture, steps);
        ep_replay(&captured);
        check(&fixture, steps);
    }
    renew(&fixture, steps);
    for (unsigned i = 0; i < kLateReplays; ++i) ep_replay(&captured);
    check(&fixture, steps);
    ep_release_captured(&captured);
    close_fixture(&fixture);
}

// ---- The cases ---------------------------------------------------------------------------------

#define SEQUENCE_OF(test, name, num_runs, kind, ...)           \
    test(name) {                                               \
        static const Step kSteps[] = {__VA_ARGS__, {kEnd, 0}}; \
        capture_and_replay(env, num_runs, kind, kSteps);       \
    }
#define SEQUENCE(name, num_runs, ...) SEQUENCE_OF(EP_TEST, name, num_runs, kLl, __VA_ARGS__)

SEQUENCE(dispatch_alone, 1, {kDispatch, 0})
SEQUENCE(dispatch_and_combine, 1, {kDispatch, 0}, {kCombine, 0})
SEQUENCE(odd_number_of_operations, 1, {kDispatch, 0}, {kDispatch, 0}, {kCombine, 0})
SEQUENCE(staged, 1, {kSendDispatch, 0}, {kComplete, 0}, {kSendCombine, 0}, {kComplete, 0})
SEQUENCE(completed_on_a_second_stream, 1, {kSendDispatch, 0}, {kCompleteAside, 0}, {kSendCombine, 0},
         {kCompleteAside, 0})
// Completing on a stream that is not captured does not pull it into the capture; the call can be repeated.
SEQUENCE(completed_outside, 1, {kSendDispatch, 0}, {kCompleteApart, 0}, {kComplete, 0}, {kCombine, 0})
SEQUENCE(two_handles, 2, {kDispatch, 0}, {kDispatch, 1}, {kCombine, 0}, {kCombine, 1}, {kDispatch, 0})
// Only the library orders the operations of the graph's two branches.
SEQUENCE(two_branches, 2, {kFork, 0}, {kDispatch, 0}, {kDispatchAside, 1}, {kCombine, 0}, {kCombineAside, 1},
         {kJoin, 0})
SEQUENCE(two_handles_staged, 2, {kSendDispatch, 0}, {kSendDispatch, 1}, {kComplete, 0}, {kCompleteAside, 1},
         {kSendCombine, 0}, {kSendCombine, 1}, {kComplete, 1}, {kComplete, 0})

SEQUENCE_OF(EP_TEST, rows_with_scales, 2, kLlScaled, {kDispatch, 0}, {kDispatch, 1}, {kCombine, 0}, {kCombine, 1})
// A handle that goes forward, and one that goes backward.
#define THERE_AND_BACK {kDispatch, 0}, {kCached, 1}, {kCombine, 0}, {kBackward, 1}
SEQUENCE_OF(EP_TEST_HT, ht_dispatches_and_combines, 2, kHt, THERE_AND_BACK)
SEQUENCE_OF(EP_TEST_HT, ht_rows_with_scales, 2, kHtScaled, THERE_AND_BACK)

// Operations keep their numbering across graphs and direct calls, also of handles that are new.
static void between_direct_ones(EpEnv* env, bool ht) {
    static const Step kOdd[] = {{kDispatch, 0}, {kEnd, 0}};
    Fixture fixture = open_fixture(env, ht, 2);
    RefRun *run = &fixture.runs[0], *other = &fixture.runs[1];
    Sequence odd = {&fixture, kOdd};
    const EpCaptured captured = ep_capture(env->stream, play, &odd);
    for (unsigned i = 0; i < kReplays; ++i) {
        renew(&fixture, kOdd);
        ep_replay(&captured);
        check(&fixture, kOdd);
        ref_combine_as(run, i % 2 == 0 ? kRefBackward : kRefWhole);
        if (i % 2 == 1) {
            const RefOpening opening = ref_opening(ht, kHtRowsExact, kHtNoCounter, 20 + i);
            ref_run_close(other);
            *other = ref_run_open_with(env, run->group, &run->shape, kRefMessy, true, opening);
        }
        ref_dispatch(other);
        if (i % 2 == 0) ref_combine_as(other, kRefBackward);
    }
    ep_release_captured(&captured);
    close_fixture(&fixture);
}
EP_TEST(between_direct_operations) { between_direct_ones(env, false); }
EP_TEST_HT(ht_between_direct_operations) { between_direct_ones(env, true); }

// A graph for each half of a layer, replayed alternately and in other orders.
static void replay_halves(EpEnv* env, const Step* there_steps, const Step* back_steps) {
    Fixture fixture = open_fixture(env, false, 1);
    ref_dispatch(&fixture.runs[0]);  // a combine needs a dispatch before it, also at its capture
    Sequence there_sequence = {&fixture, there_steps}, back_sequence = {&fixture, back_steps};
    const EpCaptured there = ep_capture(env->stream, play, &there_sequence);
    const EpCaptured back = ep_capture(env->stream, play, &back_sequence);
    for (unsigned i = 0; i < kReplays; ++i) {
        renew(&fixture, there_steps);
        ep_replay(&there);
        check(&fixture, there_steps);
        for (unsigned n = 0; n <= i % 3; ++n) {
            renew(&fixture, back_steps);
            ep_replay(&back);
            check(&fixture, back_steps);
        }
    }
    ep_release_captured(&there);
    ep_release_captured(&back);
    close_fixture(&fixture);
}

EP_TEST(two_graphs) {
    static const Step kThere[] = {{kDispatch, 0}, {kEnd, 0}};
    static const Step kBack[] = {{kSendCombine, 0}, {kCompleteAside, 0}, {kEnd, 0}};
    replay_halves(env, kThere, kBack);
}

// Each graph uses both staged slots of the group, so the second uses those of the first.
EP_TEST(two_staged_graphs) {
    static const Step kThere[] = {
        {kSendDispatch, 0}, {kCompleteAside, 0}, {kSendDispatch, 0}, {kCompleteAside, 0}, {kEnd, 0}};
    static const Step kBack[] = {
        {kSendCombine, 0}, {kCompleteAside, 0}, {kSendCombine, 0}, {kCompleteAside, 0}, {kEnd, 0}};
    replay_halves(env, kThere, kBack);
}
