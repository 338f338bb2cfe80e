// Collecting the figures of all ranks, and the byte formulas of the conventions.
#include "programs/ep_bench/result.h"

#include <mpi.h>

#include <algorithm>

#include "harness/nodes.h"

namespace ep_bench {

double Result::Mean(double RankFigures::* figure) const {
    double sum = 0;
    for (const RankFigures& rank : ranks) sum += rank.*figure;
    return ranks.empty() ? 0 : sum / static_cast<double>(ranks.size());
}

double Result::Max(double RankFigures::* figure) const {
    double max = 0;
    for (const RankFigures& rank : ranks) max = std::max(max, rank.*figure);
    return max;
}

double Result::Imbalance() const {
    const double mean = Mean(&RankFigures::received);
    return mean > 0 ? Max(&RankFigures::received) / mean : 1;
}

Result Collect(const EpEnv& env, const Timing& timing, const Sent& sent, const Session& session, const Shape& shape) {
    const Traffic& traffic = sent.traffic;
    constexpr int kFigures = sizeof(RankFigures) / sizeof(double);
    const RankFigures mine = {timing.reference.rank[kDispatch].average_us,
                              timing.reference.rank[kCombine].average_us,
                              timing.reference.rank[kTotal].average_us,
                              static_cast<double>(traffic.pair),
                              static_cast<double>(traffic.dedup),
                              static_cast<double>(traffic.wire),
                              static_cast<double>(traffic.node),
                              static_cast<double>(traffic.received),
                              static_cast<double>(traffic.wire_in),
                              static_cast<double>(sent.network.rows_once),
                              static_cast<double>(sent.network.dispatch.SentBytes()),
                              static_cast<double>(sent.network.combine.SentBytes()),
                              session.library_bytes(),
                              session.tensor_bytes()};
    Result result;
    result.tokens = shape.tokens;
    result.nodes = ep_num_nodes();
    result.max_tokens = shape.max_tokens;
    result.timing = timing;
    if (env.rank == 0) result.ranks.resize(static_cast<size_t>(env.size));
    MPI_Gather(&mine, kFigures, MPI_DOUBLE, result.ranks.data(), kFigures, MPI_DOUBLE, 0, MPI_COMM_WORLD);
    return result;
}

double DispatchRowBytes(const Options& options) {
    const unsigned hidden = options.hidden;
    if (options.rows.scaled) return static_cast<double>(ref_format_slot_bytes(&*options.rows.scaled));
    return options.use_fp8 ? hidden + 4 * (hidden / 128) + 16 : 2 * hidden;
}

double CombineRowBytes(const Options& options) { return 2 * options.hidden; }

double CastRowBytes(const Options& options) {
    const RefFormat& format = *options.rows.scaled;
    return static_cast<double>(ref_format_out_bytes(&format) + ref_format_scale_bytes(&format));
}

double RankFigures::* UsualConvention(const Options& options) {
    return options.low_latency() && !options.by_rank ? &RankFigures::pair : &RankFigures::dedup;
}

const char* UsualConventionName(const Options& options) {
    return options.low_latency() && !options.by_rank ? "pair" : "dedup";
}

}  // namespace ep_bench
