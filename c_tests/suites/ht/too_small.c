// On one rank, high-throughput tensors have fewer rows than that rank receives, or none. This shows
// only when the operation runs: the group then fails with ncclInvalidUsage instead of losing
// tokens, no byte past the tensor's end is written, and no rank hangs.
#include "harness/nodes.h"
#include "reference/run.h"

enum { kHidden = 32 };

// In this routing rank 0 receives at least one row, as every rank has tokens for its experts.
static RefRun open_run(EpEnv* env) {
    const RefShape shape = {2 * (unsigned)env->size, 12, 2 * (unsigned)env->size, ncclBfloat16, kHidden};
    RefRun run = ref_run_open_with(env, NULL, &shape, kRefDistinct, false, ref_ht_as(kHtRowsExact, kHtNoCounter, 7));
    EP_CHECK(run.received > 0);
    // On several nodes a rank that fails early would end what the others still do.
    ep_barrier();
    return run;
}

// The buffer on rank 0 is longer than its tensor says: the last row must still be poison.
static void check_last_row(const RefBuffer* buffer, size_t row_bytes) {
    const size_t bytes = row_bytes + kRefGuardBytes;
    EP_SCOPED void* poison = ref_host_poison(bytes);
    EP_SCOPED void* got = ref_host_new(bytes);
    ep_download(got, buffer->base + kRefGuardBytes + buffer->bytes - row_bytes, bytes);
    EP_CHECK_EQ_BYTES(got, poison, bytes);
}

// Rank 0 knows why it failed; the other ranks may or may not have noticed.
static void close_failed(RefRun* run, EpEnv* env, const char* tensor) {
    const ncclResult_t failure = ep_group_state(run->own_group);
    if (env->rank == 0) {
        EP_CHECK_EQ_I64(failure, ncclInvalidUsage);
        EP_CHECK_STR_CONTAINS(ncclEpGetLastError(), tensor);
        EP_CHECK_STR_CONTAINS(ncclEpGetLastError(), "sizes[0]");
        EP_CHECK_RESULT(ref_launch_dispatch(run, kRefCached, env->stream), ncclInvalidUsage);
    } else {
        EP_CHECK(failure == ncclSuccess || failure == ncclRemoteError);
    }
    ref_run_close(run);
}

// On several nodes the host enqueues in steps, and may hear of the failure meanwhile.
static void check_launched(const EpEnv* env, ncclResult_t launched) {
    const ncclResult_t failure = env->rank == 0 ? ncclInvalidUsage : ncclRemoteError;
    EP_CHECK(launched == ncclSuccess || (ep_num_nodes() > 1 && launched == failure));
}

EP_TEST(ht_token_output_too_small) {
    RefRun run = open_run(env);
    ref_prepare_dispatch(&run);
    if (env->rank == 0) --run.num_rows;
    check_launched(env, ref_launch_dispatch(&run, kRefCached, env->stream));
    ep_sync(env);
    if (env->rank == 0) check_last_row(&run.tokens_out, kHidden * sizeof(uint16_t));
    close_failed(&run, env, "outputs[TOKENS]");
}

EP_TEST(ht_routing_output_too_small) {
    const RefPass forward = {.no_tokens = true};
    RefRun run = open_run(env);
    ref_prepare_dispatch(&run);
    if (env->rank == 0) --run.num_rows;
    check_launched(env, ref_launch_dispatch(&run, forward, env->stream));
    ep_sync(env);
    if (env->rank == 0) {
        check_last_row(&run.ids_out, run.shape.top_k * sizeof(int64_t));
        check_last_row(&run.weights_out, run.shape.top_k * sizeof(float));
    }
    close_failed(&run, env, "outputs[TOPK_IDX]");
}

// The tensor was made for no rows at all: its NULL does not mean "not wanted".
static void into_nothing(EpEnv* env, RefPass pass, const char* tensor) {
    RefRun run = open_run(env);
    ref_prepare_dispatch(&run);
    if (env->rank == 0) run.num_rows = 0;
    run.variation = 1;  // without addresses of empty tensors
    check_launched(env, ref_launch_dispatch(&run, pass, env->stream));
    ep_sync(env);
    close_failed(&run, env, tensor);
}

EP_TEST(ht_outputs_without_rows) {
    into_nothing(env, kRefCached, "outputs[TOKENS]");
    into_nothing(env, (RefPass){.no_tokens = true}, "outputs[TOPK_IDX]");
}
