// Two libraries with different interfaces over one core, in one process. Each has its own
// communicator, group and stream; both work at once, and neither sees the other.
#include "harness/harness.h"
#include "suites/two_abis/probe.h"

enum { kTokens = 7, kMostTokens = 8, kTopK = 2, kHidden = 64, kLocalExperts = 4, kRounds = 12 };
enum { kHomeBytes = kTokens * kHidden * sizeof(uint16_t) };

// The objects and memory of one library.
typedef struct {
    uint64_t seed;
    uint16_t tokens[kTokens * kHidden];
    void* ids;
    EpProbeRows rows;
    size_t away_bytes;
    cudaStream_t stream;
} Side;

static unsigned experts_of(const EpEnv* env) { return kLocalExperts * (unsigned)env->size; }

// Tokens of one round. Each has two experts with weights of one half, so a combine returns the token.
static void fill(const EpEnv* env, Side* side, uint64_t seed) {
    const unsigned experts = experts_of(env);
    int64_t ids[kTokens * kTopK];
    float weights[kTokens * kTopK];
    side->seed = seed;
    for (unsigned token = 0; token < kTokens; ++token) {
        const uint64_t mixed = ep_mix(seed, (uint64_t)env->rank, token);
        ids[token * kTopK] = (int64_t)(mixed % experts);
        ids[token * kTopK + 1] = (int64_t)((mixed + 1 + mixed / experts % (experts - 1)) % experts);
        weights[token * kTopK] = weights[token * kTopK + 1] = 0.5f;
        for (unsigned i = 0; i < kHidden; ++i) {
            const uint64_t value = ep_mix(mixed, i, 1) % 255;
            side->tokens[token * kHidden + i] = ep_bf16_from_f32((float)value - 127.0f);
        }
    }
    ep_upload(side->ids, ids, sizeof(ids));
    ep_upload(side->rows.weights, weights, sizeof(weights));
    ep_upload(side->rows.home, side->tokens, kHomeBytes);
    EP_REQUIRE_CUDA(cudaMemset(side->rows.away, 0, side->away_bytes));
    EP_REQUIRE_CUDA(cudaDeviceSynchronize());
}

static void open_side(const EpEnv* env, Side* side) {
    side->away_bytes = (size_t)kLocalExperts * (size_t)env->size * kMostTokens * kHidden * sizeof(uint16_t);
    side->ids = ep_device_alloc(kTokens * kTopK * sizeof(int64_t));
    side->rows.home = ep_device_alloc(kHomeBytes);
    side->rows.away = ep_device_alloc(side->away_bytes);
    side->rows.weights = ep_device_alloc(kTokens * kTopK * sizeof(float));
    side->rows.hidden = kHidden;
    ep_open_streams(&side->stream, 1);
}

static void close_side(Side* side) {
    ep_close_streams(&side->stream, 1);
    ep_device_free(side->ids);
    ep_device_free(side->rows.home);
    ep_device_free(side->rows.away);
    ep_device_free(side->rows.weights);
}

// ---- The first interface, by the names of its own

typedef struct {
    ncclEpGroup_t group;
    ncclEpHandle_t handle;
    EpView home, away, weights;
} First;

static void open_first(const EpEnv* env, First* first, const Side* side) {
    first->group = ep_group_create(env, NCCL_EP_ALGO_LOW_LATENCY, experts_of(env), kMostTokens,
                                   kHidden * sizeof(uint16_t));
    EP_REQUIRE_NCCL(ep_handle_create(&first->handle, first->group, side->ids, kTokens, kTopK, env->stream));
    ep_view_2d(&first->home, side->rows.home, ncclBfloat16, NCCL_EP_TENSOR_TAG_TOKENS, kTokens, kHidden);
    ep_view_3d(&first->away, side->rows.away, ncclBfloat16, NCCL_EP_TENSOR_TAG_TOKENS,
               kLocalExperts, (unsigned)env->size * kMostTokens, kHidden);
    ep_view_2d(&first->weights, side->rows.weights, ncclFloat32, NCCL_EP_TENSOR_TAG_TOPK_WEIGHTS, kTokens, kTopK);
}

