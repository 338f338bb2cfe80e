// The ways in which ep_bench times an operation. They answer different questions, so all are reported under their
// names; docs/guide/ep_bench.md says which to compare with what.
#pragma once

#include <array>
#include <functional>
#include <optional>

#include "harness/base.h"
#include "programs/ep_bench/graph.h"
#include "programs/ep_bench/options.h"
#include "programs/ep_bench/stats.h"

namespace ep_bench {

class Session;

// The spans of an iteration of the reference's program:
//   start -- dispatch -- mid -- host waits -- combine -- end
enum Span : unsigned {
    kDispatch,  // start to mid
    kCombine,   // mid to end: includes the host's wait
    kTotal,     // start to end
    kSpans
};

struct ReferenceTimes {
    std::array<Stats, kSpans> rank;         // of this process
    std::array<Stats, kSpans> all;          // over all ranks; process 0
    std::array<Figures, kSpans> slowest{};  // process 0
};

// The cast of --cast outside.
struct CastTimes {
    Figures alone;
    Figures dispatch;  // the cast followed by a dispatch
    Figures pair;      // the cast followed by a dispatch and a combine
};

// One way of issuing the operations; process 0.
struct PacedTimes {
    Figures dispatch;
    Figures combine;
    Figures pair;  // a dispatch followed by a combine
    std::optional<CastTimes> cast{};  // with --cast outside; none of the former contains a cast
};

// Time that the calling thread spends inside the library; process 0.
struct HostTimes {
    Figures dispatch;
    Figures combine;
    Figures complete;
};

// Creating and destroying one more handle, with an idle stream and aligned ranks; process 0.
struct HandleTimes {
    Figures host;    // the calling thread inside ncclEpCreateHandle
    Figures stream;  // events around both calls
};

struct OperationTimes {
    PacedTimes idle;    // events around the calls, from idle streams and aligned ranks
    PacedTimes queued;  // events around operations that waited in the stream: no launch time
    std::optional<PacedTimes> graph;  // replays back to back, for one operation; with the option
    std::optional<PacedTimes> cold;   // the same with a foreign kernel behind each operation, less its time
    std::optional<PacedTimes> cold_queued;  // so queued
    HostTimes host;
};

struct Timing : OperationTimes {
    ReferenceTimes reference;
    std::optional<HandleTimes> handle;  // high throughput: creation exchanges the routing
    std::optional<OperationTimes> nccl_alone;  // on several nodes: NCCL with the same messages
};

// Collective. Runs unmeasured iterations, as many as the options say.
void WarmUp(const EpEnv& env, const Options& options, Session* session);

// Collective. Drops the first measured iteration, unless it is the only one. What graphs have
// captured is timed afterwards, by TimeGraphs: as long as a graph has an operation of a
// communicator, NCCL enqueues all others of it in a slower way.
Timing Measure(const EpEnv& env, const Options& options, Session* session);

// Collective. The same for other operations, and for graphs if the options ask for them.
OperationTimes MeasureOperations(const EpEnv& env, const Options& options, const Calls& calls);

// Collective. `code_us` is asked after each sample for what code behind an operation took.
PacedTimes TimeGraphs(const EpEnv& env, const Options& options, Graphs* graphs,
                      const std::function<double()>& code_us = NoCodeUs);

// Collective. With --between code: the cold times.
void TimeCold(const EpEnv& env, const Options& options, const Calls& calls, OperationTimes* times);

}  // namespace ep_bench
