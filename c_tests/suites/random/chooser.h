// Chooses a launch shape for each operation of a group, different on each rank, and for low-latency combines an order
// of sums, the same on all.
#pragma once

#include "harness/nodes.h"
#include "reference/ll.h"

namespace test_random {

class Chooser {
   public:
    Chooser(const EpEnv& env, uint64_t seed)
        : ranks_(static_cast<unsigned>(env.size)), own_(ep_mix(seed, static_cast<uint64_t>(env.rank), 6)) {}

    // An ncclEpSelect_t; `user` is a chooser.
    static int Select(void* user, const ncclEpQuery_t* query, ncclEpChoice_t* choice) {
        return static_cast<Chooser*>(user)->Choose(*query, choice);
    }

    // Chooses this ncclEpVariant_t for the combines to come; returns how they will sum tokens of so many ids.
    RefLlSum Sum(unsigned variant, unsigned top_k) {
        const RefLlSum own = ref_ll_sum();
        variant_ = variant;
        if (variant == NCCL_EP_VARIANT_LL_REDUCE) return kRefReduce;
        const bool possible = ep_num_nodes() == 1 && (own == kRefExact || top_k <= ranks_);
        return variant == NCCL_EP_VARIANT_LL_EXACT && possible ? kRefExact : own;
    }

   private:
    unsigned Below(unsigned bound) { return static_cast<unsigned>(ep_random_below(&own_, bound)); }

    // Every field is left to the library now and then. Shapes always fit, or they would be passed over.
    int Choose(const ncclEpQuery_t& query, ncclEpChoice_t* choice) {
        constexpr unsigned kWarp = 32;
        constexpr unsigned kMostWarps = 1024 / kWarp;
        constexpr unsigned kBlocks = 24;  // without a bound
        const unsigned most = query.sms > 0 ? query.sms : kBlocks;
        const bool combines = query.operation == NCCL_EP_OPERATION_LL_COMBINE;
        if (combines) choice->variant = variant_;
        if (Below(4) != 0) choice->blocks = 1 + Below(most);
        if (Below(4) != 0) choice->send_blocks = 1 + Below(choice->blocks > 0 ? choice->blocks : most);
        if (Below(4) != 0) choice->threads = kWarp * (1 + Below(kMostWarps));
        choice->in_order = Below(2);
        return combines || Below(8) != 0 ? 1 : 0;
    }

    unsigned ranks_;
    unsigned variant_ = NCCL_EP_VARIANT_AUTO;
    uint64_t own_;
};

}  // namespace test_random
