// Low-latency operations in straight lines; see ll.h.
#include "reference/ll.h"

#include <math.h>

#include "harness/nodes.h"
#include "reference/buffer.h"

// What a walk over all entries sees of one that names an expert.
typedef struct {
    unsigned source;
    size_t token;
    size_t entry;     // token * top_k + k
    unsigned owner;   // the rank of the expert
    size_t slot_row;  // its row at the owner
} Placed;

typedef void (*PlacedFn)(const Placed* placed, void* context);

// Calls `each`, if there is one, for every entry that names an expert, in slot order. `used` gets the number
// of slots of each of the E experts.
static void walk(const RefRouting* routing, RefLayout layout, unsigned* used, PlacedFn each, void* context) {
    const unsigned local_experts = ref_local_experts(routing);
    memset(used, 0, routing->num_experts * sizeof(*used));
    for (unsigned source = 0; source < routing->num_ranks; ++source) {
        for (size_t entry = 0; entry < ref_entries_of(routing, source); ++entry) {
            const int64_t expert = ref_expert_of(routing, routing->topk_idx[source][entry]);
            if (expert < 0) continue;
            EP_REQUIRE(used[expert] < layout.rows);
            const unsigned owner = (unsigned)expert / local_experts;
            const unsigned local = (unsigned)expert % local_experts;
            const Placed placed = {source, entry / routing->top_k, entry, owner,
                                   ref_layout_row(layout, local, used[expert])};
            ++used[expert];
            if (each != NULL) each(&placed, context);
        }
    }
}

typedef struct {
    unsigned rank;
    RefLayout layout;
    size_t* begins;  // of each local expert's slots in `rows`
    uint64_t* rows;
} Slots;

static void note_token(const Placed* placed, void* context) {
    const Slots* slots = context;
    if (placed->owner != slots->rank) return;
    const size_t local = placed->slot_row / slots->layout.rows;
    slots->rows[slots->begins[local] + placed->slot_row % slots->layout.rows] =
        ref_row_of(placed->source, placed->token);
}

uint64_t* ref_ll_slots(const RefRouting* routing, unsigned rank, RefLayout layout, int32_t* counts) {
    const unsigned local_experts = ref_local_experts(routing);
    EP_SCOPED unsigned* used = ref_host_new(routing->num_experts * sizeof(*used));
    Slots slots = {rank, layout, ref_host_new(local_experts * sizeof(*slots.begins)), NULL};
    walk(routing, layout, used, NULL, NULL);
    size_t all = 0;
    for (unsigned local = 0; local < local_experts; ++local) {
        slots.begins[local] = all;
        counts[local] = (int32_t)used[rank * local_experts + local];
        all += used[rank * local_experts + local];
    }
    slots.rows = ref_host_new((all + 1) * sizeof(*slots.rows));
    walk(routing, layout, used, note_token, &slots);
    free(slots.begins);
    return slots.rows;
}

void ref_ll_dispatch(const RefRouting* routing, unsigned rank, RefLayout layout,
                     const RefRows* tokens, void* packed, int32_t* counts) {
    const unsigned local_experts = ref_local_experts(routing);
    const size_t row_bytes = ref_row_bytes(tokens);
    EP_SCOPED int32_t* used = ref_host_new(local_experts * sizeof(*used));
    EP_SCOPED uint64_t* rows = ref_ll_slots(routing, rank, layout, used);
    const uint64_t* row = rows;
    for (unsigned local = 0; local < local_experts; ++local) {
        unsigned char* to = (unsigned char*)packed + ref_layout_row(layout, local, 0) * row_bytes;
        for (int32_t i = 0; i < used[local]; ++i, to += row_bytes) ref_row_fill(tokens, *row++, to);
    }
    if (counts != NULL) memcpy(counts, used, local_experts * sizeof(*used));
}

