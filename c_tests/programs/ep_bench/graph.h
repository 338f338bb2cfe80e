// CUDA graphs of the operations: capture, replay, and the time of a replay. A model server replays
// a graph for each step of a model, so this is the speed its users see.
#pragma once

#include <functional>
#include <optional>
#include <string>

#include "harness/harness.h"
#include "programs/ep_bench/calls.h"
#include "programs/ep_bench/options.h"
#include "programs/ep_bench/stats.h"

namespace ep_bench {

class Graph {
   public:
    // Captures what `operation` enqueues on the stream, `times` times in a row.
    Graph(cudaStream_t stream, unsigned times, const std::function<void()>& operation);
    ~Graph();
    Graph(const Graph&) = delete;
    Graph& operator=(const Graph&) = delete;

    void Launch(cudaStream_t stream);

    // Collective. Each sample is the time of one operation: the mean of several replays back to back.
    Figures TimeReplays(const EpEnv& env, const Options& options);

    unsigned Blocks() const;  // of its largest kernel; 0 if the driver does not say

   private:
    unsigned times_;
    cudaGraph_t graph_ = nullptr;
    cudaGraphExec_t executable_ = nullptr;
};

struct CastGraphs {
    CastGraphs(const EpEnv& env, const Options& options, const Calls& calls);

    Graph alone;
    Graph dispatch;  // behind the cast
    Graph pair;      // likewise
};

struct Graphs {
    Graphs(const EpEnv& env, const Options& options, const Calls& calls);

    Graph dispatch;
    Graph combine;
    Graph pair;
    std::optional<CastGraphs> cast;  // with --cast outside
};

// Why the stream cannot be captured at all; empty if it can. Leaves the stream unchanged.
std::string WhyNoCapture(cudaStream_t stream);

}  // namespace ep_bench
