// The measuring loops for plain calls; graph.h has those for graphs.
#include "programs/ep_bench/timing.h"

#include <cuda_profiler_api.h>
#include <nvtx3/nvToolsExt.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <future>
#include <vector>

#include "harness/nodes.h"
#include "programs/ep_bench/between/between.h"
#include "programs/ep_bench/calls.h"
#include "programs/ep_bench/session.h"

namespace ep_bench {
namespace {

// A named range in the profiler's time line, when profiling.
class Range {
   public:
    Range(bool enabled, const char* name) : enabled_(enabled) {
        if (enabled_) nvtxRangePushA(name);
    }
    ~Range() {
        if (enabled_) nvtxRangePop();
    }
    Range(const Range&) = delete;
    Range& operator=(const Range&) = delete;

   private:
    bool enabled_;
};

// Waits until no stream has work of an earlier iteration, and aligns the ranks.
void Settle(const EpEnv& env) {
    EP_REQUIRE_CUDA(cudaStreamSynchronize(env.stream));
    ep_barrier();
}

// ---- As the reference's program measures -------------------------------------------------------

// Around two operations, or around one, without `mid`.
struct Events {
    Event start, mid, end;
};

using ReferenceSample = std::array<double, kSpans>;

ReferenceSample IterateReference(const EpEnv& env, bool profile, Events* events, Session* session) {
    events->start.Record(env.stream);
    {
        const Range range(profile, "dispatch");
        session->Dispatch();
    }
    events->mid.Record(env.stream);
    EP_REQUIRE_CUDA(cudaStreamSynchronize(env.stream));
    {
        const Range range(profile, "combine");
        session->Combine();
    }
    events->end.Record(env.stream);
    Settle(env);
    return {events->mid.MicrosecondsSince(events->start), events->end.MicrosecondsSince(events->mid),
            events->end.MicrosecondsSince(events->start)};
}

ReferenceTimes MeasureReference(const EpEnv& env, const Options& options, Session* session) {
    Events events;
    std::array<Samples, kSpans> samples;
    if (options.profile) EP_REQUIRE_CUDA(cudaProfilerStart());
    for (unsigned i = 0; i < options.iterations; ++i) {
        const ReferenceSample sample = IterateReference(env, options.profile, &events, session);
        for (unsigned span = 0; span < kSpans; ++span) samples[span].push_back(sample[span]);
    }
    if (options.profile) EP_REQUIRE_CUDA(cudaProfilerStop());
    ReferenceTimes times;
    for (unsigned span = 0; span < kSpans; ++span) {
        DropFirst(&samples[span]);
        times.rank[span] = StatsOf(samples[span]);
        times.all[span] = OverRanks(times.rank[span], env.size);
        times.slowest[span] = SlowestRank(samples[span]);
    }
    return times;
}

// ---- Every operation from an idle stream, and host time ----------------------------------------

template <typename Operation>
void TimeFromIdle(const EpEnv& env, Events* events, Operation operation, Samples* samples) {
    events->start.Record(env.stream);
    operation();
    events->end.Record(env.stream);
    Settle(env);
    samples->push_back(events->end.MicrosecondsSince(events->start));
}

CastTimes MeasureIdleCast(const EpEnv& env, const Options& options, const Calls& calls) {
    Events events;
    Samples alone, with_dispatch, with_pair;
    for (unsigned i = 0; i < options.iterations; ++i) {
        TimeFromIdle(env, &events, calls.call_cast, &alone);
        TimeFromIdle(env, &events, [&] { calls.CastAndDispatch(); }, &with_dispatch);
        calls.Combine();
        Settle(env);
    }
    for (unsigned i = 0; i < options.iterations; ++i) {
        TimeFromIdle(env, &events, [&] { calls.CastAndPair(); }, &with_pair);
    }
    for (Samples* samples : {&alone, &with_dispatch, &with_pair}) DropFirst(samples);
    return {SlowestRank(alone), SlowestRank(with_dispatch), SlowestRank(with_pair)};
}

void MeasureIdle(const EpEnv& env, const Options& options, const Calls& calls, OperationTimes* times) {
    struct {
        Samples dispatch, combine, complete;
    } host;
    const auto dispatch = [&] {
        TimeCall(calls.call_dispatch, &host.dispatch);
        TimeCall(calls.call_complete, &host.complete);
    };
    const auto combine = [&] {
        TimeCall(calls.call_combine, &host.combine);
        TimeCall(calls.call_complete, &host.complete);
    };
    Events events;
    Samples dispatched, combined, pair;
    for (unsigned i = 0; i < options.iterations; ++i) {
        TimeFromIdle(env, &events, dispatch, &dispatched);
        TimeFromIdle(env, &events, combine, &combined);
    }
    for (unsigned i = 0; i < options.iterations; ++i) TimeFromIdle(env, &events, [&] { calls.Pair(); }, &pair);
    for (Samples* samples : {&dispatched, &combined, &pair, &host.dispatch, &host.combine, &host.complete}) {
        DropFirst(samples);
    }
    times->idle = {SlowestRank(dispatched), SlowestRank(combined), SlowestRank(pair)};
    times->host = {SlowestRank(host.dispatch), SlowestRank(host.combine), SlowestRank(host.complete)};
    if (calls.call_cast) times->idle.cast = MeasureIdleCast(env, options, calls);
}

// Handle memory comes from the group once a handle has been created and destroyed. So the first
// sample is dropped, even if it is the only one.
HandleTimes MeasureHandles(const EpEnv& env, const Options& options, Session* session) {
    Samples host, stream;
    Events events;
    ncclEpHandle_t handle = nullptr;
    const auto make_and_destroy = [&] {
        TimeCall([&] { handle = session->CallCreateHandle(); }, &host);
        EP_REQUIRE_NCCL(ncclEpHandleDestroy(handle));
    };
    for (unsigned i = 0; i <= options.iterations; ++i) TimeFromIdle(env, &events, make_and_destroy, &stream);
    DropFirst(&host);
    DropFirst(&stream);
    return {SlowestRank(host), SlowestRank(stream)};
}

// ---- Operations that are in the stream before their turn comes ---------------------------------

// Blocks a stream until it is opened, so that the host finishes its part first. After a while it opens by itself: a
// call on the host may wait for the stream, or for the driver's thread, which waits here.
class Gate {
   public:
    explicit Gate(cudaStream_t stream) { EP_REQUIRE_CUDA(cudaLaunchHostFunc(stream, &Gate::Wait, this)); }
    Gate(const Gate&) = delete;
    Gate& operator=(const Gate&) = delete;

