// High-throughput operations in straight lines; see ht.h.
#include "reference/ht.h"

#include "harness/nodes.h"
#include "reference/buffer.h"

enum { kMaxTopK = 32 };

// One token on one of the ranks that it goes to.
typedef struct {
    unsigned source;
    size_t token;
    unsigned destination;
    size_t row;  // there
    unsigned num_experts;
    unsigned experts[kMaxTopK];  // local ids there, ascending
} Copy;

typedef void (*CopyFn)(const Copy* copy, void* context);

// Fills in the experts of a token on copy->destination.
static void find_experts(const RefRouting* routing, Copy* copy) {
    const unsigned local_experts = ref_local_experts(routing);
    const int64_t* ids = &routing->topk_idx[copy->source][copy->token * routing->top_k];
    copy->num_experts = 0;
    for (unsigned k = 0; k < routing->top_k; ++k) {
        const int64_t expert = ref_expert_of(routing, ids[k]);
        if (expert < 0 || (unsigned)expert / local_experts != copy->destination) continue;
        const unsigned local = (unsigned)expert % local_experts;
        unsigned at = copy->num_experts;
        while (at > 0 && copy->experts[at - 1] > local) --at;
        if (at > 0 && copy->experts[at - 1] == local) continue;
        memmove(&copy->experts[at + 1], &copy->experts[at], (copy->num_experts - at) * sizeof(copy->experts[0]));
        copy->experts[at] = local;
        ++copy->num_experts;
    }
}

// Calls `each` for every token on every rank that it goes to: by source, token and destination.
static void walk(const RefRouting* routing, CopyFn each, void* context) {
    EP_SCOPED size_t* rows = ref_host_new(routing->num_ranks * sizeof(*rows));
    Copy copy;
    memset(&copy, 0, sizeof(copy));
    for (copy.source = 0; copy.source < routing->num_ranks; ++copy.source) {
        for (copy.token = 0; copy.token < routing->num_tokens[copy.source]; ++copy.token) {
            for (copy.destination = 0; copy.destination < routing->num_ranks; ++copy.destination) {
                find_experts(routing, &copy);
                if (copy.num_experts == 0) continue;
                copy.row = rows[copy.destination]++;
                each(&copy, context);
            }
        }
    }
}

typedef struct {
    unsigned rank;
    unsigned received;
    int32_t* counts;  // may be NULL
} Count;

static void count_copy(const Copy* copy, void* context) {
    Count* count = context;
    if (copy->destination != count->rank) return;
    ++count->received;
    for (unsigned i = 0; i < copy->num_experts && count->counts != NULL; ++i) ++count->counts[copy->experts[i]];
}

unsigned ref_ht_received(const RefRouting* routing, unsigned rank) {
    Count count = {rank, 0, NULL};
    walk(routing, count_copy, &count);
    return count.received;
}

void ref_ht_counts(const RefRouting* routing, unsigned rank, int32_t* counts) {
    memset(counts, 0, ref_local_experts(routing) * sizeof(*counts));
    Count count = {rank, 0, counts};
    walk(routing, count_copy, &count);
}

typedef struct {
    unsigned rank;
    uint64_t* rows;
} Rows;

static void note_token(const Copy* copy, void* context) {
    const Rows* rows = context;
    if (copy->destination != rows->rank) return;
    rows->rows[copy->row] = ref_row_of(copy->source, copy->token);
}

uint64_t* ref_ht_rows(const RefRouting* routing, unsigned rank) {
    Rows rows = {rank, ref_host_new((ref_ht_received(routing, rank) + 1) * sizeof(*rows.rows))};
    walk(routing, note_token, &rows);
    return rows.rows;
}

void ref_ht_dispatch_tokens(const RefRouting* routing, unsigned rank, const RefRows* tokens,
                            unsigned num_rows, void* out) {
    const size_t row_bytes = ref_row_bytes(tokens);
    const unsigned received = ref_ht_received(routing, rank);
    EP_SCOPED uint64_t* rows = ref_ht_rows(routing, rank);
    memset(out, 0, num_rows * row_bytes);
    for (size_t i = 0; i < received; ++i) ref_row_fill(tokens, rows[i], (unsigned char*)out + i * row_bytes);
}

typedef struct {
    unsigned rank;
    unsigned local_experts;
    const RefRouting* given;
    int64_t* ids;
    float* weights;
} Packed;

// The sum over the entries that name the expert, by k, and without one 0.
static float given_weight(const RefRouting* given, const Copy* copy, int64_t expert) {
    float weight = 0.0f;
    bool is_named = false;
    for (size_t k = 0; k < given->top_k; ++k) {
        const size_t entry = copy->token * given->top_k + k;
        if (given->topk_idx[copy->source][entry] != expert) continue;
        // The first one is not added to zero, so that a weight of -0 stays one.
        weight = is_named ? weight + given->weights[copy->source][entry] : given->weights[copy->source][entry];
        is_named = true;
    }
    return weight;
}

static void place_routing(const Copy* copy, void* context) {
    const Packed* packed = context;
    if (copy->destination != packed->rank) return;
    for (unsigned i = 0; i < copy->num_experts; ++i) {
        const size_t at = copy->row * packed->given->top_k + i;
        const unsigned local = copy->experts[i];
        const int64_t expert = (int64_t)packed->rank * packed->local_experts + local;
        packed->ids[at] = local;
        packed->weights[at] = given_weight(packed->given, copy, expert);
    }
}

