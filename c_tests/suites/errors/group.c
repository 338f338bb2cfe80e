// Refusals of ncclEpCreateGroup: a rank's own arguments, differences between ranks, one rank that
// refuses for all, a rank that never calls, several nodes. Creation is collective: in each case all
// ranks get an error, none hangs, and the next creation succeeds.
#define _GNU_SOURCE  // setenv

#include "harness/graphs.h"
#include "harness/nodes.h"
#include "suites/errors/errors.h"

static ncclEpGroupConfig_t config_of(const EpEnv* env, ncclEpAlgorithm_t algorithm) {
    return ep_group_config(algorithm, (unsigned)env->size * kLocalExperts, kMaxTokens, kTokenBytes);
}

static ncclEpGroup_t untouched(void) { return (ncclEpGroup_t)(uintptr_t)0x5a5a; }

// Creates a group; the creation must fail.
static ncclResult_t create(const EpEnv* env, const ncclEpGroupConfig_t* config) {
    ncclEpGroup_t group = untouched();
    const ncclResult_t result = ncclEpCreateGroup(&group, env->comm, config, env->stream, NULL, NULL);
    EP_CHECK(group == untouched());
    return result;
}

static void check_creation_works(const EpEnv* env) {
    Session session = open_session(env, NCCL_EP_ALGO_LOW_LATENCY);
    finish_session(&session);
}

static void bad_pointers(const EpEnv* env, const ncclEpGroupConfig_t* config) {
    ncclEpGroup_t group = untouched();
    EP_REFUSED("group-comm-null", ncclEpCreateGroup(&group, NULL, config, env->stream, NULL, NULL));
    EP_CHECK(group == untouched());
    EP_REFUSED("group-config-null", create(env, NULL));
    EP_REFUSED("group-out-null", ncclEpCreateGroup(NULL, env->comm, config, env->stream, NULL, NULL));
}

// A program of a later generation calls this function with three arguments, so the stream is what
// the register holds by chance; the configuration begins with its size and a magic number.
static void later_generation(const EpEnv* env) {
    const unsigned config[28] = {sizeof(config), 0xC00FFFEEU, 2, 1};
    ncclEpGroup_t group = untouched();
    EP_REFUSED("group-generation",
               ncclEpCreateGroup(&group, env->comm, (const ncclEpGroupConfig_t*)config, (cudaStream_t)(uintptr_t)0x5a5a,
                                 NULL, NULL));
    EP_CHECK(group == untouched());
}

static void bad_numbers(const EpEnv* env, const ncclEpGroupConfig_t* valid) {
    const int ranks = env->size;
    ncclEpGroupConfig_t config = *valid;
    config.version = 2;
    EP_REFUSED("group-version", create(env, &config));
    config = *valid;
    config.num_experts = 0;
    EP_REFUSED_AS("group-experts", create(env, &config), "got 0, expected a multiple of %d", ranks);
    config.num_experts = (unsigned)(2 * ranks + 1);
    if (ranks > 1) {
        EP_REFUSED_AS("group-experts", create(env, &config), "got %d, expected a multiple of %d", 2 * ranks + 1, ranks);
    }
    config = *valid;
    config.max_tokens_per_rank = 0xffffffffU;
    EP_REFUSED_AS("group-tokens-range", create(env, &config), "got 4294967295, expected at most %d with %d ranks",
                  2147483647 / ranks, ranks);
    config = *valid;
    config.token_size_bytes = 0;
    EP_REFUSED("group-token-size", create(env, &config));
    config.token_size_bytes = 24;
    EP_REFUSED_AS("group-token-size", create(env, &config), "got 24, expected a multiple of 16");
}

static void bad_algorithms(const EpEnv* env, const ncclEpGroupConfig_t* valid) {
    ncclEpGroupConfig_t config = *valid;
    const unsigned unknown = 2;
    memcpy(&config.algorithm, &unknown, sizeof(unknown));
    EP_REFUSED("group-algorithm", create(env, &config));
    config = *valid;
    config.max_tokens_per_rank = NCCL_EP_AUTO;
    EP_REFUSED("group-tokens-auto", create(env, &config));
}

