// ep_test: is the library correct on this machine? One dispatch and one combine, checked on every rank; with -c both
// again on the same handle. The options, the order of the calls and the line that scripts look for are those of the
// reference's program of this name, which checks the first ten elements of a row; here every byte of every output is
// compared with the reference. Works with any number of ranks.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "harness/options.hpp"
#include "reference/run.h"

namespace {

const char kUsage[] =
    "Usage: ep_test [options], one process for each GPU under mpirun\n"
    "  -a, --algorithm ll|ht    low latency (default) or high throughput\n"
    "  -t, --tokens N           tokens of each rank (50)\n"
    "  -d, --hidden N           elements of a token, bfloat16 (7168)\n"
    "  -s, --send-only none|dispatch|combine|both\n"
    "                           which operations are staged and finished by ncclEpComplete;\n"
    "                           high throughput ignores staging\n"
    "  -c, --cached             repeat dispatch and combine on the same handle (ht)\n"
    "  -r, --random             random first expert of each token instead of the next rank's\n"
    "  -m, --dynamic-tokens     max_tokens_per_rank = NCCL_EP_AUTO (ht only)\n  -h, --help               this text\n";

struct Options {
    ncclEpAlgorithm_t algorithm = NCCL_EP_ALGO_LOW_LATENCY;
    unsigned tokens = 50;
    unsigned hidden = 7168;
    bool stage_dispatch = false;
    bool stage_combine = false;
    bool cached = false;
    bool random = false;
    bool dynamic_tokens = false;
    bool help = false;

