// High-throughput operations in straight lines; see ht.h.
#include <algorithm>

#include "reference/ht.h"
#include "reference/walk.hpp"

namespace {

// One token on one of the ranks that it goes to.
struct Copy {
    unsigned source;
    size_t token;
    unsigned destination;
    size_t row;                     // there
    std::vector<unsigned> experts;  // local ids there, ascending
};

// Fills in the experts of a token on copy->destination.
void FindExperts(const RefRouting& routing, Copy* copy) {
    const unsigned local_experts = ref_local_experts(&routing);
    const int64_t* ids = &routing.topk_idx[copy->source][copy->token * routing.top_k];
    copy->experts.clear();
    for (unsigned k = 0; k < routing.top_k; ++k) {
        const int64_t expert = ref_expert_of(&routing, ids[k]);
        if (expert < 0 || expert / local_experts != copy->destination) continue;
        copy->experts.push_back(static_cast<unsigned>(expert % local_experts));
    }
    std::sort(copy->experts.begin(), copy->experts.end());
    copy->experts.erase(std::unique(copy->experts.begin(), copy->experts.end()), copy->experts.end());
}

// Calls `each` for every token on every rank that it goes to: by source, token and destination.
template <typename Each>
void Walk(const RefRouting& routing, Each each) {
    std::vector<size_t> rows(routing.num_ranks);
    Copy copy{};
    for (copy.source = 0; copy.source < routing.num_ranks; ++copy.source) {
        for (copy.token = 0; copy.token < routing.num_tokens[copy.source]; ++copy.token) {
            for (copy.destination = 0; copy.destination < routing.num_ranks; ++copy.destination) {
                FindExperts(routing, &copy);
                if (copy.experts.empty()) continue;
                copy.row = rows[copy.destination]++;
                each(copy);
            }
        }
    }
}

template <typename Each>
void WalkTo(const RefRouting& routing, unsigned rank, Each each) {
    Walk(routing, [&](const Copy& copy) {
        if (copy.destination == rank) each(copy);
    });
}

template <typename Each>
void WalkFrom(const RefRouting& routing, unsigned rank, Each each) {
    Walk(routing, [&](const Copy& copy) {
        if (copy.source == rank) each(copy);
    });
}

// The sum over the entries that name the expert, by k, and without one 0.
float GivenWeight(const RefRouting& given, const Copy& copy, int64_t expert) {
    float weight = 0.0f;
    bool is_named = false;
    for (size_t k = 0; k < given.top_k; ++k) {
        const size_t entry = copy.token * given.top_k + k;
        if (given.topk_idx[copy.source][entry] != expert) continue;
        // The first one is not added to zero, so that a weight of -0 stays one.
        weight = is_named ? weight + given.weights[copy.source][entry] : given.weights[copy.source][entry];
        is_named = true;
    }
    return weight;
}

}  // namespace

RefRouting* ref_ht_cut(const RefRouting* routing, unsigned most) {
    RefRouting* cut = ref_routing_copy(routing);
    Walk(*routing, [&](const Copy& copy) {
        int64_t* ids = &cut->topk_idx[copy.source][copy.token * routing->top_k];
        for (unsigned k = 0; copy.row >= most && k < routing->top_k; ++k) {
            const int64_t expert = ref_expert_of(routing, ids[k]);
            if (expert >= 0 && expert / ref_local_experts(routing) == copy.destination) ids[k] = -1;
        }
    });
    return cut;
}

unsigned ref_ht_received(const RefRouting* routing, unsigned rank) {
    unsigned received = 0;
    WalkTo(*routing, rank, [&](const Copy&) { ++received; });
    return received;
}

void ref_ht_counts(const RefRouting* routing, unsigned rank, int32_t* counts) {
    std::fill_n(counts, ref_local_experts(routing), 0);
    WalkTo(*routing, rank, [&](const Copy& copy) {
        for (const unsigned expert : copy.experts) ++counts[expert];
    });
}

