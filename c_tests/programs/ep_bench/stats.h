// Statistics of repeated measurements: over the samples of a rank, then over the ranks, where the
// slowest one counts, because an operation is over when it is over everywhere.
#ifndef C_TESTS_PROGRAMS_EP_BENCH_STATS_H_
#define C_TESTS_PROGRAMS_EP_BENCH_STATS_H_

#include <vector>

namespace ep_bench {

using Samples = std::vector<double>;  // microseconds

struct Figures {
    double median_us = 0;
    double min_us = 0;
    double p90_us = 0;
    double p99_us = 0;
};

// Mean and extremes, as the reference's program reports them.
struct Stats {
    double average_us = 0;
    double min_us = 0;
    double max_us = 0;
};

// Of at least one sample. A percentile is the smallest sample with that share of samples at or
// below.
Figures FiguresOf(Samples samples);
Stats StatsOf(const Samples& samples);

// Collective. Each figure is the largest of all ranks' own ones; the result is for process 0.
Figures SlowestRank(const Samples& mine);

// Collective. Mean of the averages, min of the mins, max of the maxes; for process 0.
Stats OverRanks(const Stats& mine, int ranks);

// The first sample belongs to the warm-up if there are more.
void DropFirst(Samples* samples);

}  // namespace ep_bench

#endif  // C_TESTS_PROGRAMS_EP_BENCH_STATS_H_
