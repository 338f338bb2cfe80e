// High throughput by expert in straight lines; see zones.h.
#include "reference/zones.h"

#include "reference/buffer.h"

#include "harness/nodes.h"

static bool names(const RefRouting* routing, unsigned source, size_t token, int64_t expert) {
    for (unsigned k = 0; k < routing->top_k; ++k) {
        if (routing->topk_idx[source][token * routing->top_k + k] == expert) return true;
    }
    return false;
}

static size_t* slot_at(const RefZones* zones, unsigned source, size_t token, unsigned expert) {
    return &zones->slots[(zones->first_of[source] + token) * ref_local_experts(zones->routing) + expert];
}

static bool is_there(const RefZones* zones, size_t slot) { return slot != kRefNoSlot && slot < zones->most; }

static RefZones zones_of(const RefRouting* routing, unsigned rank, unsigned alignment, unsigned most) {
    const unsigned experts = ref_local_experts(routing);
    RefZones zones = {routing, rank, most, ref_host_new((experts + 1) * sizeof(size_t)), NULL,
                      ref_host_new((routing->num_ranks + 1) * sizeof(size_t))};
    for (unsigned source = 0; source < routing->num_ranks; ++source) {
        zones.first_of[source + 1] = zones.first_of[source] + routing->num_tokens[source];
    }
    zones.slots = ref_host_new((zones.first_of[routing->num_ranks] * experts + 1) * sizeof(size_t));
    size_t next = 0;
    for (unsigned expert = 0; expert < experts; ++expert) {
        zones.begins[expert] = next;
        for (unsigned source = 0; source < routing->num_ranks; ++source) {
            for (size_t token = 0; token < routing->num_tokens[source]; ++token) {
                const bool is_named = names(routing, source, token, (int64_t)rank * experts + expert);
                *slot_at(&zones, source, token, expert) = is_named ? next++ : kRefNoSlot;
            }
        }
        while (next % alignment != 0) ++next;
    }
    zones.begins[experts] = next;
    return zones;
}

RefZones* ref_zones_new(const RefRouting* routing, unsigned alignment, unsigned most) {
    RefZones* zones = ref_host_new(routing->num_ranks * sizeof(*zones));
    for (unsigned rank = 0; rank < routing->num_ranks; ++rank) {
        zones[rank] = zones_of(routing, rank, alignment, most);
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

typedef void (*SlotFn)(const RefZones* zones, unsigned source, size_t token, unsigned expert, size_t slot,
                       void* context);

static void each_slot(const RefZones* zones, SlotFn each, void* context) {
    for (unsigned source = 0; source < zones->routing->num_ranks; ++source) {
        for (size_t token = 0; token < zones->routing->num_tokens[source]; ++token) {
            for (unsigned expert = 0; expert < ref_local_experts(zones->routing); ++expert) {
                const size_t slot = *slot_at(zones, source, token, expert);
                if (is_there(zones, slot)) each(zones, source, token, expert, slot, context);
            }
        }
    }
}

typedef struct {
    const RefRows* tokens;
    unsigned char* rows;
    float* weights;
} Output;

static void write_row(const RefZones* zones, unsigned source, size_t token, unsigned expert, size_t slot,
                      void* context) {
    (void)zones, (void)expert;
    const Output* out = context;
    ref_row_fill(out->tokens, ref_row_of(source, token), out->rows + slot * ref_row_bytes(out->tokens));
}

void ref_zones_dispatch(const RefZones* zones, const RefRows* tokens, void* out) {
    Output output = {tokens, out, NULL};
    memset(out, 0, ref_zones_begin(zones, ref_local_experts(zones->routing)) * ref_row_bytes(tokens));
    each_slot(zones, write_row, &output);
}

// The sum over the ids that name the expert, by k; the first is not added to zero.
static void write_weight(const RefZones* zones, unsigned source, size_t token, unsigned expert, size_t slot,
                         void* context) {
    const RefRouting* routing = zones->routing;
    const int64_t id = (int64_t)zones->rank * ref_local_experts(routing) + expert;
    bool is_first = true;
    for (unsigned k = 0; k < routing->top_k; ++k) {
        const size_t entry = token * routing->top_k + k;
        if (routing->topk_idx[source][entry] != id) continue;
        float* weight = &((Output*)context)->weights[slot];
        const float given = routing->weights[source][entry];
        *weight = is_first ? given : *weight + given;
        is_first = false;
    }
}

void ref_zones_weights(const RefZones* zones, size_t slots, float* weights) {
    Output output = {NULL, NULL, weights};
    memset(weights, 0, slots * sizeof(*weights));
    each_slot(zones, write_weight, &output);
}

// Adds what a rank returns for a token, if any of its experts is named, and says so.
static bool add_rank(const RefZones* zones, const RefRows* rows, unsigned home, size_t token, void* row, float* sum,
                     float* total) {
    bool found = false;
    memset(sum, 0, rows->hidden * sizeof(*sum));
    for (unsigned expert = 0; expert < ref_local_experts(zones->routing); ++expert) {
        const size_t slot = *slot_at(zones, home, token, expert);
        found = found || slot != kRefNoSlot;
        if (!is_there(zones, slot)) continue;
        ref_row_fill(rows, ref_row_of(zones->rank, slot), row);
        for (unsigned i = 0; i < rows->hidden; ++i) sum[i] += ep_load(rows->datatype, row, i);
    }
    if (!found) return false;
    ep_store_all(rows->datatype, row, rows->hidden, sum);
    for (unsigned i = 0; i < rows->hidden; ++i) total[i] += ep_load(rows->datatype, row, i);
    return true;
}

void ref_zones_combine(const RefZones* all, unsigned rank, const RefRows* expert_rows, void* out) {
    const RefRouting* routing = all[0].routing;
    const size_t hidden = expert_rows->hidden, row_bytes = ref_row_bytes(expert_rows);
    EP_SCOPED float* sum = ref_host_new(hidden * sizeof(float));
    EP_SCOPED float* total = ref_host_new(hidden * sizeof(float));
    EP_SCOPED float* of_node = ref_host_new(hidden * sizeof(float));
    EP_SCOPED void* row = ref_host_new(row_bytes);
    for (size_t token = 0; token < routing->num_tokens[rank]; ++token) {
        memset(total, 0, hidden * sizeof(float));
        for (unsigned place = 0; place < ep_num_nodes(); ++place) {
            const unsigned distance = ep_distance_in_sum(rank, place);
            bool found = false;
            memset(of_node, 0, hidden * sizeof(float));
            for (unsigned from = 0; from < routing->num_ranks; ++from) {
                if (ep_node_distance(rank, from) != distance) continue;
                found = add_rank(&all[from], expert_rows, rank, token, row, sum, of_node) || found;
            }
            if (!found) continue;
            if (distance > 0 || ep_sums_are_invariant()) {
                // As rows without zones.
                ep_store_all(expert_rows->datatype, row, hidden, of_node);
                ep_load_all(expert_rows->datatype, row, hidden, of_node);
            }
            for (size_t i = 0; i < hidden; ++i) total[i] += of_node[i];
        }
        ep_store_all(expert_rows->datatype, (unsigned char*)out + token * row_bytes, hidden, total);
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
        const size_t slot = *slot_at(zones, rank, entry / routing->top_k, (unsigned)(expert % experts));
        if (is_there(zones, slot)) out[entry] = ref_weight(seed, zones->rank, slot);
    }
}
