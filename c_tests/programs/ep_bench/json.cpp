// The file of --json: one object with machine and configuration, and an array with one entry per
// measurement. Times are microseconds, sizes bytes, bandwidths GB/s; each key says so.
//   reference   the spans of the reference's program, whose combine includes the host's wait
//   idle        each operation from an idle stream; gbps is computed from its medians
//   queued      operations that waited in the stream for their turn
//   graph       replays back to back, or null
//   cold, cold_queued  graph and queued between other code (--between code), or null
//   host_call   inside the calls, on the calling thread
//   create_handle  creation and destruction of one more handle; null in low latency
// `tokens` is the largest number of `tokens_by_rank`; `max_tokens` is the group's bound, null if it
// has none. `dtype` is that of the rows that a combine returns, `dispatch` the format of those that a
// dispatch sends, `forward` whether they had it from the beginning. `cast` of the configuration says
// who casts them (inside, outside), null if nobody does. `cast` of times is null unless that is
// outside: the cast `alone`, followed by a `dispatch`, followed by both operations (`pair`); the
// times beside it contain no cast. `library_bytes` is the memory of group, handle and first
// operations, `tensor_bytes`
// that of the program's tensors, `first_use_bytes` the memory left once the first group of the
// process is gone. `blocks` are those of the largest kernels in captured graphs, null without
// graphs; `channels` is the group's setting, null for the library's choice. `network` is null on
// one node; else it has, for each operation, the bytes of a rank to other nodes: `once` of each
// token to each other node with one of its experts, `sent` by the library (mean, and of the rank
// with most) with gbps from the idle medians. `nccl_alone` times NCCL with the messages of `sent`.
#include <cstdio>
#include <string>
#include <utility>

#include "harness/nodes.h"
#include "programs/ep_bench/report.h"