static ncclResult_t first_away(const First* first, cudaStream_t stream) {
    const ncclNDTensor_t* inputs[] = {&first->home.tensor};
    ncclNDTensor_t* outputs[] = {(ncclNDTensor_t*)&first->away.tensor};
    return ncclEpDispatch(first->handle, inputs, 1, outputs, 1, NULL, 0, 0, NULL, stream);
}

static ncclResult_t first_home(const First* first, cudaStream_t stream) {
    const ncclNDTensor_t* inputs[] = {&first->away.tensor};
    ncclNDTensor_t* outputs[] = {(ncclNDTensor_t*)&first->home.tensor};
    ncclNDTensor_t* locals[] = {(ncclNDTensor_t*)&first->weights.tensor};
    return ncclEpCombine(first->handle, inputs, 1, outputs, 1, locals, 1, 0, NULL, stream);
}

static void close_first(const EpEnv* env, const First* first) {
    EP_CHECK_NCCL(ncclEpHandleDestroy(first->handle));
    EP_CHECK_NCCL(ncclEpGroupDestroy(first->group, env->stream));
}

// ---- Cases

// Other launch shapes in each round but the first, and on each rank.
static void launch_otherwise(const EpEnv* env, const EpProbeGroup* group, uint64_t round) {
    const uint64_t mixed = ep_mix(round, (uint64_t)env->rank, 2);
    const uint64_t blocks = 1 + mixed % 6;
    const uint64_t senders = 1 + mixed / 6 % blocks;
    const uint64_t threads = 160 + 32 * (mixed / 36 % 8);
    const EpProbeShape shapes[] = {{0, kMostTokens, blocks, threads, senders},
                                   {1, kMostTokens, 7 - blocks, threads, 1}};
    EP_CHECK_EQ_I64(epProbeTune(group, shapes, round == 0 ? 0 : 2), 0);
}

// Enqueues a round of both libraries without any wait in between.
static void start_round(const First* first, const EpProbeRoute* route, const Side sides[2]) {
    const EpProbeRows* rows = &sides[1].rows;
    EP_CHECK_NCCL(first_away(first, sides[0].stream));
    EP_CHECK_EQ_I64(epProbeAway(route, rows, sides[1].stream), 0);
    EP_CHECK_CUDA(cudaMemsetAsync(rows->home, 0, kHomeBytes, sides[1].stream));
    EP_CHECK_EQ_I64(epProbeHome(route, rows, sides[1].stream), 0);
    EP_CHECK_CUDA(cudaMemsetAsync(sides[0].rows.home, 0, kHomeBytes, sides[0].stream));
    EP_CHECK_NCCL(first_home(first, sides[0].stream));
}

static void check_round(const Side sides[2]) {
    for (unsigned i = 0; i < 2; ++i) {
        EP_CHECK_CUDA(cudaStreamSynchronize(sides[i].stream));
        uint16_t back[kTokens * kHidden];
        ep_download(back, sides[i].rows.home, kHomeBytes);
        EP_CHECK_EQ_BYTES(back, sides[i].tokens, kHomeBytes);
    }
    if (sides[0].seed != sides[1].seed) return;
    // The same tokens and ids: the experts of both libraries receive the same.
    char* away[2];
    for (unsigned i = 0; i < 2; ++i) {
        away[i] = malloc(sides[i].away_bytes);
        EP_REQUIRE(away[i] != NULL);
        ep_download(away[i], sides[i].rows.away, sides[i].away_bytes);
    }
    EP_CHECK_EQ_BYTES(away[1], away[0], sides[0].away_bytes);
    free(away[0]);
    free(away[1]);
}

// Copies the ids to another address and updates the route to it.
static void update_elsewhere(EpProbeRoute* route, Side* side) {
    int64_t ids[kTokens * kTopK];
    ep_download(ids, side->ids, sizeof(ids));
    void* elsewhere = ep_device_upload(ids, sizeof(ids));
    EP_CHECK_EQ_I64(epProbeUpdate(route, elsewhere, kTokens, kTopK), 0);
    ep_device_free(side->ids);
    side->ids = elsewhere;
}

