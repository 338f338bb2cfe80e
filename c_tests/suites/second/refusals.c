// What is refused in calls that make something: structs, descriptors, groups and handles; outputs stay as they are.
// What operations refuse is in operations.c.
#define _GNU_SOURCE  // RTLD_DEFAULT
#include <dlfcn.h>
#include <string.h>

#include "suites/second/second.h"

EP_TEST(descriptors_are_made_and_destroyed) {
    const size_t sizes[] = {3, 5};
    ncclEpTensor_t* tensor = NULL;
    EP_CHECK_NCCL(ncclEpTensorAlloc(&tensor, 2, ncclFloat32, sizes, NULL));
    if (!EP_CHECK(tensor != NULL)) return;
    EP_CHECK_EQ_U64(tensor->size, sizeof(*tensor));
    EP_CHECK_EQ_U64(tensor->ndim, 2);
    EP_CHECK(tensor->sizes != sizes && tensor->sizes[0] == 3 && tensor->sizes[1] == 5);
    EP_CHECK(tensor->data == NULL && tensor->win_hdl == NULL && tensor->win_offset == 0);
    EP_CHECK(tensor->magic != NCCL_EP_TENSOR_MAGIC);
    EP_CHECK_NCCL(ncclEpTensorDestroy(tensor));
    CHECK_REFUSED(ncclEpTensorDestroy(tensor), ncclInvalidArgument, "tensor: must be a tensor of");
    EP_CHECK_NCCL(ncclEpTensorDestroy(NULL));
    View own;
    view_of(&own, NULL, ncclFloat32, 3, 5, 0);
    CHECK_REFUSED(ncclEpTensorDestroy(&own.tensor), ncclInvalidArgument, "tensor: must be");
}

EP_TEST(bad_descriptors_are_not_made) {
    const size_t sizes[] = {1, 1, 1, 1, 1, 1};
    ncclEpTensor_t* tensor = NULL;
    ncclEpTensorAllocConfig_t config = NCCL_EP_TENSOR_ALLOC_CONFIG_INIT;
    EP_CHECK_NCCL(ncclEpTensorAlloc(&tensor, 5, ncclFloat4x2, sizes, &config));
    EP_CHECK_NCCL(ncclEpTensorDestroy(tensor));
    tensor = NULL;
    const ncclResult_t no = ncclInvalidArgument;
    CHECK_REFUSED(ncclEpTensorAlloc(NULL, 1, ncclInt8, sizes, NULL), no, "tensor: must not be NULL");
    CHECK_REFUSED(ncclEpTensorAlloc(&tensor, 0, ncclInt8, sizes, NULL), no, "ndim");
    CHECK_REFUSED(ncclEpTensorAlloc(&tensor, 6, ncclInt8, sizes, NULL), no, "got 6");
    CHECK_REFUSED(ncclEpTensorAlloc(&tensor, 1, ncclInt8, NULL, NULL), no, "sizes");
    CHECK_REFUSED(ncclEpTensorAlloc(&tensor, 1, (ncclDataType_t)13, sizes, NULL), no, "datatype");
    config.size = 7;
    CHECK_REFUSED(ncclEpTensorAlloc(&tensor, 1, ncclInt8, sizes, &config), no, "config.size");
    config.size = sizeof(config);
    config.magic = NCCL_EP_TENSOR_MAGIC;
    CHECK_REFUSED(ncclEpTensorAlloc(&tensor, 1, ncclInt8, sizes, &config), no, "config.magic");
    EP_CHECK(tensor == NULL);
}

// ---- Groups

static void group_refused(EpSite site, const EpEnv* env, const ncclEpGroupConfig_t* config,
                          ncclResult_t expected, const char* words) {
    ncclEpGroup_t group = NULL;
    check_refused(site, ncclEpCreateGroup(&group, env->comm, config), expected, words);
    ep_check(site, group == NULL);
}

