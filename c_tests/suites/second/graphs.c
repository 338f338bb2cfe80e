// How routes count: updates in graphs, and a rank that is late. Each replay routes by the ids that are there then,
// beside updates outside of graphs.
#define _GNU_SOURCE  // usleep
#include <unistd.h>

#include "harness/graphs.h"
#include "suites/second/run.h"

enum { kReplays = 3 };

static void play(void* context) {
    const Run* run = context;
    EP_CHECK_NCCL(run_update(run));
    EP_CHECK_NCCL(run_dispatch(run, NCCL_EP_FWD_PASS));
    EP_CHECK_NCCL(run_combine(run, NCCL_EP_BWD_PASS));
}

static void check_replay(const EpCaptured* captured, const Run* run) {
    run_poison(run);
    ep_replay(captured);
    ep_sync(run->env);
    if (run->test->kind == kHtFlat) run_check_counters(run);
    run_check_dispatch(run, NCCL_EP_FWD_PASS);
    run_check_combine(run, NCCL_EP_BWD_PASS);
}

static void replay_beside(const EpEnv* env, const Case* test, const Case* other_test) {
    Run run, other;
    run_open(&run, env, NULL, test, 900);
    run_open(&other, env, run.group, other_test, 910);
    run_init(&run);
    run_init(&other);
    const EpCaptured captured = ep_capture(env->stream, play, &run);
    for (unsigned i = 0; i < kReplays; ++i) {
        run_renew(&run, 920 + i);
        check_replay(&captured, &run);
        // As often as it shows whether both count alike.
        for (unsigned turn = 0; turn < i; ++turn) {
            run_renew(&other, 930 + turn);
            EP_CHECK_NCCL(run_update(&other));
        }
        if (i > 0) {
            run_check_counters(&other);
            run_exchange(&other, NCCL_EP_FWD_PASS);
            run_exchange(&other, NCCL_EP_BWD_PASS);
        }
        // Twice with the same ids.
        check_replay(&captured, &run);
    }
    ep_release_captured(&captured);
    run_close(&other);
    run_close(&run);
}

// Uneven tokens, with room for all of their rows.
static Case uneven_case(const EpEnv* env) {
    Case test = kSmallHt;
    test.max_tokens = 12;
    test.top_k = 3;
    test.local_experts = 3;
    test.uneven = true;
    test.recv_rows = (unsigned)env->size * test.max_tokens;
    return test;
}

EP_TEST(updates_are_captured) {
    if (!ranks_share_a_node()) return;
    Case test = uneven_case(env);
    const Case other = test;
    replay_beside(env, &test, &other);
    test.in_memory = true;
    test.narrow_ids = true;
    replay_beside(env, &test, &other);
}

EP_TEST(updates_that_drop_rows_are_captured) {
    if (!ranks_share_a_node()) return;
    Case test = uneven_case(env);
    test.drops = true;
    test.recv_rows = 12;
    replay_beside(env, &test, &test);
}

EP_TEST(updates_by_expert_are_captured) {
    if (!ranks_share_a_node()) return;
    Case test = uneven_case(env);
    test.kind = kHtZones;
    test.alignment = 4;
    test.recv_rows = 24;
    test.drops = true;
    replay_beside(env, &test, &test);
}

// A handle whose operations are in a graph, and which then gets another routing; and a handle that got one after it,
// whose memory may be what the first one's was.
typedef struct {
    ncclEpPassDir_t returning;  // of combines
    Run run, next, later;       // as captured; the same handle now; the other one
    EpCaptured captured;
} Rerouted;

static void play_routed(void* context) {
    const Rerouted* it = context;
    EP_CHECK_NCCL(run_dispatch(&it->run, NCCL_EP_FWD_PASS));
    EP_CHECK_NCCL(run_combine(&it->run, it->returning));
}

static void reroute(Rerouted* it, const EpEnv* env, const Case* test) {
    run_open(&it->run, env, NULL, test, 950);
    run_open(&it->later, env, it->run.group, test, 960);
    run_init(&it->run);
    run_init(&it->later);
    EP_CHECK_NCCL(run_update(&it->run));
    ep_sync(env);
    it->captured = ep_capture(env->stream, play_routed, it);
    it->next = it->later;
    it->next.handle = it->run.handle;
    EP_CHECK_NCCL(run_update(&it->next));
    EP_CHECK_NCCL(run_update(&it->later));
}

static void check_replayed(const Rerouted* it) {
    run_check_dispatch(&it->run, NCCL_EP_FWD_PASS);
    run_check_combine(&it->run, it->returning);
    run_exchange(&it->next, NCCL_EP_FWD_PASS);
}

static void close_rerouted(Rerouted* it) {
    ep_release_captured(&it->captured);
    run_close(&it->later);
    run_close(&it->run);
}

static bool replays_are_calls(void) {
    if (ep_on_host_backend()) ep_skip("on the CPU backend a replay is a call");
    return ep_on_host_backend();
}

// Operations in a graph keep the routing that their handle had when they were captured.
EP_TEST(a_routing_stays_in_its_graph) {
    if (!ranks_share_a_node() || replays_are_calls()) return;
    const Case test = uneven_case(env);
    Rerouted it = {.returning = NCCL_EP_BWD_PASS};
    reroute(&it, env, &test);
    for (unsigned i = 0; i < kReplays; ++i) {
        run_poison(&it.run);
        ep_replay(&it.captured);
        check_replayed(&it);
    }
    close_rerouted(&it);
}

