// The calls of frameworks, in their order, with what they pass and nothing else.
#include "suites/second/run.h"

// Counters are told by the update, or with NVTE_EP_FUSED_PREPARE_DISPATCH by the dispatch.
static void forward(Run* run, bool fused) {
    run_init(run);
    run_poison(run);
    Call call;
    call_set(&call, run, NCCL_EP_FWD_PASS);
    const cudaStream_t stream = run->env->stream;
    const ncclEpTensor_t* ids = &call.views[kIds].tensor;
    EP_CHECK_NCCL(ncclEpUpdateHandle(run->handle, ids, fused ? NULL : &call.update, stream));
    const ncclEpLayoutInfo_t* told = fused ? &call.update : NULL;
    EP_CHECK_NCCL(ncclEpDispatch(run->handle, &call.inputs, &call.outputs, told, &call.config, stream));
    EP_CHECK_NCCL(ncclEpCombine(run->handle, &call.combine_inputs, &call.combine_outputs, NULL, stream));
    run_check_dispatch(run, NCCL_EP_FWD_PASS);
    run_check_combine(run, NCCL_EP_FWD_PASS);
}

// The gradient of the combine is a dispatch, that of the dispatch a combine.
static void backward(const Run* run) {
    run_poison(run);
    Call call;
    call_set(&call, run, NCCL_EP_BWD_PASS);
    const cudaStream_t stream = run->env->stream;
    EP_CHECK_NCCL(ncclEpDispatch(run->handle, &call.inputs, &call.outputs, NULL, &call.config, stream));
    EP_CHECK_NCCL(
        ncclEpCombine(run->handle, &call.combine_inputs, &call.combine_outputs, &call.combine_config, stream));
    run_check_dispatch(run, NCCL_EP_BWD_PASS);
    run_check_combine(run, NCCL_EP_BWD_PASS);
}

// XLA keeps the memory as a value, and TransformerEngine makes another handle for each address: a combine follows at
// once.
static void move(Run* run) {
    RefBuffer before = run->memory;
    ncclEpHandle_t first = run->handle;
    run_copy(run);
    run_poison(run);
    EP_CHECK_NCCL(run_combine(run, NCCL_EP_FWD_PASS));
    run_check_combine(run, NCCL_EP_FWD_PASS);
    EP_CHECK_NCCL(ncclEpHandleDestroy(first));
    ref_buffer_free(&before);
}

// A layer of a model: its routing has memory of its own from its forward pass to its backward one.
static Case layer_case(const EpEnv* env) {
    Case test = kSmallHt;
    test.in_memory = true;
    test.kind = kHtZones;
    test.no_offsets = true;
    test.alignment = 4;
    test.uneven = true;
    test.recv_rows = 64 * (unsigned)env->size;
    return test;
}

EP_TEST(transformer_engine_moves_its_routings) {
    for (unsigned eager = 0; eager < 2; ++eager) {
        Case test = layer_case(env);
        if (eager) test.recv_rows = 0;
        test.narrow_ids = eager;
        ncclEpGroup_t group = group_of(env, &test);
        Run layers[2];
        for (unsigned i = 0; i < 2; ++i) {
            run_open(&layers[i], env, group, &test, 960 + i);
            forward(&layers[i], i == 1 && !eager);
        }
        for (unsigned i = 0; i < 2; ++i) move(&layers[i]);
        for (unsigned i = 2; i-- > 0;) {
            backward(&layers[i]);
            run_close(&layers[i]);
        }
        EP_CHECK_NCCL(ncclEpGroupDestroy(group));
    }
}