// The stand-ins recognise a destroyed communicator; real NCCL dereferences the pointer.
static void dead_communicator(const EpEnv* env, const ncclEpGroupConfig_t* config) {
    if (!ep_on_hostsim()) return;
    ncclComm_t dead = NULL;
    EP_REQUIRE_NCCL(ncclCommSplit(env->comm, 0, env->rank, &dead, NULL));
    EP_REQUIRE_NCCL(ncclCommDestroy(dead));
    ncclEpGroup_t group = untouched();
    EP_REFUSED_AS("group-comm-nccl", ncclEpCreateGroup(&group, dead, config, env->stream, NULL, NULL), "{4}");
    EP_CHECK(group == untouched());
}

EP_TEST(group_arguments) {
    const ncclEpGroupConfig_t config = config_of(env, NCCL_EP_ALGO_LOW_LATENCY);
    bad_pointers(env, &config);
    later_generation(env);
    bad_numbers(env, &config);
    bad_algorithms(env, &config);
    dead_communicator(env, &config);
    check_creation_works(env);
}

// ---- One rank against the others ---------------------------------------------------------------

// Checks that a rank's own setting is refused, and how the texts show it and that of the odd rank.
static void check_differs(const EpEnv* env, const char* id, const char* usual, const char* other,
                          const ncclEpGroupConfig_t* config) {
    const int differs = is_odd(env) ? 0 : odd_rank(env);
    EP_REFUSED_AS(id, create(env, config), "{%d} got %s, expected %s as on rank %d", differs,
                  is_odd(env) ? other : usual, is_odd(env) ? usual : other, differs);
}

// Changes `field` on the odd rank to a value that is itself valid.
static void one_differs(const EpEnv* env, const char* id, unsigned* field, unsigned theirs,
                        const ncclEpGroupConfig_t* config) {
    char usual[16];
    char other[16];
    snprintf(usual, sizeof(usual), "%u", *field);
    snprintf(other, sizeof(other), "%u", theirs);
    const unsigned ours = *field;
    if (is_odd(env)) *field = theirs;
    check_differs(env, id, usual, other, config);
    *field = ours;
}

static void modes_differ(const EpEnv* env) {
    const ncclEpGroupConfig_t config =
        config_of(env, is_odd(env) ? NCCL_EP_ALGO_HIGH_THROUGHPUT : NCCL_EP_ALGO_LOW_LATENCY);
    check_differs(env, "group-differs-algorithm", "low latency", "high throughput", &config);
}

// `usual` is what the library says for a variable that is not set.
static void variable_differs(const EpEnv* env, const char* id, const char* variable, const char* usual,
                             const char* other, const ncclEpGroupConfig_t* config) {
    EP_WITH_VARIABLE(variable, is_odd(env) ? other : NULL);
    check_differs(env, id, usual, other, config);
}

EP_TEST(group_differences_between_ranks) {
    if (!enough_ranks(env, 2, "group-differs-*")) return;
    ncclEpGroupConfig_t config = config_of(env, NCCL_EP_ALGO_LOW_LATENCY);
    modes_differ(env);
    one_differs(env, "group-differs-experts", &config.num_experts, config.num_experts * 2, &config);
    one_differs(env, "group-differs-tokens", &config.max_tokens_per_rank, 7, &config);
    one_differs(env, "group-differs-token-size", &config.token_size_bytes, 32, &config);
    variable_differs(env, "group-differs-ll-combine", "NCCL_EP_LL_COMBINE", "reduce", "exact", &config);
    variable_differs(env, "group-differs-node-sums", "NCCL_EP_NODE_SUMS", "home", "invariant", &config);
    ncclEpGroupConfig_t of_ht = config_of(env, NCCL_EP_ALGO_HIGH_THROUGHPUT);
    variable_differs(env, "group-differs-ht-chunk-bytes", "NCCL_EP_HT_CHUNK_BYTES", "unset", "65536", &of_ht);
    of_ht.max_tokens_per_rank = is_odd(env) ? 7 : NCCL_EP_AUTO;
    check_differs(env, "group-differs-tokens", "no bound", "7", &of_ht);
    check_creation_works(env);
}

