// The text of ep_bench: what ran, one block for each number of tokens, and a table of all of them.
#include "programs/ep_bench/report.h"

#include <algorithm>
#include <cstdio>
#include <string>

#include "harness/nodes.h"

namespace ep_bench {
namespace {

constexpr double kMegabyte = 1e6;
constexpr double kMebibyte = 1024 * 1024;

const char* AlgorithmName(const Options& options) { return options.low_latency() ? "low latency" : "high throughput"; }

void PrintRanks(const Options& options, const Result& result) {
    const auto usual = UsualConvention(options);
    for (size_t rank = 0; rank < result.ranks.size(); ++rank) {
        const RankFigures& figures = result.ranks[rank];
        const double sent = figures.*usual * DispatchRowBytes(options);
        const double returned = figures.*usual * CombineRowBytes(options);
        printf("[Rank %zu] Dispatch: avg=%.2f us, %.2f GB/s | Combine: avg=%.2f us, %.2f GB/s | Total: avg=%.2f us\n",
               rank, figures.dispatch_us, GigabytesPerSecond(sent, figures.dispatch_us), figures.combine_us,
               GigabytesPerSecond(returned, figures.combine_us), figures.total_us);
    }
}

void PrintSpan(const char* name, const Stats& stats, double bytes) {
    printf("  %-10s avg=%10.2f us  min=%10.2f us  max=%10.2f us  throughput=%8.2f GB/s\n", name, stats.average_us,
           stats.min_us, stats.max_us, GigabytesPerSecond(bytes, stats.average_us));
}

// The reference computes the throughput of this block from the bytes of rank 0.
void PrintSummary(const Options& options, const Result& result) {
    const double rows = result.ranks[0].*UsualConvention(options);
    const double sent = rows * DispatchRowBytes(options);
    const double returned = rows * CombineRowBytes(options);
    printf("Summary (%s, %zu ranks, tokens per rank: %s):\n", AlgorithmName(options), result.ranks.size(),
           NameOf(result.tokens).c_str());
    const auto& all = result.timing.reference.all;
    PrintSpan("Dispatch:", all[kDispatch], sent);
    PrintSpan("Combine:", all[kCombine], returned);
    PrintSpan("Total:", all[kTotal], sent + returned);
    printf("  %-10s dispatch=%.0f combine=%.0f (rank 0, %s convention)\n", "Bytes:", sent, returned,
           UsualConventionName(options));
}

struct Bytes {
    double dispatch;
    double combine;
};

void PrintBytes(const char* name, const Bytes& bytes, const PacedTimes& idle) {
    printf("  %-42s %8.3f MB %7.2f GB/s %8.3f MB %7.2f GB/s\n", name, bytes.dispatch / kMegabyte,
           GigabytesPerSecond(bytes.dispatch, idle.dispatch.median_us), bytes.combine / kMegabyte,
           GigabytesPerSecond(bytes.combine, idle.combine.median_us));
}

void PrintConvention(const Options& options, const Result& result, const char* name, double RankFigures::* figure) {
    const double rows = result.Mean(figure);
    PrintBytes(name, {rows * DispatchRowBytes(options), rows * CombineRowBytes(options)}, result.timing.idle);
}

void PrintFigures(const char* name, const Figures& figures) {
    printf("  %-42s %10.2f %10.2f %10.2f %10.2f\n", name, figures.median_us, figures.min_us, figures.p90_us,
           figures.p99_us);
}

void PrintPaced(const char* how, const PacedTimes& times) {
    const std::string suffix = std::string(", ") + how;
    PrintFigures(("dispatch" + suffix).c_str(), times.dispatch);
    PrintFigures(("combine" + suffix).c_str(), times.combine);
    PrintFigures(("dispatch and combine" + suffix).c_str(), times.pair);
    if (!times.cast) return;
    PrintFigures(("cast" + suffix).c_str(), times.cast->alone);
    PrintFigures(("cast and dispatch" + suffix).c_str(), times.cast->dispatch);
    PrintFigures(("cast and both" + suffix).c_str(), times.cast->pair);
}

void PrintTimes(const Timing& timing) {
    printf("%-44s %10s %10s %10s %10s\n", "Times of the slowest rank (us):", "median", "min", "p90", "p99");
    PrintFigures("combine with the host's wait (reference)", timing.reference.slowest[kCombine]);
    PrintPaced("from an idle stream", timing.idle);
    PrintPaced("queued", timing.queued);
    if (timing.graph) PrintPaced("graph replay", *timing.graph);
    if (timing.cold) PrintPaced("between other code", *timing.cold);
    if (timing.cold_queued) PrintPaced("queued between other code", *timing.cold_queued);
    if (timing.handle) {
        PrintFigures("create and destroy a handle, from idle", timing.handle->stream);
        PrintFigures("host, inside ncclEpCreateHandle", timing.handle->host);
    }
    PrintFigures("host, inside ncclEpDispatch", timing.host.dispatch);
    PrintFigures("host, inside ncclEpCombine", timing.host.combine);
    PrintFigures("host, inside ncclEpComplete", timing.host.complete);
}

void PrintConventions(const Options& options, const Result& result) {
    printf("%-44s %24s %24s\n", "Bytes of one rank (mean of all):", "dispatch", "combine");
    PrintConvention(options, result, "pair: every valid (token, k)", &RankFigures::pair);
    PrintConvention(options, result, "dedup: distinct (token, rank)", &RankFigures::dedup);
    PrintConvention(options, result, "wire: dedup without the own rank", &RankFigures::wire);
    if (!options.low_latency()) {
        PrintConvention(options, result, "node: distinct (token, node of 8 ranks)", &RankFigures::node);
    }
    printf("  received: %.1f rows, %.3f MB; at most %.0f rows, %.3f times the mean\n",
           result.Mean(&RankFigures::received),
           result.Mean(&RankFigures::received) * DispatchRowBytes(options) / kMegabyte,
           result.Max(&RankFigures::received), result.Imbalance());
}

// What the cast outside moves through the memory of the rank with the most tokens.
void PrintCast(const Options& options, const Result& result) {
    const double tokens = Largest(result.tokens);
    const double read = tokens * CombineRowBytes(options);  // bfloat16
    const double written = tokens * CastRowBytes(options);
    const double time = result.timing.queued.cast->alone.median_us;
    printf("  the cast outside: reads %.3f MB, writes %.3f MB; queued %.2f GB/s\n", read / kMegabyte,
           written / kMegabyte, GigabytesPerSecond(read + written, time));
}

void PrintValidation(const Options& options, const Wrong& wrong) {
    const auto verdict = [](uint64_t rows) { return rows == 0 ? "PASSED" : "FAILED"; };
    printf("Global validation: Dispatch=%s, Combine=%s", verdict(wrong.dispatch_rows), verdict(wrong.combine_rows));
    if (options.rows.casts_outside()) printf(", Cast=%s", verdict(wrong.cast_rows));
    printf("\n");
}

void PrintRow(const Options& options, const Result& result, int tokens_width, bool dispatch) {
    const double row_bytes = dispatch ? DispatchRowBytes(options) : CombineRowBytes(options);
    const PacedTimes& idle = result.timing.idle;
    const double time = (dispatch ? idle.dispatch : idle.combine).median_us;
    const double bytes = result.Mean(UsualConvention(options)) * row_bytes;
    const double wire = result.Mean(&RankFigures::wire) * row_bytes;
    char wrong[24] = "N/A";
    if (result.wrong) {
        const uint64_t rows = dispatch ? result.wrong->dispatch_rows : result.wrong->combine_rows;
        snprintf(wrong, sizeof(wrong), "%llu", static_cast<unsigned long long>(rows));
    }
    printf("  %-8s %*s %12.0f %10.2f %9.2f %9.2f %8s\n", dispatch ? "dispatch" : "combine", tokens_width,
           NameOf(result.tokens).c_str(), bytes, time, GigabytesPerSecond(bytes, time), GigabytesPerSecond(wire, time),
           wrong);
}

// Of the column of tokens.
int WidthOf(const std::vector<Result>& results) {
    size_t width = 10;
    for (const Result& result : results) width = std::max(width, NameOf(result.tokens).size());
    return static_cast<int>(width);
}

// ---- The network between nodes: bytes, and the library beside NCCL alone -----------------------

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
        printf("  %-8s %*s %12.0f %-7s", dispatch ? "dispatch" : "combine", width, NameOf(result.tokens).c_str(), bytes,
               way);
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

void PrintNetwork(const Options& options, const Result& result) {
    printf("%-44s %24s %24s\n", ("Network, " + std::to_string(result.nodes) + " nodes:").c_str(), "dispatch",
           "combine");
    const PacedTimes& idle = result.timing.idle;
    PrintConvention(options, result, "once: distinct (token, other node)", &RankFigures::network_rows);
    PrintBytes("sent: by this library, mean of all ranks",
               {result.Mean(&RankFigures::network_dispatch), result.Mean(&RankFigures::network_combine)}, idle);
    PrintBytes("sent: by the rank that sends most",
               {result.Max(&RankFigures::network_dispatch), result.Max(&RankFigures::network_combine)}, idle);
}

// Nothing if NCCL alone was not measured.
void PrintNetworkTable(const std::vector<Result>& results) {
    if (results.empty() || !results[0].timing.nccl_alone) return;
    const int width = WidthOf(results);
    printf(
        "\n# network: NCCL alone sends the same bytes between the same ranks, one message for each pair, in one group\n"
        "# medians of the slowest rank in us; host: inside the calls; bytes: mean of all ranks\n");
    printf("# %-8s %*s %12s %-7s %10s %10s %10s %7s %10s %10s %10s\n", "op", width, "tokens", "bytes", "way", "alone",
           "library", "more", "ratio", "host alone", "host", "more");
    for (const Result& result : results) {
        PrintOperation(result, width, true);
        PrintOperation(result, width, false);
    }
    fflush(stdout);
}

}  // namespace

void PrintHeader(const Options& options, int ranks, bool on_hostsim) {
    const std::string nodes = ep_num_nodes() > 1 ? std::to_string(ep_num_nodes()) + " nodes, " : "";
    printf("ep_bench: %s, %s%d ranks, hidden %u, %s, top-%u of %u experts\n", AlgorithmName(options), nodes.c_str(),
           ranks, options.hidden, options.rows.scaled ? options.rows.name.c_str() : "bfloat16", options.top_k,
           options.experts);
    printf("%u warm-up and %u measured iterations%s\n", options.warmup, options.iterations,
           options.iterations > 1 ? ", the first of these is dropped" : "");
    if (on_hostsim) printf("CPU stand-ins instead of a GPU: times are those of this host\n");
    if (!options.reduced.empty()) {
        printf("Reduced defaults, because there is no GPU: %s\n", options.reduced.c_str());
    }
    if (options.by_rank) printf("layout: rank-major%s\n", options.view ? ", in a view" : "");
    if (options.variant != NCCL_EP_VARIANT_AUTO) printf("variant: %s\n", VariantName(options));
    printf("routing: %s", RoutingName(options));
    if (options.routing == RoutingKind::kZipf) printf(", exponent %g", options.zipf_exponent);
    if (options.channels == NCCL_EP_AUTO) {
        printf("; channels: chosen by the library\n");
    } else {
        printf("; channels: %u, 2 SMs each\n", options.channels);
    }
    if (options.rows.scaled) {
        printf("--dispatch: %s, %s; %zu bytes of payload and %zu of scales in a row\n", options.rows.name.c_str(),
               options.rows.how(), ref_format_out_bytes(&*options.rows.scaled),
               ref_format_scale_bytes(&*options.rows.scaled));
    }
    if (options.use_fp8) printf("--use-fp8: flag and byte formula only, the data is bfloat16\n");
    if (options.disable_nvlink) {
        printf("--disable-nvlink: %s\n",
               options.low_latency() ? "NCCL_P2P_DISABLE=1, NCCL_SHM_DISABLE=1" : "ignored, it applies to low latency");
    }
    if (options.use_cuda_graph) printf("--use-cuda-graph: %u operation(s) in each graph\n", options.graph_ops);
    if (options.dynamic_tokens) printf("max_tokens_per_rank = NCCL_EP_AUTO\n");
    if (options.max_tokens > 0) printf("max_tokens_per_rank = %u\n", options.max_tokens);
    fflush(stdout);
}

void PrintResult(const Options& options, const Result& result) {
    printf("\n");
    PrintRanks(options, result);
    PrintSummary(options, result);
    PrintTimes(result.timing);
    PrintConventions(options, result);
    if (options.rows.casts_outside()) PrintCast(options, result);
    if (result.nodes > 1) PrintNetwork(options, result);
    printf("  memory taken by group and handle: %.1f MiB, by this program's tensors: %.1f MiB\n",
           result.Max(&RankFigures::library_bytes) / kMebibyte, result.Max(&RankFigures::tensor_bytes) / kMebibyte);
    if (result.blocks) {
        printf("  blocks of the largest kernel: dispatch %u, combine %u\n", result.blocks->dispatch,
               result.blocks->combine);
    }
    if (result.wrong) PrintValidation(options, *result.wrong);
    fflush(stdout);
}

void PrintFirstUse(double bytes) {
    printf("# memory that the first group of the process left behind: %.1f MiB\n", bytes / kMebibyte);
    fflush(stdout);
}

void PrintTable(const Options& options, const std::vector<Result>& results) {
    printf(
        "\n# time: median of the slowest rank, each operation from an idle stream, without a wait of the host in it\n");
    printf("# bytes: mean of all ranks, %s convention; algbw = bytes/time, busbw = wire bytes/time\n",
           UsualConventionName(options));
    const int width = WidthOf(results);
    printf("# %-8s %*s %12s %10s %9s %9s %8s\n", "op", width, "tokens", "bytes", "time", "algbw", "busbw", "#wrong");
    printf("# %-8s %*s %12s %10s %9s %9s %8s\n", "", width, "(rank)", "(B)", "(us)", "(GB/s)", "(GB/s)", "(rows)");
    for (const Result& result : results) {
        PrintRow(options, result, width, true);
        PrintRow(options, result, width, false);
    }
    PrintNetworkTable(results);
    fflush(stdout);
}

}  // namespace ep_bench
