// The data that ep_test sends, and the comparison of everything that arrives with the reference. It covers every byte
// of every output; the reference's program checks the first ten elements of a row.
#pragma once

#include <stdint.h>

#include <vector>

#include "harness/harness.h"
#include "reference/layout.h"
#include "reference/owned.hpp"
#include "reference/rows.h"

namespace ep_test {

// One rank's view of an exchange. Poison the outputs before an operation.
class Exchange {
   public:
    Exchange(ref::Routing routing, unsigned rank, unsigned hidden);

    const RefRouting& routing() const { return *routing_; }
    unsigned tokens() const { return routing_->num_tokens[rank_]; }
    // Of what arrives in low latency.
    RefLayout layout() const {
        return ref_expert_major(ref_local_experts(routing_.get()), routing_->num_ranks * tokens());
    }

    // Inputs. Rows and columns that nobody may read are poison.
    std::vector<uint16_t> Tokens() const;
    std::vector<uint16_t> ResultsLl() const;
    std::vector<uint16_t> ResultsHt(unsigned rows) const;
    std::vector<float> Gradients(unsigned rows) const;

    void CheckDispatchLl(const ncclNDTensor_t& tokens, const ncclNDTensor_t& counter) const;
    void CheckTokensHt(const ncclNDTensor_t& tokens) const;
    void CheckRoutingHt(const ncclNDTensor_t& ids, const ncclNDTensor_t& weights) const;
    void CheckCombineLl(const ncclNDTensor_t& combined) const;
    void CheckCombineHt(const ncclNDTensor_t& combined) const;
    void CheckGradients(const ncclNDTensor_t& gradients) const;

   private:
    ref::Routing routing_;
    unsigned rank_;
    RefRows tokens_;
    RefRows results_;
};

void Poison(const ncclNDTensor_t& output);

}  // namespace ep_test
