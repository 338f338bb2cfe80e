// NCCL_EP_CHECK=1: what a call says on stderr about its ids and weights, and what stands in the
// rows of an output that nothing was delivered to. Nothing is refused.
#define _GNU_SOURCE  // dup, fileno, setenv, usleep
#include <math.h>
#include <unistd.h>

#include "harness/graphs.h"
#include "suites/errors/errors.h"

enum { kPoison = 0xff, kStale = 0x11 };

// ---- What is printed ---------------------------------------------------------------------------

static int g_stderr = -1;
static FILE* g_printed = NULL;

// From here on everything that goes to stderr is kept.
static void listen(void) {
    fflush(stderr);
    g_stderr = dup(STDERR_FILENO);
    g_printed = tmpfile();
    EP_REQUIRE(g_stderr >= 0 && g_printed != NULL);
    EP_REQUIRE(dup2(fileno(g_printed), STDERR_FILENO) >= 0);
}

// Ends that; checks that it fits `pattern`.
static void expect_printed(const char* pattern) {
    char text[2048];
    fflush(stderr);
    EP_REQUIRE(dup2(g_stderr, STDERR_FILENO) >= 0);
    close(g_stderr);
    rewind(g_printed);
    text[fread(text, 1, sizeof(text) - 1, g_printed)] = '\0';
    fclose(g_printed);
    if (!EP_CHECK(fits(text, pattern))) fprintf(stderr, "got:      %s\nexpected: %s\n", text, pattern);
}

static void expect_line(const EpEnv* env, const char* call, const char* finding) {
    char pattern[512];
    snprintf(pattern, sizeof(pattern), "*:*:* NCCL_EP WARN NCCL_EP_CHECK: rank %d, %s: %s\n", env->rank, call, finding);
    expect_printed(pattern);
}

// ---- Unusual ids and weights -------------------------------------------------------------------

// Token 0 names an expert that is not there, token 1 none, token 2 one twice; token 3 is in order.
static char g_found_in_ids[256];

static void set_unusual_ids(Session* session) {
    const int64_t experts = (int64_t)session->env->size * kLocalExperts;
    const int64_t ids[kTokens][kTopK] = {{experts, 0}, {-2, -1}, {1, 1}, {0, 1}};
    ep_upload(session->ids, ids, sizeof(ids));
    snprintf(g_found_in_ids, sizeof(g_found_in_ids),
             "ids outside -1 to %d: 2 (first: token 0, k 0, id %d); "
             "ids repeated within a token: 1 (first: token 2, k 1, id 1)",
             (int)experts - 1, (int)experts);
}

// Two of them where no expert has the weight.
static void set_nan_weights(Session* session) {
    const float weights[kTokens][kTopK] = {{NAN, 1}, {NAN, 1}, {1, 1}, {1, NAN}};
    ep_upload(session->weights, weights, sizeof(weights));
}

static const char kFoundInWeights[] = "NaN weights: 1 (first: token 3, k 1, id 1)";

// ---- Rows that nothing was delivered to --------------------------------------------------------

static bool is_all(const uint8_t* bytes, size_t count, int byte) {
    for (size_t i = 0; i < count; ++i) {
        if (bytes[i] != byte) return false;
    }
    return true;
}

// Whether exactly those rows of `output`, of `row` bytes each, that are beyond the counter consist of `byte`.
static bool unread_are(const Session* session, const void* output, size_t row, int byte) {
    int32_t counts[kLocalExperts];
    ep_download(counts, session->counter, sizeof(counts));
    const size_t rows = max_recv_rows(session);
    EP_SCOPED uint8_t* bytes = malloc(kLocalExperts * rows * row);
    EP_REQUIRE(bytes != NULL);
    ep_download(bytes, output, kLocalExperts * rows * row);
    bool good = true;
    for (size_t i = 0; i < kLocalExperts * rows; ++i) {
        const bool is_unread = i % rows >= (size_t)counts[i / rows];
        good = good && is_all(bytes + i * row, row, byte) == is_unread;
    }
    return good;
}

static void make_stale(const Session* session) {
    const size_t rows = kLocalExperts * (size_t)max_recv_rows(session);
    EP_REQUIRE_CUDA(cudaMemset(session->received, kStale, rows * kBytesOfRow));
    EP_REQUIRE_CUDA(cudaMemset(session->received_scales, kStale, rows * kScales * sizeof(float)));
    EP_REQUIRE_CUDA(cudaStreamSynchronize(NULL));
}

static void check_poison(const Session* session) {
    make_stale(session);
    EP_CHECK_NCCL(make_valid_call(session, kForward, 0));
    ep_sync(session->env);
    EP_CHECK(unread_are(session, session->received, kBytesOfRow, kPoison));
    EP_CHECK(unread_are(session, session->received_scales, kScales * sizeof(float), kPoison));
    // A staged dispatch writes when it is completed.
    make_stale(session);
    EP_CHECK_NCCL(make_valid_call(session, kDispatch, 1));
    ep_sync(session->env);
    const size_t bytes = kLocalExperts * (size_t)max_recv_rows(session) * kBytesOfRow;
    EP_SCOPED uint8_t* received = malloc(bytes);
    EP_REQUIRE(received != NULL);
    ep_download(received, session->received, bytes);
    EP_CHECK(is_all(received, bytes, kStale));
    EP_CHECK_NCCL(ncclEpComplete(session->handle, NULL, session->env->stream));
    ep_sync(session->env);
    EP_CHECK(unread_are(session, session->received, kBytesOfRow, kPoison));
}

