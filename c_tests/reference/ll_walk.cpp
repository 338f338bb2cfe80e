// Low-latency operations in straight lines; see ll.h.
#include <cmath>
#include <cstdlib>

#include "reference/ll.h"
#include "reference/walk.hpp"

namespace {

// An entry that names an expert.
struct Placed {
    unsigned source;
    size_t entry;  // token * top_k + k
    int64_t expert;
    unsigned slot;  // of the expert
};

// Calls `each` for every entry that names an expert, in slot order.
template <typename Each>
void Walk(const RefRouting& routing, RefLayout layout, Each each) {
    std::vector<unsigned> used(routing.num_experts);
    for (unsigned source = 0; source < routing.num_ranks; ++source) {
        for (size_t entry = 0; entry < ref_entries_of(&routing, source); ++entry) {
            const int64_t expert = ref_expert_of(&routing, routing.topk_idx[source][entry]);
            if (expert < 0) continue;
            const unsigned slot = used[static_cast<size_t>(expert)]++;
            EP_REQUIRE(slot < layout.rows);
            each(Placed{source, entry, expert, slot});
        }
    }
}

constexpr unsigned kUnmatched = ~0u;

// Which of the `top_k` dispatched ids entry k of the combine means, or kUnmatched.
unsigned Match(const RefRouting& routing, const int64_t* sent, const int64_t* now, unsigned k) {
    unsigned before = 0;
    unsigned found = kUnmatched;
    if (ref_expert_of(&routing, now[k]) < 0) return kUnmatched;
    for (unsigned other = 0; other < k; ++other) before += now[other] == now[k];
    for (unsigned entry = 0; entry < routing.top_k; ++entry) {
        if (sent[entry] != now[k]) continue;
        found = entry;
        if (before-- == 0) break;
    }
    return found;
}

// The results of one rank's entries, and which of them take part in its sums, how.
class Combine {
   public:
    Combine(const RefRouting& sent, const RefRouting& now, unsigned rank, RefLayout layout, const RefRows& rows)
        : sent_(sent), rank_(rank), rows_(rows), entries_(ref_entries_of(&sent, rank)) {
        const unsigned experts = ref_local_experts(&sent);
        Walk(sent, layout, [&](const Placed& placed) {
            if (placed.source != rank) return;
            Entry& entry = entries_[placed.entry];
            entry.owner = static_cast<unsigned>(placed.expert / experts);
            entry.result.resize(rows.hidden);
            const auto local = static_cast<unsigned>(placed.expert % experts);
            const size_t row = ref_layout_row(layout, local, placed.slot);
            ref::LoadRow(rows, ref_row_of(entry.owner, row), entry.result.data());
        });
        for (size_t i = 0; i < entries_.size(); ++i) Weigh(now, i);
    }

    void Exact(size_t token, void* out) const {
        std::vector<float> sum(rows_.hidden);
        for (unsigned k = 0; k < sent_.top_k; ++k) {
            for (const Entry* entry = Begin(token); entry != Begin(token + 1); ++entry) {
                if (entry->first == k) AddEntry(*entry, sum.data());
            }
        }
        ep_store_all(rows_.datatype, static_cast<char*>(out) + token * ref_row_bytes(&rows_), rows_.hidden, sum.data());
    }

    void Reduced(size_t token, void* out) const {
        ref::SumNodes(rank_, token, rows_, out, [&](unsigned distance, float* sum) {
            bool found = false;
            for (unsigned owner = 0; owner < sent_.num_ranks; ++owner) {
                if (ep_node_distance(rank_, owner) == distance) found = AddOwner(token, owner, sum) || found;
            }
            return found;
        });
    }

   private:
    struct Entry {
        unsigned owner = kUnmatched;  // the rank of its expert, if it names one
        std::vector<float> result;
        unsigned first = kUnmatched;  // the first k of the combine that means it
        float weight = 0;
    };

    const Entry* Begin(size_t token) const { return entries_.data() + token * sent_.top_k; }

    // Entry `i` of the combine.
    void Weigh(const RefRouting& now, size_t i) {
        const auto k = static_cast<unsigned>(i % now.top_k);
        const size_t begin = i - k;
        const unsigned found = Match(now, &sent_.topk_idx[rank_][begin], &now.topk_idx[rank_][begin], k);
        if (found == kUnmatched) return;
        Entry& entry = entries_[begin + found];
        const bool again = entry.first != kUnmatched;
        entry.weight = again ? entry.weight + now.weights[rank_][i] : now.weights[rank_][i];
        if (!again) entry.first = k;
    }

