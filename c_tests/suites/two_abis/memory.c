// Routes in memory of the caller's: what a handle keeps is one block of bytes, which works wherever it lies.
#include "harness/graphs.h"
#include "harness/harness.h"
#include "harness/nodes.h"
#include "suites/two_abis/probe.h"

enum { kMostTokens = 8, kTopK = 3, kHidden = 64, kLocalExperts = 4 };
enum { kRow = kHidden * sizeof(uint16_t), kHomeBytes = kMostTokens * kRow };
enum { kUntouched = 0xab, kGone = 0xcd };

// A group of one mode, and the tensors of its operations.
typedef struct {
    ncclComm_t comm;
    EpProbeGroup* group;
    EpProbeRows rows;
    size_t away_bytes, block_bytes;
    cudaStream_t stream;
} Side;

static void open_side(const EpEnv* env, Side* side, bool high_throughput) {
    const size_t slots = (size_t)env->size * kMostTokens;
    const EpProbeSettings settings = {(size_t)kLocalExperts * (size_t)env->size, kMostTokens, kHidden, high_throughput};
    side->comm = ep_new_comm(env);
    EP_REQUIRE(epProbeOpen(&side->group, side->comm, &settings) == 0);
    side->away_bytes = slots * kRow * (high_throughput ? 1 : kLocalExperts);
    side->block_bytes = epProbeBytes(side->group, kTopK);
    EP_REQUIRE(side->block_bytes > 0);
    side->rows.home = ep_device_alloc(kHomeBytes);
    side->rows.away = ep_device_alloc(side->away_bytes);
    side->rows.weights = ep_device_alloc(kMostTokens * kTopK * sizeof(float));
    side->rows.hidden = kHidden;
    ep_open_streams(&side->stream, 1);
}

static void close_side(Side* side) {
    epProbeClose(side->group);
    EP_CHECK_NCCL(ncclCommDestroy(side->comm));
    ep_close_streams(&side->stream, 1);
    ep_device_free(side->rows.home);
    ep_device_free(side->rows.away);
    ep_device_free(side->rows.weights);
}

static size_t tokens_of(const EpEnv* env, uint64_t seed) { return kMostTokens - ((size_t)env->rank + seed) % 3; }

// Ids in device memory; some name nothing, some repeat.
static void* upload_ids(const EpEnv* env, uint64_t seed) {
    int64_t ids[kMostTokens * kTopK];
    for (unsigned i = 0; i < kMostTokens * kTopK; ++i) {
        const uint64_t mixed = ep_mix(seed, (uint64_t)env->rank, i);
        ids[i] = (int64_t)(mixed % ((uint64_t)kLocalExperts * (uint64_t)env->size + 1)) - 1;
    }
    return ep_device_upload(ids, sizeof(ids));
}

static void fill_rows(const EpEnv* env, const Side* side, uint64_t seed) {
    uint16_t rows[kMostTokens * kHidden];
    float weights[kMostTokens * kTopK];
    for (unsigned i = 0; i < kMostTokens * kHidden; ++i) {
        const uint64_t mixed = ep_mix(seed, (uint64_t)env->rank, i);
        rows[i] = ep_bf16_from_f32((float)(mixed % 63) - 31.0f);
    }
    for (unsigned i = 0; i < kMostTokens * kTopK; ++i) weights[i] = (float)(1 + i % 4);
    ep_upload(side->rows.home, rows, sizeof(rows));
    ep_upload(side->rows.weights, weights, sizeof(weights));
    EP_REQUIRE_CUDA(cudaMemset(side->rows.away, 0, side->away_bytes));
    EP_REQUIRE_CUDA(cudaDeviceSynchronize());
}

static void* new_block(const Side* side) {
    void* block = ep_device_alloc(side->block_bytes);
    EP_REQUIRE_CUDA(cudaMemset(block, kUntouched, side->block_bytes));
    EP_REQUIRE_CUDA(cudaDeviceSynchronize());
    return block;
}

static EpProbeRoute* route_in(const Side* side, void* block, size_t tokens) {
    EpProbeRoute* route = NULL;
    const EpProbeMemory memory = {block, side->block_bytes, tokens, kTopK};
    EP_REQUIRE(epProbeRouteIn(&route, side->group, &memory) == 0);
    return route;
}

