// The result of one measurement, collected on process 0: times, rows by each convention, memory and validation.
#pragma once

#include <optional>
#include <vector>

#include "programs/ep_bench/network.h"
#include "programs/ep_bench/options.h"
#include "programs/ep_bench/routing.h"
#include "programs/ep_bench/timing.h"
#include "programs/ep_bench/validate.h"

namespace ep_bench {

// One rank's averages in microseconds, its rows and its memory. Plain doubles, so one gather collects them.
struct RankFigures {
    double dispatch_us;
    double combine_us;
    double total_us;
    double pair;
    double dedup;
    double wire;
    double node;
    double received;
    double wire_in;
    double network_rows;     // each token once for each other node with one of its experts
    double network_dispatch;  // bytes that the library sends to other nodes
    double network_combine;
    double library_bytes;
    double tensor_bytes;
};

// Blocks of the largest kernel of each operation; one block occupies an SM. 0 if the driver does not say.
struct Blocks {
    unsigned dispatch = 0;
    unsigned combine = 0;
};

struct Result {
    Tokens tokens;
    unsigned nodes = 1;
    unsigned max_tokens = 0;
    Timing timing;
    std::vector<RankFigures> ranks;  // process 0
    std::optional<Wrong> wrong;      // with --validate
    std::optional<Blocks> blocks;    // with --use-cuda-graph

    // One figure over all ranks; process 0 only.
    double Mean(double RankFigures::* figure) const;
    double Max(double RankFigures::* figure) const;

    // Imbalance of the received rows: the largest of any rank over the mean; 1 is even.
    double Imbalance() const;
};

// What a rank sends: rows by each convention, and messages to other nodes.
struct Sent {
    Traffic traffic;
    Network network;
};

// Collective.
Result Collect(const EpEnv& env, const Timing& timing, const Sent& sent, const Session& session, const Shape& shape);

// Bytes of one row sent and returned. The flag changes only the formula of dispatch: one byte per
// element, a scale per 128 elements and a header.
double DispatchRowBytes(const Options& options);
double CombineRowBytes(const Options& options);

// What a cast outside writes of a row; its scales are not padded.
double CastRowBytes(const Options& options);

// The convention usually quoted for a mode: pair for low latency, dedup for high throughput.
double RankFigures::* UsualConvention(const Options& options);
const char* UsualConventionName(const Options& options);

inline double GigabytesPerSecond(double bytes, double microseconds) {
    return microseconds > 0 ? bytes / 1e3 / microseconds : 0;
}

}  // namespace ep_bench
