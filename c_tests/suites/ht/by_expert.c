// Handles that are opened first and routed by updates, in graphs, too: rows by expert, and flat rows with gradients by k.
#include "harness/graphs.h"
#include "harness/harness.h"
#include "harness/nodes.h"
#include "reference/buffer.h"
#include "reference/format.h"
#include "reference/ht.h"
#include "reference/mapped.h"
#include "reference/zones.h"

enum { kMost = 12, kTopK = 3, kExperts = 3, kHidden = 32, kReplays = 3, kSeed = 50 };

typedef struct {
    const EpEnv* env;
    ncclEpHandle_t handle;
    unsigned alignment, rank, tokens, slots;
    RefRouting* routing;
    RefZones* zones;
    RefBuffer ids, weights, tokens_in, tokens_out, weights_out, counter, results, gradients_in, combined, gradients;
} Run;

static const RefRows kTokens = {ncclBfloat16, kHidden, kSeed, false};
static const RefRows kResults = {ncclBfloat16, kHidden, kSeed + 1, false};

static RefShape shape_of(const EpEnv* env) {
    return (RefShape){kExperts * (unsigned)env->size, kMost, kTopK, ncclBfloat16, kHidden};
}

// Other ids, for as many tokens.
static void route(Run* run, uint64_t seed) {
    const RefShape shape = shape_of(run->env);
    if (run->zones != NULL) ref_zones_free(run->zones);
    if (run->routing != NULL) {
        RefRouting* other = ref_routing_new((unsigned)run->env->size, shape.num_experts, kTopK, run->routing->num_tokens,
                                            kRefMessy, seed);
        ref_routing_free(run->routing);
        run->routing = other;
    } else {
        run->routing = ref_routing_drawn((unsigned)run->env->size, &shape, kRefMessy, true, seed);
    }
    run->zones = ref_zones_new(run->routing, run->alignment, ~0u);
}

static void upload(Run* run) {
    ref_buffer_upload(&run->ids, run->routing->topk_idx[run->rank]);
    ref_buffer_upload(&run->weights, run->routing->weights[run->rank]);
    const RefBuffer* outputs[] = {&run->tokens_out, &run->weights_out, &run->counter, &run->combined, &run->gradients};
    for (size_t i = 0; i < COUNT(outputs); ++i) ref_buffer_poison(outputs[i]);
}

static void open_run(Run* run, const EpEnv* env, ncclEpGroup_t group, unsigned alignment) {
    *run = (Run){.env = env, .alignment = alignment, .rank = (unsigned)env->rank};
    route(run, kSeed);
    EP_CHECK_NCCL(ncclEpHandleOpen(&run->handle, group, alignment));
    run->tokens = run->routing->num_tokens[run->rank];
    run->slots = kExperts * ((unsigned)env->size * kMost + alignment);
    const size_t entries = ref_entries_of(run->routing, run->rank);
    const size_t row = ref_row_bytes(&kTokens);
    run->ids = ref_buffer_new_input(entries * sizeof(int64_t));
    run->weights = ref_buffer_new_input(entries * sizeof(float));
    run->tokens_in = ref_buffer_new_input(run->tokens * row);
    run->tokens_out = ref_buffer_new(run->slots * row);
    run->weights_out = ref_buffer_new(run->slots * sizeof(float));
    run->counter = ref_buffer_new(kExperts * sizeof(int32_t));
    run->results = ref_buffer_new_input(run->slots * row);
    run->gradients_in = ref_buffer_new_input(run->slots * sizeof(float));
    run->combined = ref_buffer_new(run->tokens * row);
    run->gradients = ref_buffer_new(entries * sizeof(float));
    EP_SCOPED void* rows = ref_host_new(run->slots * row);
    EP_SCOPED float* gradients = ref_host_new(run->slots * sizeof(float));
    ref_rows_fill(&kTokens, run->rank, 0, run->tokens, rows);
    ref_buffer_upload(&run->tokens_in, rows);
    ref_rows_fill(&kResults, run->rank, 0, run->slots, rows);
    ref_buffer_upload(&run->results, rows);
    for (size_t i = 0; i < run->slots; ++i) gradients[i] = ref_weight(kSeed, run->rank, i);
    ref_buffer_upload(&run->gradients_in, gradients);
}

static void close_run(Run* run) {
    EP_CHECK_NCCL(ncclEpHandleDestroy(run->handle));
    RefBuffer* all[] = {&run->ids,     &run->weights,      &run->tokens_in, &run->tokens_out, &run->weights_out,
                        &run->counter, &run->gradients_in, &run->combined,  &run->gradients,  &run->results};
    for (size_t i = 0; i < COUNT(all); ++i) ref_buffer_free(all[i]);
    ref_zones_free(run->zones);
    ref_routing_free(run->routing);
}

