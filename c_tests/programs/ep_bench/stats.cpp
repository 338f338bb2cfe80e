// Medians, percentiles and their reductions over the ranks.
#include "programs/ep_bench/stats.h"

#include <mpi.h>

#include <algorithm>
#include <cmath>
#include <numeric>

namespace ep_bench {
namespace {

double Percentile(const Samples& sorted, double percent) {
    const double rank = std::ceil(percent / 100 * static_cast<double>(sorted.size()));
    return sorted[static_cast<size_t>(std::max(rank, 1.0)) - 1];
}

double Median(const Samples& sorted) {
    const size_t middle = sorted.size() / 2;
    return sorted.size() % 2 == 1 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
}

double Reduce(double mine, MPI_Op operation) {
    double all = 0;
    MPI_Reduce(&mine, &all, 1, MPI_DOUBLE, operation, 0, MPI_COMM_WORLD);
    return all;
}

}  // namespace

Figures FiguresOf(Samples samples) {
    std::sort(samples.begin(), samples.end());
    return {Median(samples), samples.front(), Percentile(samples, 90), Percentile(samples, 99)};
}

Stats StatsOf(const Samples& samples) {
    const auto [min, max] = std::minmax_element(samples.begin(), samples.end());
    const double sum = std::accumulate(samples.begin(), samples.end(), 0.0);
    return {sum / static_cast<double>(samples.size()), *min, *max};
}

Figures SlowestRank(const Samples& mine) {
    const Figures own = FiguresOf(mine);
    return {Reduce(own.median_us, MPI_MAX), Reduce(own.min_us, MPI_MAX),
            Reduce(own.p90_us, MPI_MAX), Reduce(own.p99_us, MPI_MAX)};
}

Stats OverRanks(const Stats& mine, int ranks) {
    return {Reduce(mine.average_us, MPI_SUM) / ranks, Reduce(mine.min_us, MPI_MIN), Reduce(mine.max_us, MPI_MAX)};
}

void DropFirst(Samples* samples) {
    if (samples->size() > 1) samples->erase(samples->begin());
}

}  // namespace ep_bench
