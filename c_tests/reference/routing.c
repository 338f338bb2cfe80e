// Drawing the ids and weights of all ranks; see routing.h.
#include "reference/routing.h"

#include "reference/buffer.h"
#include "reference/rows.h"

unsigned ref_local_experts(const RefRouting* routing) { return routing->num_experts / routing->num_ranks; }

size_t ref_entries_of(const RefRouting* routing, unsigned rank) {
    return (size_t)routing->num_tokens[rank] * routing->top_k;
}

int64_t ref_expert_of(const RefRouting* routing, int64_t id) {
    return id >= 0 && id < (int64_t)routing->num_experts ? id : -1;
}

static RefRouting* new_empty(unsigned num_ranks, unsigned num_experts, unsigned top_k, const unsigned* num_tokens) {
    RefRouting* routing = ref_host_new(sizeof(*routing));
    routing->num_ranks = num_ranks;
    routing->num_experts = num_experts;
    routing->top_k = top_k;
    routing->num_tokens = ref_host_new(num_ranks * sizeof(*routing->num_tokens));
    memcpy(routing->num_tokens, num_tokens, num_ranks * sizeof(*num_tokens));
    routing->topk_idx = ref_host_new(num_ranks * sizeof(*routing->topk_idx));
    routing->weights = ref_host_new(num_ranks * sizeof(*routing->weights));
    for (unsigned rank = 0; rank < num_ranks; ++rank) {
        routing->topk_idx[rank] = ref_host_new(ref_entries_of(routing, rank) * sizeof(int64_t));
        routing->weights[rank] = ref_host_new(ref_entries_of(routing, rank) * sizeof(float));
    }
    return routing;
}

static bool is_among(const int64_t* ids, unsigned count, int64_t id) {
    for (unsigned i = 0; i < count; ++i) {
        if (ids[i] == id) return true;
    }
    return false;
}

static int64_t messy_id(unsigned num_experts, uint64_t* state) {
    static const int64_t kTooLow[] = {-1, -1, -2, -100, INT64_MIN, INT32_MIN};
    static const int64_t kTooHigh[] = {0, 1, 1000, INT32_MAX, 0x100000000, INT64_MAX};
    const uint64_t kind = ep_random_below(state, 8);
    const uint64_t which = ep_random_below(state, 6);
    if (kind == 0) return kTooLow[which];
    // The low 32 bits of 0x100000000 alone would name expert 0.
    if (kind == 1) return kTooHigh[which] < 2000 ? num_experts + kTooHigh[which] : kTooHigh[which];
    return (int64_t)ep_random_below(state, num_experts);
}

static int64_t draw_id(const RefRouting* routing, RefStyle style, uint64_t* state) {
    const unsigned local_experts = ref_local_experts(routing);
    switch (style) {
        case kRefMessy: return messy_id(routing->num_experts, state);
        case kRefSkewed:
            return (int64_t)(ep_random_below(
                state, ep_random_below(state, 4) > 0 ? (routing->num_experts + 3) / 4 : routing->num_experts));
        case kRefOneRank: return (int64_t)(routing->num_experts - 1 - ep_random_below(state, local_experts));
        case kRefOneExpert: return 0;
        case kRefNowhere: return -1 - (int64_t)ep_random_below(state, 3);
        default: return (int64_t)ep_random_below(state, routing->num_experts);
    }
}

static void draw_token(const RefRouting* routing, RefStyle style, int64_t* ids, uint64_t* state) {
    for (unsigned k = 0; k < routing->top_k; ++k) {
        int64_t id = draw_id(routing, style, state);
        const bool can_differ = style == kRefDistinct && k < routing->num_experts;
        while (can_differ && is_among(ids, k, id)) id = (id + 1) % routing->num_experts;
        ids[k] = id;
    }
}

RefRouting* ref_routing_new(unsigned num_ranks, unsigned num_experts, unsigned top_k,
                            const unsigned* num_tokens, RefStyle style, uint64_t seed) {
    RefRouting* routing = new_empty(num_ranks, num_experts, top_k, num_tokens);
    for (unsigned rank = 0; rank < num_ranks; ++rank) {
        uint64_t state = ep_mix(seed, rank, 1);
        for (unsigned token = 0; token < num_tokens[rank]; ++token) {
            draw_token(routing, style, &routing->topk_idx[rank][(size_t)token * top_k], &state);
        }
    }
    ref_routing_new_weights(routing, seed);
    return routing;
}

RefRouting* ref_routing_of_ids(unsigned num_ranks, unsigned num_experts, unsigned top_k,
                               const unsigned* num_tokens, const int64_t* ids, uint64_t seed) {
    RefRouting* routing = new_empty(num_ranks, num_experts, top_k, num_tokens);
    for (unsigned rank = 0; rank < num_ranks; ++rank) {
        const size_t entries = ref_entries_of(routing, rank);
        memcpy(routing->topk_idx[rank], ids, entries * sizeof(*ids));
        ids += entries;
    }
    ref_routing_new_weights(routing, seed);
    return routing;
}

