// What the compiler can check of the later interface: offsets, sizes and values, on which programs that were built with
// any of its headers rely.
#include <assert.h>

#include "suites/second/second.h"

#define SIZE(owner, bytes) static_assert(sizeof(owner) == (bytes), "size of " #owner)
#define FIELD(owner, field, at, bytes)                                                 \
    static_assert(offsetof(owner, field) == (at), "offset of " #owner "." #field);     \
    static_assert(sizeof(((owner*)0)->field) == (bytes), "size of " #owner "." #field)
#define PREFIX(owner, bytes)   \
    SIZE(owner, bytes);        \
    FIELD(owner, size, 0, 4);  \
    FIELD(owner, magic, 4, 4)
#define VALUE(name, value) static_assert((name) == (value), "value of " #name)

PREFIX(ncclEpTensor_t, 48);
FIELD(ncclEpTensor_t, ndim, 8, 4);
FIELD(ncclEpTensor_t, datatype, 12, 4);
FIELD(ncclEpTensor_t, data, 16, 8);
FIELD(ncclEpTensor_t, win_hdl, 24, 8);
FIELD(ncclEpTensor_t, win_offset, 32, 8);
FIELD(ncclEpTensor_t, sizes, 40, 8);

PREFIX(ncclEpTensorAllocConfig_t, 8);
PREFIX(ncclEpCompleteConfig_t, 8);
SIZE(ncclEpAllocConfig_t, 24);
FIELD(ncclEpAllocConfig_t, alloc_fn, 0, 8);
FIELD(ncclEpAllocConfig_t, free_fn, 8, 8);
FIELD(ncclEpAllocConfig_t, context, 16, 8);
#define TYPE(value, type) static_assert(_Generic((value), type: true, default: false), "type of " #value)
TYPE((ncclEpAllocFn_t)0, cudaError_t (*)(void**, size_t, void*));
TYPE((ncclEpFreeFn_t)0, cudaError_t (*)(void*, void*));
TYPE(((ncclEpAllocConfig_t*)0)->alloc_fn, ncclEpAllocFn_t);
TYPE(((ncclEpAllocConfig_t*)0)->free_fn, ncclEpFreeFn_t);

PREFIX(ncclEpGroupConfig_t, 120);
FIELD(ncclEpGroupConfig_t, version, 8, 4);
FIELD(ncclEpGroupConfig_t, algorithm, 12, 4);
FIELD(ncclEpGroupConfig_t, num_experts, 16, 4);
FIELD(ncclEpGroupConfig_t, max_dispatch_tokens_per_rank, 20, 4);
FIELD(ncclEpGroupConfig_t, max_recv_tokens_per_rank, 24, 4);
FIELD(ncclEpGroupConfig_t, max_token_bytes, 28, 4);
FIELD(ncclEpGroupConfig_t, rdma_buffer_size, 32, 8);
FIELD(ncclEpGroupConfig_t, num_qp_per_rank, 40, 4);
FIELD(ncclEpGroupConfig_t, num_channels, 44, 4);
FIELD(ncclEpGroupConfig_t, max_num_sms, 48, 4);
FIELD(ncclEpGroupConfig_t, alloc, 56, 24);
FIELD(ncclEpGroupConfig_t, enable_mask, 80, 4);
FIELD(ncclEpGroupConfig_t, timeout_ns, 88, 8);
FIELD(ncclEpGroupConfig_t, zero_copy, 96, 4);
FIELD(ncclEpGroupConfig_t, overflow_policy, 100, 4);
FIELD(ncclEpGroupConfig_t, num_topk, 104, 4);
FIELD(ncclEpGroupConfig_t, padding_v2, 108, 4);
FIELD(ncclEpGroupConfig_t, dispatch_num_sms, 112, 4);
FIELD(ncclEpGroupConfig_t, combine_num_sms, 116, 4);
VALUE(NCCL_EP_GROUP_CONFIG_V1_SIZE, 96);
VALUE(NCCL_EP_GROUP_CONFIG_V2_SIZE, 112);
VALUE(NCCL_EP_GROUP_CONFIG_V3_SIZE, 120);

PREFIX(ncclEpLayoutInfo_t, 48);
FIELD(ncclEpLayoutInfo_t, expert_counters, 8, 8);
FIELD(ncclEpLayoutInfo_t, src_rank_counters, 16, 8);
FIELD(ncclEpLayoutInfo_t, expert_offsets, 24, 8);
FIELD(ncclEpLayoutInfo_t, recv_total_counter, 32, 8);
FIELD(ncclEpLayoutInfo_t, recv_topk_idx_kind, 40, 4);
VALUE(NCCL_EP_LAYOUT_INFO_V1_SIZE, 40);

PREFIX(ncclEpDispatchInputs_t, 32);
FIELD(ncclEpDispatchInputs_t, tokens, 8, 8);
FIELD(ncclEpDispatchInputs_t, topk_weights, 16, 8);
FIELD(ncclEpDispatchInputs_t, scales, 24, 8);
PREFIX(ncclEpDispatchOutputs_t, 40);
FIELD(ncclEpDispatchOutputs_t, tokens, 8, 8);
FIELD(ncclEpDispatchOutputs_t, topk_weights, 16, 8);
FIELD(ncclEpDispatchOutputs_t, scales, 24, 8);
FIELD(ncclEpDispatchOutputs_t, topk_idx, 32, 8);
PREFIX(ncclEpCombineInputs_t, 32);
FIELD(ncclEpCombineInputs_t, tokens, 8, 8);
FIELD(ncclEpCombineInputs_t, topk_weights, 16, 8);
FIELD(ncclEpCombineInputs_t, scales, 24, 8);
VALUE(NCCL_EP_COMBINE_INPUTS_V1_SIZE, 24);
PREFIX(ncclEpCombineOutputs_t, 24);
FIELD(ncclEpCombineOutputs_t, tokens, 8, 8);
FIELD(ncclEpCombineOutputs_t, topk_weights, 16, 8);
PREFIX(ncclEpHandleConfig_t, 16);
FIELD(ncclEpHandleConfig_t, dispatch_output_per_expert_alignment, 8, 8);

PREFIX(ncclEpDispatchConfig_t, 24);
static_assert(_Alignof(ncclEpDispatchConfig_t) == 4, "alignment of ncclEpDispatchConfig_t");
FIELD(ncclEpDispatchConfig_t, send_only, 8, 4);
FIELD(ncclEpDispatchConfig_t, round_scales, 12, 4);
FIELD(ncclEpDispatchConfig_t, pass_direction, 16, 4);
FIELD(ncclEpDispatchConfig_t, quant_recipe, 20, 4);
VALUE(NCCL_EP_DISPATCH_CONFIG_V1_SIZE, 20);
PREFIX(ncclEpCombineConfig_t, 20);
FIELD(ncclEpCombineConfig_t, send_only, 8, 4);
FIELD(ncclEpCombineConfig_t, pass_direction, 12, 4);
FIELD(ncclEpCombineConfig_t, quant_recipe, 16, 4);
VALUE(NCCL_EP_COMBINE_CONFIG_V1_SIZE, 16);

VALUE(NCCL_EP_VERSION_CODE, 200);
VALUE(NCCL_EP_API_VERSION, 3);
VALUE(NCCL_EP_AUTO, 0);
VALUE(NCCL_EP_MAGIC, 0xC00FFFEE);
VALUE(NCCL_EP_TENSOR_MAGIC, 0xCAFECAFE);
VALUE(NCCL_EP_ALGO_LOW_LATENCY, 0);
VALUE(NCCL_EP_ALGO_HIGH_THROUGHPUT, 1);
VALUE(NCCL_EP_LAYOUT_UNSET, 0);
VALUE(NCCL_EP_LAYOUT_EXPERT_MAJOR, 1);
VALUE(NCCL_EP_LAYOUT_RANK_MAJOR, 2);
VALUE(NCCL_EP_LAYOUT_FLAT, 3);
VALUE(NCCL_EP_FWD_PASS, 0);
VALUE(NCCL_EP_BWD_PASS, 1);
VALUE(NCCL_EP_OVERFLOW_AUTO, 0);
VALUE(NCCL_EP_OVERFLOW_TRAP, 1);
VALUE(NCCL_EP_OVERFLOW_DROP, 2);
VALUE(NCCL_EP_ZERO_COPY_AUTO, 0);
VALUE(NCCL_EP_ZERO_COPY_OFF, 1);
VALUE(NCCL_EP_ZERO_COPY_ON, 2);
VALUE(NCCL_EP_EXPERT_ID_AUTO, 0);
VALUE(NCCL_EP_EXPERT_ID_LOCAL, 1);
VALUE(NCCL_EP_EXPERT_ID_GLOBAL, 2);
VALUE(NCCL_EP_DISP_QUANT_NONE, 0);
VALUE(NCCL_EP_DISP_QUANT_FWD, 1);
VALUE(NCCL_EP_DISP_QUANT_DS_FP8E3M4, 2);
VALUE(NCCL_EP_COMB_QUANT_NONE, 0);
VALUE(NCCL_EP_COMB_QUANT_NVFP4, 1);
VALUE(NCCL_EP_COMB_QUANT_MXFP8, 2);

EP_TEST(the_version_is_that_of_the_header) {
    int version = -1;
    EP_CHECK_NCCL(ncclEpGetVersion(&version));
    EP_CHECK_EQ_I64(version, NCCL_EP_VERSION_CODE);
    EP_CHECK_RESULT(ncclEpGetVersion(NULL), ncclInvalidArgument);
}

EP_TEST(new_structs_have_size_and_magic) {
    const ncclEpGroupConfig_t group = NCCL_EP_GROUP_CONFIG_INIT;
    EP_CHECK_EQ_U64(group.size, 120);
    EP_CHECK_EQ_U64(group.magic, 0xC00FFFEE);
    EP_CHECK_EQ_U64(group.version, 3);
    EP_CHECK_EQ_U64(group.num_experts, 0);
    const ncclEpTensor_t tensor = {NCCL_EP_TENSOR_INIT_INLINE, .ndim = 2};
    EP_CHECK_EQ_U64(tensor.size, 48);
    EP_CHECK_EQ_U64(tensor.magic, 0xCAFECAFE);
    EP_CHECK_EQ_U64(tensor.ndim, 2);
    const ncclEpTensor_t empty = NCCL_EP_STRUCT_INIT(ncclEpTensor_t, NCCL_EP_TENSOR_MAGIC);
    EP_CHECK_EQ_U64(empty.size, 48);
    EP_CHECK_EQ_U64(empty.magic, 0xCAFECAFE);
    EP_CHECK_EQ_U64(empty.ndim, 0);
    const ncclEpDispatchConfig_t old = {.size = NCCL_EP_DISPATCH_CONFIG_V1_SIZE};
    EP_CHECK(NCCL_EP_HAS_FIELD(&old, ncclEpDispatchConfig_t, pass_direction));
    EP_CHECK(!NCCL_EP_HAS_FIELD(&old, ncclEpDispatchConfig_t, quant_recipe));
}