uint64_t* ref_ht_rows(const RefRouting* routing, unsigned rank) {
    uint64_t* rows = ref::NewArray<uint64_t>(ref_ht_received(routing, rank));
    WalkTo(*routing, rank, [&](const Copy& copy) { rows[copy.row] = ref_row_of(copy.source, copy.token); });
    return rows;
}

void ref_ht_dispatch_tokens(const RefRouting* routing, unsigned rank, const RefRows* tokens, unsigned num_rows,
                            void* out) {
    const size_t row_bytes = ref_row_bytes(tokens);
    std::memset(out, 0, num_rows * row_bytes);
    WalkTo(*routing, rank, [&](const Copy& copy) {
        ref_row_fill(tokens, ref_row_of(copy.source, copy.token),
                     static_cast<unsigned char*>(out) + copy.row * row_bytes);
    });
}

void ref_ht_dispatch_routing(const RefRouting* routing, const RefRouting* given, unsigned rank, unsigned num_rows,
                             int64_t* ids, float* weights) {
    const size_t top_k = routing->top_k;
    const int64_t first = int64_t{rank} * ref_local_experts(routing);
    std::fill_n(ids, num_rows * top_k, -1);
    std::fill_n(weights, num_rows * top_k, 0.0f);
    WalkTo(*routing, rank, [&](const Copy& copy) {
        for (size_t i = 0; i < copy.experts.size(); ++i) {
            ids[copy.row * top_k + i] = copy.experts[i];
            weights[copy.row * top_k + i] = GivenWeight(*given, copy, first + copy.experts[i]);
        }
    });
}

void ref_ht_combine(const RefRouting* routing, unsigned rank, const RefRows* expert_rows, void* out) {
    struct Result {
        unsigned rank;
        size_t row;
    };
    // By destination, which is the order of a node's sum.
    std::vector<std::vector<Result>> results(routing->num_tokens[rank]);
    WalkFrom(*routing, rank, [&](const Copy& copy) { results[copy.token].push_back({copy.destination, copy.row}); });
    for (size_t token = 0; token < results.size(); ++token) {
        ref::SumNodes(rank, token, *expert_rows, out, [&](unsigned distance, float* sum) {
            bool found = false;
            for (const Result& result : results[token]) {
                if (ep_node_distance(rank, result.rank) != distance) continue;
                found = true;
                ref::AddRow(*expert_rows, ref_row_of(result.rank, result.row), sum);
            }
            return found;
        });
    }
}

void ref_ht_gradients(const RefRouting* routing, unsigned rank, unsigned columns, uint64_t seed, float* out) {
    const size_t tokens = routing->num_tokens[rank];
    std::vector<unsigned> used(tokens);  // columns of each token that are filled
    std::fill_n(out, tokens * columns, 0.0f);
    WalkFrom(*routing, rank, [&](const Copy& copy) {
        for (unsigned i = 0; i < copy.experts.size() && i < columns && used[copy.token] < columns; ++i) {
            out[copy.token * columns + used[copy.token]++] = ref_weight(seed, copy.destination, copy.row * columns + i);
        }
    });
}

void ref_ht_gradients_by_k(const RefRouting* routing, unsigned rank, uint64_t seed, float* out) {
    const size_t top_k = routing->top_k;
    std::fill_n(out, ref_entries_of(routing, rank), 0.0f);
    WalkFrom(*routing, rank, [&](const Copy& copy) {
        const int64_t first = int64_t{copy.destination} * ref_local_experts(routing);
        for (size_t entry = copy.token * top_k; entry < (copy.token + 1) * top_k; ++entry) {
            for (size_t i = 0; i < copy.experts.size(); ++i) {
                if (routing->topk_idx[rank][entry] != first + copy.experts[i]) continue;
                out[entry] = ref_weight(seed, copy.destination, copy.row * top_k + i);
            }
        }
    });
}
