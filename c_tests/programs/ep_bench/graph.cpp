// Capture and timed replay. The capture mode is the strictest one: a call that could disturb a
// capture in any thread fails. What works here works in every framework.
#include "programs/ep_bench/graph.h"

#include "programs/ep_bench/machine.h"

namespace ep_bench {
namespace {

// Replays per sample, and replays before its first event. The latter keep the stream busy while the
// host runs ahead, so the sample contains neither a launch nor the skew of the ranks.
// High-throughput operations are long, so a few replays are enough.
struct Pace {
    unsigned run_up;
    unsigned replays;
};
constexpr Pace kShortOperations = {3, 20};
constexpr Pace kLongOperations = {1, 4};

}  // namespace

Graph::Graph(cudaStream_t stream, unsigned times, const std::function<void()>& operation) : times_(times) {
    EP_REQUIRE_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    for (unsigned i = 0; i < times; ++i) operation();
    EP_REQUIRE_CUDA(cudaStreamEndCapture(stream, &graph_));
    EP_REQUIRE_CUDA(cudaGraphInstantiate(&executable_, graph_, 0));
}

Graph::~Graph() {
    EP_REQUIRE_CUDA(cudaGraphExecDestroy(executable_));
    EP_REQUIRE_CUDA(cudaGraphDestroy(graph_));
}

void Graph::Launch(cudaStream_t stream) { EP_REQUIRE_CUDA(cudaGraphLaunch(executable_, stream)); }

Figures Graph::TimeReplays(const EpEnv& env, const Options& options) {
    const Pace pace = options.low_latency() ? kShortOperations : kLongOperations;
    Event start, end;
    Samples samples;
    for (unsigned i = 0; i < options.iterations; ++i) {
        ep_barrier();
        for (unsigned replay = 0; replay < pace.run_up; ++replay) Launch(env.stream);
        start.Record(env.stream);
        for (unsigned replay = 0; replay < pace.replays; ++replay) Launch(env.stream);
        end.Record(env.stream);
        EP_REQUIRE_CUDA(cudaStreamSynchronize(env.stream));
        samples.push_back(end.MicrosecondsSince(start) / (pace.replays * times_));
    }
    DropFirst(&samples);
    return SlowestRank(samples);
}

unsigned Graph::Blocks() const { return LargestGrid(graph_); }

CastGraphs::CastGraphs(const EpEnv& env, const Options& options, const Calls& calls)
    : alone(env.stream, options.graph_ops, [&] { calls.call_cast(); }),
      dispatch(env.stream, options.graph_ops, [&] { calls.CastAndDispatch(); }),
      pair(env.stream, options.graph_ops, [&] {
          calls.CastAndDispatch();
          calls.Combine();
      }) {}

Graphs::Graphs(const EpEnv& env, const Options& options, const Calls& calls)
    : dispatch(env.stream, options.graph_ops, [&] { calls.Dispatch(); }),
      combine(env.stream, options.graph_ops, [&] { calls.Combine(); }),
      pair(env.stream, options.graph_ops, [&] {
          calls.Dispatch();
          calls.Combine();
      }) {
    if (calls.call_cast) cast.emplace(env, options, calls);
}

std::string WhyNoCapture(cudaStream_t stream) {
    cudaGraph_t graph = nullptr;
    cudaError_t error = cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal);
    if (error == cudaSuccess) error = cudaStreamEndCapture(stream, &graph);
    if (error == cudaSuccess) error = cudaGraphDestroy(graph);
    if (error == cudaSuccess) return "";
    cudaGetLastError();  // the refusal is reported; clear it for later calls
    return std::string("no stream capture here: ") + cudaGetErrorString(error);
}

}  // namespace ep_bench
