// The routings of ep_bench. Those that the reference's program has (top-k of random scores for low
// latency, consecutive experts for high throughput) use its generators and seeds.
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
constexpr uint64_t kSeedOfWeights = 42;

// For each token, the experts with the highest scores that `draw` makes.
template <typename Draw>
std::vector<int64_t> TopScores(const Shape& shape, unsigned tokens, Draw draw) {
    std::vector<int64_t> ids;
    std::vector<float> scores(shape.experts);
    std::vector<int64_t> order(shape.experts);
    for (unsigned token = 0; token < tokens; ++token) {
        draw(&scores);
        std::iota(order.begin(), order.end(), 0);
        std::partial_sort(order.begin(), order.begin() + shape.top_k, order.end(),
                          [&scores](int64_t left, int64_t right) {
                              const float a = scores[static_cast<size_t>(left)];
                              const float b = scores[static_cast<size_t>(right)];
                              return a != b ? a > b : left < right;
                          });
        ids.insert(ids.end(), order.begin(), order.begin() + shape.top_k);
    }
    return ids;
}

std::vector<int64_t> DrawUniform(const Shape& shape, unsigned tokens, std::mt19937* generator) {
    std::normal_distribution<float> normal(0.0f, 1.0f);
    return TopScores(shape, tokens, [&](std::vector<float>* scores) {
        for (float& score : *scores) score = std::abs(normal(*generator)) + 1.0f;
    });
}

// The logarithm of each expert's weight. The popular experts are the same on all ranks, and the
// popularity of neighbours, which share a rank, is independent. Avoids the distributions of the
// standard library, whose results differ between implementations.
std::vector<float> ZipfLogWeights(const Shape& shape) {
    constexpr unsigned kSeed = 7;
    std::mt19937 generator(kSeed);
    std::vector<float> weights(shape.experts);
    for (unsigned i = 0; i < shape.experts; ++i) {
        weights[i] = static_cast<float>(-shape.zipf_exponent * std::log(i + 1.0));
    }
    for (unsigned left = shape.experts; left > 1; --left) {
        std::swap(weights[left - 1], weights[generator() % left]);
    }
    return weights;
}

// With Gumbel noise on the logarithms, the top k are k draws without replacement.
std::vector<int64_t> DrawZipf(const Shape& shape, unsigned tokens, std::mt19937* generator) {
    const std::vector<float> weights = ZipfLogWeights(shape);
    return TopScores(shape, tokens, [&](std::vector<float>* scores) {
        for (size_t expert = 0; expert < scores->size(); ++expert) {
            const double uniform = ((*generator)() + 0.5) / 4294967296.0;
            (*scores)[expert] = weights[expert] - static_cast<float>(std::log(-std::log(uniform)));
        }
    });
}

std::vector<int64_t> DrawConsecutive(const Shape& shape, unsigned rank) {
    srand(rank + 42);
    std::vector<int64_t> ids;
    for (unsigned token = 0; token < shape.tokens[rank]; ++token) {
        const unsigned first = static_cast<unsigned>(rand()) % shape.experts;
        for (unsigned k = 0; k < shape.top_k; ++k) ids.push_back((first + k) % shape.experts);
    }
    return ids;
}

std::vector<int64_t> Draw(const Shape& shape, unsigned rank, std::mt19937* generator) {
    switch (shape.kind) {
        case RoutingKind::kUniform: return DrawUniform(shape, shape.tokens[rank], generator);
        case RoutingKind::kZipf: return DrawZipf(shape, shape.tokens[rank], generator);
        default: return DrawConsecutive(shape, rank);
    }
}

void Mask(const Shape& shape, unsigned tokens, std::mt19937* generator, std::vector<int64_t>* ids) {
    if (tokens == 0) return;
    std::uniform_int_distribution<unsigned> any_token(0, tokens - 1);
    std::uniform_int_distribution<unsigned> any_k(0, shape.top_k - 1);
    for (unsigned i = 0; i < shape.masked; ++i) {
        const size_t token = any_token(*generator);
        (*ids)[token * shape.top_k + any_k(*generator)] = -1;
    }
}

}  // namespace

Routing::Routing(const Shape& shape, unsigned rank) : shape_(shape), rank_(rank) {
    std::mt19937 generator(1 + rank);
    std::vector<int64_t> mine = Draw(shape, rank, &generator);
    Mask(shape, tokens(), &generator, &mine);
    std::vector<int> counts, places;  // in ids
    int before = 0;
    for (const unsigned tokens : shape.tokens) {
        counts.push_back(static_cast<int>(tokens * shape.top_k));
        places.push_back(before);
        before += counts.back();
    }
    std::vector<int64_t> ids(static_cast<size_t>(before));
    MPI_Allgatherv(mine.data(), counts[rank], MPI_INT64_T, ids.data(), counts.data(), places.data(),
                   MPI_INT64_T, MPI_COMM_WORLD);
    all_.reset(ref_routing_of_ids(shape.ranks, shape.experts, shape.top_k, shape.tokens.data(),
                                  ids.data(), kSeedOfWeights));
}

unsigned Routing::Entries(unsigned source, unsigned token) const {
    const int64_t* begin = ids(source, token);
    return static_cast<unsigned>(std::count_if(begin, begin + shape_.top_k, [](int64_t id) { return id >= 0; }));
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
    for (unsigned token = 0; token < routing.tokens(); ++token) {
        std::vector<unsigned> ranks = routing.Destinations(self, token);
        traffic.pair += routing.Entries(self, token);
        traffic.dedup += ranks.size();
        traffic.wire += ranks.size() - static_cast<size_t>(std::count(ranks.begin(), ranks.end(), self));
        for (unsigned& rank : ranks) rank /= kRanksOfNode;
        traffic.node += static_cast<size_t>(std::unique(ranks.begin(), ranks.end()) - ranks.begin());
    }
    for (unsigned source = 0; source < shape.ranks; ++source) {
        for (unsigned token = 0; token < shape.tokens[source]; ++token) {
            uint64_t here = 0;
            for (unsigned k = 0; k < shape.top_k; ++k) {
                const int64_t id = routing.ids(source, token)[k];
                here += id >= 0 && id / shape.local_experts() == self;
            }
            const uint64_t any = std::min<uint64_t>(here, 1);
            traffic.received += low_latency ? here : any;
            traffic.wire_in += source == self ? 0 : any;
        }
    }
    return traffic;
}

}  // namespace ep_bench