void ref_ll_results(const RefRouting* routing, unsigned rank, RefLayout layout, const RefRows* expert_rows, void* out) {
    const unsigned local_experts = ref_local_experts(routing);
    EP_SCOPED int32_t* used = ref_host_new(local_experts * sizeof(*used));
    free(ref_ll_slots(routing, rank, layout, used));
    for (unsigned local = 0; local < local_experts; ++local) {
        const size_t slot = ref_layout_row(layout, local, 0);
        ref_rows_fill(expert_rows, rank, slot, (size_t)used[local],
                      (unsigned char*)out + slot * ref_row_bytes(expert_rows));
    }
}

RefLlSum ref_ll_sum_unset = kRefReduce;

RefLlSum ref_ll_sum(void) {
    const char* name = getenv("NCCL_EP_LL_COMBINE");
    // Over nodes nobody sums otherwise.
    if (name == NULL) return ep_num_nodes() > 1 ? kRefReduce : ref_ll_sum_unset;
    return name != NULL && strcmp(name, "exact") == 0 ? kRefExact : kRefReduce;
}

static const unsigned kUnmatched = ~0u;

// What one rank needs for its sums: its results as float, and which of them take part, how.
typedef struct {
    const RefRouting* sent;
    unsigned rank;
    const RefRows* rows;
    unsigned char* row;  // room for one
    float* results;      // [num_tokens, top_k, hidden]; 0 where there is none
    float* weights;      // [num_tokens, top_k], by the entries of the dispatch
    unsigned* first;     // the first k of the combine that found the entry, or kUnmatched
} Combine;

static void fetch_result(const Placed* placed, void* context) {
    const Combine* combine = context;
    if (placed->source != combine->rank) return;
    const unsigned hidden = combine->rows->hidden;
    ref_row_fill(combine->rows, ref_row_of(placed->owner, placed->slot_row), combine->row);
    ep_load_all(combine->rows->datatype, combine->row, hidden, &combine->results[placed->entry * hidden]);
}

// Which of the `top_k` dispatched ids entry k of the combine means, or kUnmatched.
static unsigned match(const RefRouting* routing, const int64_t* sent, const int64_t* now, unsigned k) {
    unsigned before = 0;
    unsigned found = kUnmatched;
    if (ref_expert_of(routing, now[k]) < 0) return kUnmatched;
    for (unsigned other = 0; other < k; ++other) before += now[other] == now[k];
    for (unsigned entry = 0; entry < routing->top_k; ++entry) {
        if (sent[entry] != now[k]) continue;
        found = entry;
        if (before-- == 0) break;
    }
    return found;
}

static void match_all(Combine* combine, const RefRouting* now) {
    const unsigned top_k = now->top_k;
    for (size_t i = 0; i < ref_entries_of(now, combine->rank); ++i) combine->first[i] = kUnmatched;
    for (size_t token = 0; token < now->num_tokens[combine->rank]; ++token) {
        const size_t begin = token * top_k;
        for (unsigned k = 0; k < top_k; ++k) {
            const unsigned found = match(now, &combine->sent->topk_idx[combine->rank][begin],
                                         &now->topk_idx[combine->rank][begin], k);
            if (found == kUnmatched) continue;
            const float weight = now->weights[combine->rank][begin + k];
            const bool again = combine->first[begin + found] != kUnmatched;
            float* sum = &combine->weights[begin + found];
            *sum = again ? *sum + weight : weight;
            if (!again) combine->first[begin + found] = k;
        }
    }
}

// sum + w * y for an entry of the dispatch, if the combine found it.
static float add_entry(const Combine* combine, size_t entry, unsigned column, float sum) {
    if (combine->first[entry] == kUnmatched) return sum;
    return fmaf(combine->weights[entry], combine->results[entry * combine->rows->hidden + column], sum);
}

static float exact_sum(const Combine* combine, size_t token, unsigned column) {
    const unsigned top_k = combine->sent->top_k;
    float sum = 0.0f;
    for (unsigned k = 0; k < top_k; ++k) {
        for (size_t entry = token * top_k; entry < (token + 1) * top_k; ++entry) {
            if (combine->first[entry] == k) sum = add_entry(combine, entry, column, sum);
        }
    }
    return sum;
}