// The odd rank makes a call that it refuses by itself.
static void one_refuses(const EpEnv* env, const ncclEpGroupConfig_t* odd_config, bool odd_null, const char* id,
                        const char* given) {
    const ncclEpGroupConfig_t valid = config_of(env, NCCL_EP_ALGO_LOW_LATENCY);
    char text[kMostText];
    const char* reason = write_refusal(id, given, text);
    if (!is_odd(env)) {
        EP_REFUSED_AS("group-rank-refused", create(env, &valid), "{%d}{%s}", odd_rank(env), reason);
    } else if (odd_null) {
        EP_REFUSED(id, ncclEpCreateGroup(NULL, env->comm, odd_config, env->stream, NULL, NULL));
    } else {
        EP_REFUSED_AS(id, create(env, odd_config), "%s", given);
    }
    check_creation_works(env);
}

EP_TEST(group_refused_by_one_rank) {
    if (!enough_ranks(env, 2, "group-rank-refused")) return;
    const ncclEpGroupConfig_t valid = config_of(env, NCCL_EP_ALGO_LOW_LATENCY);
    ncclEpGroupConfig_t config = valid;
    config.version = 9;
    one_refuses(env, &config, false, "group-version", "got 9, expected 1");
    one_refuses(env, NULL, false, "group-config-null", "");
    one_refuses(env, &valid, true, "group-out-null", "");
    config = valid;
    config.num_experts = 0;
    one_refuses(env, &config, false, "group-experts", "got 0, *");
}

// ---- A rank that never calls -------------------------------------------------------------------

EP_TEST(group_with_a_missing_rank) {
    if (!enough_ranks(env, 2, "group-rank-missing")) return;
    EpEnv own = open_own(env);
    // NCCL connects the ranks in a communicator's first collective and waits for them without a deadline.
    check_creation_works(&own);
    const ncclEpGroupConfig_t config = config_of(env, NCCL_EP_ALGO_LOW_LATENCY);
    ep_barrier();
    set_timeout_ms(kShortTimeoutMs);
    if (!is_odd(env)) {
        const double start = ep_seconds();
        EP_REFUSED_AS("group-rank-missing", create(&own, &config), "{%d}{%d}{%d}", env->rank, env->size,
                      kShortTimeoutMs);
        EP_CHECK(ep_seconds() - start < 0.001 * kShortTimeoutMs + 1.0);
    }
    set_timeout_ms(0);
    ep_barrier();
    EP_CHECK_NCCL(ncclCommAbort(own.comm));
    close_own(&own);
    check_creation_works(env);
}

EP_TEST(group_over_several_nodes) {
    if (!enough_ranks(env, 2, "group-nodes-exact")) return;
    if (ep_num_nodes() > 1) return;  // the other cases are to stay there
    const ncclEpGroupConfig_t config = config_of(env, NCCL_EP_ALGO_LOW_LATENCY);
    EP_WITH_VARIABLE("NCCL_HOSTID", is_odd(env) ? "right" : "left");
    EP_WITH_VARIABLE("NCCL_EP_LL_COMBINE", "exact");
    EP_REFUSED("group-nodes-exact", create(env, &config));
    EP_WITH_VARIABLE("NCCL_EP_LL_COMBINE", NULL);
    if (ep_on_fake_nccl() && !ep_on_host_backend()) {
        EP_CHECK_RESULT(create(env, &config), ncclInvalidUsage);
        EP_CHECK_STR_CONTAINS(ep_last_error(), "NCCL: has no ");
        EP_CHECK_STR_CONTAINS(ep_last_error(), ", which groups that span nodes need");
    } else {
        check_creation_works(env);
    }
}

// The environment is as before.
EP_TEST(group_after_several_nodes) { check_creation_works(env); }

// The capture goes on (test_graph has more of that), and so does the group. The CPU backend captures nothing.
LL_SESSION_TEST(groups_in_a_capture) {
    if (ep_begin_capture(env->stream)) {
        const ncclEpGroupConfig_t config = session_config(session);
        ncclEpGroup_t group = NULL;
        EP_REFUSED("group-captured", ncclEpCreateGroup(&group, env->comm, &config, env->stream, NULL, NULL));
        EP_CHECK(group == NULL);
        EP_REFUSED("group-destroy-captured", ncclEpGroupDestroy(session->group, env->stream));
        EP_REQUIRE_CUDA(cudaGraphDestroy(ep_end_capture(env->stream)));
    }
}
