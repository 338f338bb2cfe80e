// What the operations of a run must have left, by the reference; see run.h.
#include "reference/ht.h"
#include "reference/ll.h"
#include "reference/rank_major.h"
#include "suites/second/run.h"

typedef struct {
    const RefRows* tokens;
    unsigned char* out;
} Output;

static void write_row(unsigned source, size_t token, size_t row, void* context) {
    const Output* output = context;
    ref_row_fill(output->tokens, ref_row_of(source, token), output->out + row * ref_row_bytes(output->tokens));
}

// Rows or scales that come, and zeros where a dispatch writes some.
static void expect_rows(const Run* run, const RefRows* tokens, void* out) {
    Output output = {tokens, out};
    const unsigned filled = (unsigned)(run->received < run->used ? run->received : run->used);
    switch (run->test->kind) {
        case kLlExperts: ref_ll_dispatch(run->routing, run->rank, run->layout, tokens, out, NULL); break;
        case kLlRanks: ref_rank_each(run->routing, run->rank, run->layout, write_row, &output); break;
        case kHtFlat: ref_ht_dispatch_tokens(run->routing, run->rank, tokens, filled, out); break;
        case kHtZones: ref_zones_dispatch(&run->zones[run->rank], tokens, out);
    }
}

// Ids and weights of a forward dispatch.
static void expect_beside(const Run* run, void* ids_out, float* weights) {
    const Case* test = run->test;
    if (test->kind == kLlExperts) return;
    if (test->kind == kHtZones) {
        ref_zones_weights(&run->zones[run->rank], run->used, weights);
        return;
    }
    const size_t rows = test->kind == kHtFlat ? run->used : ref_layout_rows(run->layout);
    EP_SCOPED int64_t* ids = ref_host_new(rows * test->top_k * sizeof(*ids));
    if (test->kind == kHtFlat) {
        ref_ht_dispatch_routing(run->routing, run->routing, run->rank, (unsigned)rows, ids, weights);
    } else {
        ref_rank_beside(run->routing, run->rank, run->layout, ids, weights);
    }
    const int64_t first = test->global_ids ? run->rank * test->local_experts : 0;
    const bool is_narrow = test->kind == kLlRanks && test->narrow_ids;
    for (size_t i = 0; i < rows * test->top_k; ++i) {
        const int64_t id = ids[i] < 0 ? -1 : ids[i] + first;
        if (is_narrow) ((int32_t*)ids_out)[i] = (int32_t)id;
        else ((int64_t*)ids_out)[i] = id;
    }
}

void run_check_dispatch(const Run* run, ncclEpPassDir_t pass) {
    ep_sync(run->env);
    const bool is_forward = pass == NCCL_EP_FWD_PASS;
    const RefBuffer* buffers = run->buffers;
    EP_SCOPED void* tokens = ref_host_poison(buffers[kReceived].bytes);
    EP_SCOPED void* scales = ref_host_poison(buffers[kScalesOut].bytes);
    EP_SCOPED void* ids = ref_host_poison(buffers[kIdsOut].bytes);
    EP_SCOPED float* weights = ref_host_poison(buffers[kWeightsOut].bytes);
    expect_rows(run, &run->tokens, tokens);
    if (run->test->scaled) expect_rows(run, &run->scales, scales);
    if (is_forward) expect_beside(run, ids, weights);
    REF_CHECK_BUFFER(&buffers[kReceived], tokens);
    REF_CHECK_BUFFER(&buffers[kScalesOut], scales);
    REF_CHECK_BUFFER(&buffers[kIdsOut], ids);
    REF_CHECK_BUFFER(&buffers[kWeightsOut], weights);
    if (run->test->kind != kHtFlat && is_forward) run_check_counters(run);
}

static void check_numbers(EpSite site, const RefBuffer* buffer, const int64_t* numbers, size_t count, bool is_wide) {
    EP_SCOPED void* expected = ref_host_poison(buffer->bytes);
    for (size_t i = 0; i < count; ++i) {
        if (is_wide) ((int64_t*)expected)[i] = numbers[i];
        else ((int32_t*)expected)[i] = (int32_t)numbers[i];
    }
    ref_buffer_check(site, buffer, expected);
    ref_buffer_poison(buffer);
}

void run_check_counters(const Run* run) {
    const Case* test = run->test;
    const size_t experts = test->local_experts, ranks = (size_t)run->env->size;
    const size_t count = test->kind == kLlRanks ? ranks : experts;
    EP_SCOPED int32_t* counts = ref_host_new((experts + ranks) * sizeof(*counts));
    EP_SCOPED int64_t* counters = ref_host_new(count * sizeof(*counters));
    EP_SCOPED int64_t* offsets = ref_host_new(count * sizeof(*offsets));
    EP_SCOPED void* slots = NULL;
    switch (test->kind) {
        case kLlExperts: slots = ref_ll_slots(run->routing, run->rank, run->layout, counts); break;
        case kLlRanks: ref_rank_counts(run->routing, run->rank, counts); break;
        case kHtFlat: ref_ht_counts(run->routing, run->rank, counts); break;
        case kHtZones: break;
    }
    const bool has_zones = test->kind == kHtZones;
    for (unsigned i = 0; i < count; ++i) {
        counters[i] = has_zones ? (int64_t)ref_zones_length(&run->zones[run->rank], i) : counts[i];
        offsets[i] = has_zones ? (int64_t)ref_zones_begin(&run->zones[run->rank], i) : 0;
    }
    const int64_t total = (int64_t)run->received;
    const bool is_wide = run->buffers[kTotal].bytes == sizeof(int64_t);
    check_numbers(EP_HERE("counters"), &run->buffers[kCounters], counters, count, is_wide);
    const size_t zones = has_zones && !test->no_offsets ? count : 0;
    check_numbers(EP_HERE("offsets"), &run->buffers[kOffsets], offsets, zones, is_wide);
    check_numbers(EP_HERE("total"), &run->buffers[kTotal], &total, is_ll(test) ? 0 : 1, is_wide);
}

void run_check_combine(const Run* run, ncclEpPassDir_t pass) {
    ep_sync(run->env);
    EP_SCOPED void* sums = ref_host_poison(run->buffers[kCombined].bytes);
    EP_SCOPED float* gradients = ref_host_poison(run->buffers[kGradients].bytes);
    const bool has_gradients = pass == NCCL_EP_BWD_PASS;
    switch (run->test->kind) {
        case kLlExperts:
            ref_ll_combine(run->routing, run->routing, run->rank, run->layout, &run->results, sums);
            break;
        case kLlRanks: ref_rank_combine(run->routing, run->rank, run->layout, &run->results, sums); break;
        case kHtFlat:
            ref_ht_combine(run->routing, run->rank, &run->results, sums);
            if (has_gradients) ref_ht_gradients_by_k(run->routing, run->rank, run->seed, gradients);
            break;
        case kHtZones:
            ref_zones_combine(run->zones, run->rank, &run->results, sums);
            if (has_gradients) ref_zones_gradients(run->zones, run->rank, run->seed, gradients);
    }
    REF_CHECK_BUFFER(&run->buffers[kCombined], sums);
    REF_CHECK_BUFFER(&run->buffers[kGradients], gradients);
}
