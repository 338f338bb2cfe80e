// CUDA graphs of the operations: capture, replay, and the time of a replay. A model server replays
// a graph for each step of a model, so this is the speed its users see. The capture mode is the strictest one: a call
// that could disturb a capture in any thread fails. What works here works in every framework.
#pragma once

#include <functional>
#include <optional>
#include <string>

#include "programs/ep_bench/calls.h"
#include "programs/ep_bench/machine.h"
#include "programs/ep_bench/stats.h"

namespace ep_bench {

// Replays per sample, and replays before its first event. The latter keep the stream busy while the
// host runs ahead, so the sample contains neither a launch nor the skew of the ranks.
struct Pace {
    unsigned run_up;
    unsigned replays;
};

// What other kernels took of an operation's time.
inline double NoCodeUs() { return 0; }

// Collective. Each sample is the time of one of the `operations` that `replay` enqueues: the mean of several replays
// back to back, less what `of_others` says that other kernels took of it.
inline Figures TimeReplays(const EpEnv& env, Pace pace, unsigned iterations, unsigned operations,
                           const Enqueue& replay, const std::function<double()>& of_others = NoCodeUs) {
    Event start, end;
    Samples samples;
    for (unsigned i = 0; i < iterations; ++i) {
        ep_barrier();
        for (unsigned k = 0; k < pace.run_up; ++k) replay();
        start.Record(env.stream);
        for (unsigned k = 0; k < pace.replays; ++k) replay();
        end.Record(env.stream);
        EP_REQUIRE_CUDA(cudaStreamSynchronize(env.stream));
        samples.push_back(end.MicrosecondsSince(start) / (pace.replays * operations) - of_others());
    }
    DropFirst(&samples);
    return SlowestRank(samples);
}

class Graph {
   public:
    // Captures what `operation` enqueues on the stream, `times` times in a row.
    Graph(cudaStream_t stream, unsigned times, const Enqueue& operation) : times_(times) {
        EP_REQUIRE_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
        for (unsigned i = 0; i < times; ++i) operation();
        EP_REQUIRE_CUDA(cudaStreamEndCapture(stream, &graph_));
        EP_REQUIRE_CUDA(cudaGraphInstantiate(&executable_, graph_, 0));
    }
    ~Graph() {
        EP_REQUIRE_CUDA(cudaGraphExecDestroy(executable_));
        EP_REQUIRE_CUDA(cudaGraphDestroy(graph_));
    }
    Graph(const Graph&) = delete;
    Graph& operator=(const Graph&) = delete;

    void Launch(cudaStream_t stream) { EP_REQUIRE_CUDA(cudaGraphLaunch(executable_, stream)); }

    Figures TimeReplays(const EpEnv& env, Pace pace, unsigned iterations,
                        const std::function<double()>& of_others = NoCodeUs) {
        return ep_bench::TimeReplays(env, pace, iterations, times_, [&] { Launch(env.stream); }, of_others);
    }

    // Of its largest kernel; 0 if the driver does not say.
    unsigned Blocks() const { return LargestGrid(graph_); }

   private:
    unsigned times_;
    cudaGraph_t graph_ = nullptr;
    cudaGraphExec_t executable_ = nullptr;
};

struct CastGraphs {
    CastGraphs(const EpEnv& env, unsigned times, const Calls& calls)
        : alone(env.stream, times, [&] { calls.call_cast(); }),
          dispatch(env.stream, times, [&] { calls.CastAndDispatch(); }),
          pair(env.stream, times, [&] { calls.CastAndPair(); }) {}

    Graph alone;
    Graph dispatch;  // behind the cast
    Graph pair;      // likewise
};

struct Graphs {
    Graphs(const EpEnv& env, unsigned times, const Calls& calls)
        : dispatch(env.stream, times, [&] { calls.Dispatch(); }),
          combine(env.stream, times, [&] { calls.Combine(); }),
          pair(env.stream, times, [&] { calls.Pair(); }) {
        if (calls.call_cast) cast.emplace(env, times, calls);
    }

    Graph dispatch;
    Graph combine;
    Graph pair;
    std::optional<CastGraphs> cast;  // with --cast outside
};

// Why the stream cannot be captured at all; empty if it can. Leaves the stream unchanged.
inline std::string WhyNoCapture(cudaStream_t stream) {
    cudaGraph_t graph = nullptr;
    cudaError_t error = cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal);
    if (error == cudaSuccess) error = cudaStreamEndCapture(stream, &graph);
    if (error == cudaSuccess) error = cudaGraphDestroy(graph);
    if (error == cudaSuccess) return "";
    cudaGetLastError();  // the refusal is reported; clear it for later calls
    return std::string("no stream capture here: ") + cudaGetErrorString(error);
}

}  // namespace ep_bench