static void update(const Run* run) {
    EpView ids, counter;
    ep_view_2d(&ids, ref_buffer_data(&run->ids), ncclInt64, NCCL_EP_TENSOR_TAG_TOPK_IDX, run->tokens, kTopK);
    ep_view_1d(&counter, ref_buffer_data(&run->counter), ncclInt32, NCCL_EP_TENSOR_TAG_RECV_EXPERT_COUNTER_DEVICE,
               kExperts);
    ncclNDTensor_t* const locals[] = {&counter.tensor};
    EP_CHECK_NCCL(ncclEpHandleUpdate(run->handle, &ids.tensor, locals, 1, run->env->stream));
}

// An update, a forward dispatch and a combine with gradients.
static void play(void* context) {
    const Run* run = context;
    cudaStream_t stream = run->env->stream;
    EpView tokens, weights, out, out_weights, results, gradients, combined, home;
    update(run);
    const ncclEpTensorTag_t rows = NCCL_EP_TENSOR_TAG_TOKENS, factors = NCCL_EP_TENSOR_TAG_TOPK_WEIGHTS;
    ep_view_2d(&tokens, ref_buffer_data(&run->tokens_in), ncclBfloat16, rows, run->tokens, kHidden);
    ep_view_2d(&weights, ref_buffer_data(&run->weights), ncclFloat32, factors, run->tokens, kTopK);
    ep_view_2d(&out, ref_buffer_data(&run->tokens_out), ncclBfloat16, rows, run->slots, kHidden);
    ep_view_1d(&out_weights, ref_buffer_data(&run->weights_out), ncclFloat32, factors, run->slots);
    const ncclNDTensor_t* const sent[] = {&tokens.tensor, &weights.tensor};
    ncclNDTensor_t* const received[] = {&out.tensor, &out_weights.tensor};
    EP_CHECK_NCCL(ncclEpDispatch(run->handle, sent, 2, received, 2, NULL, 0, 0, NULL, stream));

    ep_view_2d(&results, ref_buffer_data(&run->results), ncclBfloat16, rows, run->slots, kHidden);
    ep_view_1d(&gradients, ref_buffer_data(&run->gradients_in), ncclFloat32, factors, run->slots);
    ep_view_2d(&combined, ref_buffer_data(&run->combined), ncclBfloat16, rows, run->tokens, kHidden);
    ep_view_2d(&home, ref_buffer_data(&run->gradients), ncclFloat32, factors, run->tokens, kTopK);
    const ncclNDTensor_t* const returned[] = {&results.tensor, &gradients.tensor};
    ncclNDTensor_t* const at_home[] = {&combined.tensor, &home.tensor};
    EP_CHECK_NCCL(ncclEpCombine(run->handle, returned, 2, at_home, 2, NULL, 0, 0, NULL, stream));
}

static void check(const Run* run) {
    EP_SCOPED void* tokens = ref_host_poison(run->tokens_out.bytes);
    EP_SCOPED float* weights = ref_host_poison(run->weights_out.bytes);
    EP_SCOPED int32_t* counts = ref_host_poison(run->counter.bytes);
    EP_SCOPED void* combined = ref_host_new(run->combined.bytes);
    EP_SCOPED float* gradients = ref_host_new(run->gradients.bytes);
    ref_zones_dispatch(&run->zones[run->rank], &kTokens, tokens);
    ref_zones_weights(&run->zones[run->rank], run->slots, weights);
    ref_ht_counts(run->routing, run->rank, counts);
    ref_zones_combine(run->zones, run->rank, &kResults, combined);
    ref_zones_gradients(run->zones, run->rank, kSeed, gradients);
    REF_CHECK_BUFFER(&run->tokens_out, tokens);
    REF_CHECK_BUFFER(&run->weights_out, weights);
    REF_CHECK_BUFFER(&run->counter, counts);
    REF_CHECK_BUFFER(&run->combined, combined);
    REF_CHECK_BUFFER(&run->gradients, gradients);
}

static void check_bound(const Run* run, unsigned alignment) {
    unsigned told = 0;
    EP_CHECK_NCCL(ncclEpHandleGetNumRecvTokens(run->handle, &told));
    const unsigned most = (unsigned)run->env->size * kMost * kTopK + kExperts * (alignment - 1);
    EP_CHECK_EQ_U64(told, most / alignment * alignment);
    EP_CHECK(run->zones[run->rank].begins[kExperts] <= told);
}

