// The random configurations of test_random: drawn from a seed and an index, equal on all ranks.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "reference/run.h"
#include "suites/random/chooser.h"

namespace test_random {

// Making a group costs more than an operation, so consecutive configurations share one.
constexpr unsigned kConfigsPerGroup = 20;

struct GroupPlan {
    bool low_latency;
    unsigned num_experts;
    unsigned max_tokens;  // may be NCCL_EP_AUTO in high throughput
    unsigned row_bytes;
};

struct HandlePlan {
    RefStyle style;
    bool uneven;
    unsigned top_k;
    ncclDataType_t datatype;
    unsigned hidden;
    HtRows rows;        // high throughput
    HtCounter counter;  // high throughput
    uint64_t seed;
};

struct Config {
    uint64_t seed;
    unsigned index;
    GroupPlan group;
    std::vector<HandlePlan> handles;
    unsigned steps;
    bool delays;
    bool graphs = false;         // each operation is captured, and its graph launched
    Chooser* chooser = nullptr;  // of the group, if operations have choices
};

// The group of all configurations with this index / kConfigsPerGroup.
GroupPlan DrawGroup(uint64_t seed, unsigned index, unsigned num_ranks);
Config Draw(uint64_t seed, unsigned index, unsigned num_ranks);
std::string Describe(const Config& config);

// Runs operations in a random order on the handles, and compares all outputs with the reference. Returns what ran.
std::string PlayAll(const EpEnv& env, ncclEpGroup_t group, const Config& config);

}  // namespace test_random
