// The file of --json: one object with machine and configuration, and an array with one entry per
// measurement. Times are microseconds, sizes bytes, bandwidths GB/s; each key says so.
//   reference   the spans of the reference's program, whose combine includes the host's wait
//   idle        each operation from an idle stream; gbps is computed from its medians
//   queued      operations that waited in the stream for their turn
//   graph       replays back to back, or null
//   cold, cold_queued  graph and queued between other code (--between code), or null
//   host_call   inside the calls, on the calling thread
//   create_handle  creation and destruction of one more handle; null in low latency
// `tokens` is the largest number of `tokens_by_rank`; `max_tokens` is the group's bound, null if it has none. `dtype`
// is that of the rows that a combine returns, `dispatch` the format of those that a dispatch sends, `forward` whether
// they had it from the beginning. `cast` of the configuration says who casts them (inside, outside), null if nobody
// does. `cast` of times is null unless that is outside: the cast `alone`, followed by a `dispatch`, followed by both
// operations (`pair`); the times beside it contain no cast. `library_bytes` is the memory of group, handle and first
// operations, `tensor_bytes` that of the program's tensors, `first_use_bytes` the memory left once the first group of
// the process is gone. `blocks` are those of the largest kernels in captured graphs, null without graphs; `channels` is
// the group's setting, null for the library's choice. `network` is null on one node; else it has, for each operation,
// the bytes of a rank to other nodes: `once` of each token to each other node with one of its experts, `sent` by the
// library (mean, and of the rank with most) with gbps from the idle medians. `nccl_alone` times NCCL with the messages
// of `sent`.
#include "harness/nodes.h"
#include "programs/ep_bench/json.h"
#include "programs/ep_bench/report.h"