EP_TEST(rows_by_expert_and_updates) {
    const RefShape shape = shape_of(env);
    ncclEpGroup_t group = ref_group_new(env, NCCL_EP_ALGO_HIGH_THROUGHPUT, &shape);
    for (unsigned alignment = 1; alignment <= 16; alignment *= 4) {
        Run run;
        open_run(&run, env, group, alignment);
        for (unsigned i = 0; i < 2; ++i) {
            route(&run, kSeed + 10 + i);
            upload(&run);
            play(&run);
            ep_sync(env);
            check(&run);
            check_bound(&run, alignment);
        }
        // Over several nodes the host waits for a routing.
        if (ep_num_nodes() == 1) {
            const EpCaptured captured = ep_capture(env->stream, play, &run);
            for (unsigned i = 0; i < kReplays; ++i) {
                route(&run, kSeed + 20 + i);
                upload(&run);
                ep_replay(&captured);
                ep_sync(env);
                check(&run);
            }
            ep_release_captured(&captured);
        }
        close_run(&run);
    }
    ref_mapped_close();
    EP_CHECK_NCCL(ncclEpGroupDestroy(group, env->stream));
}

// What arrives: zeros in a zone's slots that have no row; slots that are no zone's keep what they have.
static void expect_rows(const Run* run, const RefFormat* format, void* out, void* out_scales) {
    const RefZones* zones = &run->zones[run->rank];
    const RefLayout layout = ref_flat(run->slots);
    for (size_t slot = 0; slot < zones->begins[kExperts]; ++slot) {
        ref_format_clear(format, layout, slot, out, out_scales);
    }
    for (unsigned source = 0; source < (unsigned)run->env->size; ++source) {
        for (size_t entry = 0; entry < (size_t)run->routing->num_tokens[source] * kExperts; ++entry) {
            const size_t slot = zones->slots[zones->first_of[source] * kExperts + entry];
            if (slot == kRefNoSlot) continue;
            ref_format_place(format, kSeed, ref_row_of(source, entry / kExperts), layout, slot, out, out_scales);
        }
    }
}

static void dispatch_with_scales(const Run* run, const RefFormat* format) {
    const RefLayout in = ref_flat(run->tokens), out = ref_flat(run->slots);
    RefBuffer from = ref_buffer_new_input(ref_scale_memory(format, format->in_order, in));
    RefBuffer to = ref_buffer_new(ref_scale_memory(format, format->out_order, out));
    ref_format_fill(format, kSeed, run->rank, run->tokens, &run->tokens_in, &from);
    RefLists lists = {0};
    ref_list_add_rows(&lists.inputs, &run->tokens_in, format->from, kHidden, in);
    ref_list_add_scales(&lists.inputs, &from, format, format->in_order, in);
    ref_list_add_rows(&lists.outputs, &run->tokens_out, format->to, kHidden, out);
    ref_list_add_scales(&lists.outputs, &to, format, format->out_order, out);
    EP_CHECK_NCCL(ref_lists_dispatch(&lists, run->handle, 0, NULL, run->env->stream));
    ep_sync(run->env);
    EP_SCOPED void* rows = ref_host_poison(run->tokens_out.bytes);
    EP_SCOPED void* scales = ref_host_poison(to.bytes);
    expect_rows(run, format, rows, scales);
    REF_CHECK_BUFFER(&run->tokens_out, rows);
    REF_CHECK_BUFFER(&to, scales);
    ref_buffer_free(&from);
    ref_buffer_free(&to);
}

// Over several nodes these rows lie apart before they are brought to their slots.
EP_TEST(scales_of_rows_by_expert) {
    static const struct {
        unsigned scales;
        RefOrder order;
    } kCases[] = {{1, kRefDense}, {9, kRefDense}, {9, kRefColumns}, {16, kRefDense}};
    RefShape shape = shape_of(env);
    shape.hidden *= 4;  // There is room for the scales.
    ncclEpGroup_t group = ref_group_new(env, NCCL_EP_ALGO_HIGH_THROUGHPUT, &shape);
    for (size_t i = 0; i < COUNT(kCases); ++i) {
        RefFormat format = ref_format_forward(ncclBfloat16, kHidden, ncclFloat32, kCases[i].scales);
        format.in_order = format.out_order = kCases[i].order;
        Run run;
        open_run(&run, env, group, 4);
        upload(&run);
        update(&run);
        dispatch_with_scales(&run, &format);
        close_run(&run);
    }
    ref_mapped_close();
    EP_CHECK_NCCL(ncclEpGroupDestroy(group, env->stream));
}
