// Ids that a rank repeats, low latency. They take slots of their expert, and once there are more rows
// than slots, the group fails on every rank: nobody gets a sum without a row that found none.
#include "suites/errors/errors.h"

// Replaces the handle: of `top_k` ids of each token the first `times` name expert 0, the others none.
static void name_expert_0(Session* session, unsigned top_k, unsigned times) {
    const EpEnv* env = session->env;
    EP_SCOPED int64_t* ids = calloc((size_t)kTokens * top_k, sizeof(*ids));
    EP_REQUIRE(ids != NULL);
    for (unsigned i = 0; i < kTokens * top_k; ++i) ids[i] = i % top_k < times ? 0 : -1;
    EP_CHECK_NCCL(ncclEpHandleDestroy(session->handle));
    ep_device_free(session->ids);
    session->ids = ep_device_upload(ids, (size_t)kTokens * top_k * sizeof(*ids));
    EP_REQUIRE_NCCL(ep_handle_create(&session->handle, session->group, session->ids, kTokens, top_k, env->stream));
}

static ncclResult_t combine(const Session* session, void* weights, unsigned top_k) {
    CallTensors tensors;
    valid_tensors(session, kCombine, &tensors);
    ep_view_2d(&tensors.lists[kLocals].views[0], weights, ncclFloat32, NCCL_EP_TENSOR_TAG_TOPK_WEIGHTS, kTokens, top_k);
    return make_call(session, kCombine, &tensors, 0);
}

// How often each token of the odd rank must name an expert until that and one row of each other token
// overfill its R * kMaxTokens slots.
static unsigned overfilling(const EpEnv* env) {
    const unsigned slots = (unsigned)env->size * kMaxTokens;
    const unsigned of_others = ((unsigned)env->size - 1) * kTokens;
    return (slots - of_others) / kTokens + 1;
}

static void overfill(const EpEnv* env, unsigned send_only) {
    const unsigned top_k = overfilling(env);
    Session session = open_session(env, NCCL_EP_ALGO_LOW_LATENCY);
    void* weights = ep_device_alloc((size_t)kTokens * top_k * sizeof(float));
    EP_REQUIRE_CUDA(cudaMemset(weights, 0, (size_t)kTokens * top_k * sizeof(float)));
    name_expert_0(&session, top_k, is_odd(env) ? top_k - 1 : 1);  // it fits
    EP_CHECK_NCCL(make_valid_call(&session, kDispatch, send_only));
    EP_CHECK_NCCL(ncclEpComplete(session.handle, NULL, env->stream));
    EP_CHECK_NCCL(combine(&session, weights, top_k));
    ep_sync(env);
    EP_CHECK_EQ_I64(wait_for_failure(&session, 0.0), ncclSuccess);
    name_expert_0(&session, top_k, is_odd(env) ? top_k : 1);
    ep_barrier();
    EP_CHECK_NCCL(make_valid_call(&session, kDispatch, send_only));
    (void)ncclEpComplete(session.handle, NULL, env->stream);  // the failure may be known already
    if (env->rank == 0) {
        EP_REFUSED_AS("running-ll-repeated-ids", wait_for_failure(&session, 10.0),
                      "{ncclEpDispatch (low latency)}{0}{%d} got %u, expected at most %u", odd_rank(env),
                      top_k * kTokens, (unsigned)kMaxTokens);
    } else {
        const ncclResult_t next = combine(&session, weights, top_k);
        EP_CHECK(next == ncclSuccess || next == ncclRemoteError);
        EP_CHECK_EQ_I64(wait_for_failure(&session, 10.0), ncclRemoteError);
    }
    ep_barrier();
    close_session(&session);
    ep_device_free(weights);
}

EP_TEST(ll_repeated_ids_overfill_an_expert) {
    overfill(env, 0);
    overfill(env, 1);
}
