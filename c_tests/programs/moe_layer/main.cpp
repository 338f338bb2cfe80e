// A Mixture-of-Experts model over all ranks, through the public API of NCCL EP only.
//
// The tokens are words of a real text, a stripe of it on every rank. In each layer a router selects
// the top-k experts of each token, NCCL EP carries the tokens to the ranks of their experts and the
// results back (exchange_ll.cpp, exchange_ht.cpp), and rank 0 repeats the layer for the tokens of
// all ranks without any exchange and compares (dense.h). --help lists the options.

#include <algorithm>
#include <cstdio>
#include <string>
#include <vector>

#include "harness/harness.h"
#include "harness/options.hpp"
#include "programs/moe_layer/dense.h"
#include "programs/moe_layer/exchange.h"
#include "programs/moe_layer/model.h"
#include "programs/moe_layer/options.h"
#include "programs/moe_layer/report.h"
#include "programs/moe_layer/text.h"

namespace moe {
namespace {

// The tokens of one rank and their position in the text.
struct Stripe {
    size_t first_position = 0;
    std::vector<uint64_t> tokens;
};

// Rank r takes (r + 1) / R of the largest number of tokens: every rank has a different number, and
// with few tokens the first ranks have none.
size_t NumTokensOf(size_t rank, size_t num_ranks, size_t max_tokens_per_rank) {
    return max_tokens_per_rank * (rank + 1) / num_ranks;
}

// Stripes are consecutive; after its end the text starts again.
Stripe TakeStripe(const EpEnv& env, size_t max_tokens_per_rank, const std::vector<uint64_t>& text) {
    const auto num_ranks = static_cast<size_t>(env.size);
    const auto rank = static_cast<size_t>(env.rank);
    Stripe stripe;
    for (size_t r = 0; r < rank; ++r) stripe.first_position += NumTokensOf(r, num_ranks, max_tokens_per_rank);
    stripe.tokens.resize(NumTokensOf(rank, num_ranks, max_tokens_per_rank));
    for (size_t t = 0; t < stripe.tokens.size(); ++t) {
        stripe.tokens[t] = text[(stripe.first_position + t) % text.size()];
    }
    return stripe;
}

// Rank 0 reads the file; the ranks may be on different hosts.
std::vector<uint64_t> ShareTokensOfText(const EpEnv& env, const std::string& path) {
    std::vector<uint64_t> tokens;
    if (env.rank == 0) {
        tokens = Tokenise(ReadTextFile(path));
        if (tokens.empty()) std::fprintf(stderr, "moe_layer: no text in %s\n", path.c_str());
        EP_REQUIRE(!tokens.empty());
    }
    uint64_t count = tokens.size();
    MPI_Bcast(&count, 1, MPI_UINT64_T, 0, MPI_COMM_WORLD);
    tokens.resize(count);
    MPI_Bcast(tokens.data(), static_cast<int>(count), MPI_UINT64_T, 0, MPI_COMM_WORLD);
    return tokens;
}

// All rows of all ranks, in the order of the ranks, on rank 0; nothing on the others.
std::vector<uint16_t> GatherRows(const EpEnv& env, const std::vector<uint16_t>& rows) {
    const int count = static_cast<int>(rows.size());
    std::vector<int> counts(static_cast<size_t>(env.size));
    MPI_Gather(&count, 1, MPI_INT, counts.data(), 1, MPI_INT, 0, MPI_COMM_WORLD);
    std::vector<int> begins(counts.size(), 0);
    for (size_t r = 1; r < counts.size(); ++r) begins[r] = begins[r - 1] + counts[r - 1];
    std::vector<uint16_t> all;
    if (env.rank == 0) all.resize(static_cast<size_t>(begins.back() + counts.back()));
    MPI_Gatherv(rows.data(), count, MPI_UINT16_T, all.data(), counts.data(), begins.data(),
                MPI_UINT16_T, 0, MPI_COMM_WORLD);
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

// The numbers of all ranks, in the order of the ranks, on rank 0.
std::vector<uint64_t> GatherNumbers(const EpEnv& env, const std::vector<uint64_t>& own) {
    const int count = static_cast<int>(own.size());
    std::vector<uint64_t> all(env.rank == 0 ? own.size() * static_cast<size_t>(env.size) : 0);
    MPI_Gather(own.data(), count, MPI_UINT64_T, all.data(), count, MPI_UINT64_T, 0, MPI_COMM_WORLD);
    return all;
}

// Every rank has received as many rows as the others sent it.
void CheckRows(LayerReport* report) {
    const size_t num_ranks = report->received.size();
    std::vector<uint64_t> expected(num_ranks);
    for (size_t i = 0; i < report->sent.size(); ++i) expected[i % num_ranks] += report->sent[i];
    EP_CHECK_EQ_BYTES(report->received.data(), expected.data(), num_ranks * sizeof(uint64_t));
}

uint64_t SumOverRanks(uint64_t value) {
    uint64_t sum = 0;
    MPI_Allreduce(&value, &sum, 1, MPI_UINT64_T, MPI_SUM, MPI_COMM_WORLD);
    return sum;
}

// Compares the layer with the dense computation and shows that the comparison can fail.
void CheckLayer(const LayerContext& context, const Options& options, const std::vector<uint16_t>& input,
                const LayerOutput& output, LayerReport* report) {
    report->received = GatherNumbers(context.env, {output.rows_received});
    const std::vector<uint16_t> all_input = GatherRows(context.env, input);
    std::vector<uint16_t> all_output = GatherRows(context.env, output.rows);
    if (context.env.rank != 0) return;

    CheckRows(report);

    const DenseResult dense = DenseForward(context.model, context.layer, all_input);
    std::vector<uint16_t> swapped = all_output;
    SwapFirstAndLastRow(context.model, &swapped);
    if (options.spoil) all_output = swapped;
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
    ncclEpGroupConfig_t config = {};
    config.version = 1;
    config.algorithm = algorithm;
    config.num_experts = static_cast<unsigned>(model.num_experts);
    config.max_tokens_per_rank = static_cast<unsigned>(options.max_tokens_per_rank);
    config.token_size_bytes = static_cast<unsigned>(model.hidden * sizeof(uint16_t));
    config.rdma_buffer_size = NCCL_EP_AUTO;
    config.num_qp_per_rank = NCCL_EP_AUTO;
    config.num_channels = NCCL_EP_AUTO;
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
        report.sent = GatherNumbers(env, RowsSent(context, algorithm, routing));
        CheckLayer(context, options, rows, output, &report);
        // The next layer starts from the result under test. Each layer is compared for its actual
        // input, because rounding may change the router's choice between two close experts.
        rows = NextLayerInput(model, rows, output.rows);
    }
    EP_REQUIRE_NCCL(ncclEpGroupDestroy(group, env.stream));
}

// The whole program between the set-up and the closing line.
void Run(const EpEnv& env, const Options& options) {
    const std::string path = options.text_path.empty() ? DefaultTextPath() : options.text_path;
    const std::vector<uint64_t> text = ShareTokensOfText(env, path);
    const Stripe stripe = TakeStripe(env, options.max_tokens_per_rank, text);
    const uint64_t num_tokens = SumOverRanks(stripe.tokens.size());
    if (env.rank == 0) PrintModel(env, options, path, num_tokens);
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
        if (env.rank == 0 && options.help) std::printf("%s", moe::Usage());
        if (env.rank == 0 && !options.help) ep::PrintRefusal("moe_layer", refusal);
        ep_release(&env);
        return options.help ? 0 : 2;
    }
    ep_init_device(&env);
    moe::Run(env, options);
    return ep_finish(&env);
}
