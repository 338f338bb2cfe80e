// The two routings of ep_bench. Low latency: the top-k of random scores, with some entries masked.
// High throughput: consecutive experts from a random first one, or as low latency if that is asked
// for. Generators and seeds are the documented ones.
#include "programs/ep_bench/routing.h"

#include <mpi.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <numeric>
#include <random>

namespace ep_bench {
namespace {

constexpr unsigned kRanksOfNode = 8;

std::vector<int64_t> DrawTopScores(const Shape& shape, unsigned rank) {
    std::mt19937 generator(1 + rank);
    std::normal_distribution<float> normal(0.0f, 1.0f);
    std::vector<int64_t> ids;
    std::vector<float> scores(shape.experts);
    std::vector<int64_t> order(shape.experts);
    for (unsigned token = 0; token < shape.tokens; ++token) {
        for (float& score : scores) score = std::abs(normal(generator)) + 1.0f;
        std::iota(order.begin(), order.end(), 0);
        std::partial_sort(order.begin(), order.begin() + shape.top_k, order.end(),
                          [&scores](int64_t left, int64_t right) {
                              const float a = scores[static_cast<size_t>(left)];
                              const float b = scores[static_cast<size_t>(right)];
                              return a != b ? a > b : left < right;
                          });
        ids.insert(ids.end(), order.begin(), order.begin() + shape.top_k);
    }
    std::uniform_int_distribution<unsigned> any_token(0, shape.tokens - 1);
    std::uniform_int_distribution<unsigned> any_k(0, shape.top_k - 1);
    for (unsigned i = 0; i < shape.masked; ++i) {
        const size_t token = any_token(generator);
        ids[token * shape.top_k + any_k(generator)] = -1;
    }
    return ids;
}

std::vector<int64_t> DrawConsecutive(const Shape& shape, unsigned rank) {
    srand(rank + 42);
    std::vector<int64_t> ids;
    for (unsigned token = 0; token < shape.tokens; ++token) {
        const unsigned first = static_cast<unsigned>(rand()) % shape.experts;
        for (unsigned k = 0; k < shape.top_k; ++k) ids.push_back((first + k) % shape.experts);
    }
    return ids;
}

}  // namespace

Routing::Routing(const Shape& shape, unsigned rank, bool by_scores) : shape_(shape), rank_(rank) {
    const std::vector<int64_t> mine =
        by_scores ? DrawTopScores(shape, rank) : DrawConsecutive(shape, rank);
    ids_.resize(mine.size() * shape.ranks);
    const int count = static_cast<int>(mine.size());
    MPI_Allgather(mine.data(), count, MPI_INT64_T, ids_.data(), count, MPI_INT64_T, MPI_COMM_WORLD);
}

unsigned Routing::Entries(unsigned source, unsigned token) const {
    const int64_t* begin = ids(source, token);
    return static_cast<unsigned>(
        std::count_if(begin, begin + shape_.top_k, [](int64_t id) { return id >= 0; }));
}

std::vector<unsigned> Routing::Destinations(unsigned source, unsigned token) const {
    std::vector<unsigned> ranks;
    for (unsigned k = 0; k < shape_.top_k; ++k) {
        const int64_t id = ids(source, token)[k];
        if (id >= 0) ranks.push_back(static_cast<unsigned>(id / shape_.local_experts()));
    }
    std::sort(ranks.begin(), ranks.end());
    ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());
    return ranks;
}

Traffic CountTraffic(const Routing& routing, bool low_latency) {
    const Shape& shape = routing.shape();
    const unsigned self = routing.rank();
    Traffic traffic;
    for (unsigned token = 0; token < shape.tokens; ++token) {
        std::vector<unsigned> ranks = routing.Destinations(self, token);
        traffic.pair += routing.Entries(self, token);
        traffic.dedup += ranks.size();
        traffic.wire +=
            ranks.size() - static_cast<size_t>(std::count(ranks.begin(), ranks.end(), self));
        for (unsigned& rank : ranks) rank /= kRanksOfNode;
        traffic.node +=
            static_cast<size_t>(std::unique(ranks.begin(), ranks.end()) - ranks.begin());
    }
    for (unsigned source = 0; source < shape.ranks; ++source) {
        for (unsigned token = 0; token < shape.tokens; ++token) {
            uint64_t here = 0;
            for (unsigned k = 0; k < shape.top_k; ++k) {
                const int64_t id = routing.ids(source, token)[k];
                here += id >= 0 && id / shape.local_experts() == self;
            }
            traffic.received += low_latency ? here : std::min<uint64_t>(here, 1);
        }
    }
    return traffic;
}

}  // namespace ep_bench
