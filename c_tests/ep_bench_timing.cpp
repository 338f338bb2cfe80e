// The measuring loop. The stream is idle at every start, so the host's share of a call is inside
// its time, and all ranks start an iteration together.
#include "ep_bench_timing.h"

#include <cuda_profiler_api.h>
#include <mpi.h>
#include <nvtx3/nvToolsExt.h>

#include <algorithm>
#include <numeric>
#include <vector>

namespace ep_bench {
namespace {

class Events {
   public:
    Events() {
        for (cudaEvent_t* event : {&start, &mid, &resume, &end}) {
            EP_REQUIRE_CUDA(cudaEventCreate(event));
        }
    }
    ~Events() {
        for (cudaEvent_t event : {start, mid, resume, end}) {
            EP_REQUIRE_CUDA(cudaEventDestroy(event));
        }
    }
    Events(const Events&) = delete;
    Events& operator=(const Events&) = delete;

    cudaEvent_t start{}, mid{}, resume{}, end{};
};

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

double Microseconds(cudaEvent_t from, cudaEvent_t to) {
    float milliseconds = 0;
    EP_REQUIRE_CUDA(cudaEventElapsedTime(&milliseconds, from, to));
    return 1e3 * static_cast<double>(milliseconds);
}

using Sample = std::array<double, kSpans>;

Sample Iterate(const EpEnv& env, bool profile, const Events& events, Session* session) {
    EP_REQUIRE_CUDA(cudaEventRecord(events.start, env.stream));
    {
        const Range range(profile, "dispatch");
        session->Dispatch();
    }
    EP_REQUIRE_CUDA(cudaEventRecord(events.mid, env.stream));
    EP_REQUIRE_CUDA(cudaStreamSynchronize(env.stream));
    EP_REQUIRE_CUDA(cudaEventRecord(events.resume, env.stream));
    {
        const Range range(profile, "combine");
        session->Combine();
    }
    EP_REQUIRE_CUDA(cudaEventRecord(events.end, env.stream));
    EP_REQUIRE_CUDA(cudaStreamSynchronize(env.stream));
    ep_barrier();
    return {Microseconds(events.start, events.mid), Microseconds(events.mid, events.end),
            Microseconds(events.start, events.end), Microseconds(events.resume, events.end)};
}

Stats StatsOf(const std::vector<double>& times) {
    const auto [min, max] = std::minmax_element(times.begin(), times.end());
    const double sum = std::accumulate(times.begin(), times.end(), 0.0);
    return {sum / static_cast<double>(times.size()), *min, *max};
}

double MedianOf(std::vector<double> times) {
    std::sort(times.begin(), times.end());
    const size_t middle = times.size() / 2;
    return times.size() % 2 == 1 ? times[middle] : (times[middle - 1] + times[middle]) / 2;
}

double Reduce(double mine, MPI_Op operation) {
    double all = 0;
    MPI_Reduce(&mine, &all, 1, MPI_DOUBLE, operation, 0, MPI_COMM_WORLD);
    return all;
}

void Summarise(const EpEnv& env, unsigned span, const std::vector<Sample>& samples,
               Timing* timing) {
    std::vector<double> mine;
    for (const Sample& sample : samples) mine.push_back(sample[span]);
    std::vector<double> slowest(mine.size());
    MPI_Reduce(mine.data(), slowest.data(), static_cast<int>(mine.size()), MPI_DOUBLE, MPI_MAX, 0,
               MPI_COMM_WORLD);
    const Stats stats = StatsOf(mine);
    timing->rank[span] = stats;
    timing->all[span] = {Reduce(stats.average_us, MPI_SUM) / env.size,
                         Reduce(stats.min_us, MPI_MIN), Reduce(stats.max_us, MPI_MAX)};
    if (env.rank == 0) timing->median_us[span] = MedianOf(slowest);
}

}  // namespace

Timing Measure(const EpEnv& env, const Options& options, Session* session) {
    const Events events;
    for (unsigned i = 0; i < options.warmup; ++i) Iterate(env, false, events, session);
    std::vector<Sample> samples;
    if (options.profile) EP_REQUIRE_CUDA(cudaProfilerStart());
    for (unsigned i = 0; i < options.iterations; ++i) {
        samples.push_back(Iterate(env, options.profile, events, session));
    }
    if (options.profile) EP_REQUIRE_CUDA(cudaProfilerStop());
    if (samples.size() > 1) samples.erase(samples.begin());
    Timing timing;
    for (unsigned span = 0; span < kSpans; ++span) Summarise(env, span, samples, &timing);
    return timing;
}

}  // namespace ep_bench