void ref_routing_new_weights(RefRouting* routing, uint64_t seed) {
    for (unsigned rank = 0; rank < routing->num_ranks; ++rank) {
        for (size_t i = 0; i < ref_entries_of(routing, rank); ++i) {
            routing->weights[rank][i] = ref_weight(seed, rank, i);
        }
    }
}

RefRouting* ref_routing_drawn(unsigned num_ranks, const RefShape* shape, RefStyle style, bool uneven, uint64_t seed) {
    enum { kTokensIfAuto = 9 };
    const unsigned most = shape->max_tokens == 0 ? kTokensIfAuto : shape->max_tokens;
    EP_SCOPED unsigned* num_tokens = ref_host_new(num_ranks * sizeof(*num_tokens));
    if (uneven) {
        ref_tokens_uneven(num_tokens, num_ranks, most, seed);
    } else {
        ref_tokens_full(num_tokens, num_ranks, most);
    }
    RefRouting* routing = ref_routing_new(num_ranks, shape->num_experts, shape->top_k, num_tokens, style, seed);
    return routing;
}

RefRouting* ref_routing_copy(const RefRouting* from) {
    RefRouting* routing = new_empty(from->num_ranks, from->num_experts, from->top_k, from->num_tokens);
    for (unsigned rank = 0; rank < from->num_ranks; ++rank) {
        const size_t entries = ref_entries_of(from, rank);
        memcpy(routing->topk_idx[rank], from->topk_idx[rank], entries * sizeof(int64_t));
        memcpy(routing->weights[rank], from->weights[rank], entries * sizeof(float));
    }
    return routing;
}

void ref_routing_free(RefRouting* routing) {
    if (routing == NULL) return;
    for (unsigned rank = 0; rank < routing->num_ranks; ++rank) {
        free(routing->topk_idx[rank]);
        free(routing->weights[rank]);
    }
    free(routing->topk_idx);
    free(routing->weights);
    free(routing->num_tokens);
    free(routing);
}

void ref_routing_mask(RefRouting* routing, unsigned every, uint64_t seed) {
    for (unsigned rank = 0; rank < routing->num_ranks; ++rank) {
        for (size_t i = 0; i < ref_entries_of(routing, rank); ++i) {
            if (ep_mix(seed, rank, i) % every == 0) routing->topk_idx[rank][i] = -1;
        }
    }
}

void ref_routing_fit(RefRouting* routing, unsigned capacity) {
    EP_SCOPED unsigned* used = ref_host_new(routing->num_experts * sizeof(*used));
    for (unsigned rank = 0; rank < routing->num_ranks; ++rank) {
        for (size_t i = 0; i < ref_entries_of(routing, rank); ++i) {
            const int64_t expert = ref_expert_of(routing, routing->topk_idx[rank][i]);
            if (expert >= 0 && used[expert]++ >= capacity) routing->topk_idx[rank][i] = -1;
        }
    }
}

static void change_token(const RefRouting* routing, RefChange change, int64_t* ids, uint64_t* state) {
    const unsigned top_k = routing->top_k;
    for (unsigned left = top_k; left > 1; --left) {
        const unsigned last = left - 1;
        // Reversed: the last one changes places with the first until they meet.
        const unsigned other = change == kRefReverse ? top_k - left : (unsigned)ep_random_below(state, left);
        if (change == kRefReverse && other >= last) break;
        const int64_t id = ids[last];
        ids[last] = ids[other];
        ids[other] = id;
    }
    for (unsigned k = 0; k < top_k && change == kRefReplace; ++k) {
        if (ep_random_below(state, 4) == 0) ids[k] = messy_id(routing->num_experts, state);
    }
}

void ref_routing_change(RefRouting* routing, RefChange change, uint64_t seed) {
    for (unsigned rank = 0; rank < routing->num_ranks; ++rank) {
        uint64_t state = ep_mix(seed, rank, 3);
        for (size_t token = 0; token < routing->num_tokens[rank]; ++token) {
            int64_t* ids = &routing->topk_idx[rank][token * routing->top_k];
            change_token(routing, change, ids, &state);
        }
    }
}

void ref_tokens_full(unsigned* num_tokens, unsigned num_ranks, unsigned most) {
    for (unsigned rank = 0; rank < num_ranks; ++rank) num_tokens[rank] = most;
}

void ref_tokens_uneven(unsigned* num_tokens, unsigned num_ranks, unsigned most, uint64_t seed) {
    for (unsigned rank = 0; rank < num_ranks; ++rank) {
        num_tokens[rank] = (unsigned)(ep_mix(seed, rank, 2) % (most + 1u));
    }
    const unsigned first = (unsigned)(seed % num_ranks);
    num_tokens[first] = 0;
    num_tokens[(first + 1) % num_ranks] = most;
}