void ref_ht_dispatch_routing(const RefRouting* routing, const RefRouting* given, unsigned rank,
                             unsigned num_rows, int64_t* ids, float* weights) {
    for (size_t i = 0; i < (size_t)num_rows * routing->top_k; ++i) {
        ids[i] = -1;
        weights[i] = 0.0f;
    }
    Packed context = {rank, ref_local_experts(routing), given, ids, weights};
    walk(routing, place_routing, &context);
}

typedef struct {
    unsigned rank;
    unsigned distance;  // of the nodes whose rows are added
    const RefRows* rows;
    unsigned char* row;  // room for one
    float* values;       // of it
    float* sums;         // [num_tokens, hidden]
    bool* found;         // [num_tokens]: whether there was something to add
} Sums;

// The walk comes to the destinations of a token in ascending order, which is that of a node's sum.
static void add_copy(const Copy* copy, void* context) {
    const Sums* sums = context;
    if (copy->source != sums->rank) return;
    if (ep_node_distance(copy->source, copy->destination) != sums->distance) return;
    sums->found[copy->token] = true;
    ref_row_fill(sums->rows, ref_row_of(copy->destination, copy->row), sums->row);
    const size_t hidden = sums->rows->hidden;
    ep_load_all(sums->rows->datatype, sums->row, hidden, sums->values);
    float* of_token = &sums->sums[copy->token * hidden];
    for (size_t i = 0; i < hidden; ++i) of_token[i] += sums->values[i];
}

void ref_ht_combine(const RefRouting* routing, unsigned rank, const RefRows* expert_rows, void* out) {
    const size_t num_tokens = routing->num_tokens[rank];
    const size_t hidden = expert_rows->hidden;
    const size_t elements = num_tokens * hidden;
    const ncclDataType_t datatype = expert_rows->datatype;
    EP_SCOPED float* total = ref_host_new((elements + 1) * sizeof(float));
    Sums sums = {.rank = rank,
                 .rows = expert_rows,
                 .row = ref_host_new(ref_row_bytes(expert_rows)),
                 .values = ref_host_new(hidden * sizeof(float)),
                 .sums = ref_host_new((elements + 1) * sizeof(float)),
                 .found = ref_host_new((num_tokens + 1) * sizeof(bool))};
    for (unsigned place = 0; place < ep_num_nodes(); ++place) {
        sums.distance = ep_distance_in_sum(rank, place);
        memset(sums.sums, 0, elements * sizeof(float));
        memset(sums.found, 0, num_tokens * sizeof(bool));
        walk(routing, add_copy, &sums);
        for (size_t token = 0; token < num_tokens; ++token) {
            if (!sums.found[token]) continue;
            float* of_node = &sums.sums[token * hidden];
            if (sums.distance > 0 || ep_sums_are_invariant()) {
                // What another node has summed crosses the network as one row; the option rounds all.
                ep_store_all(datatype, sums.row, hidden, of_node);
                ep_load_all(datatype, sums.row, hidden, of_node);
            }
            for (size_t i = 0; i < hidden; ++i) total[token * hidden + i] += of_node[i];
        }
    }
    ep_store_all(datatype, out, elements, total);
    free(sums.row);
    free(sums.values);
    free(sums.sums);
    free(sums.found);
}

typedef struct {
    const RefRouting* routing;
    unsigned rank;
    unsigned columns;
    uint64_t seed;
    unsigned* used;  // columns of each token that are filled
    float* out;
} Gradients;

static void place_gradients(const Copy* copy, void* context) {
    const Gradients* gradients = context;
    if (copy->source != gradients->rank) return;
    const unsigned columns = gradients->columns;
    for (unsigned i = 0; i < copy->num_experts && i < columns; ++i) {
        if (gradients->used[copy->token] == columns) return;
        const size_t from = copy->row * columns + i;
        const size_t to = copy->token * columns + gradients->used[copy->token]++;
        gradients->out[to] = ref_weight(gradients->seed, copy->destination, from);
    }
}

void ref_ht_gradients(const RefRouting* routing, unsigned rank, unsigned columns, uint64_t seed, float* out) {
    const size_t tokens = routing->num_tokens[rank];
    for (size_t i = 0; i < tokens * columns; ++i) out[i] = 0.0f;
    Gradients context = {routing, rank, columns, seed, ref_host_new((tokens + 1) * sizeof(unsigned)), out};
    walk(routing, place_gradients, &context);
    free(context.used);
}

static void place_by_k(const Copy* copy, void* context) {
    const Gradients* gradients = context;
    if (copy->source != gradients->rank) return;
    const RefRouting* routing = gradients->routing;
    const unsigned top_k = routing->top_k, first = copy->destination * ref_local_experts(routing);
    for (unsigned k = 0; k < top_k; ++k) {
        const size_t entry = copy->token * top_k + k;
        for (unsigned i = 0; i < copy->num_experts; ++i) {
            if (routing->topk_idx[copy->source][entry] != (int64_t)(first + copy->experts[i])) continue;
            gradients->out[entry] = ref_weight(gradients->seed, copy->destination, copy->row * top_k + i);
        }
    }
}

void ref_ht_gradients_by_k(const RefRouting* routing, unsigned rank, uint64_t seed, float* out) {
    const size_t entries = ref_entries_of(routing, rank);
    for (size_t i = 0; i < entries; ++i) out[i] = 0.0f;
    Gradients context = {.routing = routing, .rank = rank, .seed = seed, .out = out};
    walk(routing, place_by_k, &context);
}
