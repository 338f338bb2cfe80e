// The two routings of ep_test; see routing.h.
#include "programs/ep_test/routing.h"

#include <algorithm>
#include <cstdlib>
#include <vector>

namespace ep_test {
namespace {

constexpr uint64_t kSeedOfWeights = 42;

unsigned TopK(unsigned ranks) {
    unsigned top_k = 1;
    while (2 * top_k <= std::min(8u, ranks)) top_k *= 2;
    return top_k;
}

}  // namespace

ref::Routing MakeRouting(unsigned ranks, unsigned tokens, bool random) {
    const unsigned top_k = TopK(ranks);
    const unsigned experts = top_k * ranks;
    std::vector<int64_t> ids;
    ids.reserve(size_t{ranks} * tokens * top_k);
    for (unsigned rank = 0; rank < ranks; ++rank) {
        srand(rank + 42);
        for (unsigned token = 0; token < tokens; ++token) {
            const unsigned first = random ? static_cast<unsigned>(rand()) % experts : (rank + 1) * top_k;
            for (unsigned k = 0; k < top_k; ++k) ids.push_back((first + k) % experts);
        }
    }
    const std::vector<unsigned> num_tokens(ranks, tokens);
    return ref::Routing(ref_routing_of_ids(ranks, experts, top_k, num_tokens.data(), ids.data(), kSeedOfWeights));
}

}  // namespace ep_test
