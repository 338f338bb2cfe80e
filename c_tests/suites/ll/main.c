// Low-latency dispatch and combine: the results of single operations, byte by byte. Every kind of
// routing, shapes and element types, slots that are all filled, tensors made by the library, and the bits
// of the sum. test_stress has sequences of operations.

#include <math.h>

#include "suites/ll/shapes.h"

enum { kMaxLocalExperts = 4 };

// Dispatch and combine, twice: the second pair finds what the first left behind.
static void two_pairs(RefRun* run) {
    for (unsigned pair = 0; pair < 2; ++pair) ref_pair(run);
}
#define PAIRS_TEST(name, ...) SHAPES_TEST(name, false, two_pairs, __VA_ARGS__)

PAIRS_TEST(routing_styles, {2, 16, 4, ncclBfloat16, 64, kRefDistinct, false},
           {2, 16, 4, ncclBfloat16, 64, kRefRepeating, false}, {2, 16, 4, ncclBfloat16, 64, kRefMessy, false},
           {4, 16, 3, ncclBfloat16, 64, kRefSkewed, false}, {2, 16, 2, ncclBfloat16, 64, kRefOneRank, false},
           {2, 16, 4, ncclBfloat16, 64, kRefNowhere, false})

PAIRS_TEST(uneven_tokens, {1, 1, 1, ncclBfloat16, 32, kRefDistinct, true},
           {2, 33, 4, ncclBfloat16, 32, kRefDistinct, true}, {3, 17, 5, ncclBfloat16, 32, kRefMessy, true},
           {2, 40, 2, ncclBfloat16, 32, kRefOneRank, true})

EP_TEST(no_tokens_anywhere) {
    REF_SCOPED RefRun run = open_without_tokens(env);
    for (unsigned i = 0; i < 4; ++i) ref_pair(&run);
}

EP_TEST(every_top_k) {
    const RefShape shape = {kMaxLocalExperts * (unsigned)env->size, 6, 32, ncclBfloat16, 16};
    play_every_top_k(env, shape, ref_ll(100), two_pairs);
}

PAIRS_TEST(widths, {1, 5, 2, ncclBfloat16, 8, kRefDistinct, true}, {2, 5, 2, ncclBfloat16, 24, kRefDistinct, true},
           {2, 5, 2, ncclBfloat16, 1000, kRefDistinct, true}, {1, 7, 2, ncclBfloat16, 6656, kRefDistinct, true},
           {2, 9, 3, ncclBfloat16, 7168, kRefDistinct, true})

PAIRS_TEST(element_types, {2, 11, 5, ncclFloat16, 8, kRefMessy, true},
           {2, 11, 5, ncclFloat16, 1024, kRefRepeating, true}, {2, 11, 5, ncclFloat32, 4, kRefMessy, true},
           {2, 11, 5, ncclFloat32, 500, kRefRepeating, true}, {2, 11, 9, ncclFloat32, 2048, kRefDistinct, true})

// Ranks with few tokens where others may have many, and have: they serve those of others, too, and cut rows with scales
// otherwise.
EP_TEST(few_where_many_may_come) {
    enum { kTurns = 3, kFormats = 6, kMostBytes = 4096 };
    static const unsigned kTokens[][kTurns] = {{1, 1, 1}, {4, 0, 70}, {0, 1, 2}, {33, 2, 8}};
    const RefShape shape = {2 * (unsigned)env->size, 70, 4, ncclBfloat16, kMostBytes / 2};
    const RefFormat cast = ref_format_cast(ncclBfloat16, kMostBytes / 2, ncclFloat32, 128);
    for (unsigned i = 0; i < COUNT(kTokens); ++i) {
        REF_SCOPED RefRun run = open_by_turns(env, &shape, kTokens[i], kTurns);
        run.shape.hidden = 1000;
        for (unsigned pair = 0; pair < 4; ++pair) {
            run.by_rank = pair % 2 != 0;
            ref_pair(&run);
        }
        run.shape.hidden = 64;  // of combines
        for (unsigned pair = 0; pair < kFormats; ++pair) {
            const RefFormat format = pair < 2 ? cast : ref_format_draw(860 + kFormats * i + pair, kMostBytes);
            run.by_rank = pair % 2 != 0;
            ref_run_set_format(&run, &format);
            ref_pair(&run);
        }
    }
}

// Tokens name an expert again and again until all its R * M slots are filled: by one rank, of whose entries
// more than M find a slot, while those of others have none left.
PAIRS_TEST(slots_are_filled, {1, 4, 2, ncclBfloat16, 32, kRefOneExpert, false},
           {2, 8, 5, ncclBfloat16, 32, kRefOneExpert, false}, {2, 8, 32, ncclFloat32, 32, kRefOneExpert, true},
           {1, 8, 32, ncclBfloat16, 32, kRefOneRank, true})

enum { kFusedTokens = 16, kFusedHidden = 16 };