namespace ep_bench {

// ---- Times -------------------------------------------------------------------------------------

static Json To(const CastTimes& times) {
    return Object("alone", times.alone, "dispatch", times.dispatch, "pair", times.pair);
}

static Json To(const PacedTimes& times) {
    return Object("dispatch", times.dispatch, "combine", times.combine, "pair", times.pair, "cast", times.cast);
}

static Json SpanOf(const ReferenceTimes& times, Span span) {
    const Stats& all = times.all[span];
    const Figures& slowest = times.slowest[span];
    return Object("avg_us", all.average_us, "min_us", all.min_us, "max_us", all.max_us, "median_us", slowest.median_us,
                  "p90_us", slowest.p90_us);
}

static Json To(const ReferenceTimes& times) {
    return Object("dispatch", SpanOf(times, kDispatch), "combine", SpanOf(times, kCombine), "total",
                  SpanOf(times, kTotal));
}

static Json To(const HostTimes& times) {
    return Object("dispatch", times.dispatch, "combine", times.combine, "complete", times.complete);
}

static Json To(const HandleTimes& times) { return Object("host", times.host, "stream", times.stream); }

// ---- Bytes -------------------------------------------------------------------------------------

// A figure computed from one operation's bytes by each convention.
template <typename Make>
static Json ByConvention(const Result& result, double row_bytes, Make make) {
    return Object("pair", make(result.Mean(&RankFigures::pair) * row_bytes), "dedup",
                  make(result.Mean(&RankFigures::dedup) * row_bytes), "wire",
                  make(result.Mean(&RankFigures::wire) * row_bytes));
}

static Json BytesOf(const Options& options, const Result& result) {
    const auto same = [](double bytes) { return bytes; };
    return Object("dispatch", ByConvention(result, DispatchRowBytes(options), same), "combine",
                  ByConvention(result, CombineRowBytes(options), same));
}

static Json BandwidthOf(const Options& options, const Result& result) {
    const PacedTimes& idle = result.timing.idle;
    const auto rate = [](const Figures& figures) {
        return [time = figures.median_us](double bytes) { return GigabytesPerSecond(bytes, time); };
    };
    return Object("dispatch", ByConvention(result, DispatchRowBytes(options), rate(idle.dispatch)), "combine",
                  ByConvention(result, CombineRowBytes(options), rate(idle.combine)));
}

static Json MessagesOf(const Result& result, double row_bytes, double RankFigures::* sent, const Figures& idle) {
    const double mean = result.Mean(sent);
    return Object("once", result.Mean(&RankFigures::network_rows) * row_bytes, "sent", mean, "sent_max",
                  result.Max(sent), "gbps", GigabytesPerSecond(mean, idle.median_us));
}

// NCCL alone.
static Json To(const OperationTimes& times) {
    return Object("idle", times.idle, "queued", times.queued, "graph", times.graph, "host_call",
                  Object("dispatch", times.host.dispatch, "combine", times.host.combine));
}

static Json NetworkOf(const Options& options, const Result& result) {
    const Timing& timing = result.timing;
    return Object("dispatch",
                  MessagesOf(result, DispatchRowBytes(options), &RankFigures::network_dispatch, timing.idle.dispatch),
                  "combine",
                  MessagesOf(result, CombineRowBytes(options), &RankFigures::network_combine, timing.idle.combine),
                  "nccl_alone", timing.nccl_alone);
}

// ---- The file ----------------------------------------------------------------------------------

// Rows of a cast count only where they were checked.
static Json WrongOf(const Options& options, const Wrong& wrong) {
    if (!options.rows.casts_outside()) return Object("dispatch", wrong.dispatch_rows, "combine", wrong.combine_rows);
    return Object("dispatch", wrong.dispatch_rows, "combine", wrong.combine_rows, "cast", wrong.cast_rows);
}

static Json To(const Blocks& blocks) {
    return blocks.dispatch == 0 ? Json{"null"} : Object("dispatch", blocks.dispatch, "combine", blocks.combine);
}

static Json ResultOf(const Options& options, const Result& result) {
    const Timing& timing = result.timing;
    return Object(
        "tokens", Largest(result.tokens), "tokens_by_rank", result.tokens, "max_tokens",
        If(!options.dynamic_tokens, result.max_tokens), "received_rows", result.Mean(&RankFigures::received),
        "received_max", result.Max(&RankFigures::received), "received_imbalance", result.Imbalance(),
        "wire_rows_in_max", result.Max(&RankFigures::wire_in), "wire_rows_out_max", result.Max(&RankFigures::wire),
        "library_bytes", result.Max(&RankFigures::library_bytes), "tensor_bytes",
        result.Max(&RankFigures::tensor_bytes), "blocks", result.blocks, "wrong_rows",
        result.wrong ? WrongOf(options, *result.wrong) : Json{"null"}, "bytes", BytesOf(options, result), "gbps",
        BandwidthOf(options, result), "network", result.nodes == 1 ? Json{"null"} : NetworkOf(options, result),
        "reference", timing.reference, "idle", timing.idle, "queued", timing.queued, "graph", timing.graph, "cold",
        timing.cold, "cold_queued", timing.cold_queued, "host_call", timing.host, "create_handle", timing.handle);
}

static Json To(const Machine& machine) {
    return Object("gpu", machine.gpu, "driver", machine.driver, "cuda_of_driver", machine.cuda_of_driver, "nccl",
                  machine.nccl, "library", machine.library, "multiprocessors", machine.multiprocessors);
}

static const char* LayoutName(const Options& options) {
    if (!options.low_latency()) return "flat";
    if (options.view) return "rank view";
    return options.by_rank ? "rank" : "expert";
}

static Json ConfigOf(const Options& options, int ranks) {
    const bool ll = options.low_latency();
    return Object(
        "algorithm", ll ? "ll" : "ht", "backend", ep_on_hostsim() ? "host" : "cuda", "ranks", ranks, "nodes",
        ep_num_nodes(), "hidden", options.hidden, "top_k", options.top_k, "experts", options.experts, "masked",
        ll ? options.masked : 0, "layout", LayoutName(options), "memory", options.symmetric ? "symmetric" : "plain",
        "variant", VariantName(options), "routing", RoutingName(options), "zipf_exponent",
        If(options.routing == RoutingKind::kZipf, options.zipf_exponent), "channels",
        If(options.channels != NCCL_EP_AUTO, options.channels), "dtype", "bfloat16", "dispatch", options.rows.name,
        "forward", options.rows.forward, "cast", options.rows.where(), "warmup", options.warmup, "iterations",
        options.iterations, "graph_ops", If(options.use_cuda_graph, options.graph_ops), "use_fp8", options.use_fp8,
        "dynamic_tokens", options.dynamic_tokens, "usual_convention", UsualConventionName(options));
}

bool WriteJson(const Options& options, const Machine& machine, int ranks, const Measurements& measured) {
    FILE* file = fopen(options.json_file.c_str(), "w");
    if (file == nullptr) return false;
    std::string json = "{\n  \"program\": \"ep_bench\",\n  \"machine\": " + To(machine).text +
                       ",\n  \"config\": " + ConfigOf(options, ranks).text +
                       ",\n  \"first_use_bytes\": " + To(measured.first_use_bytes).text + ",\n  \"results\": [\n";
    const std::vector<Result>& results = measured.results;
    for (size_t i = 0; i < results.size(); ++i) {
        json += "    " + ResultOf(options, results[i]).text + (i + 1 < results.size() ? ",\n" : "\n");
    }
    json += "  ]\n}\n";
    const bool written = fwrite(json.data(), 1, json.size(), file) == json.size();
    return fclose(file) == 0 && written;
}

}  // namespace ep_bench
