// What moe_layer prints, on rank 0.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "harness/harness.h"
#include "programs/moe_layer/options.h"

namespace moe {

struct LayerReport {
    ncclEpAlgorithm_t algorithm = NCCL_EP_ALGO_LOW_LATENCY;
    size_t layer = 0;
    std::vector<uint64_t> sent;      // by each rank to each, computed from the routing
    std::vector<uint64_t> received;  // by each rank, as the library reported it
    double error = 0.0;             // largest relative error against the dense computation
    double error_if_swapped = 0.0;  // the same with the results of two tokens swapped
    double bound = 0.0;             // for error; error_if_swapped has to exceed it
};

// num_tokens: of all ranks together.
void PrintModel(const EpEnv& env, const Options& options, const std::string& text_path, uint64_t num_tokens);
void PrintLayer(const Options& options, const LayerReport& report);

}  // namespace moe
