// Low-latency operations in straight lines; see ll.h.
#include "reference/ll.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

// What a walk over all entries sees of one that got a slot.
typedef struct {
    unsigned source;
    size_t token;
    size_t entry;     // token * top_k + k
    unsigned owner;   // the rank of the expert
    size_t slot_row;  // its row in the owner's [L * capacity, hidden]
} Placed;

typedef void (*PlacedFn)(const Placed* placed, void* context);

// Calls `each` for every entry with a slot, in slot order. `used` gets the number of slots of each
// of the E experts.
static void walk(const RefRouting* routing, unsigned capacity, unsigned* used, PlacedFn each,
                 void* context) {
    const unsigned local_experts = ref_local_experts(routing);
    memset(used, 0, routing->num_experts * sizeof(*used));
    for (unsigned source = 0; source < routing->num_ranks; ++source) {
        for (size_t entry = 0; entry < ref_entries_of(routing, source); ++entry) {
            const int64_t expert = ref_expert_of(routing, routing->topk_idx[source][entry]);
            if (expert < 0 || used[expert] == capacity) continue;
            const unsigned owner = (unsigned)expert / local_experts;
            const size_t local = (unsigned)expert % local_experts;
            const Placed placed = {source, entry / routing->top_k, entry, owner,
                                   local * capacity + used[expert]};
            ++used[expert];
            each(&placed, context);
        }
    }
}

typedef struct {
    unsigned rank;
    const RefRows* tokens;
    unsigned char* packed;
} Dispatch;

static void place_row(const Placed* placed, void* context) {
    const Dispatch* dispatch = context;
    if (placed->owner != dispatch->rank || dispatch->packed == NULL) return;
    ref_row_fill(dispatch->tokens, ref_row_of(placed->source, placed->token),
                 dispatch->packed + placed->slot_row * ref_row_bytes(dispatch->tokens));
}

void ref_ll_dispatch(const RefRouting* routing, unsigned rank, unsigned capacity,
                     const RefRows* tokens, void* packed, int32_t* counts) {
    const unsigned local_experts = ref_local_experts(routing);
    unsigned* used = malloc(routing->num_experts * sizeof(*used));
    EP_REQUIRE(used != NULL);
    Dispatch dispatch = {rank, tokens, packed};
    walk(routing, capacity, used, place_row, &dispatch);
    for (unsigned local = 0; local < local_experts && counts != NULL; ++local) {
        counts[local] = (int32_t)used[rank * local_experts + local];
    }
    free(used);
}

typedef struct {
    unsigned rank;
    const RefRows* rows;
    unsigned char* results;  // [num_tokens, top_k, hidden] of `rank`
    bool* has_result;        // [num_tokens, top_k]
} Results;

static void fetch_result(const Placed* placed, void* context) {
    const Results* results = context;
    if (placed->source != results->rank) return;
    ref_row_fill(results->rows, ref_row_of(placed->owner, placed->slot_row),
                 results->results + placed->entry * ref_row_bytes(results->rows));
    results->has_result[placed->entry] = true;
}

void ref_ll_combine(const RefRouting* sent, const RefRouting* now, unsigned rank, unsigned capacity,
                    const RefRows* expert_rows, void* out) {
    const size_t entries = ref_entries_of(sent, rank);
    const size_t row_bytes = ref_row_bytes(expert_rows);
    unsigned* used = malloc(sent->num_experts * sizeof(*used));
    Results results = {rank, expert_rows, malloc(entries * row_bytes + 1),
                       calloc(entries + 1, sizeof(bool))};
    EP_REQUIRE(used != NULL && results.results != NULL && results.has_result != NULL);
    walk(sent, capacity, used, fetch_result, &results);
    for (size_t token = 0; token < now->num_tokens[rank]; ++token) {
        for (size_t column = 0; column < expert_rows->hidden; ++column) {
            float sum = 0.0f;
            for (size_t k = 0; k < now->top_k; ++k) {
                const size_t entry = token * now->top_k + k;
                const int64_t expert = ref_expert_of(now, now->topk_idx[rank][entry]);
                if (expert < 0 || !results.has_result[entry]) continue;
                const float result =
                    ep_load(expert_rows->datatype, results.results + entry * row_bytes, column);
                sum = fmaf(now->weights[rank][entry], result, sum);
            }
            ep_store(expert_rows->datatype, out, token * expert_rows->hidden + column, sum);
        }
    }
    free(used);
    free(results.results);
    free(results.has_result);
}
