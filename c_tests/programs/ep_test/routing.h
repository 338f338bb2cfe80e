// Which token goes to which expert in ep_test. Every process computes
// the routing of all ranks, and from it what it must receive: no
// message, and no call of the library, takes part in the expectation.
#ifndef C_TESTS_PROGRAMS_EP_TEST_ROUTING_H_
#define C_TESTS_PROGRAMS_EP_TEST_ROUTING_H_

#include <stddef.h>
#include <stdint.h>

#include <vector>

namespace ep_test {

class Routing {
   public:
    // top-k is the largest power of two up to min(8, ranks), so that the
    // weights 1/top-k and sums of them are exact; every rank has top-k
    // experts. For 2, 4, 8, 16 and 32 ranks that is the reference's choice.
    Routing(unsigned ranks, unsigned tokens, bool random);

    unsigned ranks() const { return ranks_; }
    unsigned tokens() const { return tokens_; }
    unsigned top_k() const { return top_k_; }
    unsigned local_experts() const { return top_k_; }
    unsigned experts() const { return top_k_ * ranks_; }

    // The [tokens, top_k] ids of one rank.
    const int64_t* ids(unsigned rank) const { return &ids_[size_t{rank} * tokens_ * top_k_]; }

    // Low latency: rows that an expert gets from each source rank.
    std::vector<unsigned> RowsBySource(unsigned expert) const;

    // High throughput: the source rank and local expert ids of each
    // row that a rank gets, in row order.
    struct Row {
        unsigned source;
        std::vector<int64_t> local_ids;  // ascending
    };
    std::vector<Row> RowsOfRank(unsigned rank) const;

    // High throughput: to how many ranks a token goes.
    unsigned DestinationCount(unsigned rank, unsigned token) const;

   private:
    unsigned ranks_;
    unsigned tokens_;
    unsigned top_k_;
    std::vector<int64_t> ids_;  // [ranks, tokens, top_k]
};

}  // namespace ep_test

#endif  // C_TESTS_PROGRAMS_EP_TEST_ROUTING_H_