    void Open() { open_.set_value(); }
    // Whether it was opened in time; once the stream has passed it.
    bool was_opened() const { return was_opened_; }

   private:
    static void Wait(void* argument) {
        constexpr std::chrono::seconds kPatience(30);
        auto* gate = static_cast<Gate*>(argument);
        gate->was_opened_ = gate->opened_.wait_for(kPatience) == std::future_status::ready;
    }

    std::promise<void> open_;
    std::future<void> opened_ = open_.get_future();
    std::atomic<bool> was_opened_ = false;
};

// Few enough for a batch to fit into the driver's launch queue: a call that waited for room there would wait for the
// gate. On several nodes an operation has many entries there, and NCCL has room for some hundred messages.
unsigned MaxPairsOfBatch(const Options& options) {
    if (ep_num_nodes() == 1) return 16;
    return options.low_latency() ? 4 : 2;
}

void RunBatch(const EpEnv& env, const Enqueue& first, const Enqueue& second, std::vector<Events>* events) {
    Gate gate(env.stream);
    for (Events& pair : *events) {
        pair.start.Record(env.stream);
        first();
        pair.mid.Record(env.stream);
        second();
        pair.end.Record(env.stream);
    }
    ep_barrier();
    gate.Open();
    Settle(env);
    EP_REQUIRE(gate.was_opened());
}

struct PairTimes {
    Figures first, second, both;
};

PairTimes MeasureBatches(const EpEnv& env, const Options& options, const Enqueue& first, const Enqueue& second) {
    // The first pair of a batch does not count: the gates of the ranks do not open at the same moment.
    std::vector<Events> events(std::min(MaxPairsOfBatch(options), options.iterations + 1));
    Samples firsts, seconds, both;
    while (both.size() < options.iterations) {
        RunBatch(env, first, second, &events);
        for (size_t i = 1; i < events.size(); ++i) {
            const Events& pair = events[i];
            firsts.push_back(pair.mid.MicrosecondsSince(pair.start));
            seconds.push_back(pair.end.MicrosecondsSince(pair.mid));
            both.push_back(pair.end.MicrosecondsSince(pair.start));
        }
    }
    return {SlowestRank(firsts), SlowestRank(seconds), SlowestRank(both)};
}

PacedTimes MeasureQueued(const EpEnv& env, const Options& options, const Calls& calls) {
    const auto combine = [&] { calls.Combine(); };
    const PairTimes plain = MeasureBatches(env, options, [&] { calls.Dispatch(); }, combine);
    PacedTimes times = {plain.first, plain.second, plain.both};
    if (!calls.call_cast) return times;
    const PairTimes with_cast = MeasureBatches(env, options, [&] { calls.CastAndDispatch(); }, combine);
    // Behind a combine, as in a layer.
    const PairTimes cast = MeasureBatches(env, options, calls.call_cast, [&] { calls.Pair(); });
    times.cast = {cast.first, with_cast.first, with_cast.both};
    return times;
}

// High-throughput operations are long, so a few replays are enough.
Pace PaceOf(const Options& options) { return options.low_latency() ? Pace{3, 20} : Pace{1, 4}; }

// Collective. TakeCodeUs of the rank whose code took longest, as the others wait for it in their operations.
double MostCodeUs() {
    double most = TakeCodeUs();
    MPI_Allreduce(MPI_IN_PLACE, &most, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
    return most;
}

// The times of operations less the code behind each, which takes `code_us`.
PacedTimes Without(double code_us, PacedTimes times) {
    times.dispatch.Subtract(code_us);
    times.combine.Subtract(code_us);
    times.pair.Subtract(2 * code_us);
    if (times.cast) {
        times.cast->dispatch.Subtract(code_us);
        times.cast->pair.Subtract(2 * code_us);
    }
    return times;
}

}  // namespace

void WarmUp(const EpEnv& env, const Options& options, Session* session) {
    Events events;
    for (unsigned i = 0; i < options.warmup; ++i) IterateReference(env, false, &events, session);
}

Timing Measure(const EpEnv& env, const Options& options, Session* session) {
    const Calls calls = session->MakeCalls();
    Timing timing;
    timing.reference = MeasureReference(env, options, session);
    MeasureIdle(env, options, calls, &timing);
    if (!options.low_latency()) timing.handle = MeasureHandles(env, options, session);
    timing.queued = MeasureQueued(env, options, calls);
    return timing;
}

OperationTimes MeasureOperations(const EpEnv& env, const Options& options, const Calls& calls) {
    OperationTimes times;
    for (unsigned i = 0; i < options.warmup; ++i) {
        calls.Pair();
        Settle(env);
    }
    MeasureIdle(env, options, calls, &times);
    times.queued = MeasureQueued(env, options, calls);
    if (options.use_cuda_graph) {
        Graphs graphs(env, options.graph_ops, calls);
        times.graph = TimeGraphs(env, options, &graphs);
    }
    return times;
}

PacedTimes TimeGraphs(const EpEnv& env, const Options& options, Graphs* graphs,
                      const std::function<double()>& code_us) {
    // With so much code in the graph's operation.
    const auto time = [&](Graph& graph, unsigned codes) {
        return graph.TimeReplays(env, PaceOf(options), options.iterations, [&] { return codes * code_us(); });
    };
    PacedTimes times = {time(graphs->dispatch, 1), time(graphs->combine, 1), time(graphs->pair, 2)};
    if (!graphs->cast) return times;
    times.cast = {time(graphs->cast->alone, 0), time(graphs->cast->dispatch, 1), time(graphs->cast->pair, 2)};
    return times;
}

// What code takes is measured where it runs: rows of an operation displace it from the L2 cache, so that behind one
// with many it takes longer than behind itself. Only its launch is taken from code alone.
void TimeCold(const EpEnv& env, const Options& options, const Calls& calls, OperationTimes* times) {
    unsigned turn = 0;
    const auto code = [&] { EP_REQUIRE_CUDA(EnqueueCode(env.stream, turn++)); };
    // Now, as code that loads at its first use may not be loaded during a capture.
    while (turn < kCodes) code();
    Settle(env);
    Calls followed = calls;
    followed.call_complete = [&] {
        calls.call_complete();
        code();
    };
    TakeCodeUs();
    const double code_us = MeasureBatches(env, options, code, code).first.median_us;
    const double launch_of_queued_us = code_us - MostCodeUs();
    const PacedTimes queued = MeasureQueued(env, options, followed);
    times->cold_queued = Without(launch_of_queued_us + MostCodeUs(), queued);
    Graphs graphs(env, options.graph_ops, followed);
    Graph launches(env.stream, options.graph_ops, code);
    const Figures launch = launches.TimeReplays(env, PaceOf(options), options.iterations, MostCodeUs);
    times->cold = Without(launch.median_us, TimeGraphs(env, options, &graphs, MostCodeUs));
}

}  // namespace ep_bench
