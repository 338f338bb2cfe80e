// Chooses a launch shape for each operation of a group, different on each rank, and for low-latency combines an order
// of sums, the same on all.
#pragma once

#include "reference/ll.h"
#include "suites/random/config.h"

namespace test_random {

class Chooser {
   public:
    Chooser(const EpEnv& env, uint64_t seed);
    // An ncclEpSelect_t; `user` is a chooser.
    static int Select(void* user, const ncclEpQuery_t* query, ncclEpChoice_t* choice);
    // Chooses this ncclEpVariant_t for the combines to come; returns how they will sum tokens of so many ids.
    RefLlSum Sum(unsigned variant, unsigned top_k);

   private:
    unsigned Below(unsigned bound);
    int Choose(const ncclEpQuery_t& query, ncclEpChoice_t* choice);

    unsigned ranks_;
    unsigned variant_ = NCCL_EP_VARIANT_AUTO;
    uint64_t own_;
};

}  // namespace test_random
