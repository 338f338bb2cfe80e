// Calls with any arguments: they are refused and leave their outputs alone, or do what the right ones do. All ranks
// draw the same, so they agree.
#include "suites/second/run.h"

enum { kCalls = 80, kMostChanges = 3 };

static uint64_t g_seed;

static unsigned draw(unsigned below) { return (unsigned)ep_random_below(&g_seed, below); }

// Nothing is longer than its buffer afterwards.
static void change_tensor(View* view) {
    ncclEpTensor_t* tensor = &view->tensor;
    static const unsigned kDimensions[] = {0, 1, 2, 3, 6, 1u << 31};
    const ncclDataType_t datatype = (ncclDataType_t)draw(15);
    size_t* extent = &view->sizes[draw(3)];
    switch (draw(8)) {
        case 0: tensor->size = draw(sizeof(*tensor)); break;
        case 1: tensor->magic = draw(2) ? NCCL_EP_MAGIC : 0; break;
        case 2: tensor->ndim = kDimensions[draw(6)]; break;
        case 3:
            if (datatype >= ncclFloat4x2 || ep_datatype_size(datatype) == 1) tensor->datatype = datatype;
            break;
        case 4: tensor->data = draw(2) ? NULL : (char*)tensor->data + 2; break;
        case 5: tensor->sizes = NULL; break;
        case 6: *extent -= *extent > 0; break;
        default: *extent = draw(2) ? 0 : (size_t)1 << 32;
    }
}

// A struct begins with its size and a magic number.
static void change_prefix(void* structure) {
    unsigned* words = structure;
    words[draw(2)] = draw(2) && words[0] > 0 ? draw(words[0]) : 0;
}

// A field, and the first of the tensors that it may have instead: those that are read, or those that are written.
static void change_field(Call* it) {
    const struct {
        ncclEpTensor_t** field;
        bool is_output;
    } fields[] = {{&it->inputs.tokens, false},         {&it->inputs.topk_weights, false},
                  {&it->inputs.scales, false},         {&it->outputs.tokens, true},
                  {&it->outputs.topk_weights, true},   {&it->outputs.scales, true},
                  {&it->outputs.topk_idx, true},       {&it->info.expert_counters, true},
                  {&it->info.src_rank_counters, true}, {&it->update.expert_offsets, true},
                  {&it->update.expert_counters, true}, {&it->update.recv_total_counter, true},
                  {&it->combine_inputs.tokens, false}, {&it->combine_inputs.topk_weights, false},
                  {&it->combine_inputs.scales, false}, {&it->combine_outputs.tokens, true},
                  {&it->combine_outputs.topk_weights, true}};
    const unsigned i = draw(COUNT(fields));
    const unsigned read = draw(kFirstOutput), written = kFirstOutput + draw(kNumTensors - kFirstOutput);
    *fields[i].field = draw(3) ? NULL : &it->views[fields[i].is_output ? written : read].tensor;
}

static void change(Call* it) {
    void* structs[] = {&it->inputs, &it->outputs,        &it->info,            &it->config,
                       &it->update, &it->combine_inputs, &it->combine_outputs, &it->combine_config};
    unsigned* numbers[] = {&it->config.round_scales,
                           (unsigned*)&it->config.pass_direction,
                           (unsigned*)&it->config.quant_recipe,
                           (unsigned*)&it->combine_config.pass_direction,
                           (unsigned*)&it->combine_config.quant_recipe,
                           (unsigned*)&it->info.recv_topk_idx_kind};
    switch (draw(5)) {
        case 0:
        case 1: change_tensor(&it->views[draw(kNumTensors)]); break;
        case 2: change_field(it); break;
        case 3: change_prefix(structs[draw(8)]); break;
        default: *numbers[draw(6)] = draw(4);
    }
}

static ncclResult_t call_drawn(const Call* it, const Run* run) {
    ncclEpHandle_t handle = run->handle;
    cudaStream_t stream = run->env->stream;
    switch (draw(is_ll(run->test) ? 2 : 3)) {
        case 0:
            return ncclEpDispatch(handle, &it->inputs, &it->outputs, draw(4) ? &it->info : NULL, &it->config, stream);
        case 1:
            return ncclEpCombine(handle, &it->combine_inputs, &it->combine_outputs, &it->combine_config, stream);
        default: return ncclEpUpdateHandle(handle, &it->views[kIds].tensor, &it->update, stream);
    }
}

static void fuzz(const EpEnv* env, Case test, uint64_t seed) {
    g_seed = seed;
    test.style = kRefNowhere;
    test.alignment = 4;
    test.recv_rows = (unsigned)env->size * test.max_tokens;
    Run run;
    run_open(&run, env, NULL, &test, seed);
    run_route(&run);
    unsigned refused = 0;
    for (unsigned i = 0; i < kCalls; ++i) {
        Call it;
        call_set(&it, &run, is_ll(&test) || draw(2) ? NCCL_EP_FWD_PASS : NCCL_EP_BWD_PASS);
        it.config.send_only = it.combine_config.send_only = 0;
        for (unsigned changes = 1 + draw(kMostChanges); changes > 0; --changes) change(&it);
        run_poison(&run);
        const ncclResult_t result = call_drawn(&it, &run);
        ep_sync(env);
        if (result == ncclSuccess) continue;
        ++refused;
        EP_CHECK(result == ncclInvalidArgument || result == ncclInvalidUsage);
        run_check_untouched(&run);
    }
    EP_CHECK(refused > kCalls / 4 && refused < kCalls);
    forget_lines();
    run_poison(&run);
    run_exchange(&run, NCCL_EP_FWD_PASS);
    run_close(&run);
}

EP_TEST(any_arguments_are_taken_or_refused) {
    for (Kind kind = kLlExperts; kind <= kHtZones; ++kind) {
        Case test = kind == kLlExperts || kind == kLlRanks ? kSmallLl : kSmallHt;
        test.kind = kind;
        test.send_only = false;
        fuzz(env, test, 950 + kind);
    }
}