// What `owner` adds to the sum of a token.
static float add_owner(const Combine* combine, unsigned owner, size_t token, unsigned column, float sum) {
    const RefRouting* sent = combine->sent;
    unsigned found = 0;
    size_t last = 0;
    float partial = 0.0f;
    for (unsigned k = 0; k < sent->top_k; ++k) {
        const size_t entry = token * sent->top_k + k;
        const int64_t expert = ref_expert_of(sent, sent->topk_idx[combine->rank][entry]);
        if (expert < 0 || (unsigned)expert / ref_local_experts(sent) != owner) continue;
        partial = add_entry(combine, entry, column, partial);
        last = entry;
        ++found;
    }
    if (found == 0) return sum;
    if (found == 1) return add_entry(combine, last, column, sum);
    ep_store(combine->rows->datatype, combine->row, 0, partial);
    return sum + ep_load(combine->rows->datatype, combine->row, 0);
}

// Whether the dispatch found an expert of `owner` in the token.
static bool goes_to(const Combine* combine, size_t token, unsigned owner) {
    const RefRouting* sent = combine->sent;
    for (unsigned k = 0; k < sent->top_k; ++k) {
        const int64_t expert = ref_expert_of(sent, sent->topk_idx[combine->rank][token * sent->top_k + k]);
        if (expert >= 0 && (unsigned)expert / ref_local_experts(sent) == owner) return true;
    }
    return false;
}

// What the node at `distance` from home adds to the sum of a token.
static float add_node(const Combine* combine, unsigned distance, size_t token, unsigned column, float sum) {
    const bool is_plain = distance == 0 && !ep_sums_are_invariant();
    bool found = false;
    float partial = is_plain ? sum : 0.0f;
    for (unsigned owner = 0; owner < combine->sent->num_ranks; ++owner) {
        if (ep_node_distance(combine->rank, owner) != distance) continue;
        if (!goes_to(combine, token, owner)) continue;
        found = true;
        partial = add_owner(combine, owner, token, column, partial);
    }
    if (is_plain) return partial;
    if (!found) return sum;
    ep_store(combine->rows->datatype, combine->row, 0, partial);
    return sum + ep_load(combine->rows->datatype, combine->row, 0);
}

static float reduced_sum(const Combine* combine, size_t token, unsigned column) {
    float sum = 0.0f;
    for (unsigned place = 0; place < ep_num_nodes(); ++place) {
        sum = add_node(combine, ep_distance_in_sum(combine->rank, place), token, column, sum);
    }
    return sum;
}

void ref_ll_combine(const RefRouting* sent, const RefRouting* now, unsigned rank, RefLayout layout,
                    const RefRows* expert_rows, void* out) {
    ref_ll_combine_as(ref_ll_sum(), sent, now, rank, layout, expert_rows, out);
}

void ref_ll_combine_as(RefLlSum order, const RefRouting* sent, const RefRouting* now, unsigned rank,
                       RefLayout layout, const RefRows* expert_rows, void* out) {
    const unsigned hidden = expert_rows->hidden;
    EP_SCOPED unsigned* used = ref_host_new(sent->num_experts * sizeof(*used));
    const size_t entries = ref_entries_of(sent, rank);
    Combine combine = {.sent = sent,
                       .rank = rank,
                       .rows = expert_rows,
                       .row = ref_host_new(ref_row_bytes(expert_rows)),
                       .results = ref_host_new((entries * hidden + 1) * sizeof(float)),
                       .weights = ref_host_new((entries + 1) * sizeof(float)),
                       .first = ref_host_new((entries + 1) * sizeof(unsigned))};
    walk(sent, layout, used, fetch_result, &combine);
    match_all(&combine, now);
    const bool exact = order == kRefExact;
    for (size_t token = 0; token < now->num_tokens[rank]; ++token) {
        for (unsigned column = 0; column < hidden; ++column) {
            const float sum = exact ? exact_sum(&combine, token, column) : reduced_sum(&combine, token, column);
            ep_store(expert_rows->datatype, out, token * hidden + column, sum);
        }
    }
    free(combine.row);
    free(combine.results);
    free(combine.weights);
    free(combine.first);
}