EP_TEST(both_work_at_once) {
    const EpProbeSettings settings = {experts_of(env), kMostTokens, kHidden, 0};
    ncclComm_t comm = ep_new_comm(env);
    Side sides[2];
    First first;
    EpProbeGroup* group = NULL;
    EpProbeRoute* route = NULL;
    open_side(env, &sides[0]);
    open_side(env, &sides[1]);
    open_first(env, &first, &sides[0]);
    EP_REQUIRE(epProbeOpen(&group, comm, &settings) == 0);
    EP_REQUIRE(epProbeRoute(&route, group) == 0);
    for (uint64_t round = 0; round < kRounds; ++round) {
        fill(env, &sides[0], round);
        fill(env, &sides[1], round % 2 == 0 ? round : round + 1000);
        if (round % 3 < 2) {
            launch_otherwise(env, group, round);
            update_elsewhere(route, &sides[1]);
        }
        start_round(&first, route, sides);
        check_round(sides);
    }
    epProbeForget(route);
    // In another order than they were opened; the remaining group still works.
    EP_CHECK_EQ_I64(epProbeClose(group), 0);
    fill(env, &sides[0], kRounds);
    EP_CHECK_NCCL(first_away(&first, sides[0].stream));
    EP_CHECK_NCCL(first_home(&first, sides[0].stream));
    EP_CHECK_CUDA(cudaStreamSynchronize(sides[0].stream));
    close_first(env, &first);
    EP_CHECK_NCCL(ncclCommDestroy(comm));
    close_side(&sides[0]);
    close_side(&sides[1]);
}

EP_TEST(each_refuses_in_words_of_its_own) {
    const EpProbeSettings settings = {experts_of(env), kMostTokens, kHidden / 2, 0};
    ncclComm_t comm = ep_new_comm(env);
    Side side;
    First first;
    EpProbeGroup* group = NULL;
    EpProbeRoute* route = NULL;
    open_side(env, &side);
    open_first(env, &first, &side);
    EP_REQUIRE(epProbeOpen(&group, comm, &settings) == 0);
    EP_REQUIRE(epProbeRoute(&route, group) == 0);
    EP_CHECK_RESULT(epProbeHome(route, &side.rows, side.stream), ncclInvalidUsage);
    EP_CHECK_STR_CONTAINS(epProbeText(), "the route breaks");
    EP_CHECK_EQ_I64(epProbeUpdate(route, side.ids, kTokens, kTopK), 0);
    EP_CHECK_RESULT(epProbeAway(route, &side.rows, side.stream), ncclInvalidArgument);
    EP_CHECK_STR_CONTAINS(epProbeText(), "extent 1 of the rows that are read breaks");
    first.home.sizes[1] = 2 * kHidden;
    EP_CHECK_RESULT(first_away(&first, side.stream), ncclInvalidArgument);
    EP_CHECK_STR_CONTAINS(ep_last_error(), "inputs[TOKENS].sizes[1]: a row must not exceed");
    EP_CHECK_STR_CONTAINS(epProbeText(), "extent 1 of the rows that are read breaks");
    epProbeForget(route);
    close_first(env, &first);
    EP_CHECK_EQ_I64(epProbeClose(group), 0);
    EP_CHECK_NCCL(ncclCommDestroy(comm));
    close_side(&side);
}

// Other ranks hear of a refusal in the words of the library that they call.
EP_TEST(other_ranks_are_told_in_its_words) {
    if (env->size < 2) {
        ep_skip("needs another rank");
        return;
    }
    const EpProbeSettings settings = {env->rank == 0 ? 0 : experts_of(env), kMostTokens, kHidden, 0};
    ncclComm_t comm = ep_new_comm(env);
    EpProbeGroup* group = NULL;
    EP_CHECK_EQ_I64(epProbeOpen(&group, comm, &settings), env->rank == 0 ? ncclInvalidArgument : ncclRemoteError);
    EP_CHECK(group == NULL);
    if (env->rank != 0) EP_CHECK_STR_CONTAINS(epProbeText(), "rank 0 refused: ");
    EP_CHECK_STR_CONTAINS(epProbeText(), "Setting(Experts) breaks");
    EP_CHECK_NCCL(ncclCommDestroy(comm));
}