#define GROUP_REFUSED(kind, change, expected, words)                               \
    do {                                                                           \
        ncclEpGroupConfig_t it = config_of(env, &(kind));                          \
        change;                                                                    \
        group_refused(EP_HERE(#change), env, &it, expected, words);                \
    } while (false)

// One rank's environment asks for what no rank can do: all refuse at once.
EP_TEST(exact_sums_over_nodes_are_refused) {
    if (ranks_share_a_node()) return;
    EP_WITH_VARIABLE("NCCL_EP_LL_COMBINE", env->rank == 0 ? "exact" : NULL);
    GROUP_REFUSED(kSmallLl, it.num_topk = kSmallLl.top_k, ncclInvalidArgument, "NCCL_EP_LL_COMBINE");
}

EP_TEST(groups_with_wrong_structs_are_not_made) {
    const ncclResult_t no = ncclInvalidArgument;
    GROUP_REFUSED(kSmallLl, it.size = 95, no, "config.size: must be the size of its struct");
    GROUP_REFUSED(kSmallLl, it.size = 0, no, "got 0, expected 96 or more");
    GROUP_REFUSED(kSmallLl, it.magic = 0, no, "config.magic");
    GROUP_REFUSED(kSmallLl, it.magic = NCCL_EP_TENSOR_MAGIC, no, "config.magic");
    ncclEpGroupConfig_t config = config_of(env, &kSmallLl);
    ncclEpGroup_t group = NULL;
    CHECK_REFUSED(ncclEpCreateGroup(&group, env->comm, NULL), no, "config: must not be NULL");
    CHECK_REFUSED(ncclEpCreateGroup(NULL, env->comm, &config), no, "ep_group: must not be NULL");
    CHECK_REFUSED(ncclEpCreateGroup(&group, NULL, &config), no, "comm: must not be NULL");
    EP_CHECK(group == NULL);
}

EP_TEST(a_program_of_the_first_release_is_told) {
    const unsigned first[10] = {1, NCCL_EP_ALGO_HIGH_THROUGHPUT, 8, 4, 64};
    ncclEpGroup_t group = NULL;
    CHECK_REFUSED(ncclEpCreateGroup(&group, env->comm, (const ncclEpGroupConfig_t*)first), ncclInvalidArgument,
                  "built for the first release (got libnccl_ep.so.0, expected libnccl_ep.so)");
    EP_CHECK(group == NULL);
}

static cudaError_t free_nothing(void* memory, void* context) {
    (void)memory, (void)context;
    return cudaSuccess;
}

EP_TEST(groups_with_wrong_settings_are_not_made) {
    const ncclResult_t no = ncclInvalidArgument;
    GROUP_REFUSED(kSmallLl, it.algorithm = (ncclEpAlgorithm_t)2, no, "config.algorithm");
    GROUP_REFUSED(kSmallLl, it.num_experts = 0, no, "config.num_experts");
    GROUP_REFUSED(kSmallLl, it.max_dispatch_tokens_per_rank = 0, no, "max_dispatch_tokens_per_rank");
    GROUP_REFUSED(kSmallLl, it.max_token_bytes = 0, no, "config.max_token_bytes: must be positive (got 0");
    GROUP_REFUSED(kSmallLl, it.zero_copy = (ncclEpZeroCopyMode_t)3, no, "config.zero_copy");
    if (env->size > 1) GROUP_REFUSED(kSmallLl, it.num_experts += 1, no, "config.num_experts");
    GROUP_REFUSED(kSmallHt, it.max_token_bytes = 0, no, "config.max_token_bytes");
    GROUP_REFUSED(kSmallHt, it.max_token_bytes = 40, no, "config.max_token_bytes");
    GROUP_REFUSED(kSmallHt, it.max_recv_tokens_per_rank = 3, no, "max_recv_tokens_per_rank");
    GROUP_REFUSED(kSmallHt, it.num_topk = it.num_experts + 1, no, "config.num_topk");
    GROUP_REFUSED(kSmallHt, it.overflow_policy = (ncclEpOverflowPolicy_t)3, no, "overflow_policy");
    GROUP_REFUSED(kSmallLl, it.overflow_policy = (ncclEpOverflowPolicy_t)77, no, "overflow_policy");
    GROUP_REFUSED(kSmallLl, it.alloc.free_fn = free_nothing, ncclInvalidUsage, "config.alloc");
}

EP_TEST(groups_that_are_not_served_are_not_made) {
    const ncclResult_t no = ncclInvalidUsage;
    GROUP_REFUSED(kSmallLl, it.enable_mask = 1, no, "config.enable_mask");
    GROUP_REFUSED(kSmallHt, it.overflow_policy = NCCL_EP_OVERFLOW_DROP, no, "config.overflow_policy: must not");
}

// A rank that refuses tells the others so.
EP_TEST(one_rank_refuses_for_all) {
    ncclEpGroupConfig_t config = config_of(env, &kSmallLl);
    if (env->rank == 0) config.enable_mask = 1;
    ncclEpGroup_t group = NULL;
    const ncclResult_t expected = env->rank == 0 ? ncclInvalidUsage : ncclRemoteError;
    CHECK_REFUSED(ncclEpCreateGroup(&group, env->comm, &config), expected, "config.enable_mask");
    EP_CHECK(group == NULL);
    ep_barrier();
}

EP_TEST(ranks_agree_on_the_rows_that_stay) {
    if (env->size == 1) return;
    const ncclResult_t no = ncclInvalidArgument;
    GROUP_REFUSED(kSmallHt, it.max_recv_tokens_per_rank = env->rank == 0 ? 0 : it.max_dispatch_tokens_per_rank, no,
                  "config.max_recv_tokens_per_rank: must be the same on every rank");
    GROUP_REFUSED(kSmallHt, (it.max_recv_tokens_per_rank = it.max_dispatch_tokens_per_rank,
                             it.overflow_policy = env->rank == 0 ? NCCL_EP_OVERFLOW_TRAP : NCCL_EP_OVERFLOW_DROP), no,
                  "config.overflow_policy: must be the same on every rank");
    ep_barrier();
}

static ncclResult_t ask_for_sms(const EpEnv* env, unsigned sms) {
    ncclEpGroupConfig_t config = config_of(env, &kSmallHt);
    config.combine_num_sms = sms;
    ncclEpGroup_t group = NULL;
    const ncclResult_t made = ncclEpCreateGroup(&group, env->comm, &config);
    EP_CHECK_NCCL(ncclEpGroupDestroy(group));
    return made;
}

// The backend of the CPU has no SMs. A variable is ignored, which is told once.
EP_TEST(budgets_above_the_device_are_refused_or_ignored) {
    const ncclResult_t made = ask_for_sms(env, 1u << 20);
    const bool has_sms = made != ncclSuccess;
    if (has_sms) CHECK_REFUSED(made, ncclInvalidUsage, "more SMs are asked for than the device has");
    else ep_skip("a device without SMs");
    EP_REQUIRE(setenv("NCCL_EP_COMM_SMS", "1048576", 1) == 0 && setenv("NCCL_EP_DISPATCH_SMS", "2", 1) == 0);
    CHECK_REFUSED(ask_for_sms(env, 1), ncclSuccess, has_sms ? "NCCL_EP_COMM_SMS=1048576 is ignored; allowed: SMs" : "");
    // What is ignored does not stand before the configuration.
    const ncclResult_t again = has_sms ? ncclInvalidUsage : ncclSuccess;
    CHECK_REFUSED(ask_for_sms(env, 1u << 20), again, has_sms ? "more SMs are asked for" : "");
    EP_REQUIRE(unsetenv("NCCL_EP_COMM_SMS") == 0 && unsetenv("NCCL_EP_DISPATCH_SMS") == 0);
}

EP_TEST(variables_that_contradict_each_other_are_refused) {
    EP_REQUIRE(setenv("NCCL_EP_HT_EM_LOCAL_DUP", "1", 1) == 0 && setenv("NCCL_EP_HT_EM_NVLINK_DUP", "1", 1) == 0);
    GROUP_REFUSED(kSmallHt, (void)0, ncclInvalidUsage, "NCCL_EP_HT_EM_LOCAL_DUP: must not be 1 with");
    EP_REQUIRE(unsetenv("NCCL_EP_HT_EM_LOCAL_DUP") == 0 && unsetenv("NCCL_EP_HT_EM_NVLINK_DUP") == 0);
}

EP_TEST(settings_that_have_no_effect_are_accepted) {
    ncclEpGroupConfig_t config = config_of(env, &kSmallHt);
    config.version = 99;
    config.rdma_buffer_size = 1;
    config.num_qp_per_rank = config.num_channels = 7;
    config.max_num_sms = 2;
    config.enable_mask = 1;
    config.timeout_ns = 50000000000;
    config.zero_copy = NCCL_EP_ZERO_COPY_ON;
    config.overflow_policy = NCCL_EP_OVERFLOW_TRAP;
    ncclEpGroup_t group = NULL;
    EP_CHECK_NCCL(ncclEpCreateGroup(&group, env->comm, &config));
    EP_CHECK_NCCL(ncclEpGroupDestroy(group));
    CHECK_REFUSED(ncclEpGroupDestroy(group), ncclInvalidArgument, "ep_group: was destroyed already");
    EP_CHECK_NCCL(ncclEpGroupDestroy(NULL));
}

EP_TEST(masks_need_a_group_that_has_one) {
    const ncclResult_t no = ncclInvalidUsage;
    ncclEpGroup_t group = group_of(env, &kSmallLl);
    int words[64] = {0};
    CHECK_REFUSED(ncclEpMaskQuery(group, words, env->stream), no, "config.enable_mask");
    CHECK_REFUSED(ncclEpMaskUpdate(group, words, env->stream), no, "ncclEpMaskUpdate: ep_group");
    CHECK_REFUSED(ncclEpMaskClean(group, env->stream), no, "ncclEpMaskClean: ep_group");
    CHECK_REFUSED(ncclEpGetAsyncError(group, words), no, "ncclEpGetAsyncError: ep_group");
    CHECK_REFUSED(ncclEpErrorClear(group), no, "ncclEpErrorClear: ep_group");
    CHECK_REFUSED(ncclEpErrorClear(NULL), ncclInvalidArgument, "ep_group: must not be NULL");
    EP_CHECK_NCCL(ncclEpGroupDestroy(group));
    ncclEpGroupConfig_t config = config_of(env, &kSmallHt);
    config.enable_mask = 1;
    EP_CHECK_NCCL(ncclEpCreateGroup(&group, env->comm, &config));
    CHECK_REFUSED(ncclEpErrorClear(group), no, "ep_group: a mask of lost ranks is not served");
    EP_CHECK_NCCL(ncclEpGroupDestroy(group));
}

// ---- Handles

typedef struct {
    ncclEpGroup_t group;
    ncclEpHandle_t handle;
    View ids;
    void* memory;
} Handles;

static void open_handles(Handles* it, const EpEnv* env, const Case* test) {
    memset(it, 0, sizeof(*it));
    it->group = group_of(env, test);
    const int64_t none[8] = {-1, -1, -1, -1, -1, -1, -1, -1};
    it->memory = ep_device_upload(none, sizeof(none));
    view_of(&it->ids, it->memory, ncclInt64, 4, 2, 0);
}

static void close_handles(Handles* it) {
    EP_CHECK(it->handle == NULL);
    EP_CHECK_NCCL(ncclEpGroupDestroy(it->group));
    ep_device_free(it->memory);
}

EP_TEST(handles_of_wrong_shape_are_not_made) {
    const ncclResult_t no = ncclInvalidArgument, later = ncclInvalidUsage;
    const ncclEpLayout_t em = NCCL_EP_LAYOUT_EXPERT_MAJOR, rm = NCCL_EP_LAYOUT_RANK_MAJOR;
    const ncclEpLayout_t flat = NCCL_EP_LAYOUT_FLAT;
    Handles ll, ht;
    open_handles(&ll, env, &kSmallLl);
    open_handles(&ht, env, &kSmallHt);
    const int most = 2 * env->size;
    ncclEpHandle_t* out = &ll.handle;
    CHECK_REFUSED(ncclEpInitHandle(NULL, ll.group, em, NULL, 2, NULL), no, "handle: must not be");
    CHECK_REFUSED(ncclEpInitHandle(out, NULL, em, NULL, 2, NULL), no, "ep_group: must not be NULL");
    CHECK_REFUSED(ncclEpInitHandle(out, ll.group, flat, NULL, 2, NULL), no, "layout: must be a");
    CHECK_REFUSED(ncclEpInitHandle(out, ll.group, NCCL_EP_LAYOUT_UNSET, NULL, 2, NULL), no, "got 0");
    CHECK_REFUSED(ncclEpInitHandle(out, ll.group, em, NULL, 0, NULL), no, "num_topk");
    CHECK_REFUSED(ncclEpInitHandle(out, ll.group, em, NULL, most + 1, NULL), no, "num_topk");
    CHECK_REFUSED(ncclEpInitHandle(out, ht.group, rm, NULL, 2, NULL), no, "layout: must be a");
    CHECK_REFUSED(ncclEpInitHandle(out, ht.group, em, NULL, 2, NULL), later, "layout: must be NCCL_EP_LAYOUT_FLAT");
    CHECK_REFUSED(ncclEpInitHandle(out, ht.group, flat, NULL, 0, NULL), later, "num_topk");
    CHECK_REFUSED(ncclEpInitHandle(out, ht.group, flat, NULL, -1, NULL), later, "got -1");
    CHECK_REFUSED(ncclEpInitHandle(out, ht.group, flat, NULL, 33, NULL), later, "1 to 32");
    ncclEpHandleConfig_t config = NCCL_EP_HANDLE_CONFIG_INIT;
    config.dispatch_output_per_expert_alignment = 3;
    CHECK_REFUSED(ncclEpInitHandle(out, ht.group, em, &config, 2, NULL), no, "power of two");
    CHECK_REFUSED(ncclEpHandleMemSize(ht.group, em, &config, &(size_t){7}, 2), no, "power of two");
    config.dispatch_output_per_expert_alignment = (size_t)1 << 33;
    CHECK_REFUSED(ncclEpInitHandle(out, ht.group, em, &config, 2, NULL), no, "must be countable in 31 bits");
    config.size = 15;
    CHECK_REFUSED(ncclEpInitHandle(out, ht.group, flat, &config, 2, NULL), no, "config.size");
    close_handles(&ll);
    close_handles(&ht);
}

EP_TEST(memory_of_callers_is_checked) {
    const ncclResult_t no = ncclInvalidArgument;
    const ncclEpLayout_t em = NCCL_EP_LAYOUT_EXPERT_MAJOR;
    Handles it;
    open_handles(&it, env, &kSmallLl);
    size_t size = 7;
    CHECK_REFUSED(ncclEpHandleMemSize(it.group, em, NULL, NULL, 2), no, "size: must not be NULL");
    CHECK_REFUSED(ncclEpHandleMemSize(it.group, em, NULL, &size, 0), no, "num_topk");
    EP_CHECK_EQ_U64(size, 7);
    EP_CHECK_NCCL(ncclEpHandleMemSize(it.group, em, NULL, &size, 2));
    View memory;
    view_of(&memory, it.memory, ncclInt8, size, 0, 0);
#define INIT ncclEpInitHandle(&it.handle, it.group, em, NULL, 2, &memory.tensor)
    CHECK_REFUSED(INIT, no, "handle_mem: must be uint8");
    memory.tensor.datatype = ncclUint8;
    memory.sizes[0] = size - 1;
    CHECK_REFUSED(INIT, no, "handle_mem: a handle's memory is too small");
    memory.sizes[0] = size + ((size_t)1 << 32);
    EP_CHECK_NCCL(INIT);
    EP_CHECK_NCCL(ncclEpHandleDestroy(it.handle));
    it.handle = NULL;
    memory.sizes[0] = size;
    memory.tensor.data = (unsigned char*)it.memory + 8;
    CHECK_REFUSED(INIT, no, "handle_mem: a handle's memory must begin at an address");
#undef INIT
    close_handles(&it);
}

#define CREATE(it, layout, info) \
    ncclEpCreateHandle(&(it).handle, (it).group, layout, &(it).ids.tensor, info, NULL, env->stream)

EP_TEST(handles_of_wrong_tensors_are_not_made) {
    const ncclResult_t no = ncclInvalidArgument;
    const ncclEpLayout_t em = NCCL_EP_LAYOUT_EXPERT_MAJOR, flat = NCCL_EP_LAYOUT_FLAT;
    Handles ll, ht;
    open_handles(&ll, env, &kSmallLl);
    open_handles(&ht, env, &kSmallHt);
    ncclEpLayoutInfo_t info = NCCL_EP_LAYOUT_INFO_INIT;
    CHECK_REFUSED(CREATE(ll, em, &info), no, "layout_info: must be NULL in low latency");
    info.size = 39;
    CHECK_REFUSED(CREATE(ht, flat, &info), no, "layout_info.size");
    info.size = sizeof(info);
    View total;
    view_of(&total, ht.memory, ncclFloat32, 1, 0, 0);
    info.recv_total_counter = &total.tensor;
    CHECK_REFUSED(CREATE(ht, flat, &info), no, "layout_info.recv_total_counter: must be int32 or");
    view_of(&total, NULL, ncclInt32, 1, 0, 0);
    total.tensor.ndim = 2;
    CHECK_REFUSED(CREATE(ht, flat, &info), no, "layout_info.recv_total_counter: must be int32 or");
    view_of(&total, (unsigned char*)ht.memory + 4, ncclInt64, 1, 0, 0);
    CHECK_REFUSED(CREATE(ht, flat, &info), no, "layout_info.recv_total_counter.data: must be a mul");
    view_of(&total, ht.memory, ncclFloat32, 1, 0, 0);
    info.recv_total_counter = NULL;
    info.expert_counters = &total.tensor;
    CHECK_REFUSED(CREATE(ht, flat, &info), no, "layout_info.expert_counters: must be int32 or");
    view_of(&total, ht.memory, ncclInt64, 1, 0, 0);
    CHECK_REFUSED(CREATE(ht, flat, &info), no, "layout_info.expert_counters.sizes[0]: must have room");
    CHECK_REFUSED(CREATE(ht, em, NULL), ncclInvalidUsage, "layout: must be NCCL_EP_LAYOUT_FLAT");
    ht.ids.tensor.datatype = ncclUint32;
    CHECK_REFUSED(CREATE(ht, flat, NULL), no, "topk_idx.datatype");
    ht.ids.tensor.datatype = ncclInt64;
    ht.ids.tensor.ndim = 1;
    CHECK_REFUSED(CREATE(ht, flat, NULL), no, "topk_idx.ndim");
    ht.ids.tensor.ndim = 3;
    ht.ids.sizes[1] = 0;
    CHECK_REFUSED(CREATE(ht, flat, NULL), no, "topk_idx.ndim");
    ht.ids.tensor.ndim = 2;
    CHECK_REFUSED(CREATE(ht, flat, NULL), ncclInvalidUsage, "topk_idx.sizes[1]: must be a top-k");
    ht.ids.sizes[1] = 2;
    ht.ids.sizes[0] = 5;
    CHECK_REFUSED(CREATE(ht, flat, NULL), no, "max_dispatch_tokens_per_rank");
    CHECK_REFUSED(ncclEpCreateHandle(&ll.handle, ll.group, em, NULL, NULL, NULL, env->stream), no,
                  "topk_idx: is required");
    EP_CHECK(ht.handle == NULL);
    close_handles(&ll);
    close_handles(&ht);
}

EP_TEST(wrong_descriptors_are_refused) {
    const ncclResult_t no = ncclInvalidArgument;
    const ncclEpLayout_t em = NCCL_EP_LAYOUT_EXPERT_MAJOR;
    Handles it;
    open_handles(&it, env, &kSmallLl);
    const View good = it.ids;
#define WITH(change, expected, words)              \
    it.ids = good;                                 \
    it.ids.tensor.sizes = it.ids.sizes;            \
    change;                                        \
    CHECK_REFUSED(CREATE(it, em, NULL), expected, words)
    WITH(it.ids.tensor.size = 47, no, "topk_idx.size: must be");
    WITH(it.ids.tensor.magic = NCCL_EP_MAGIC, no, "topk_idx.magic: must be");
    WITH(it.ids.tensor.ndim = 0, no, "topk_idx.ndim");
    WITH(it.ids.tensor.ndim = 1, no, "topk_idx");
    WITH(it.ids.tensor.sizes = NULL, no, "topk_idx.sizes: must not be NULL");
    WITH(it.ids.sizes[0] = (size_t)1 << 32, no, "topk_idx.sizes: must be numbers of 32 bits");
    WITH(it.ids.sizes[1] = 3 * (unsigned)env->size, no, "topk_idx.sizes[1]: must be a top-k");
    WITH(it.ids.tensor.data = NULL, no, "topk_idx.data: must not be NULL");
    // NCCL itself follows any address.
    if (dlsym(RTLD_DEFAULT, "ncclEpHostsimCommunicators") != NULL) {
        WITH((it.ids.tensor.data = NULL, it.ids.tensor.win_hdl = (ncclWindow_t)16), no,
             "topk_idx.win_hdl: ncclWinGetUserPtr: NCCL error 4");
    }
#undef WITH
    close_handles(&it);
}

EP_TEST(updates_keep_the_top_k) {
    Handles it;
    open_handles(&it, env, &kSmallHt);
    EP_CHECK_NCCL(ncclEpInitHandle(&it.handle, it.group, NCCL_EP_LAYOUT_FLAT, NULL, 1, NULL));
    CHECK_REFUSED(ncclEpUpdateHandle(it.handle, &it.ids.tensor, NULL, env->stream),
                  ncclInvalidArgument, "topk_idx.sizes[1]: must be the handle's top-k");
    EP_CHECK_NCCL(ncclEpHandleDestroy(it.handle));
    CHECK_REFUSED(ncclEpHandleDestroy(it.handle), ncclInvalidArgument, "was destroyed already");
    CHECK_REFUSED(ncclEpUpdateHandle(it.handle, &it.ids.tensor, NULL, env->stream),
                  ncclInvalidArgument, "handle: was destroyed already");
    it.handle = NULL;
    EP_CHECK_NCCL(ncclEpHandleDestroy(NULL));
    close_handles(&it);
}