namespace ep_bench {
namespace {

using Member = std::pair<const char*, std::string>;

std::string Object(std::initializer_list<Member> members) {
    std::string json;
    for (const auto& [name, value] : members) {
        json += (json.empty() ? "{\"" : ", \"") + std::string(name) + "\": " + value;
    }
    return json + "}";
}

std::string Number(double value) {
    char text[64];
    snprintf(text, sizeof(text), "%.10g", value);
    return text;
}

const char* Bool(bool value) { return value ? "true" : "false"; }

// Names from drivers and from us contain no control characters.
std::string Text(const std::string& value) {
    std::string json = "\"";
    for (const char character : value) {
        if (character == '"' || character == '\\') json += '\\';
        json += character;
    }
    return json + "\"";
}

std::string TextOrNull(const std::string& value) { return value.empty() ? "null" : Text(value); }

std::string FiguresJson(const Figures& figures) {
    return Object({{"median_us", Number(figures.median_us)},
                   {"min_us", Number(figures.min_us)},
                   {"p90_us", Number(figures.p90_us)},
                   {"p99_us", Number(figures.p99_us)}});
}

std::string CastJson(const CastTimes& times) {
    return Object({{"alone", FiguresJson(times.alone)},
                   {"dispatch", FiguresJson(times.dispatch)},
                   {"pair", FiguresJson(times.pair)}});
}

std::string PacedJson(const PacedTimes& times) {
    return Object({{"dispatch", FiguresJson(times.dispatch)},
                   {"combine", FiguresJson(times.combine)},
                   {"pair", FiguresJson(times.pair)},
                   {"cast", times.cast ? CastJson(*times.cast) : "null"}});
}

std::string SpanJson(const ReferenceTimes& times, Span span) {
    return Object({{"avg_us", Number(times.all[span].average_us)},
                   {"min_us", Number(times.all[span].min_us)},
                   {"max_us", Number(times.all[span].max_us)},
                   {"median_us", Number(times.slowest[span].median_us)},
                   {"p90_us", Number(times.slowest[span].p90_us)}});
}

std::string ReferenceJson(const ReferenceTimes& times) {
    return Object({{"dispatch", SpanJson(times, kDispatch)},
                   {"combine", SpanJson(times, kCombine)},
                   {"total", SpanJson(times, kTotal)}});
}

std::string HostJson(const HostTimes& times) {
    return Object({{"dispatch", FiguresJson(times.dispatch)},
                   {"combine", FiguresJson(times.combine)},
                   {"complete", FiguresJson(times.complete)}});
}

std::string HandleJson(const HandleTimes& times) {
    return Object({{"host", FiguresJson(times.host)}, {"stream", FiguresJson(times.stream)}});
}

// A figure computed from one operation's bytes by each convention.
template <typename Make>
std::string ByConvention(const Result& result, double row_bytes, Make make) {
    return Object({{"pair", Number(make(result.Mean(&RankFigures::pair) * row_bytes))},
                   {"dedup", Number(make(result.Mean(&RankFigures::dedup) * row_bytes))},
                   {"wire", Number(make(result.Mean(&RankFigures::wire) * row_bytes))}});
}

std::string BytesJson(const Options& options, const Result& result) {
    const auto same = [](double bytes) { return bytes; };
    return Object({{"dispatch", ByConvention(result, DispatchRowBytes(options), same)},
                   {"combine", ByConvention(result, CombineRowBytes(options), same)}});
}

std::string BandwidthJson(const Options& options, const Result& result) {
    const PacedTimes& idle = result.timing.idle;
    const auto rate = [](const Figures& figures) {
        return [time = figures.median_us](double bytes) { return GigabytesPerSecond(bytes, time); };
    };
    return Object({{"dispatch", ByConvention(result, DispatchRowBytes(options), rate(idle.dispatch))},
                   {"combine", ByConvention(result, CombineRowBytes(options), rate(idle.combine))}});
}

std::string NetworkJson(const Result& result, double row_bytes, double RankFigures::* sent, const Figures& idle) {
    const double mean = result.Mean(sent);
    return Object({{"once", Number(result.Mean(&RankFigures::network_rows) * row_bytes)},
                   {"sent", Number(mean)},
                   {"sent_max", Number(result.Max(sent))},
                   {"gbps", Number(GigabytesPerSecond(mean, idle.median_us))}});
}

std::string NcclAloneJson(const OperationTimes& times) {
    return Object({{"idle", PacedJson(times.idle)},
                   {"queued", PacedJson(times.queued)},
                   {"graph", times.graph ? PacedJson(*times.graph) : "null"},
                   {"host_call", Object({{"dispatch", FiguresJson(times.host.dispatch)},
                                         {"combine", FiguresJson(times.host.combine)}})}});
}

std::string NetworkJson(const Options& options, const Result& result) {
    const Timing& timing = result.timing;
    if (result.nodes == 1) return "null";
    return Object(
        {{"dispatch",
          NetworkJson(result, DispatchRowBytes(options), &RankFigures::network_dispatch, timing.idle.dispatch)},
         {"combine", NetworkJson(result, CombineRowBytes(options), &RankFigures::network_combine, timing.idle.combine)},
         {"nccl_alone", timing.nccl_alone ? NcclAloneJson(*timing.nccl_alone) : "null"}});
}

// Rows of a cast count only where they were checked.
std::string WrongJson(const Options& options, const Result& result) {
    if (!result.wrong) return "null";
    const Member dispatch = {"dispatch", std::to_string(result.wrong->dispatch_rows)};
    const Member combine = {"combine", std::to_string(result.wrong->combine_rows)};
    if (!options.rows.casts_outside()) return Object({dispatch, combine});
    return Object({dispatch, combine, {"cast", std::to_string(result.wrong->cast_rows)}});
}

std::string BlocksJson(const Result& result) {
    if (!result.blocks || result.blocks->dispatch == 0) return "null";
    return Object({{"dispatch", Number(result.blocks->dispatch)}, {"combine", Number(result.blocks->combine)}});
}

std::string TokensJson(const Tokens& tokens) {
    std::string json;
    for (const unsigned number : tokens) json += (json.empty() ? "[" : ", ") + Number(number);
    return json + "]";
}

std::string ResultJson(const Options& options, const Result& result) {
    const Timing& timing = result.timing;
    return Object({{"tokens", Number(Largest(result.tokens))},
                   {"tokens_by_rank", TokensJson(result.tokens)},
                   {"max_tokens", options.dynamic_tokens ? "null" : Number(result.max_tokens)},
                   {"received_rows", Number(result.Mean(&RankFigures::received))},
                   {"received_max", Number(result.Max(&RankFigures::received))},
                   {"received_imbalance", Number(result.Imbalance())},
                   {"wire_rows_in_max", Number(result.Max(&RankFigures::wire_in))},
                   {"wire_rows_out_max", Number(result.Max(&RankFigures::wire))},
                   {"library_bytes", Number(result.Max(&RankFigures::library_bytes))},
                   {"tensor_bytes", Number(result.Max(&RankFigures::tensor_bytes))},
                   {"blocks", BlocksJson(result)},
                   {"wrong_rows", WrongJson(options, result)},
                   {"bytes", BytesJson(options, result)},
                   {"gbps", BandwidthJson(options, result)},
                   {"network", NetworkJson(options, result)},
                   {"reference", ReferenceJson(timing.reference)},
                   {"idle", PacedJson(timing.idle)},
                   {"queued", PacedJson(timing.queued)},
                   {"graph", timing.graph ? PacedJson(*timing.graph) : "null"},
                   {"cold", timing.cold ? PacedJson(*timing.cold) : "null"},
                   {"cold_queued", timing.cold_queued ? PacedJson(*timing.cold_queued) : "null"},
                   {"host_call", HostJson(timing.host)},
                   {"create_handle", timing.handle ? HandleJson(*timing.handle) : "null"}});
}

std::string MachineJson(const Machine& machine) {
    return Object({{"gpu", TextOrNull(machine.gpu)},
                   {"driver", TextOrNull(machine.driver)},
                   {"cuda_of_driver", std::to_string(machine.cuda_of_driver)},
                   {"nccl", std::to_string(machine.nccl)},
                   {"library", TextOrNull(machine.library)},
                   {"multiprocessors", std::to_string(machine.multiprocessors)}});
}

const char* LayoutName(const Options& options) {
    if (!options.low_latency()) return "flat";
    if (options.view) return "rank view";
    return options.by_rank ? "rank" : "expert";
}

std::string ConfigJson(const Options& options, int ranks) {
    return Object({{"algorithm", Text(options.low_latency() ? "ll" : "ht")},
                   {"backend", Text(ep_on_hostsim() ? "host" : "cuda")},
                   {"ranks", std::to_string(ranks)},
                   {"nodes", std::to_string(ep_num_nodes())},
                   {"hidden", std::to_string(options.hidden)},
                   {"top_k", std::to_string(options.top_k)},
                   {"experts", std::to_string(options.experts)},
                   {"masked", options.low_latency() ? std::to_string(options.masked) : "0"},
                   {"layout", Text(LayoutName(options))},
                   {"memory", Text(options.symmetric ? "symmetric" : "plain")},
                   {"variant", Text(VariantName(options))},
                   {"routing", Text(RoutingName(options))},
                   {"zipf_exponent", options.routing == RoutingKind::kZipf ? Number(options.zipf_exponent) : "null"},
                   {"channels", options.channels == NCCL_EP_AUTO ? "null" : Number(options.channels)},
                   {"dtype", Text("bfloat16")},
                   {"dispatch", Text(options.rows.name)},
                   {"forward", Bool(options.rows.forward)},
                   {"cast", TextOrNull(options.rows.where())},
                   {"warmup", std::to_string(options.warmup)},
                   {"iterations", std::to_string(options.iterations)},
                   {"graph_ops", options.use_cuda_graph ? Number(options.graph_ops) : "null"},
                   {"use_fp8", Bool(options.use_fp8)},
                   {"dynamic_tokens", Bool(options.dynamic_tokens)},
                   {"usual_convention", Text(UsualConventionName(options))}});
}

}  // namespace

bool WriteJson(const Options& options, const Machine& machine, int ranks, const Measurements& measured) {
    FILE* file = fopen(options.json_file.c_str(), "w");
    if (file == nullptr) return false;
    std::string json = "{\n  \"program\": \"ep_bench\",\n  \"machine\": " + MachineJson(machine) +
                       ",\n  \"config\": " + ConfigJson(options, ranks) +
                       ",\n  \"first_use_bytes\": " + Number(measured.first_use_bytes) + ",\n  \"results\": [\n";
    const std::vector<Result>& results = measured.results;
    for (size_t i = 0; i < results.size(); ++i) {
        json += "    " + ResultJson(options, results[i]) + (i + 1 < results.size() ? ",\n" : "\n");
    }
    json += "  ]\n}\n";
    const bool written = fwrite(json.data(), 1, json.size(), file) == json.size();
    return fclose(file) == 0 && written;
}

}  // namespace ep_bench
