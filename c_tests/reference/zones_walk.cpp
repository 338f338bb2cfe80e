// High throughput by expert in straight lines; see zones.h.
#include <algorithm>
#include <cstdlib>

#include "reference/walk.hpp"
#include "reference/zones.h"

namespace {

bool Names(const RefRouting* routing, unsigned source, size_t token, int64_t expert) {
    for (unsigned k = 0; k < routing->top_k; ++k) {
        if (routing->topk_idx[source][token * routing->top_k + k] == expert) return true;
    }
    return false;
}

size_t* SlotAt(const RefZones* zones, unsigned source, size_t token, unsigned expert) {
    return &zones->slots[(zones->first_of[source] + token) * ref_local_experts(zones->routing) + expert];
}

bool IsThere(const RefZones* zones, size_t slot) { return slot != kRefNoSlot && slot < zones->most; }

RefZones ZonesOf(const RefRouting* routing, unsigned rank, unsigned alignment, unsigned most) {
    const unsigned experts = ref_local_experts(routing);
    RefZones zones = {
        routing, rank, most, ref::NewArray<size_t>(experts), nullptr, ref::NewArray<size_t>(routing->num_ranks)};
    for (unsigned source = 0; source < routing->num_ranks; ++source) {
        zones.first_of[source + 1] = zones.first_of[source] + routing->num_tokens[source];
    }
    zones.slots = ref::NewArray<size_t>(zones.first_of[routing->num_ranks] * experts);
    size_t next = 0;
    for (unsigned expert = 0; expert < experts; ++expert) {
        zones.begins[expert] = next;
        for (unsigned source = 0; source < routing->num_ranks; ++source) {
            for (size_t token = 0; token < routing->num_tokens[source]; ++token) {
                const bool is_named = Names(routing, source, token, int64_t{rank} * experts + expert);
                *SlotAt(&zones, source, token, expert) = is_named ? next++ : kRefNoSlot;
            }
        }
        while (next % alignment != 0) ++next;
    }
    zones.begins[experts] = next;
    return zones;
}

template <typename Each>
void EachSlot(const RefZones& zones, Each each) {
    for (unsigned source = 0; source < zones.routing->num_ranks; ++source) {
        for (size_t token = 0; token < zones.routing->num_tokens[source]; ++token) {
            for (unsigned expert = 0; expert < ref_local_experts(zones.routing); ++expert) {
                const size_t slot = *SlotAt(&zones, source, token, expert);
                if (IsThere(&zones, slot)) each(source, token, expert, slot);
            }
        }
    }
}

// Adds what a rank returns for a token, if any of its experts is named, and says so.
bool AddRank(const RefZones* zones, const RefRows& rows, unsigned home, size_t token, float* total) {
    bool found = false;
    std::vector<float> sum(rows.hidden);
    for (unsigned expert = 0; expert < ref_local_experts(zones->routing); ++expert) {
        const size_t slot = *SlotAt(zones, home, token, expert);
        found = found || slot != kRefNoSlot;
        if (IsThere(zones, slot)) ref::AddRow(rows, ref_row_of(zones->rank, slot), sum.data());
    }
    if (!found) return false;
    ref::Round(rows, sum.data());
    ref::Add(sum, total);
    return true;
}

}  // namespace

RefZones* ref_zones_new(const RefRouting* routing, unsigned alignment, unsigned most) {
    RefZones* zones = ref::NewArray<RefZones>(routing->num_ranks);
    for (unsigned rank = 0; rank < routing->num_ranks; ++rank) {
        zones[rank] = ZonesOf(routing, rank, alignment, most);
    }
    return zones;
}

void ref_zones_free(RefZones* zones) {
    const unsigned ranks = zones[0].routing->num_ranks;
    for (unsigned rank = 0; rank < ranks; ++rank) {
        free(zones[rank].begins);
        free(zones[rank].slots);
        free(zones[rank].first_of);
    }
    free(zones);
}

size_t ref_zones_begin(const RefZones* zones, unsigned expert) {
    return zones->begins[expert] < zones->most ? zones->begins[expert] : zones->most;
}

size_t ref_zones_length(const RefZones* zones, unsigned expert) {
    return ref_zones_begin(zones, expert + 1) - ref_zones_begin(zones, expert);
}

void ref_zones_dispatch(const RefZones* zones, const RefRows* tokens, void* out) {
    const size_t row_bytes = ref_row_bytes(tokens);
    std::memset(out, 0, ref_zones_begin(zones, ref_local_experts(zones->routing)) * row_bytes);
    EachSlot(*zones, [&](unsigned source, size_t token, unsigned, size_t slot) {
        ref_row_fill(tokens, ref_row_of(source, token), static_cast<char*>(out) + slot * row_bytes);
    });
}

// The sum over the ids that name the expert, by k; the first is not added to zero.
void ref_zones_weights(const RefZones* zones, size_t slots, float* weights) {
    const RefRouting* routing = zones->routing;
    std::fill_n(weights, slots, 0.0f);
    EachSlot(*zones, [&](unsigned source, size_t token, unsigned expert, size_t slot) {
        const int64_t id = int64_t{zones->rank} * ref_local_experts(routing) + expert;
        bool is_first = true;
        for (size_t entry = token * routing->top_k; entry < (token + 1) * routing->top_k; ++entry) {
            if (routing->topk_idx[source][entry] != id) continue;
            const float given = routing->weights[source][entry];
            weights[slot] = is_first ? given : weights[slot] + given;
            is_first = false;
        }
    });
}

void ref_zones_combine(const RefZones* all, unsigned rank, const RefRows* expert_rows, void* out) {
    const RefRouting* routing = all[0].routing;
    for (size_t token = 0; token < routing->num_tokens[rank]; ++token) {
        ref::SumNodes(rank, token, *expert_rows, out, [&](unsigned distance, float* sum) {
            bool found = false;
            for (unsigned from = 0; from < routing->num_ranks; ++from) {
                if (ep_node_distance(rank, from) != distance) continue;
                found = AddRank(&all[from], *expert_rows, rank, token, sum) || found;
            }
            return found;
        });
    }
}

void ref_zones_gradients(const RefZones* all, unsigned rank, uint64_t seed, float* out) {
    const RefRouting* routing = all[0].routing;
    const unsigned experts = ref_local_experts(routing);
    for (size_t entry = 0; entry < ref_entries_of(routing, rank); ++entry) {
        const int64_t expert = ref_expert_of(routing, routing->topk_idx[rank][entry]);
        out[entry] = 0.0f;
        if (expert < 0) continue;
        const RefZones* zones = &all[expert / experts];
        const size_t slot = *SlotAt(zones, rank, entry / routing->top_k, static_cast<unsigned>(expert % experts));
        if (IsThere(zones, slot)) out[entry] = ref_weight(seed, zones->rank, slot);
    }
}
