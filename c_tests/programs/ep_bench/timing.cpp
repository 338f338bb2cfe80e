// The measuring loops for plain calls; graph.cpp has those for graphs.
#include "programs/ep_bench/timing.h"

#include <cuda_profiler_api.h>
#include <nvtx3/nvToolsExt.h>

#include <algorithm>
#include <chrono>
#include <future>
#include <vector>

#include "programs/ep_bench/events.h"

namespace ep_bench {
namespace {

using HostClock = std::chrono::steady_clock;

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

struct ReferenceEvents {
    Event start, mid, end;
};

using ReferenceSample = std::array<double, kSpans>;

ReferenceSample IterateReference(const EpEnv& env, bool profile, ReferenceEvents* events,
                                 Session* session) {
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
    return {events->mid.MicrosecondsSince(events->start),
            events->end.MicrosecondsSince(events->mid),
            events->end.MicrosecondsSince(events->start)};
}

ReferenceTimes MeasureReference(const EpEnv& env, const Options& options, Session* session) {
    ReferenceEvents events;
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

struct CallSamples {
    Samples dispatch, combine, complete;
};

template <typename Call>
void TimeCall(Call call, Samples* samples) {
    const HostClock::time_point before = HostClock::now();
    call();
    samples->push_back(
        std::chrono::duration<double, std::micro>(HostClock::now() - before).count());
}

struct EventPair {
    Event start, end;
};

template <typename Operation>
void TimeFromIdle(const EpEnv& env, EventPair* events, Operation operation, Samples* samples) {
    events->start.Record(env.stream);
    operation();
    events->end.Record(env.stream);
    Settle(env);
    samples->push_back(events->end.MicrosecondsSince(events->start));
}

void MeasureIdle(const EpEnv& env, const Options& options, Session* session, Timing* timing) {
    CallSamples calls;
    const auto dispatch = [&] {
        TimeCall([&] { session->CallDispatch(); }, &calls.dispatch);
        TimeCall([&] { session->CallComplete(); }, &calls.complete);
    };
    const auto combine = [&] {
        TimeCall([&] { session->CallCombine(); }, &calls.combine);
        TimeCall([&] { session->CallComplete(); }, &calls.complete);
    };
    EventPair events;
    Samples dispatched, combined, pair;
    for (unsigned i = 0; i < options.iterations; ++i) {
        TimeFromIdle(env, &events, dispatch, &dispatched);
        TimeFromIdle(env, &events, combine, &combined);
    }
    const auto both = [session] {
        session->Dispatch();
        session->Combine();
    };
    for (unsigned i = 0; i < options.iterations; ++i) {
        TimeFromIdle(env, &events, both, &pair);
    }
    for (Samples* samples :
         {&dispatched, &combined, &pair, &calls.dispatch, &calls.combine, &calls.complete}) {
        DropFirst(samples);
    }
    timing->idle = {SlowestRank(dispatched), SlowestRank(combined), SlowestRank(pair)};
    timing->host = {SlowestRank(calls.dispatch), SlowestRank(calls.combine),
                    SlowestRank(calls.complete)};
}

// Handle memory comes from the group once a handle has been created and destroyed. So the first
// sample is dropped, even if it is the only one.
HandleTimes MeasureHandles(const EpEnv& env, const Options& options, Session* session) {
    Samples host, stream;
    EventPair events;
    ncclEpHandle_t handle = nullptr;
    const auto make_and_destroy = [&] {
        TimeCall([&] { handle = session->CallCreateHandle(); }, &host);
        EP_REQUIRE_NCCL(ncclEpHandleDestroy(handle));
    };
    for (unsigned i = 0; i <= options.iterations; ++i) {
        TimeFromIdle(env, &events, make_and_destroy, &stream);
    }
    DropFirst(&host);
    DropFirst(&stream);
    return {SlowestRank(host), SlowestRank(stream)};
}

// ---- Operations that are in the stream before their turn comes ---------------------------------

// Blocks a stream until it is opened, so that the host finishes its part first.
class Gate {
   public:
    explicit Gate(cudaStream_t stream) {
        EP_REQUIRE_CUDA(cudaLaunchHostFunc(stream, &Gate::Wait, &opened_));
    }
    void Open() { open_.set_value(); }

   private:
    static void Wait(void* opened) { static_cast<std::shared_future<void>*>(opened)->wait(); }

    std::promise<void> open_;
    std::shared_future<void> opened_ = open_.get_future().share();
};

// Small enough for a batch to fit into the driver's launch queue: a call that waited for room there
// would wait for a gate that nobody opens.
constexpr unsigned kMaxPairsOfBatch = 16;

struct PairEvents {
    Event start, mid, end;
};

void RunBatch(const EpEnv& env, std::vector<PairEvents>* events, Session* session) {
    Gate gate(env.stream);
    for (PairEvents& pair : *events) {
        pair.start.Record(env.stream);
        session->Dispatch();
        pair.mid.Record(env.stream);
        session->Combine();
        pair.end.Record(env.stream);
    }
    ep_barrier();
    gate.Open();
    Settle(env);
}

PacedTimes MeasureQueued(const EpEnv& env, const Options& options, Session* session) {
    // The first pair of a batch does not count: the gates of the ranks do not open at the same
    // moment.
    std::vector<PairEvents> events(std::min(kMaxPairsOfBatch, options.iterations + 1));
    Samples dispatched, combined, both;
    while (both.size() < options.iterations) {
        RunBatch(env, &events, session);
        for (size_t i = 1; i < events.size(); ++i) {
            const PairEvents& pair = events[i];
            dispatched.push_back(pair.mid.MicrosecondsSince(pair.start));
            combined.push_back(pair.end.MicrosecondsSince(pair.mid));
            both.push_back(pair.end.MicrosecondsSince(pair.start));
        }
    }
    return {SlowestRank(dispatched), SlowestRank(combined), SlowestRank(both)};
}

}  // namespace

void WarmUp(const EpEnv& env, const Options& options, Session* session) {
    ReferenceEvents events;
    for (unsigned i = 0; i < options.warmup; ++i) IterateReference(env, false, &events, session);
}

Timing Measure(const EpEnv& env, const Options& options, Session* session, Graphs* graphs) {
    Timing timing;
    timing.reference = MeasureReference(env, options, session);
    MeasureIdle(env, options, session, &timing);
    if (!options.low_latency()) timing.handle = MeasureHandles(env, options, session);
    timing.queued = MeasureQueued(env, options, session);
    if (graphs != nullptr) {
        timing.graph = {graphs->dispatch.TimeReplays(env, options),
                        graphs->combine.TimeReplays(env, options),
                        graphs->pair.TimeReplays(env, options)};
    }
    return timing;
}

}  // namespace ep_bench