    void AddEntry(const Entry& entry, float* sum) const {
        if (entry.first == kUnmatched) return;
        for (unsigned i = 0; i < rows_.hidden; ++i) sum[i] = std::fmaf(entry.weight, entry.result[i], sum[i]);
    }

    // Adds what `owner` has of a token, and says whether the dispatch found an expert of it there.
    bool AddOwner(size_t token, unsigned owner, float* sum) const {
        std::vector<const Entry*> found;
        for (const Entry* entry = Begin(token); entry != Begin(token + 1); ++entry) {
            if (entry->owner == owner) found.push_back(entry);
        }
        if (found.size() == 1) AddEntry(*found[0], sum);
        if (found.size() > 1) {
            std::vector<float> partial(rows_.hidden);
            for (const Entry* entry : found) AddEntry(*entry, partial.data());
            ref::Round(rows_, partial.data());
            ref::Add(partial, sum);
        }
        return !found.empty();
    }

    const RefRouting& sent_;
    const unsigned rank_;
    const RefRows& rows_;
    std::vector<Entry> entries_;
};

}  // namespace

uint64_t* ref_ll_slots(const RefRouting* routing, unsigned rank, RefLayout layout, int32_t* counts) {
    const unsigned local_experts = ref_local_experts(routing);
    std::vector<std::vector<uint64_t>> slots(local_experts);
    Walk(*routing, layout, [&](const Placed& placed) {
        if (placed.expert / local_experts != rank) return;
        slots[static_cast<size_t>(placed.expert % local_experts)].push_back(
            ref_row_of(placed.source, placed.entry / routing->top_k));
    });
    std::vector<uint64_t> all;
    for (unsigned local = 0; local < local_experts; ++local) {
        counts[local] = static_cast<int32_t>(slots[local].size());
        all.insert(all.end(), slots[local].begin(), slots[local].end());
    }
    uint64_t* rows = ref::NewArray<uint64_t>(all.size());
    if (!all.empty()) std::memcpy(rows, all.data(), all.size() * sizeof(*rows));
    return rows;
}

void ref_ll_dispatch(const RefRouting* routing, unsigned rank, RefLayout layout, const RefRows* tokens, void* packed,
                     int32_t* counts) {
    const unsigned local_experts = ref_local_experts(routing);
    const size_t row_bytes = ref_row_bytes(tokens);
    if (counts != nullptr) std::memset(counts, 0, local_experts * sizeof(*counts));
    Walk(*routing, layout, [&](const Placed& placed) {
        if (placed.expert / local_experts != rank) return;
        const auto local = static_cast<unsigned>(placed.expert % local_experts);
        if (counts != nullptr) ++counts[local];
        ref_row_fill(tokens, ref_row_of(placed.source, placed.entry / routing->top_k),
                     static_cast<char*>(packed) + ref_layout_row(layout, local, placed.slot) * row_bytes);
    });
}

void ref_ll_results(const RefRouting* routing, unsigned rank, RefLayout layout, const RefRows* expert_rows, void* out) {
    std::vector<int32_t> used(ref_local_experts(routing));
    free(ref_ll_slots(routing, rank, layout, used.data()));
    for (unsigned local = 0; local < used.size(); ++local) {
        const size_t slot = ref_layout_row(layout, local, 0);
        ref_rows_fill(expert_rows, rank, slot, static_cast<size_t>(used[local]),
                      static_cast<char*>(out) + slot * ref_row_bytes(expert_rows));
    }
}

RefLlSum ref_ll_sum_unset = kRefReduce;

RefLlSum ref_ll_sum(void) {
    const char* name = getenv("NCCL_EP_LL_COMBINE");
    // Over nodes nobody sums otherwise.
    if (name == nullptr) return ep_num_nodes() > 1 ? kRefReduce : ref_ll_sum_unset;
    return std::strcmp(name, "exact") == 0 ? kRefExact : kRefReduce;
}

void ref_ll_combine(const RefRouting* sent, const RefRouting* now, unsigned rank, RefLayout layout,
                    const RefRows* expert_rows, void* out) {
    ref_ll_combine_as(ref_ll_sum(), sent, now, rank, layout, expert_rows, out);
}

void ref_ll_combine_as(RefLlSum order, const RefRouting* sent, const RefRouting* now, unsigned rank, RefLayout layout,
                       const RefRows* expert_rows, void* out) {
    const Combine combine(*sent, *now, rank, layout, *expert_rows);
    for (size_t token = 0; token < now->num_tokens[rank]; ++token) {
        order == kRefExact ? combine.Exact(token, out) : combine.Reduced(token, out);
    }
}
