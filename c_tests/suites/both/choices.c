// Selectors and homes; see both.h.
#include "suites/both/both.h"

int select_choice(void* user, const ncclEpQuery_t* query, ncclEpChoice_t* choice) {
    Selector* selector = user;
    static const ncclEpChoice_t kEmpty = {sizeof(kEmpty), 0, 0, 0, 0, 0};
    EP_CHECK_EQ_BYTES(choice, &kEmpty, sizeof(kEmpty));
    ++selector->asked;
    selector->query = *query;
    *choice = selector->choice;
    return selector->chooses ? 1 : 0;
}

void check_query(const Selector* selector, const RefRun* run, unsigned operation) {
    const ncclEpQuery_t* query = &selector->query;
    EP_CHECK_EQ_U64(query->size, sizeof(*query));
    EP_CHECK_EQ_U64(query->operation, operation);
    EP_CHECK_EQ_U64(query->tokens, run->now->num_tokens[run->env->rank]);
    EP_CHECK_EQ_U64(query->top_k, run->shape.top_k);
    EP_CHECK_EQ_U64(query->row_bytes, run->shape.hidden * ep_datatype_size(run->shape.datatype));
    EP_CHECK_EQ_U64(query->ranks, (unsigned)run->env->size);
    if (!run->ht) EP_CHECK_EQ_U64(query->symmetric, 0);
}

// A routing of `num_tokens` tokens for each rank, the same ones everywhere: token t goes to expert t of each
// rank, modulo their number, with the same weights on all ranks.
static RefRouting* routing_everywhere(unsigned num_ranks, unsigned num_experts, unsigned num_tokens) {
    EP_SCOPED unsigned* all = ref_host_new(num_ranks * sizeof(*all));
    ref_tokens_full(all, num_ranks, num_tokens);
    RefRouting* routing = ref_routing_new(num_ranks, num_experts, num_ranks, all, kRefDistinct, 1);
    const unsigned local_experts = ref_local_experts(routing);
    for (unsigned rank = 0; rank < num_ranks; ++rank) {
        for (size_t i = 0; i < ref_entries_of(routing, rank); ++i) {
            const unsigned owner = (unsigned)(i % num_ranks);
            const unsigned local = (unsigned)(i / num_ranks % local_experts);
            routing->topk_idx[rank][i] = (int64_t)owner * local_experts + local;
            routing->weights[rank][i] = ref_weight(2, 0, i);
        }
    }
    return routing;
}

// What `rank` answers to a token: `hidden` bfloat16.
static void answer(unsigned rank, size_t token, unsigned hidden, void* row) {
    uint64_t state = ep_mix(3, rank, token);
    for (unsigned i = 0; i < hidden; ++i) {
        ep_store(ncclBfloat16, row, i, (float)(4 * ep_random_unit(&state) - 2));
    }
}

// Whether the buffer has the bytes that it has on rank 0. Collective.
static void check_same_everywhere(const RefBuffer* buffer) {
    EP_SCOPED unsigned char* here = ref_host_new(buffer->bytes);
    EP_SCOPED unsigned char* there = ref_host_new(buffer->bytes);
    ep_download(here, ref_buffer_data(buffer), buffer->bytes);
    memcpy(there, here, buffer->bytes);
    MPI_Bcast(there, (int)buffer->bytes, MPI_BYTE, 0, MPI_COMM_WORLD);
    EP_CHECK_EQ_BYTES(here, there, buffer->bytes);
}

void bits_from_any_home(EpEnv* env, bool ht) {
    enum { kTokens = 4, kHidden = 64, kLocalExperts = 2, kBytes = kHidden * 2 };
    const unsigned ranks = (unsigned)env->size;
    const RefShape shape = {kLocalExperts * ranks, kTokens, ranks, ncclBfloat16, kHidden};
    EP_WITH_VARIABLE("NCCL_EP_NODE_SUMS", "invariant");
    RefRun run = ref_run_open(env, NULL, &shape, routing_everywhere(ranks, shape.num_experts, kTokens),
                              ht ? ref_ht(1) : ref_ll(1));
    ref_dispatch(&run);
    ref_prepare_combine(&run);
    EP_SCOPED char* rows = ref_host_new(run.results_in.bytes);
    // Low latency: half of each source's tokens are in an expert's rows, source by source.
    for (size_t i = 0; i < ranks * kTokens; ++i) {
        const size_t half = ranks * kTokens / kLocalExperts;
        const unsigned expert = (unsigned)(i / half);
        const size_t token = ht ? i : i % half % (kTokens / kLocalExperts) * kLocalExperts + expert;
        const size_t row = ht ? i : ref_layout_row(run.layout, expert, i % half);
        answer((unsigned)env->rank, token % kTokens, kHidden, rows + row * kBytes);
    }
    ref_buffer_upload(&run.results_in, rows);
    RefRouting* same = routing_everywhere(ranks, shape.num_experts, kTokens);
    ref_buffer_upload(&run.weights, same->weights[env->rank]);
    ref_routing_free(same);
    EP_CHECK_NCCL(ref_launch_combine(&run, kRefWhole, env->stream));
    ep_sync(env);
    check_same_everywhere(&run.combined);
    ref_run_close(&run);
}
