// The command line of ep_bench. Names, letters and defaults are those of the reference's program of
// this name; --layout, --view, --memory, --variant, --sweep, --dispatch, --cast, --forward, --max-tokens, --masked,
// --routing, --channels, --use-cuda-graph, --graph-ops, --between, --json and --version are ours; so is a number for
// each rank in --tokens.
#pragma once

#include <string>
#include <vector>

#include "harness/harness.h"
#include "programs/ep_bench/format.h"
#include "programs/ep_bench/tokens.h"

namespace ep_bench {

// Which experts a token gets.
enum class RoutingKind {
    kUniform,      // the top-k of random scores
    kZipf,         // popular and unpopular experts, the same ones for all ranks
    kConsecutive,  // adjacent experts from a random first one
};

constexpr unsigned kAllChannels = ~0u;

struct Options {
    ncclEpAlgorithm_t algorithm = NCCL_EP_ALGO_LOW_LATENCY;
    std::vector<Tokens> tokens;  // one measurement for each; more than one with --sweep
    bool sweep = false;          // --sweep gave them
    unsigned max_tokens = 0;     // max_tokens_per_rank; 0: the largest of each measurement
    unsigned hidden = 7168;
    DispatchRows rows;
    unsigned top_k = 8;
    unsigned experts = 256;
    unsigned masked = 10;
    RoutingKind routing = RoutingKind::kUniform;
    double zipf_exponent = 1;
    unsigned channels = NCCL_EP_AUTO;  // of the group; kAllChannels: half as many as there are SMs
    unsigned warmup = 10;
    unsigned iterations = 50;
    bool profile = false;
    bool disable_nvlink = false;
    bool use_fp8 = false;
    bool validate = false;
    bool dynamic_tokens = false;
    bool use_cuda_graph = false;
    unsigned graph_ops = 1;
    bool between_code = false;  // --between code: graphs with a foreign kernel behind each operation, too
    std::string json_file;  // empty: no file
    std::string reduced;    // defaults that were reduced because there is no GPU; empty: none

    bool by_rank = false;    // --layout rank: rank-major rows
    bool view = false;       // --view: they stay in memory of the library
    bool symmetric = false;  // --memory symmetric: experts' rows in memory that peers map
    ncclEpVariant_t variant = NCCL_EP_VARIANT_AUTO;  // --variant: of the operations that have it

    bool low_latency() const { return algorithm == NCCL_EP_ALGO_LOW_LATENCY; }
};

struct ParsedOptions {
    Options options;
    bool help = false;
    bool version = false;
    std::string error;  // empty if the command line is valid
};

extern const char kUsage[];

const char* VariantName(const Options& options);  // ll.exact and so on; own
const char* RoutingName(const Options& options);  // as in the results: scores, zipf, consecutive

// Sizes that the user leaves open are the reference's on a GPU and smaller on the CPU stand-ins.
ParsedOptions ParseOptions(int argc, char** argv, bool on_hostsim);

// Fills in what depends on the number of ranks, and the tokens of each. Returns a text if the
// options do not fit, else an empty one.
std::string ApplyRanks(unsigned ranks, Options* options);

}  // namespace ep_bench
