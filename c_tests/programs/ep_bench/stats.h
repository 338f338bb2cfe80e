// Statistics of repeated measurements: over the samples of a rank, then over the ranks. There the
// slowest counts, because an operation ends when it has ended everywhere.
#pragma once

#include <vector>

namespace ep_bench {

using Samples = std::vector<double>;  // microseconds

struct Figures {
    double median_us = 0;
    double min_us = 0;
    double p90_us = 0;
    double p99_us = 0;

    void Subtract(double us) {
        for (double* figure : {&median_us, &min_us, &p90_us, &p99_us}) *figure -= us;
    }
};

// Mean and extremes, as the reference's program reports them.
struct Stats {
    double average_us = 0;
    double min_us = 0;
    double max_us = 0;
};

// Needs at least one sample. A percentile is the smallest sample with that share of samples at or below it.
Figures FiguresOf(Samples samples);
Stats StatsOf(const Samples& samples);

// Collective. Each figure is the largest of all ranks' own figures; the result is for process 0.
Figures SlowestRank(const Samples& mine);

// Collective. Mean of the averages, min of the mins, max of the maxes; for process 0.
Stats OverRanks(const Stats& mine, int ranks);

// Drops the first sample as warm-up, unless it is the only one.
void DropFirst(Samples* samples);

}  // namespace ep_bench
