// One MoE layer over all ranks, through NCCL EP: tokens travel to the ranks of their experts, the
// experts compute there, the results come back and are summed up at home.
//
// The library's two algorithms differ in the rows that a rank receives and in the rank that applies the weights:
//                     low latency                      high throughput
//   a rank receives   one row for each (token, expert)  one row for each token
//   weights           applied by combine, at home       arrive with the rows; the expert rank
//                                                       applies them
// The library moves rows in device memory. The experts of this program compute on the host, so that it needs no device
// code; a real layer would launch its kernels on the same stream instead of downloading and uploading.
#pragma once

#include "harness/harness.h"
#include "programs/moe_layer/model.h"

namespace moe {

struct LayerContext {
    const EpEnv& env;
    ncclEpGroup_t group;
    const ModelConfig& model;
    size_t max_tokens_per_rank;
    size_t layer;
    bool fp8;  // dispatches cast the rows to e4m3

    size_t num_ranks() const { return static_cast<size_t>(env.size); }
    size_t num_local_experts() const { return model.num_experts / num_ranks(); }
    // Expert e lives on rank e / num_local_experts().
    Expert LocalExpert(size_t e) const {
        return Expert(model, layer, static_cast<size_t>(env.rank) * num_local_experts() + e);
    }
};

struct LayerOutput {
    std::vector<uint16_t> rows;  // [tokens, hidden], one for each token of this rank
    size_t rows_received;        // by this rank, from all ranks
};

// rows: the tokens of this rank, [tokens, hidden]; routing: their experts. Collective.
LayerOutput RunLowLatencyLayer(const LayerContext& context, const std::vector<uint16_t>& rows, const Routing& routing);
LayerOutput RunHighThroughputLayer(const LayerContext& context, const std::vector<uint16_t>& rows,
                                   const Routing& routing);

}  // namespace moe
