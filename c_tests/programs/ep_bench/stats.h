// Statistics of repeated measurements: over the samples of a rank, then over the ranks. There the
// slowest counts, because an operation ends when it has ended everywhere.
#pragma once

#include <mpi.h>

#include <algorithm>
#include <cmath>
#include <numeric>
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

inline double Percentile(const Samples& sorted, double percent) {
    const double rank = std::ceil(percent / 100 * static_cast<double>(sorted.size()));
    return sorted[static_cast<size_t>(std::max(rank, 1.0)) - 1];
}

inline double Median(const Samples& sorted) {
    const size_t middle = sorted.size() / 2;
    return sorted.size() % 2 == 1 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
}

inline double Reduce(double mine, MPI_Op operation) {
    double all = 0;
    MPI_Reduce(&mine, &all, 1, MPI_DOUBLE, operation, 0, MPI_COMM_WORLD);
    return all;
}

// Needs at least one sample. A percentile is the smallest sample with that share of samples at or below it.
inline Figures FiguresOf(Samples samples) {
    std::sort(samples.begin(), samples.end());
    return {Median(samples), samples.front(), Percentile(samples, 90), Percentile(samples, 99)};
}

inline Stats StatsOf(const Samples& samples) {
    const auto [min, max] = std::minmax_element(samples.begin(), samples.end());
    const double sum = std::accumulate(samples.begin(), samples.end(), 0.0);
    return {sum / static_cast<double>(samples.size()), *min, *max};
}

// Collective. Each figure is the largest of all ranks' own figures; the result is for process 0.
inline Figures SlowestRank(const Samples& mine) {
    const Figures own = FiguresOf(mine);
    return {Reduce(own.median_us, MPI_MAX), Reduce(own.min_us, MPI_MAX),
            Reduce(own.p90_us, MPI_MAX), Reduce(own.p99_us, MPI_MAX)};
}

// Collective. Mean of the averages, min of the mins, max of the maxes; for process 0.
inline Stats OverRanks(const Stats& mine, int ranks) {
    return {Reduce(mine.average_us, MPI_SUM) / ranks, Reduce(mine.min_us, MPI_MIN), Reduce(mine.max_us, MPI_MAX)};
}

// Drops the first sample as warm-up, unless it is the only one.
inline void DropFirst(Samples* samples) {
    if (samples->size() > 1) samples->erase(samples->begin());
}

}  // namespace ep_bench
