// Rank-major low-latency operations in straight lines; see rank_major.h.
#include "reference/rank_major.h"

#include "harness/nodes.h"
#include "reference/buffer.h"

enum { kNobody = -1 };

// The rank that hosts the expert of entry k of a token, or kNobody.
static int owner_of(const RefRouting* routing, unsigned source, size_t token, unsigned k) {
    const int64_t expert = ref_expert_of(routing, routing->topk_idx[source][token * routing->top_k + k]);
    return expert < 0 ? kNobody : (int)(expert / ref_local_experts(routing));
}

// Whether entry k of a token is the first that names an expert of its rank.
static bool is_first(const RefRouting* routing, unsigned source, size_t token, unsigned k) {
    const int owner = owner_of(routing, source, token, k);
    for (unsigned before = 0; before < k; ++before) {
        if (owner_of(routing, source, token, before) == owner) return false;
    }
    return owner != kNobody;
}

static bool goes_to(const RefRouting* routing, unsigned source, size_t token, unsigned rank) {
    for (unsigned k = 0; k < routing->top_k; ++k) {
        if (owner_of(routing, source, token, k) == (int)rank) return true;
    }
    return false;
}

void ref_rank_each(const RefRouting* routing, unsigned rank, RefLayout layout, RefRankRowFn each, void* context) {
    for (unsigned source = 0; source < routing->num_ranks; ++source) {
        size_t index = 0;
        for (size_t token = 0; token < routing->num_tokens[source]; ++token) {
            if (!goes_to(routing, source, token, rank)) continue;
            each(source, token, ref_layout_row(layout, source, index++), context);
        }
    }
}

static void count_row(unsigned source, size_t token, size_t row, void* context) {
    (void)token, (void)row;
    ++((int32_t*)context)[source];
}

void ref_rank_counts(const RefRouting* routing, unsigned rank, int32_t* counts) {
    memset(counts, 0, routing->num_ranks * sizeof(*counts));
    ref_rank_each(routing, rank, ref_rank_major(routing->num_ranks, 0), count_row, counts);
}

typedef struct {
    const RefRouting* routing;
    unsigned rank;
    int64_t* ids;
    float* weights;
} Beside;

static void write_beside(unsigned source, size_t token, size_t row, void* context) {
    const Beside* beside = context;
    const RefRouting* routing = beside->routing;
    const unsigned top_k = routing->top_k;
    for (unsigned k = 0; k < top_k; ++k) {
        const size_t entry = token * top_k + k;
        beside->weights[row * top_k + k] = routing->weights[source][entry];
        if (owner_of(routing, source, token, k) == (int)beside->rank) {
            beside->ids[row * top_k + k] = routing->topk_idx[source][entry] % ref_local_experts(routing);
        }
    }
}

void ref_rank_beside(const RefRouting* routing, unsigned rank, RefLayout layout, int64_t* ids, float* weights) {
    Beside beside = {routing, rank, ids, weights};
    const size_t entries = ref_layout_rows(layout) * routing->top_k;
    for (size_t i = 0; i < entries; ++i) ids[i] = -1;
    ref_rank_each(routing, rank, layout, write_beside, &beside);
}

typedef struct {
    unsigned rank;
    const RefRows* rows;
    unsigned char* out;
} Results;

static void write_result(unsigned source, size_t token, size_t row, void* context) {
    (void)source, (void)token;
    const Results* results = context;
    ref_row_fill(results->rows, ref_row_of(results->rank, row), results->out + row * ref_row_bytes(results->rows));
}

void ref_rank_results(const RefRouting* routing, unsigned rank, RefLayout layout,
                      const RefRows* expert_rows, void* out) {
    Results results = {rank, expert_rows, out};
    ref_rank_each(routing, rank, layout, write_result, &results);
}

// The sum of a token while it is made.
typedef struct {
    const RefRouting* sent;
    unsigned rank;
    RefLayout layout;
    const RefRows* rows;
    size_t* begins;  // by rank, how many rows it has of this one's tokens before the current token
    float* sum;      // [hidden]
    float* of_node;  // [hidden]
    float* row;      // [hidden]
    void* packed;    // a row
} Sum;

static void add_owner(const Sum* sum, unsigned owner, float* to) {
    const size_t row = ref_layout_row(sum->layout, sum->rank, sum->begins[owner]);
    ref_row_fill(sum->rows, ref_row_of(owner, row), sum->packed);
    ep_load_all(sum->rows->datatype, sum->packed, sum->rows->hidden, sum->row);
    for (unsigned i = 0; i < sum->rows->hidden; ++i) to[i] += sum->row[i];
}

// Adds what the node at `distance` from home has of a token.
static void add_node(const Sum* sum, unsigned distance, size_t token) {
    const ncclDataType_t datatype = sum->rows->datatype;
    const bool is_plain = distance == 0 && !ep_sums_are_invariant();
    const unsigned hidden = sum->rows->hidden;
    bool found = false;
    memset(sum->of_node, 0, hidden * sizeof(float));
    for (unsigned k = 0; k < sum->sent->top_k; ++k) {
        if (!is_first(sum->sent, sum->rank, token, k)) continue;
        const unsigned owner = (unsigned)owner_of(sum->sent, sum->rank, token, k);
        if (ep_node_distance(sum->rank, owner) != distance) continue;
        found = true;
        add_owner(sum, owner, is_plain ? sum->sum : sum->of_node);
    }
    if (is_plain || !found) return;
    for (unsigned i = 0; i < hidden; ++i) {
        ep_store(datatype, sum->packed, i, sum->of_node[i]);
        sum->sum[i] += ep_load(datatype, sum->packed, i);
    }
}

void ref_rank_combine(const RefRouting* sent, unsigned rank, RefLayout layout, const RefRows* expert_rows, void* out) {
    const unsigned hidden = expert_rows->hidden;
    Sum sum = {sent, rank, layout, expert_rows, ref_host_new(sent->num_ranks * sizeof(size_t)),
               ref_host_new(hidden * sizeof(float)), ref_host_new(hidden * sizeof(float)),
               ref_host_new(hidden * sizeof(float)), ref_host_new(ref_row_bytes(expert_rows))};
    for (size_t token = 0; token < sent->num_tokens[rank]; ++token) {
        memset(sum.sum, 0, hidden * sizeof(float));
        for (unsigned place = 0; place < ep_num_nodes(); ++place) {
            add_node(&sum, ep_distance_in_sum(rank, place), token);
        }
        for (unsigned i = 0; i < hidden; ++i) {
            ep_store(expert_rows->datatype, out, token * hidden + i, sum.sum[i]);
        }
        for (unsigned owner = 0; owner < sent->num_ranks; ++owner) {
            sum.begins[owner] += goes_to(sent, rank, token, owner) ? 1 : 0;
        }
    }
    free(sum.begins);
    free(sum.sum);
    free(sum.of_node);
    free(sum.row);
    free(sum.packed);
}