// Copies a block to another address, in the order of the stream, and forgets the first.
static void move(const Side* side, void* to, void* from) {
    EP_CHECK_CUDA(cudaMemcpyAsync(to, from, side->block_bytes, cudaMemcpyDefault, side->stream));
    EP_CHECK_CUDA(cudaMemsetAsync(from, kGone, side->block_bytes, side->stream));
}

// The rows that a dispatch has delivered, and those of the combine behind it.
typedef struct {
    char* away;
    uint16_t home[kMostTokens * kHidden];
} Seen;

static void expect_same(const Side* side, const Seen* seen, const Seen* expected) {
    EP_CHECK_EQ_BYTES(seen->away, expected->away, side->away_bytes);
    EP_CHECK_EQ_BYTES(seen->home, expected->home, kHomeBytes);
    free(seen->away);
}

static Seen download(const Side* side) {
    Seen seen;
    seen.away = malloc(side->away_bytes);
    EP_REQUIRE(seen.away != NULL);
    ep_download(seen.away, side->rows.away, side->away_bytes);
    ep_download(seen.home, side->rows.home, kHomeBytes);
    return seen;
}

// Both operations, of two routes of one routing: `back` is that of the combine.
static Seen run(const Side* side, const EpProbeRoute* out, const EpProbeRoute* back) {
    if (out != NULL) EP_CHECK_EQ_I64(epProbeAway(out, &side->rows, side->stream), 0);
    EP_CHECK_CUDA(cudaMemsetAsync(side->rows.home, 0, kHomeBytes, side->stream));
    EP_CHECK_EQ_I64(epProbeHome(back, &side->rows, side->stream), 0);
    EP_CHECK_CUDA(cudaStreamSynchronize(side->stream));
    return download(side);
}

// What a route in the library's own memory delivers.
static Seen run_own(const EpEnv* env, const Side* side, const void* ids, uint64_t seed) {
    EpProbeRoute* own = NULL;
    EP_REQUIRE(epProbeRoute(&own, side->group) == 0);
    EP_REQUIRE(epProbeUpdate(own, ids, tokens_of(env, seed), kTopK) == 0);
    fill_rows(env, side, seed);
    const Seen expected = run(side, own, own);
    epProbeForget(own);
    return expected;
}

static void check_untouched(const Side* side, const void* block) {
    EP_SCOPED unsigned char* bytes = malloc(side->block_bytes);
    EP_REQUIRE(bytes != NULL);
    ep_download(bytes, block, side->block_bytes);
    for (size_t i = 0; i < side->block_bytes; ++i) EP_REQUIRE(bytes[i] == kUntouched);
}

// Dispatched by a routing in one memory, combined by a copy of it in another.
static void combine_elsewhere(const EpEnv* env, bool high_throughput) {
    enum { kSeed = 5 };
    const size_t tokens = tokens_of(env, kSeed);
    Side side;
    open_side(env, &side, high_throughput);
    void *ids = upload_ids(env, kSeed), *block = new_block(&side), *elsewhere = new_block(&side);
    const Seen expected = run_own(env, &side, ids, kSeed);
    EpProbeRoute* route = route_in(&side, block, 0);
    EpProbeRoute* moved = route_in(&side, elsewhere, high_throughput ? tokens : 0);
    check_untouched(&side, block);
    EP_CHECK_EQ_I64(epProbeUpdate(route, ids, tokens, kTopK), 0);
    // What an update of low latency keeps is on the host.
    if (!high_throughput) EP_CHECK_EQ_I64(epProbeUpdate(moved, ids, tokens, kTopK), 0);
    check_untouched(&side, elsewhere);
    fill_rows(env, &side, kSeed);
    EP_CHECK_EQ_I64(epProbeAway(route, &side.rows, side.stream), 0);
    move(&side, elsewhere, block);
    epProbeForget(route);
    Seen seen = run(&side, NULL, moved);
    expect_same(&side, &seen, &expected);
    fill_rows(env, &side, kSeed);
    seen = run(&side, moved, moved);
    expect_same(&side, &seen, &expected);
    free(expected.away);
    epProbeForget(moved);
    ep_device_free(ids);
    ep_device_free(block);
    ep_device_free(elsewhere);
    close_side(&side);
}

