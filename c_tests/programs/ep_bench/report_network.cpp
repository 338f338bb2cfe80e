// The text of ep_bench about the network between nodes: bytes, and the library beside NCCL alone.
#include <algorithm>
#include <cstdio>
#include <string>

#include "programs/ep_bench/report.h"

namespace ep_bench {
namespace {

constexpr double kMegabyte = 1e6;

struct Bytes {
    double dispatch;
    double combine;
};

void PrintBytes(const char* name, const Bytes& bytes, const PacedTimes& idle) {
    printf("  %-42s %8.3f MB %7.2f GB/s %8.3f MB %7.2f GB/s\n", name, bytes.dispatch / kMegabyte,
           GigabytesPerSecond(bytes.dispatch, idle.dispatch.median_us), bytes.combine / kMegabyte,
           GigabytesPerSecond(bytes.combine, idle.combine.median_us));
}

void PrintPair(const Figures& alone, const Figures& library) {
    printf(" %10.2f %10.2f %10.2f", alone.median_us, library.median_us, library.median_us - alone.median_us);
}

void PrintOperation(const Result& result, int width, bool dispatch) {
    const Timing& times = result.timing;
    const OperationTimes& alone = *times.nccl_alone;
    const auto of = [dispatch](const auto& both) { return dispatch ? both.dispatch : both.combine; };
    const double bytes = result.Mean(dispatch ? &RankFigures::network_dispatch : &RankFigures::network_combine);
    const auto print = [&](const char* way, const PacedTimes& library, const PacedTimes& nccl) {
        const Figures ours = of(library);
        const Figures theirs = of(nccl);
        printf("  %-8s %*s %12.0f %-7s", dispatch ? "dispatch" : "combine", width,
               NameOf(result.tokens).c_str(), bytes, way);
        PrintPair(theirs, ours);
        printf(" %7.2f", theirs.median_us > 0 ? ours.median_us / theirs.median_us : 0);
    };
    print("idle", times.idle, alone.idle);
    PrintPair(of(alone.host), of(times.host));
    printf("\n");
    print("queued", times.queued, alone.queued);
    printf("\n");
    if (!times.graph || !alone.graph) return;
    print("graph", *times.graph, *alone.graph);
    printf("\n");
}

}  // namespace

void PrintNetwork(const Options& options, const Result& result) {
    printf("%-44s %24s %24s\n", ("Network, " + std::to_string(result.nodes) + " nodes:").c_str(),
           "dispatch", "combine");
    const double rows = result.Mean(&RankFigures::network_rows);
    const PacedTimes& idle = result.timing.idle;
    PrintBytes("once: distinct (token, other node)",
               {rows * DispatchRowBytes(options), rows * CombineRowBytes(options)}, idle);
    PrintBytes("sent: by this library, mean of all ranks",
               {result.Mean(&RankFigures::network_dispatch), result.Mean(&RankFigures::network_combine)}, idle);
    PrintBytes("sent: by the rank that sends most",
               {result.Max(&RankFigures::network_dispatch), result.Max(&RankFigures::network_combine)}, idle);
}

void PrintNetworkTable(const std::vector<Result>& results) {
    int width = 10;
    for (const Result& result : results) {
        if (!result.timing.nccl_alone) return;
        width = std::max(width, static_cast<int>(NameOf(result.tokens).size()));
    }
    printf(
        "\n# network: NCCL alone sends the same bytes between the same ranks, one message for each "
        "pair, in one group\n"
        "# medians of the slowest rank in us; host: inside the calls; bytes: mean of all ranks\n");
    printf("# %-8s %*s %12s %-7s %10s %10s %10s %7s %10s %10s %10s\n", "op", width, "tokens",
           "bytes", "way", "alone", "library", "more", "ratio", "host alone", "host", "more");
    for (const Result& result : results) {
        PrintOperation(result, width, true);
        PrintOperation(result, width, false);
    }
    fflush(stdout);
}

}  // namespace ep_bench
