// Rank-major low-latency operations in straight lines; see rank_major.h.
#include <algorithm>

#include "reference/rank_major.h"
#include "reference/walk.hpp"

namespace {

constexpr int64_t kNobody = -1;

// The rank that hosts the expert of entry k of a token, or kNobody.
int64_t OwnerOf(const RefRouting& routing, unsigned source, size_t token, unsigned k) {
    const int64_t expert = ref_expert_of(&routing, routing.topk_idx[source][token * routing.top_k + k]);
    return expert < 0 ? kNobody : expert / ref_local_experts(&routing);
}

// The ranks that a token goes to, in the order of the first k that names each.
std::vector<unsigned> OwnersOf(const RefRouting& routing, unsigned source, size_t token) {
    std::vector<unsigned> owners;
    for (unsigned k = 0; k < routing.top_k; ++k) {
        const int64_t owner = OwnerOf(routing, source, token, k);
        const auto rank = static_cast<unsigned>(owner);
        if (owner == kNobody || std::find(owners.begin(), owners.end(), rank) != owners.end()) continue;
        owners.push_back(rank);
    }
    return owners;
}

template <typename Each>
void Walk(const RefRouting& routing, unsigned rank, RefLayout layout, Each each) {
    for (unsigned source = 0; source < routing.num_ranks; ++source) {
        size_t index = 0;
        for (size_t token = 0; token < routing.num_tokens[source]; ++token) {
            const std::vector<unsigned> owners = OwnersOf(routing, source, token);
            if (std::find(owners.begin(), owners.end(), rank) == owners.end()) continue;
            each(source, token, ref_layout_row(layout, source, index++));
        }
    }
}

}  // namespace

void ref_rank_each(const RefRouting* routing, unsigned rank, RefLayout layout, RefRankRowFn each, void* context) {
    Walk(*routing, rank, layout, [&](unsigned source, size_t token, size_t row) { each(source, token, row, context); });
}

void ref_rank_counts(const RefRouting* routing, unsigned rank, int32_t* counts) {
    std::fill_n(counts, routing->num_ranks, 0);
    Walk(*routing, rank, ref_rank_major(routing->num_ranks, 0),
         [&](unsigned source, size_t, size_t) { ++counts[source]; });
}

void ref_rank_beside(const RefRouting* routing, unsigned rank, RefLayout layout, int64_t* ids, float* weights) {
    const unsigned top_k = routing->top_k;
    std::fill_n(ids, ref_layout_rows(layout) * top_k, -1);
    Walk(*routing, rank, layout, [&](unsigned source, size_t token, size_t row) {
        for (unsigned k = 0; k < top_k; ++k) {
            const size_t entry = token * top_k + k;
            weights[row * top_k + k] = routing->weights[source][entry];
            if (OwnerOf(*routing, source, token, k) != rank) continue;
            ids[row * top_k + k] = routing->topk_idx[source][entry] % ref_local_experts(routing);
        }
    });
}

void ref_rank_results(const RefRouting* routing, unsigned rank, RefLayout layout, const RefRows* expert_rows,
                      void* out) {
    Walk(*routing, rank, layout, [&](unsigned, size_t, size_t row) {
        ref_row_fill(expert_rows, ref_row_of(rank, row), static_cast<char*>(out) + row * ref_row_bytes(expert_rows));
    });
}

void ref_rank_combine(const RefRouting* sent, unsigned rank, RefLayout layout, const RefRows* expert_rows, void* out) {
    // By rank, how many rows it has of this one's tokens before the current token.
    std::vector<size_t> begins(sent->num_ranks);
    for (size_t token = 0; token < sent->num_tokens[rank]; ++token) {
        const std::vector<unsigned> owners = OwnersOf(*sent, rank, token);
        ref::SumNodes(rank, token, *expert_rows, out, [&](unsigned distance, float* sum) {
            bool found = false;
            for (const unsigned owner : owners) {
                if (ep_node_distance(rank, owner) != distance) continue;
                found = true;
                const size_t row = ref_layout_row(layout, rank, begins[owner]);
                ref::AddRow(*expert_rows, ref_row_of(owner, row), sum);
            }
            return found;
        });
        for (const unsigned owner : owners) ++begins[owner];
    }
}
