// Random configurations of low-latency and high-throughput operations; every byte of all outputs is
// compared with a straight-line reference that each process computes for itself.
//
//   test_random [--configs N] [--seed S] [--only INDEX] [--graphs] [--choices]
//
// The seed and the index of the configuration determine everything. A difference prints both, with
// the whole configuration and the operations that ran; `--only INDEX` then repeats this one alone. With
// --graphs each operation runs in a graph of its own, with --choices in another launch shape and, in low latency,
// another order of sums.
#include <cstdio>
#include <string>

#include "harness/options.hpp"
#include "reference/mapped.h"
#include "suites/random/config.h"

namespace test_random {

namespace {

struct Options {
    unsigned configs = 1000;
    unsigned seed = 1;
    unsigned first = 0;
    bool only = false;  // only the first configuration
    bool graphs = false;
    bool choices = false;
};

std::string ReadOptions(int argc, char** argv, Options* options) {
    ep::Option only = ep::Number(0, "only", 0, &options->first);
    const auto read = only.read;
    only.read = [=](const std::string& value) {
        options->only = true;
        return read(value);
    };
    return ep::ParseOptions(
        argc, argv,
        {ep::Number(0, "configs", 1, &options->configs), ep::Number(0, "seed", 0, &options->seed), only,
         ep::Switch(0, "graphs", &options->graphs), ep::Switch(0, "choices", &options->choices)});
}

// True if this process saw no difference.
bool RunOne(const EpEnv& env, ncclEpGroup_t group, const Config& config) {
    static char place[64];
    std::snprintf(place, sizeof(place), "configuration %u", config.index);
    ep_watchdog_at_case(place);
    const uint64_t failed_before = ep_failed();
    const std::string history = PlayAll(env, group, config);
    if (ep_failed() == failed_before) return true;
    const std::string text = "[rank " + std::to_string(env.rank) + " of " + std::to_string(env.size) +
                             "] differs: " + Describe(config) + "\n" + history + "\n";
    std::fputs(text.c_str(), stderr);
    return false;
}

// Runs configurations `first` to `end` - 1, all of one group.
unsigned RunGroup(const EpEnv& env, const Options& options, unsigned first, unsigned end) {
    const auto num_ranks = static_cast<unsigned>(env.size);
    const GroupPlan plan = DrawGroup(options.seed, first, num_ranks);
    if (!plan.low_latency && !ep_has_high_throughput(&env)) {
        ep_skip_high_throughput();
        return 0;
    }
    ncclEpGroup_t group =
        ep_group_create(&env, plan.low_latency ? NCCL_EP_ALGO_LOW_LATENCY : NCCL_EP_ALGO_HIGH_THROUGHPUT,
                        plan.num_experts, plan.max_tokens, plan.row_bytes);
    if (!plan.low_latency) ref_mapped_open(&env, group, options.seed + first);
    Chooser chooser(env, ep_mix(options.seed, first, 5));
    if (options.choices) EP_CHECK_NCCL(ncclEpSetSelector(group, Chooser::Select, &chooser));
    unsigned different = 0;
    for (unsigned index = first; index < end; ++index) {
        Config config = Draw(options.seed, index, num_ranks);
        config.graphs = options.graphs;
        config.chooser = options.choices ? &chooser : nullptr;
        if (!RunOne(env, group, config)) ++different;
    }
    ref_mapped_close();
    EP_CHECK_NCCL(ncclEpGroupDestroy(group, env.stream));
    unsigned most = 0;
    MPI_Allreduce(&different, &most, 1, MPI_UNSIGNED, MPI_MAX, MPI_COMM_WORLD);
    return most;
}

void Run(const EpEnv& env, const Options& options) {
    constexpr unsigned kEnough = 3;  // more differences say nothing new
    constexpr unsigned kDeadlineSeconds = 120;
    const unsigned begin = options.first;
    const unsigned end = options.only ? begin + 1 : options.configs;
    unsigned different = 0;
    unsigned index = begin;
    while (index < end && different < kEnough) {
        const unsigned group_end = (index / kConfigsPerGroup + 1) * kConfigsPerGroup;
        const unsigned stop = group_end < end ? group_end : end;
        ep_watchdog_arm(&env, ep_watchdog_default(kDeadlineSeconds));
        different += RunGroup(env, options, index, stop);
        index = stop;
    }
    if (env.rank == 0) {
        std::printf("%u configurations of seed %u, %u differ\n", index - begin, options.seed, different);
    }
}

}  // namespace
}  // namespace test_random

int main(int argc, char** argv) {
    EpEnv env;
    ep_init(&env, &argc, &argv);
    test_random::Options options;
    const std::string error = test_random::ReadOptions(argc, argv, &options);
    if (!error.empty()) {
        if (env.rank == 0) {
            std::fprintf(stderr,
                         "%s\nusage: test_random [--configs N] [--seed S] [--only INDEX] [--graphs] [--choices]\n",
                         error.c_str());
        }
        ep_release(&env);
        return 2;
    }
    test_random::Run(env, options);
    return ep_finish(&env);
}
