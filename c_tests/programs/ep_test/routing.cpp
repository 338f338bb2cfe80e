// The two routings of ep_test: every token to the experts of the next
// rank, or top-k consecutive experts from a random first one. Seeds are
// the reference's, so that a configuration means the same routing in both.
#include "programs/ep_test/routing.h"

#include <algorithm>
#include <cstdlib>
#include <set>

namespace ep_test {
namespace {

unsigned TopK(unsigned ranks) {
    unsigned top_k = 1;
    while (2 * top_k <= std::min(8u, ranks)) top_k *= 2;
    return top_k;
}

}  // namespace

Routing::Routing(unsigned ranks, unsigned tokens, bool random)
    : ranks_(ranks), tokens_(tokens), top_k_(TopK(ranks)) {
    ids_.reserve(size_t{ranks} * tokens * top_k_);
    for (unsigned rank = 0; rank < ranks; ++rank) {
        srand(rank + 42);
        for (unsigned token = 0; token < tokens; ++token) {
            const unsigned first =
                random ? static_cast<unsigned>(rand()) % experts() : (rank + 1) * local_experts();
            for (unsigned k = 0; k < top_k_; ++k) ids_.push_back((first + k) % experts());
        }
    }
}

std::vector<unsigned> Routing::RowsBySource(unsigned expert) const {
    std::vector<unsigned> rows(ranks_, 0);
    for (unsigned rank = 0; rank < ranks_; ++rank) {
        const int64_t* begin = ids(rank);
        rows[rank] = static_cast<unsigned>(
            std::count(begin, begin + size_t{tokens_} * top_k_, static_cast<int64_t>(expert)));
    }
    return rows;
}

std::vector<Routing::Row> Routing::RowsOfRank(unsigned rank) const {
    const int64_t first = int64_t{rank} * local_experts();
    std::vector<Row> rows;
    for (unsigned source = 0; source < ranks_; ++source) {
        for (unsigned token = 0; token < tokens_; ++token) {
            Row row{source, {}};
            for (unsigned k = 0; k < top_k_; ++k) {
                const int64_t local = ids(source)[size_t{token} * top_k_ + k] - first;
                if (local >= 0 && local < local_experts()) row.local_ids.push_back(local);
            }
            std::sort(row.local_ids.begin(), row.local_ids.end());
            if (!row.local_ids.empty()) rows.push_back(std::move(row));
        }
    }
    return rows;
}

unsigned Routing::DestinationCount(unsigned rank, unsigned token) const {
    std::set<int64_t> destinations;
    for (unsigned k = 0; k < top_k_; ++k) {
        destinations.insert(ids(rank)[size_t{token} * top_k_ + k] / local_experts());
    }
    return static_cast<unsigned>(destinations.size());
}

}  // namespace ep_test