    bool high_throughput() const { return algorithm == NCCL_EP_ALGO_HIGH_THROUGHPUT; }
};

// Returns what is wrong with the command line.
std::string ReadOptions(int argc, char** argv, Options* options) {
    const auto stage = [=](const std::string& what) {
        options->stage_dispatch = what == "dispatch" || what == "both";
        options->stage_combine = what == "combine" || what == "both";
    };
    const std::string error = ep::ParseOptions(
        argc, argv,
        {ep::Algorithm(&options->algorithm), ep::Number('t', "tokens", 1, &options->tokens),
         ep::Number('d', "hidden", 1, &options->hidden),
         ep::Choice('s', "send-only", {"none", "dispatch", "combine", "both"}, stage),
         ep::Switch('c', "cached", &options->cached), ep::Switch('r', "random", &options->random),
         ep::Switch('m', "dynamic-tokens", &options->dynamic_tokens), ep::Switch('h', "help", &options->help)});
    if (error.empty() && !options->high_throughput() && options->dynamic_tokens) {
        return "--dynamic-tokens: low latency needs a fixed max_tokens_per_rank";
    }
    return error;
}

// One line that repeats what is going to run.
std::string Describe(const Options& options) {
    std::string text = options.high_throughput() ? "high throughput" : "low latency";
    text += ", " + std::to_string(options.tokens) + " tokens of " + std::to_string(options.hidden);
    if (options.stage_dispatch) text += ", staged dispatch";
    if (options.stage_combine) text += ", staged combine";
    if (options.cached) text += options.high_throughput() ? ", cached" : ", cached (ignored)";
    if (options.random) text += ", random routing";
    if (options.dynamic_tokens) text += ", dynamic tokens";
    return text;
}

// Every token goes to the experts of the next rank or, if `random`, to consecutive experts from a random first one.
// top-k is the largest power of two up to min(8, ranks), and every rank has top-k experts. For 2, 4, 8, 16 and 32 ranks
// these are the choices and seeds of the reference's program, so that a configuration means the same routing in both.
// Every process computes the routing of all ranks, so the expectation involves no message and no call of the library.
RefRouting* MakeRouting(unsigned ranks, unsigned tokens, bool random) {
    constexpr uint64_t kSeedOfWeights = 42;
    unsigned top_k = 1;
    while (2 * top_k <= std::min(8u, ranks)) top_k *= 2;
    const unsigned experts = top_k * ranks;
    std::vector<int64_t> ids;
    for (unsigned rank = 0; rank < ranks; ++rank) {
        srand(rank + 42);
        for (unsigned token = 0; token < tokens; ++token) {
            const unsigned first = random ? static_cast<unsigned>(rand()) % experts : (rank + 1) * top_k;
            for (unsigned k = 0; k < top_k; ++k) ids.push_back((first + k) % experts);
        }
    }
    const std::vector<unsigned> num_tokens(ranks, tokens);
    return ref_routing_of_ids(ranks, experts, top_k, num_tokens.data(), ids.data(), kSeedOfWeights);
}

void Run(EpEnv* env, const Options& options) {
    RefRouting* routing = MakeRouting(static_cast<unsigned>(env->size), options.tokens, options.random);
    const unsigned max_tokens = options.dynamic_tokens ? NCCL_EP_AUTO : options.tokens;
    const RefShape shape = {routing->num_experts, max_tokens, routing->top_k, ncclBfloat16, options.hidden};
    const ncclEpGroupConfig_t config = ep_group_config(options.algorithm, routing->num_experts, max_tokens,
                                                       options.hidden * static_cast<unsigned>(sizeof(uint16_t)));
    ncclEpGroup_t group = nullptr;
    EP_REQUIRE_NCCL(ncclEpCreateGroup(&group, env->comm, &config, env->stream, ep_counted_alloc, ep_counted_free));
    ncclNDTensor_t kept = ep_tensor_2d(group, ncclBfloat16, NCCL_EP_TENSOR_TAG_TOKENS, options.tokens, options.hidden);
    RefRun run = ref_run_open(env, group, &shape, routing, options.high_throughput() ? ref_ht(1) : ref_ll(1));

    // Every operation is completed, staged or not: without a staged one this does nothing.
    RefPass dispatch = options.stage_dispatch ? kRefStaged : kRefWhole;
    RefPass combine = options.stage_combine ? kRefStaged : kRefWhole;
    ref_dispatch_as(&run, dispatch);
    ref_combine_as(&run, combine);
    if (options.cached && options.high_throughput()) {
        dispatch.cached = true;   // moves only tokens
        combine.backward = true;  // also returns gradients of the weights
        ref_dispatch_as(&run, dispatch);
        ref_combine_as(&run, combine);
    }
    EP_CHECK_NCCL(ep_handle_destroy(&run.handle));
    EP_CHECK_NCCL(ncclEpGroupDestroy(group, env->stream));
    ref_run_close(&run);
    EP_REQUIRE_NCCL(ncclCommDestroy(env->comm));
    env->comm = nullptr;
    // After the group and the communicator with which it was made, as existing programs do.
    EP_CHECK_NCCL(ncclEpTensorDestroy(group, &kept));
    EP_CHECK_EQ_I64(ep_counted_live(), 0);
}

}  // namespace

int main(int argc, char** argv) {
    Options options;
    const std::string error = ReadOptions(argc, argv, &options);
    EpEnv env;
    ep_init_mpi(&env, &argc, &argv);
    if (options.help || !error.empty()) {
        if (env.rank == 0 && options.help) printf("%s", kUsage);
        if (env.rank == 0 && !options.help) ep::PrintRefusal("ep_test", error);
        ep_release(&env);
        return options.help ? 0 : 1;
    }
    ep_init_device(&env);
    if (options.high_throughput() && !ep_has_high_throughput(&env)) {
        ep_skip_high_throughput();
        return ep_finish(&env);
    }
    if (env.rank == 0) {
        printf("ep_test: %d ranks, %s\n", env.size, Describe(options).c_str());
        fflush(stdout);
    }
    Run(&env, options);
    if (ep_failed() == 0) {
        printf("[MPI Rank %d] Success\n", env.rank);
    } else {
        printf("[MPI Rank %d] %llu checks failed\n", env.rank, static_cast<unsigned long long>(ep_failed()));
    }
    fflush(stdout);
    const int status = ep_finish(&env);
    cudaDeviceReset();
    return status;
}
