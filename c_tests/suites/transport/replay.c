// Operations in a graph: they arrive in every replay, and have the deadline in every replay.
#include "harness/graphs.h"
#include "suites/transport/transport.h"

// Replays behind each other outlast the deadline, and each of them is short.
enum { kBatches = 100, kReplaysPerBatch = 50, kChecked = 3 };

static cudaGraphExec_t capture(Way* way, unsigned exchanges, cudaStream_t stream) {
    EP_REQUIRE(ep_begin_capture(stream));
    for (unsigned op = 0; op < exchanges; ++op) EP_CHECK_EQ_I64(enqueue(way, op % kOpsInFlight, stream), 0);
    return ep_instantiate(ep_end_capture(stream));
}

static void replay_and_check(Way* way, cudaGraphExec_t graph, cudaStream_t stream) {
    for (unsigned op = 0; op < kOpsInFlight; ++op) prepare(way, op);
    EP_CHECK_CUDA(cudaGraphLaunch(graph, stream));
    EP_CHECK_CUDA(cudaStreamSynchronize(stream));
    for (unsigned op = 0; op < kOpsInFlight; ++op) check_received(way, op);
}

static void replay_for_long(Way* way, cudaGraphExec_t graph, cudaStream_t stream) {
    for (unsigned batch = 0; batch < kBatches; ++batch) {
        for (unsigned i = 0; i < kReplaysPerBatch; ++i) EP_CHECK_CUDA(cudaGraphLaunch(graph, stream));
        EP_CHECK_CUDA(cudaStreamSynchronize(stream));
    }
    EP_CHECK_EQ_I64(epProbeRailHealth(way->rail), 0);
}

static void stop_victim(DeathRank* self) {
    meet(self, kReady, self->env.size);
    if (is_victim(self)) stop_for_good(self);
    wait_for_loss(self);
}

DEATH_CASE(a_rank_stops_before_a_replay, kVictimStops) {
    Way way;
    cudaStream_t stream = self->env.stream;
    EP_REQUIRE(open_way(&way, self, &self->env) == 0);
    exchange_rounds(&way, 1, stream);
    cudaGraphExec_t graph = capture(&way, kOpsInFlight, stream);
    for (unsigned i = 0; i < kChecked; ++i) replay_and_check(&way, graph, stream);
    replay_for_long(&way, graph, stream);
    // Operations outside of the graph in between.
    exchange_rounds(&way, 1, stream);
    replay_and_check(&way, graph, stream);
    stop_victim(self);
    const double start = ep_seconds();
    stage("launches the graph");
    for (unsigned i = 0; i < kChecked; ++i) EP_CHECK_CUDA(cudaGraphLaunch(graph, stream));
    stage("has launched it");
    if (talks_to_victim(self, &way)) {
        expect_failure(self, &way, start);
        // Or NCCL tells that another rank has given up.
        const bool first = survivors(self) == 1 || strstr(epProbeText(), "NCCL error ") == NULL;
        if (first) EP_CHECK_STR_CONTAINS(epProbeText(), ", replayed by a graph");
    }
    expect_end_of_stream(self, start);
    const double closing = ep_seconds();
    close_way(&way);
    stage("has closed");
    check_stage_in_time(self, closing);
    EP_CHECK_CUDA(cudaGraphExecDestroy(graph));
    meet(self, kNoticed, survivors(self));
    go_on(self);
}

// A graph with as many exchanges as the layers of a large model have. What was launched before the failure still runs
// after it, and NCCL's aborted kernels take their time (docs/several-nodes.md): so one launch is in flight.
static void lose_before_a_long_replay(DeathRank* self, void (*lose)(DeathRank* self)) {
    enum { kExchanges = 300, kMsToAbort = 60 };
    Way way;
    cudaStream_t stream = self->env.stream;
    EP_REQUIRE(open_way(&way, self, &self->env) == 0);
    exchange_rounds(&way, 1, stream);
    cudaGraphExec_t graph = capture(&way, kExchanges, stream);
    replay_and_check(&way, graph, stream);
    lose(self);
    const double start = ep_seconds();
    EP_CHECK_CUDA(cudaGraphLaunch(graph, stream));
    if (talks_to_victim(self, &way)) expect_failure(self, &way, start);
    self->slack_ms += kExchanges * kMsToAbort;
    expect_end_of_stream(self, start);
    close_way(&way);
    EP_CHECK_CUDA(cudaGraphExecDestroy(graph));
    meet(self, kNoticed, survivors(self));
    go_on(self);
}

DEATH_CASE(a_rank_stops_before_a_long_replay, kVictimStops) { lose_before_a_long_replay(self, stop_victim); }

DEATH_CASE(a_rank_dies_before_a_long_replay, kVictimDies) { lose_before_a_long_replay(self, lose_victim); }
