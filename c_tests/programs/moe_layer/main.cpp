// A Mixture-of-Experts model over all ranks, through the public API of NCCL EP only.
//
// The tokens are words of a random text, a stripe of it on every rank. In each layer a router selects the top-k experts
// of each token, NCCL EP carries the tokens to the ranks of their experts and the results back (layer.cpp), and rank 0
// repeats the layer for the tokens of all ranks without any exchange and compares (model.h). --help lists the options.

#include <numeric>

#include "harness/options.hpp"
#include "programs/moe_layer/layer.h"
#include "programs/moe_layer/options.h"

namespace moe {
namespace {

// Rank r takes (r + 1) / R of the largest number of tokens: every rank has a different number, and
// with few tokens the first ranks have none.
size_t NumTokensOf(size_t rank, size_t num_ranks, size_t max_tokens_per_rank) {
    return max_tokens_per_rank * (rank + 1) / num_ranks;
}

// Of all ranks in front of one.
size_t NumTokensBefore(size_t rank, size_t num_ranks, size_t max_tokens_per_rank) {
    size_t sum = 0;
    for (size_t r = 0; r < rank; ++r) sum += NumTokensOf(r, num_ranks, max_tokens_per_rank);
    return sum;
}

// ---- What is printed, on rank 0 ----------------------------------------------------------------

struct LayerReport {
    ncclEpAlgorithm_t algorithm = NCCL_EP_ALGO_LOW_LATENCY;
    size_t layer = 0;
    std::vector<uint64_t> sent;      // by each rank to each, computed from the routing
    std::vector<uint64_t> received;  // by each rank, as the library reported it
    double error = 0.0;             // largest relative error against the dense computation
    double error_if_swapped = 0.0;  // the same with the results of two tokens swapped
    double bound = 0.0;             // for error; error_if_swapped has to exceed it
};

// Who sent how many rows to whom: a line for each source, a column for each rank of experts.
void PrintRows(const LayerReport& report) {
    const size_t num_ranks = report.received.size();
    std::printf("\n  rows      ");
    for (size_t rank = 0; rank < num_ranks; ++rank) std::printf(" to %-2zu", rank);
    for (size_t i = 0; i < report.sent.size(); ++i) {
        if (i % num_ranks == 0) std::printf("\n  from %-5zu", i / num_ranks);
        std::printf("%6s", report.sent[i] == 0 ? "." : std::to_string(report.sent[i]).c_str());
    }
    std::printf("\n\n");
}

void PrintModel(const EpEnv& env, const Options& options) {
    const ModelConfig& model = options.model;
    std::printf(
        "moe_layer (%s): ranks %d, layers %zu, hidden %zu, ffn %zu, experts %zu, top-k %zu, "
        "seed %zu%s\n%zu tokens\n",
        ep_on_hostsim() ? "host" : "gpu", env.size, model.num_layers, model.hidden, model.ffn, model.num_experts,
        model.top_k, model.seed, options.fp8 ? ", dispatch in e4m3" : "",
        NumTokensBefore(env.size, env.size, options.max_tokens_per_rank));
    std::fflush(stdout);
}

void PrintLayer(const Options& options, const LayerReport& report) {
    const bool low_latency = report.algorithm == NCCL_EP_ALGO_LOW_LATENCY;
    const auto rows = std::accumulate(report.received.begin(), report.received.end(), size_t{0});
    std::printf(
        "%-16s layer %zu: %zu rows to experts; max relative error %.5f, bound %.5f; with two results swapped %.2f\n",
        low_latency ? "low latency," : "high throughput,", report.layer, rows, report.error,
        report.bound, report.error_if_swapped);
    if (options.picture && report.layer == 0) PrintRows(report);
    std::fflush(stdout);
}

// ---- The run -----------------------------------------------------------------------------------

// The tokens of one rank and their position in the text.
struct Stripe {
    size_t first_position = 0;
    std::vector<uint64_t> tokens;
};

// Stripes are consecutive. Words repeat, as they do in any text.
Stripe TakeStripe(const EpEnv& env, size_t max_tokens_per_rank) {
    constexpr uint64_t kWords = 512;
    const auto num_ranks = static_cast<size_t>(env.size);
    const auto rank = static_cast<size_t>(env.rank);
    Stripe stripe;
    stripe.first_position = NumTokensBefore(rank, num_ranks, max_tokens_per_rank);
    stripe.tokens.resize(NumTokensOf(rank, num_ranks, max_tokens_per_rank));
    for (size_t t = 0; t < stripe.tokens.size(); ++t) {
        stripe.tokens[t] = ep_mix(stripe.first_position + t, 0, 0) % kWords;
    }
    return stripe;
}

// What all ranks have, in the order of the ranks, on rank 0; nothing on the others.
template <typename T>
std::vector<T> Gather(const EpEnv& env, const std::vector<T>& own) {
    const int bytes = static_cast<int>(own.size() * sizeof(T));
    std::vector<int> counts(static_cast<size_t>(env.size));
    MPI_Gather(&bytes, 1, MPI_INT, counts.data(), 1, MPI_INT, 0, MPI_COMM_WORLD);
    std::vector<int> begins(counts.size(), 0);
    std::partial_sum(counts.begin(), counts.end() - 1, begins.begin() + 1);
    std::vector<T> all(static_cast<size_t>(begins.back() + counts.back()) / sizeof(T));
    MPI_Gatherv(own.data(), bytes, MPI_BYTE, all.data(), counts.data(), begins.data(), MPI_BYTE, 0, MPI_COMM_WORLD);
    return all;
}

// The rows that this rank sends to each rank. Low latency sends one for each (token, expert); high
// throughput one for each (token, rank).
std::vector<uint64_t> RowsSent(const LayerContext& context, ncclEpAlgorithm_t algorithm, const Routing& routing) {
    const size_t top_k = context.model.top_k;
    std::vector<uint64_t> sent(context.num_ranks());
    for (size_t begin = 0; begin < routing.expert_ids.size(); begin += top_k) {
        std::vector<bool> seen(context.num_ranks());
        for (size_t k = 0; k < top_k; ++k) {
            const size_t rank = routing.expert_ids[begin + k] / context.num_local_experts();
            if (algorithm == NCCL_EP_ALGO_LOW_LATENCY || !seen[rank]) ++sent[rank];
            seen[rank] = true;
        }
    }
    return sent;
}

// Every rank has received as many rows as the others sent it.
void CheckRows(LayerReport* report) {
    const size_t num_ranks = report->received.size();
    std::vector<uint64_t> expected(num_ranks);
    for (size_t i = 0; i < report->sent.size(); ++i) expected[i % num_ranks] += report->sent[i];
    EP_CHECK_EQ_BYTES(report->received.data(), expected.data(), num_ranks * sizeof(uint64_t));
}

// Compares the layer with the dense computation and shows that the comparison can fail.
void CheckLayer(const LayerContext& context, const Options& options, const std::vector<uint16_t>& input,
                const LayerOutput& output, LayerReport* report) {
    report->received = Gather<uint64_t>(context.env, {output.rows_received});
    const std::vector<uint16_t> all_input = Gather(context.env, input);
    const std::vector<uint16_t> all_output = Gather(context.env, output.rows);
    if (context.env.rank != 0) return;

    CheckRows(report);

    const DenseResult dense = DenseForward(context.model, context.layer, all_input);
    std::vector<uint16_t> swapped = all_output;
    SwapFirstAndLastRow(context.model, &swapped);
    report->error = MaxRelativeError(dense, all_output);
    report->error_if_swapped = MaxRelativeError(dense, swapped);
    report->bound = MaxRelativeErrorBound(options.fp8);
    EP_CHECK(report->error <= report->bound);
    EP_CHECK(report->error_if_swapped > report->bound);
    PrintLayer(options, *report);
}

// One group serves all layers; each layer has a handle of its own, as each has its own routing.
void RunModel(const EpEnv& env, const Options& options, const Stripe& stripe, ncclEpAlgorithm_t algorithm) {
    const ModelConfig& model = options.model;
    const ncclEpGroupConfig_t config = ep_group_config(algorithm, static_cast<unsigned>(model.num_experts),
                                                       static_cast<unsigned>(options.max_tokens_per_rank),
                                                       static_cast<unsigned>(model.hidden * sizeof(uint16_t)));
    ncclEpGroup_t group = nullptr;
    EP_REQUIRE_NCCL(ncclEpCreateGroup(&group, env.comm, &config, env.stream));

    std::vector<uint16_t> rows = Embed(model, stripe.tokens, stripe.first_position);
    for (size_t layer = 0; layer < model.num_layers; ++layer) {
        const LayerContext context = {env, group, model, options.max_tokens_per_rank, layer, options.fp8};
        const Routing routing = Router(model, layer).Route(rows);
        const LayerOutput output = algorithm == NCCL_EP_ALGO_LOW_LATENCY
                                       ? RunLowLatencyLayer(context, rows, routing)
                                       : RunHighThroughputLayer(context, rows, routing);
        LayerReport report;
        report.algorithm = algorithm;
        report.layer = layer;
        report.sent = Gather(env, RowsSent(context, algorithm, routing));
        CheckLayer(context, options, rows, output, &report);
        // The next layer starts from the result under test. Each layer is compared for its actual
        // input, because rounding may change the router's choice between two close experts.
        rows = NextLayerInput(model, rows, output.rows);
    }
    EP_REQUIRE_NCCL(ncclEpGroupDestroy(group, env.stream));
}

// The whole program between the set-up and the closing line.
void Run(const EpEnv& env, const Options& options) {
    const Stripe stripe = TakeStripe(env, options.max_tokens_per_rank);
    if (env.rank == 0) PrintModel(env, options);
    if (options.low_latency) RunModel(env, options, stripe, NCCL_EP_ALGO_LOW_LATENCY);
    if (!options.high_throughput) return;
    if (ep_has_high_throughput(&env)) {
        RunModel(env, options, stripe, NCCL_EP_ALGO_HIGH_THROUGHPUT);
    } else {
        ep_skip_high_throughput();
    }
}

}  // namespace
}  // namespace moe

int main(int argc, char** argv) {
    EpEnv env;
    ep_init_mpi(&env, &argc, &argv);
    moe::Options options;
    const std::string refusal = moe::ParseOptions(argc, argv, static_cast<size_t>(env.size), &options);
    if (!refusal.empty() || options.help) {
        if (env.rank == 0 && options.help) std::printf("%s", moe::kUsage);
        if (env.rank == 0 && !options.help) ep::PrintRefusal("moe_layer", refusal);
        ep_release(&env);
        return options.help ? 0 : 2;
    }
    ep_init_device(&env);
    moe::Run(env, options);
    return ep_finish(&env);
}
