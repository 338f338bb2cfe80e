// Selectors and homes; see both.h.
#include "reference/homes.h"
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

void bits_from_any_home(EpEnv* env, bool ht) {
    enum { kTokens = 4, kHidden = 64, kLocalExperts = 2, kBytes = kHidden * 2 };
    const unsigned ranks = (unsigned)env->size;
    const RefShape shape = {kLocalExperts * ranks, kTokens, ranks, ncclBfloat16, kHidden};
    EP_WITH_VARIABLE("NCCL_EP_NODE_SUMS", "invariant");
    RefRun run = ref_run_open(env, NULL, &shape, ref_routing_everywhere(ranks, shape.num_experts, kTokens),
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
        ref_answer((unsigned)env->rank, token % kTokens, kHidden, rows + row * kBytes);
    }
    ref_buffer_upload(&run.results_in, rows);
    RefRouting* same = ref_routing_everywhere(ranks, shape.num_experts, kTokens);
    ref_buffer_upload(&run.weights, same->weights[env->rank]);
    ref_routing_free(same);
    EP_CHECK_NCCL(ref_launch_combine(&run, kRefWhole, env->stream));
    ep_sync(env);
    ref_check_same_everywhere(&run.combined);
    ref_run_close(&run);
}
