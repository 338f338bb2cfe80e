// Which token goes to which expert in ep_bench, and how much data that is by each convention in
// use. Everything is computed on the host from the ids of all ranks, independent of the library.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include <vector>

#include "programs/ep_bench/options.h"
#include "programs/ep_bench/tokens.h"
#include "reference/owned.hpp"

namespace ep_bench {

// The shape of one measurement; R, T, M, K and E of the documentation.
struct Shape {
    unsigned ranks;
    Tokens tokens;        // of each rank
    unsigned max_tokens;  // of the group: what the library allows each rank
    unsigned top_k;
    unsigned experts;
    unsigned masked;  // entries of a rank without an expert, drawn with replacement
    RoutingKind kind;
    double zipf_exponent;

    unsigned local_experts() const { return experts / ranks; }
};

class Routing {
   public:
    // Collective: each rank draws its own ids, with the reference's generators and seeds where the
    // reference has that routing, and receives all others'.
    Routing(const Shape& shape, unsigned rank);

    const Shape& shape() const { return shape_; }
    unsigned rank() const { return rank_; }
    unsigned tokens() const { return shape_.tokens[rank_]; }  // of this rank

    // The ids and weights of all ranks.
    const RefRouting& all() const { return *all_; }

    // The [top_k] ids of one token of any rank; -1 means no expert.
    const int64_t* ids(unsigned source, unsigned token) const {
        return all_->topk_idx[source] + size_t{token} * shape_.top_k;
    }

    // Entries with an expert, and distinct ranks among them.
    unsigned Entries(unsigned source, unsigned token) const;
    std::vector<unsigned> Destinations(unsigned source, unsigned token) const;  // ascending

   private:
    Shape shape_;
    unsigned rank_;
    ref::Routing all_;
};

// Rows that one rank sends or receives in one dispatch; a combine moves the same rows back.
struct Traffic {
    uint64_t pair = 0;      // one for each valid (token, k)
    uint64_t dedup = 0;     // one for each distinct (token, rank), the own rank included
    uint64_t wire = 0;      // dedup without the own rank
    uint64_t node = 0;      // one for each distinct (token, node of eight ranks)
    uint64_t received = 0;  // rows in this rank's dispatch output
    uint64_t wire_in = 0;   // distinct tokens of other ranks with an expert here
};

Traffic CountTraffic(const Routing& routing, bool low_latency);

}  // namespace ep_bench