// ---- The cases ---------------------------------------------------------------------------------

static Session open_checked(EpEnv* env, ncclEpAlgorithm_t algorithm) {
    EP_WITH_VARIABLE("NCCL_EP_CHECK", "1");
    return open_session(env, algorithm);
}

static void check_captures(Session* session) {
    listen();
    if (!ep_begin_capture(session->env->stream)) {
        expect_printed("*");
        return;
    }
    EP_CHECK_NCCL(make_valid_call(session, kDispatch, 0));
    EP_CHECK_NCCL(make_valid_call(session, kCombine, 0));
    EP_CHECK_CUDA(cudaGraphDestroy(ep_end_capture(session->env->stream)));
    expect_line(session->env, "low-latency dispatch", "not checked: it is captured into a graph; that is said once");
}

EP_TEST(ll_unusual_numbers_are_told) {
    Session session = open_checked(env, NCCL_EP_ALGO_LOW_LATENCY);
    listen();
    check_works(&session);
    check_poison(&session);
    expect_printed("");
    set_unusual_ids(&session);
    listen();
    EP_CHECK_NCCL(make_valid_call(&session, kDispatch, 0));
    expect_line(env, "low-latency dispatch", g_found_in_ids);
    set_nan_weights(&session);
    listen();
    EP_CHECK_NCCL(make_valid_call(&session, kCombine, 0));
    expect_line(env, "low-latency combine", kFoundInWeights);
    ep_sync(env);
    EP_CHECK(unread_are(&session, session.received, kBytesOfRow, kPoison));
    listen();
    EP_CHECK_NCCL(make_valid_call(&session, kRankMajor, 0));
    char found[384];
    snprintf(found, sizeof(found), "%s; %s", g_found_in_ids, kFoundInWeights);
    expect_line(env, "low-latency dispatch", found);
    listen();
    EP_CHECK_NCCL(make_valid_call(&session, kSummed, 0));
    expect_printed("");  // It reads neither ids nor weights.
    ep_sync(env);
    check_captures(&session);
    close_session(&session);
}

// A combine waits for a rank that is late, and still has to read what a dispatch on another stream would poison.
EP_TEST(poison_waits_for_other_streams) {
    enum { kLateUs = 200000 };
    Session session = open_checked(env, NCCL_EP_ALGO_LOW_LATENCY);
    EP_CHECK_NCCL(make_valid_call(&session, kDispatch, 0));
    ep_sync(env);
    EpEnv beside = *env;
    EP_REQUIRE_CUDA(cudaStreamCreate(&beside.stream));
    Session other = session;
    other.env = &beside;
    if (is_odd(env)) usleep(kLateUs);
    EP_CHECK_NCCL(make_valid_call(&session, kCombine, 0));
    EP_CHECK_NCCL(make_valid_call(&other, kDispatch, 0));
    ep_sync(env);
    check_combined(&session);
    ep_sync(&beside);
    EP_CHECK_CUDA(cudaStreamDestroy(beside.stream));
    close_session(&session);
}

EP_TEST_HT(ht_unusual_numbers_are_told) {
    Session session = open_checked(env, NCCL_EP_ALGO_HIGH_THROUGHPUT);
    listen();
    check_works(&session);
    expect_printed("");
    EP_CHECK_NCCL(ncclEpHandleDestroy(session.handle));
    set_unusual_ids(&session);
    listen();
    EP_REQUIRE_NCCL(open_handle(&session));
    expect_line(env, "high-throughput handle", g_found_in_ids);
    set_nan_weights(&session);
    listen();
    EP_CHECK_NCCL(make_valid_call(&session, kDispatch, 0));
    expect_line(env, "high-throughput dispatch", kFoundInWeights);
    listen();
    EP_CHECK_NCCL(make_valid_call(&session, kTokensOnly, 0));
    EP_CHECK_NCCL(make_valid_call(&session, kCombine, 0));
    ep_sync(env);
    expect_printed("");
    close_session(&session);
}

// Without the variable nothing is looked at, and slots keep what they held.
EP_TEST(nothing_is_checked_unasked) {
    Session session = open_session(env, NCCL_EP_ALGO_LOW_LATENCY);
    set_unusual_ids(&session);
    make_stale(&session);
    listen();
    EP_CHECK_NCCL(make_valid_call(&session, kDispatch, 0));
    ep_sync(env);
    expect_printed("");
    EP_CHECK(unread_are(&session, session.received, kBytesOfRow, kStale));
    close_session(&session);
}