EP_TEST(ll_combine_works_where_the_bytes_of_its_dispatch_are) { combine_elsewhere(env, false); }
EP_TEST_HT(ht_routing_works_where_its_bytes_are) { combine_elsewhere(env, true); }

typedef struct {
    const Side* side;
    const EpProbeRoute* route;
} Captured;

static void play(void* context) {
    const Captured* it = context;
    EP_CHECK_EQ_I64(epProbeAway(it->route, &it->side->rows, it->side->stream), 0);
    EP_CHECK_EQ_I64(epProbeHome(it->route, &it->side->rows, it->side->stream), 0);
}

// A graph's replay goes by what lies in the memory then: nothing of a routing is in the graph. Over several nodes the host
// reads it.
EP_TEST_HT(ht_graph_follows_the_memory) {
    if (ep_num_nodes() > 1) return;
    Side side;
    open_side(env, &side, true);
    void* home = new_block(&side);
    const Captured context = {&side, route_in(&side, home, tokens_of(env, 0))};
    const EpCaptured captured = ep_capture(side.stream, play, (void*)&context);
    for (uint64_t seed = 0; seed < 9; seed += 3) {  // of so many tokens each
        void *ids = upload_ids(env, seed), *block = new_block(&side);
        const Seen expected = run_own(env, &side, ids, seed);
        EpProbeRoute* route = route_in(&side, block, 0);
        EP_CHECK_EQ_I64(epProbeUpdate(route, ids, tokens_of(env, seed), kTopK), 0);
        EP_CHECK_CUDA(cudaDeviceSynchronize());
        move(&side, home, block);
        epProbeForget(route);
        fill_rows(env, &side, seed);
        ep_replay(&captured);
        EP_CHECK_CUDA(cudaDeviceSynchronize());
        const Seen seen = download(&side);
        // The combine has written the tokens that there are; the others are as they were.
        EP_CHECK_EQ_BYTES(seen.away, expected.away, side.away_bytes);
        EP_CHECK_EQ_BYTES(seen.home, expected.home, tokens_of(env, seed) * kRow);
        free(seen.away);
        free(expected.away);
        ep_device_free(ids);
        ep_device_free(block);
    }
    ep_release_captured(&captured);
    epProbeForget((EpProbeRoute*)context.route);
    ep_device_free(home);
    close_side(&side);
}

// What is no routing of such a handle is not followed: the group fails.
static void expect_foreign(const EpEnv* env, bool high_throughput, size_t tokens, bool routed) {
    Side side;
    open_side(env, &side, high_throughput);
    void *ids = upload_ids(env, 6), *block = new_block(&side);
    EpProbeRoute *first = route_in(&side, block, 0), *second = route_in(&side, block, tokens);
    if (routed) EP_CHECK_EQ_I64(epProbeUpdate(first, ids, tokens_of(env, 6), kTopK), 0);
    if (!high_throughput) EP_CHECK_EQ_I64(epProbeUpdate(second, ids, tokens, kTopK), 0);
    fill_rows(env, &side, 6);
    epProbeHome(second, &side.rows, side.stream);
    EP_CHECK_CUDA(cudaStreamSynchronize(side.stream));
    ep_barrier();
    EP_CHECK_RESULT(epProbeHome(second, &side.rows, side.stream), ncclInvalidUsage);
    EP_CHECK_STR_CONTAINS(epProbeText(), "holds no routing of a handle like this one");
    epProbeForget(first);
    epProbeForget(second);
    ep_device_free(ids);
    ep_device_free(block);
    close_side(&side);
}

EP_TEST_HT(ht_memory_without_a_routing_is_not_followed) { expect_foreign(env, true, 4, false); }
EP_TEST_HT(ht_memory_with_other_tokens_is_not_followed) { expect_foreign(env, true, 2, true); }
EP_TEST(ll_memory_without_a_dispatch_is_not_followed) { expect_foreign(env, false, 4, false); }
