// One low-latency dispatch and combine on two ranks, with nothing but entry points of the first release: the program
// that the drop-in test links with a dummy library and then runs with the real one.
#include "reference/run.h"

EP_TEST(low_latency_round_trip) {
    EP_REQUIRE(env->size == 2);
    const RefShape shape = {4, 4, 2, ncclBfloat16, 64};
    ncclEpGroup_t group = ref_group_new(env, NCCL_EP_ALGO_LOW_LATENCY, &shape);
    RefRun run = ref_run_open_with(env, group, &shape, kRefDistinct, false, ref_ll(1));
    ref_dispatch(&run);
    ref_combine(&run);
    ref_run_close(&run);
    ncclNDTensor_t tensor = ep_tensor_2d(group, shape.datatype, NCCL_EP_TENSOR_TAG_TOKENS,
                                         shape.max_tokens, shape.hidden);
    EP_CHECK_NCCL(ncclEpTensorDestroy(group, &tensor));
    EP_CHECK_NCCL(ncclEpGroupDestroy(group, env->stream));
}
