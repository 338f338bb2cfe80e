// The file of --json: one object with the configuration and an array with one entry for each number
// of tokens. Times are microseconds, sizes bytes, bandwidths GB/s; each key says so. avg, min and
// max are the spans of the reference, whose combine contains the host's wait; median_slowest is the
// call alone.
#include <cstdio>
#include <string>

#include "ep_bench_report.h"

namespace ep_bench {
namespace {

const char* Bool(bool value) { return value ? "true" : "false"; }

// Every name and value that is written is ours: nothing in it needs an escape.
std::string Number(const char* name, double value) {
    char text[96];
    snprintf(text, sizeof(text), "\"%s\": %.10g", name, value);
    return text;
}

std::string OperationJson(const Options& options, const Result& result, bool dispatch) {
    const Timing& timing = result.timing;
    const Stats& stats = timing.all[dispatch ? kDispatch : kCombine];
    const double time = timing.median_us[dispatch ? kDispatch : kCombineCall];
    const double row_bytes = dispatch ? DispatchRowBytes(options) : CombineRowBytes(options);
    const auto bytes = [&](double RankFigures::* rows) { return result.Mean(rows) * row_bytes; };
    std::string json = "{" + Number("avg_us", stats.average_us) + ", " +
                       Number("min_us", stats.min_us) + ", " + Number("max_us", stats.max_us) +
                       ", " + Number("median_slowest_us", time);
    json += ", " + Number("pair_bytes", bytes(&RankFigures::pair)) + ", " +
            Number("dedup_bytes", bytes(&RankFigures::dedup)) + ", " +
            Number("wire_bytes", bytes(&RankFigures::wire));
    json += ", " + Number("algbw_gbps", GigabytesPerSecond(bytes(UsualConvention(options)), time)) +
            ", " + Number("busbw_gbps", GigabytesPerSecond(bytes(&RankFigures::wire), time));
    json += ", \"wrong_rows\": ";
    if (!result.wrong) return json + "null}";
    return json +
           std::to_string(dispatch ? result.wrong->dispatch_rows : result.wrong->combine_rows) +
           "}";
}

std::string ResultJson(const Options& options, const Result& result) {
    const Stats& total = result.timing.all[kTotal];
    return "    {" + Number("tokens", result.tokens) + ", " +
           Number("received_rows", result.Mean(&RankFigures::received)) +
           ",\n     \"dispatch\": " + OperationJson(options, result, true) +
           ",\n     \"combine\": " + OperationJson(options, result, false) +
           ",\n     \"total\": {" + Number("avg_us", total.average_us) + ", " +
           Number("min_us", total.min_us) + ", " + Number("max_us", total.max_us) + ", " +
           Number("median_slowest_us", result.timing.median_us[kTotal]) + "}}";
}

std::string ConfigJson(const Options& options, int ranks, bool on_hostsim) {
    std::string json = std::string("\"algorithm\": \"") + (options.low_latency() ? "ll" : "ht") +
                       "\", \"backend\": \"" + (on_hostsim ? "host" : "cuda") + "\", ";
    json += Number("ranks", ranks) + ", " + Number("hidden", options.hidden) + ", " +
            Number("top_k", options.top_k) + ", " + Number("experts", options.experts) +
            ", \"dtype\": \"bfloat16\", ";
    json += Number("warmup", options.warmup) + ", " + Number("iterations", options.iterations) +
            ", \"use_fp8\": " + Bool(options.use_fp8) +
            ", \"dynamic_tokens\": " + Bool(options.dynamic_tokens);
    return json + ", \"usual_convention\": \"" + UsualConventionName(options) + "\"";
}

}  // namespace

bool WriteJson(const Options& options, int ranks, bool on_hostsim,
               const std::vector<Result>& results) {
    FILE* file = fopen(options.json_file.c_str(), "w");
    if (file == nullptr) return false;
    std::string json = "{\n  \"program\": \"ep_bench\",\n  \"config\": {" +
                       ConfigJson(options, ranks, on_hostsim) + "},\n  \"results\": [\n";
    for (size_t i = 0; i < results.size(); ++i) {
        json += ResultJson(options, results[i]) + (i + 1 < results.size() ? ",\n" : "\n");
    }
    json += "  ]\n}\n";
    const bool written = fwrite(json.data(), 1, json.size(), file) == json.size();
    return fclose(file) == 0 && written;
}

}  // namespace ep_bench