// Each rank's tokens go to its own first two experts, which answer with 1 and with `factor`. The
// weights are w and minus the rounded product of w and factor, so the sum is the rounding error of
// that product, which only a fused operation keeps: without it the sum would be 0.
static void check_fused(EpEnv* env, RefRun* run, float factor) {
    const ncclDataType_t datatype = run->shape.datatype;
    float weights[2 * kFusedTokens];
    float expected[kFusedTokens * kFusedHidden];  // as wide as the widest element
    for (unsigned token = 0; token < kFusedTokens; ++token) {
        const float weight = 1024.0f + (float)(token + 1) / 17;
        const float product = weight * factor;
        const float sum = fmaf(weight, factor, -product);
        weights[2 * token] = -product;
        weights[2 * token + 1] = weight;
        for (unsigned i = 0; i < kFusedHidden; ++i) ep_store(datatype, expected, token * kFusedHidden + i, sum);
        EP_CHECK(ep_load(datatype, expected, token * kFusedHidden) != 0.0f);
    }
    ref_prepare_combine(run);
    EP_SCOPED void* rows = ref_host_new(run->results_in.bytes);
    const size_t elements = run->results_in.bytes / ep_datatype_size(datatype);
    for (size_t i = 0; i < elements; ++i) ep_store(datatype, rows, i, i < elements / 2 ? 1.0f : factor);
    ref_buffer_upload(&run->results_in, rows);
    ref_buffer_upload(&run->weights, weights);
    EP_CHECK_NCCL(ref_launch_combine(run, kRefWhole, env->stream));
    ep_sync(env);
    REF_CHECK_BUFFER(&run->combined, expected);
}

EP_TEST(products_are_fused) {
    static const struct {
        ncclDataType_t datatype;
        float factor;  // with a mantissa as long as the type's
    } kCases[] = {{ncclBfloat16, 0x1.5ap0f}, {ncclFloat16, 0x1.554p0f}, {ncclFloat32, 0x1.555556p0f}};
    for (size_t i = 0; i < COUNT(kCases); ++i) {
        const RefShape shape = {2 * (unsigned)env->size, kFusedTokens, 2, kCases[i].datatype, kFusedHidden};
        REF_SCOPED RefRun run = ref_run_open_with(env, NULL, &shape, kRefDistinct, false, ref_ll(7));
        RefRouting* at_home = ref_routing_copy(run.now);
        for (unsigned rank = 0; rank < (unsigned)env->size; ++rank) {
            for (unsigned n = 0; n < 2 * kFusedTokens; ++n) {
                at_home->topk_idx[rank][n] = (int64_t)2 * rank + n % 2;
            }
        }
        ref_run_give(&run, at_home);
        ref_dispatch(&run);
        check_fused(env, &run, kCases[i].factor);
    }
}

// Tensors of ncclEpTensorCreate instead of descriptors made by hand, and ids that are freed before
// the handle is destroyed.
EP_TEST(tensors_of_the_library) {
    const RefShape shape = {3 * (unsigned)env->size, 6, 2, ncclBfloat16, 48};
    REF_SCOPED RefRun run = ref_run_open_with(env, NULL, &shape, kRefDistinct, true, ref_ll(8));
    ncclEpGroup_t group = run.group;
    ref_prepare_dispatch(&run);
    ncclNDTensor_t in =
        ep_tensor_2d(group, ncclBfloat16, NCCL_EP_TENSOR_TAG_TOKENS, run.now->num_tokens[env->rank], shape.hidden);
    ncclNDTensor_t out =
        ep_tensor_3d(group, ncclBfloat16, NCCL_EP_TENSOR_TAG_TOKENS, run.layout.parts, run.layout.rows, shape.hidden);
    EP_SCOPED void* packed = ref_host_poison(run.tokens_out.bytes);
    ep_download(packed, ref_buffer_data(&run.tokens_in), run.tokens_in.bytes);
    ep_tensor_upload(&in, packed);
    ep_tensor_fill(&out, kRefPoison);
    const ncclNDTensor_t* inputs[] = {&in};
    ncclNDTensor_t* outputs[] = {&out};
    EP_CHECK_NCCL(ncclEpDispatch(run.handle, inputs, 1, outputs, 1, NULL, 0, 0, NULL, env->stream));
    ep_sync(env);
    EP_SCOPED void* expected = ref_host_poison(run.tokens_out.bytes);
    const RefRows tokens = {shape.datatype, shape.hidden, run.tokens_seed, true};
    ref_ll_dispatch(run.now, (unsigned)env->rank, run.layout, &tokens, expected, NULL);
    ep_tensor_download(&out, packed);
    EP_CHECK_EQ_BYTES(packed, expected, run.tokens_out.bytes);
    EP_CHECK_NCCL(ncclEpTensorDestroy(group, &in));
    EP_CHECK_NCCL(ncclEpTensorDestroy(group, &out));
    ref_buffer_free(&run.ids);
}