// What a dispatch in a graph leaves for its combine is in the way of no other handle, whatever routing its own has.
EP_TEST(low_latency_memory_stays_in_its_graph) {
    if (replays_are_calls()) return;
    Case test = kSmallLl;
    test.uneven = true;
    Rerouted it = {.returning = NCCL_EP_FWD_PASS};
    reroute(&it, env, &test);
    for (unsigned i = 0; i < kReplays; ++i) {
        run_poison(&it.run);
        run_poison(&it.later);
        EP_CHECK_NCCL(run_dispatch(&it.later, NCCL_EP_FWD_PASS));
        ep_replay(&it.captured);
        EP_CHECK_NCCL(run_combine(&it.later, NCCL_EP_FWD_PASS));
        run_check_dispatch(&it.later, NCCL_EP_FWD_PASS);
        run_check_combine(&it.later, NCCL_EP_FWD_PASS);
        check_replayed(&it);
    }
    close_rerouted(&it);
}

// How many rows come is not known before each replay.
EP_TEST(rows_that_are_counted_first_are_not_captured) {
    const Case test = kSmallHt;
    Run run;
    run_open(&run, env, NULL, &test, 940);
    run_route(&run);
    if (ep_begin_capture(env->stream)) {
        CHECK_REFUSED(run_dispatch(&run, NCCL_EP_FWD_PASS), ncclInvalidUsage,
                      "stream: must not be captured in a group without max_recv_tokens_per_rank");
        EP_CHECK_CUDA(cudaGraphDestroy(ep_end_capture(env->stream)));
    }
    run_exchange(&run, NCCL_EP_FWD_PASS);
    run_close(&run);
}

static void play_update(void* run) { EP_CHECK_NCCL(run_update(run)); }

// Each replay brings its own number of rows, for which operations outside of the graph need room.
EP_TEST(rows_of_replayed_updates_are_counted_anew) {
    if (!ranks_share_a_node()) return;
    Case many = kSmallHt, few = kSmallHt;
    many.style = kRefOneRank;
    Run runs[2];
    run_open(&runs[0], env, NULL, &many, 941);
    run_open(&runs[1], env, runs[0].group, &few, 942);
    run_init(&runs[0]);
    const EpCaptured captured = ep_capture(env->stream, play_update, &runs[0]);
    const RefBuffer* ids = &runs[0].buffers[kIds];
    for (unsigned i = 0; i < 2; ++i) {
        runs[1].handle = runs[0].handle;
        EP_CHECK_CUDA(cudaMemcpy(ref_buffer_data(ids), ref_buffer_data(&runs[i].buffers[kIds]), ids->bytes,
                                 cudaMemcpyDefault));
        ep_replay(&captured);
        ep_sync(env);
        run_exchange(&runs[i], NCCL_EP_FWD_PASS);
        run_exchange(&runs[i], NCCL_EP_BWD_PASS);
    }
    ep_release_captured(&captured);
    runs[1].handle = NULL;
    run_close(&runs[1]);
    run_close(&runs[0]);
}

enum { kLateTokens = 2, kLateMicroseconds = 100000 };

typedef struct {
    ncclEpHandle_t handle;
    RefBuffer total;
} Late;

// All tokens go to the first rank, which has none.
static void update_late(const EpEnv* env, const Late* late, const RefBuffer* ids) {
    View view, total;
    view_of(&view, ref_buffer_data(ids), ncclInt64, env->rank == 0 ? 0 : kLateTokens, 1, 0);
    view.tensor.ndim = 2;
    view_of(&total, ref_buffer_data(&late->total), ncclInt32, 1, 0, 0);
    ncclEpLayoutInfo_t info = NCCL_EP_LAYOUT_INFO_INIT;
    info.recv_total_counter = &total.tensor;
    EP_CHECK_NCCL(ncclEpUpdateHandle(late->handle, &view.tensor, &info, env->stream));
}

// The first rank's receiving block begins when the others are in their second route.
static void route_late(const EpEnv* env, Kind kind) {
    Case test = kSmallHt;
    test.kind = kind;
    test.top_k = 1;
    test.recv_rows = (unsigned)env->size * test.max_tokens;
    ncclEpGroup_t group = group_of(env, &test);
    const int64_t all_zero[kLateTokens] = {0};
    RefBuffer ids = ref_buffer_new_input(sizeof(all_zero));
    ref_buffer_upload(&ids, all_zero);
    Late late[2];
    for (unsigned i = 0; i < 2; ++i) {
        late[i].total = ref_buffer_new(sizeof(int32_t));
        EP_CHECK_NCCL(ncclEpInitHandle(&late[i].handle, group, layout_of(&test), NULL, (int)test.top_k, NULL));
    }
    ep_sync(env);
    const bool is_held = env->rank == 0 && ep_hold_block(1);
    for (unsigned i = 0; i < 2; ++i) update_late(env, &late[i], &ids);
    if (env->rank != 0 && ep_on_cpu_build()) usleep(kLateMicroseconds);
    ep_barrier();
    if (is_held) ep_release_block();
    ep_sync(env);
    const int32_t expected = env->rank == 0 ? kLateTokens * (env->size - 1) : 0;
    for (unsigned i = 0; i < 2; ++i) {
        REF_CHECK_BUFFER(&late[i].total, &expected);
        ref_buffer_free(&late[i].total);
        EP_CHECK_NCCL(ncclEpHandleDestroy(late[i].handle));
    }
    EP_CHECK_NCCL(ncclEpGroupDestroy(group));
    ref_buffer_free(&ids);
}

EP_TEST(a_rank_that_is_late_to_hear_reads_its_own_route) {
    if (!ranks_share_a_node()) return;
    route_late(env, kHtFlat);
    route_late(env, kHtZones);
}
