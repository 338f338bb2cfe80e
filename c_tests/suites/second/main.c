// What the tests of the later interface share, and where they begin; see second.h.
#define _GNU_SOURCE  // mkstemp, setenv
#include "suites/second/second.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <unistd.h>

#include "harness/nodes.h"
#include "reference/ll.h"

const Case kSmallLl = {NCCL_EP_ALGO_LOW_LATENCY, 2, 4, 2, ncclBfloat16, 32, kRefDistinct, false, 0,
                       kGeneration5, false, false, NULL, false, false, false, 0, false, false};
const Case kSmallHt = {NCCL_EP_ALGO_HIGH_THROUGHPUT, 2, 4, 2, ncclBfloat16, 32, kRefDistinct, false, 0,
                       kGeneration5, false, false, NULL, false, false, false, 0, false, false};

// The backends of the CPU have both modes.
bool ep_has_high_throughput(const EpEnv* env) {
    (void)env;
    return true;
}

enum { kMore = 16, kGarbage = 0xee };

static void* copy_of(const void* now, size_t bytes, size_t bytes_now) {
    const size_t known = bytes < bytes_now ? bytes : bytes_now;
    const unsigned size = (unsigned)bytes;
    void* copy = malloc(bytes);
    EP_REQUIRE(copy != NULL);
    memset(copy, kGarbage, bytes);
    memcpy(copy, now, known);
    memcpy(copy, &size, sizeof(size));
    return copy;
}

static size_t bytes_in(Generation generation, size_t third, size_t now) {
    return generation == kGeneration3 ? third : generation == kLaterGeneration ? now + kMore : now;
}

void* old_group_config(const ncclEpGroupConfig_t* config, Generation generation) {
    const size_t bytes =
        generation == kGeneration4 ? 112 : bytes_in(generation, 96, sizeof(*config));
    return copy_of(config, bytes, sizeof(*config));
}

void* old_layout_info(const ncclEpLayoutInfo_t* info, Generation generation) {
    return copy_of(info, bytes_in(generation, 40, sizeof(*info)), sizeof(*info));
}

void* old_dispatch_config(const ncclEpDispatchConfig_t* config, Generation generation) {
    return copy_of(config, bytes_in(generation, 20, sizeof(*config)), sizeof(*config));
}

void* old_combine_inputs(const ncclEpCombineInputs_t* inputs, Generation generation) {
    return copy_of(inputs, bytes_in(generation, 24, sizeof(*inputs)), sizeof(*inputs));
}

void* old_combine_config(const ncclEpCombineConfig_t* config, Generation generation) {
    return copy_of(config, bytes_in(generation, 16, sizeof(*config)), sizeof(*config));
}

void old_free(void* copy) { free(copy); }

static bool g_windows;
static ncclComm_t g_comm;
// Of the stand-ins alone.
static ncclResult_t (*g_register)(ncclComm_t, void*, size_t, ncclWindow_t*, int);
static ncclResult_t (*g_deregister)(ncclComm_t, ncclWindow_t);
static ncclWindow_t g_made[4096];
static unsigned g_num_made;
enum { kBeforeView = 64 };

bool views_into_windows(const EpEnv* env) {
    g_comm = env->comm;
    memcpy(&g_register, &(void*){dlsym(RTLD_DEFAULT, "ncclCommWindowRegister")}, sizeof(g_register));
    memcpy(&g_deregister, &(void*){dlsym(RTLD_DEFAULT, "ncclCommWindowDeregister")}, sizeof(g_deregister));
    g_windows = dlsym(RTLD_DEFAULT, "ncclEpHostsimCommunicators") != NULL;
    if (!g_windows) ep_skip("windows of these ranks are made together");
    return g_windows;
}

void views_end_windows(const EpEnv* env) {
    for (; g_num_made > 0; --g_num_made) {
        EP_CHECK_NCCL(g_deregister(env->comm, g_made[g_num_made - 1]));
    }
    g_windows = false;
}

static void into_window(ncclEpTensor_t* tensor) {
    EP_REQUIRE(g_num_made < sizeof(g_made) / sizeof(g_made[0]));
    ncclWindow_t* window = &g_made[g_num_made++];
    unsigned char* data = tensor->data;
    EP_REQUIRE_NCCL(g_register(g_comm, data - kBeforeView, kBeforeView + 1, window, NCCL_WIN_DEFAULT));
    tensor->data = NULL;
    tensor->win_hdl = *window;
    tensor->win_offset = kBeforeView;
}

void view_of(View* view, void* data, ncclDataType_t datatype, size_t size0, size_t size1,
             size_t size2) {
    view->tensor = NCCL_EP_TENSOR_INIT;
    view->sizes[0] = size0;
    view->sizes[1] = size1;
    view->sizes[2] = size2;
    view->tensor.ndim = size2 > 0 ? 3 : size1 > 0 ? 2 : 1;
    view->tensor.datatype = datatype;
    view->tensor.data = size0 > 0 ? data : NULL;
    view->tensor.sizes = view->sizes;
    if (g_windows && view->tensor.data != NULL) into_window(&view->tensor);
}

void view_scrap(View* view) { memset(view, kGarbage, sizeof(*view)); }

RefShape shape_of(const EpEnv* env, const Case* test) {
    const RefShape shape = {test->local_experts * (unsigned)env->size, test->max_tokens, test->top_k,
                            test->datatype, test->hidden};
    return shape;
}

unsigned capacity_of(const EpEnv* env, const Case* test) {
    return (unsigned)env->size * test->max_tokens;
}

// Ids of 32 bits name the same experts; those far away are no less far.
static void upload_ids(Inputs* in) {
    int64_t* ids = in->routing->topk_idx[in->rank];
    if (!in->test->narrow_ids) {
        ref_buffer_upload(&in->ids, ids);
        return;
    }
    const size_t entries = ref_entries_of(in->routing, in->rank);
    EP_SCOPED int32_t* narrow = ref_host_new(entries * sizeof(int32_t));
    for (size_t i = 0; i < entries; ++i) {
        narrow[i] = ids[i] < -1 ? INT32_MIN : ids[i] > INT32_MAX ? INT32_MAX : (int32_t)ids[i];
    }
    ref_buffer_upload(&in->ids, narrow);
}

void inputs_renew(Inputs* in, uint64_t seed) {
    ref_routing_change(in->routing, kRefReplace, seed);
    ref_routing_new_weights(in->routing, seed);
    upload_ids(in);
    ref_buffer_upload(&in->weights, in->routing->weights[in->rank]);
}

void view_of_ids(View* view, const Inputs* in) {
    const ncclDataType_t datatype = in->test->narrow_ids ? ncclInt32 : ncclInt64;
    view_of(view, ref_buffer_data(&in->ids), datatype, in->num_tokens, in->test->top_k, 0);
}

void scrap_ids(const Inputs* in) { ref_buffer_poison(&in->ids); }

void inputs_open(Inputs* in, const EpEnv* env, const Case* test, uint64_t seed) {
    const RefShape shape = shape_of(env, test);
    in->env = env;
    in->test = test;
    in->rank = (unsigned)env->rank;
    in->routing = ref_routing_drawn((unsigned)env->size, &shape, test->style, test->uneven, seed);
    if (test->algorithm == NCCL_EP_ALGO_LOW_LATENCY) ref_routing_fit(in->routing, capacity_of(env, test));
    in->num_tokens = in->routing->num_tokens[in->rank];
    in->tokens = (RefRows){test->datatype, test->hidden, seed + 1, false};
    in->results = (RefRows){test->datatype, test->hidden, seed + 2, false};
    in->scales = (RefRows){ncclBfloat16, kScales, seed + 3, false};
    in->row_bytes = ref_row_bytes(&in->tokens);
    const size_t entries = ref_entries_of(in->routing, in->rank);
    in->ids = ref_buffer_new_input(entries * (test->narrow_ids ? sizeof(int32_t) : sizeof(int64_t)));
    in->weights = ref_buffer_new_input(entries * sizeof(float));
    in->tokens_in = ref_buffer_new_input(in->num_tokens * in->row_bytes);
    in->combined = ref_buffer_new(in->num_tokens * in->row_bytes);
    upload_ids(in);
    ref_buffer_upload(&in->weights, in->routing->weights[in->rank]);
    void* rows = ref_host_new(in->num_tokens * in->row_bytes);
    ref_rows_fill(&in->tokens, in->rank, 0, in->num_tokens, rows);
    ref_buffer_upload(&in->tokens_in, rows);
    free(rows);
    in->scales_in = ref_buffer_new_input(in->num_tokens * ref_row_bytes(&in->scales));
    rows = ref_host_new(in->scales_in.bytes);
    ref_rows_fill(&in->scales, in->rank, 0, in->num_tokens, rows);
    ref_buffer_upload(&in->scales_in, rows);
    free(rows);
}

size_t scale_bytes(const Case* test, size_t rows) { return test->scaled ? rows * kScales * 2 : 0; }

void set_scales(ScaleViews* views, const Inputs* in, const RefBuffer* out, const View* rows,
                ncclEpDispatchInputs_t* inputs, ncclEpDispatchOutputs_t* outputs, ncclEpDispatchConfig_t* config) {
    if (!in->test->scaled) return;
    view_of(&views->in, ref_buffer_data(&in->scales_in), ncclBfloat16, in->num_tokens, kScales, 0);
    const bool is_flat = rows->tensor.ndim == 2;
    view_of(&views->out, ref_buffer_data(out), ncclBfloat16, rows->sizes[0], is_flat ? kScales : rows->sizes[1],
            is_flat ? 0 : kScales);
    inputs->scales = &views->in.tensor;
    outputs->scales = &views->out.tensor;
    config->quant_recipe = NCCL_EP_DISP_QUANT_FWD;
}

void inputs_close(Inputs* in) {
    RefBuffer* buffers[] = {&in->ids, &in->weights, &in->tokens_in, &in->combined, &in->scales_in};
    for (size_t i = 0; i < sizeof(buffers) / sizeof(buffers[0]); ++i) ref_buffer_free(buffers[i]);
    ref_routing_free(in->routing);
}

ncclEpGroupConfig_t config_of(const EpEnv* env, const Case* test) {
    ncclEpGroupConfig_t config = NCCL_EP_GROUP_CONFIG_INIT;
    config.algorithm = test->algorithm;
    config.num_experts = test->local_experts * (unsigned)env->size;
    config.max_dispatch_tokens_per_rank = test->max_tokens;
    config.max_recv_tokens_per_rank = test->recv_rows;
    if (test->drops) config.overflow_policy = NCCL_EP_OVERFLOW_DROP;
    config.num_topk = test->alignment > 0 && test->recv_rows == 0 ? test->top_k : 0;
    config.max_token_bytes = test->hidden * (unsigned)ep_datatype_size(test->datatype);
    config.max_token_bytes += (unsigned)scale_bytes(test, 1);
    return config;
}

ncclEpGroup_t group_of(const EpEnv* env, const Case* test) {
    const ncclEpGroupConfig_t now = config_of(env, test);
    void* config = old_group_config(&now, test->generation);
    ncclEpGroup_t group = NULL;
    EP_REQUIRE_NCCL(ncclEpCreateGroup(&group, env->comm, config));
    old_free(config);
    return group;
}

static ncclEpLayout_t layout_of(const Case* test) {
    const bool is_ll = test->algorithm == NCCL_EP_ALGO_LOW_LATENCY;
    if (test->by_rank) return NCCL_EP_LAYOUT_RANK_MAJOR;
    return is_ll || test->alignment > 0 ? NCCL_EP_LAYOUT_EXPERT_MAJOR : NCCL_EP_LAYOUT_FLAT;
}

static ncclEpHandleConfig_t handle_config_of(const Case* test) {
    ncclEpHandleConfig_t config = NCCL_EP_HANDLE_CONFIG_INIT;
    config.dispatch_output_per_expert_alignment = test->alignment;
    return config;
}

bool ranks_share_a_node(void) { return ep_num_nodes() == 1; }

ncclEpHandle_t handle_in_memory(ncclEpGroup_t group, const Case* test, const void* bytes) {
    const ncclEpLayout_t layout = layout_of(test);
    const int top_k = (int)test->top_k;
    size_t size = 0;
    const ncclEpHandleConfig_t config = handle_config_of(test);
    EP_CHECK_NCCL(ncclEpHandleMemSize(group, layout, &config, &size, top_k));
    *test->memory = ref_buffer_new(size);
    if (bytes != NULL) ref_buffer_upload(test->memory, bytes);
    View memory;
    view_of(&memory, ref_buffer_data(test->memory), ncclUint8, size, 0, 0);
    ncclEpHandle_t handle = NULL;
    EP_CHECK_NCCL(ncclEpInitHandle(&handle, group, layout, &config, top_k, &memory.tensor));
    view_scrap(&memory);
    return handle;
}

ncclEpHandle_t handle_without_routing(ncclEpGroup_t group, const Case* test) {
    if (test->memory != NULL) return handle_in_memory(group, test, NULL);
    const ncclEpHandleConfig_t config = handle_config_of(test);
    ncclEpHandle_t handle = NULL;
    EP_CHECK_NCCL(ncclEpInitHandle(&handle, group, layout_of(test), &config, (int)test->top_k, NULL));
    return handle;
}

ncclEpHandle_t handle_of(ncclEpGroup_t group, const Case* test, const View* ids,
                         const ncclEpLayoutInfo_t* info, cudaStream_t stream) {
    const ncclEpLayout_t layout = layout_of(test);
    const ncclEpHandleConfig_t config = handle_config_of(test);
    void* old = info != NULL ? old_layout_info(info, test->generation) : NULL;
    ncclEpHandle_t handle = NULL;
    if (test->memory != NULL || test->updated) {
        handle = handle_without_routing(group, test);
        EP_CHECK_NCCL(ncclEpUpdateHandle(handle, &ids->tensor, old, stream));
    } else {
        EP_CHECK_NCCL(
            ncclEpCreateHandle(&handle, group, layout, &ids->tensor, old, &config, stream));
    }
    old_free(old);
    return handle;
}

// Texts are told by NCCL_DEBUG alone, which the library reads before its first line.
static int g_log = -1;

__attribute__((constructor)) static void open_log(void) {
    const char* folder = getenv("TMPDIR");
    char name[4096];
    snprintf(name, sizeof(name), "%s/nccl_ep_second_XXXXXX", folder != NULL ? folder : P_tmpdir);
    const int made = mkstemp(name);
    g_log = open(name, O_RDONLY);
    const bool is_open = made >= 0 && close(made) == 0 && g_log >= 0;
    if (!is_open || setenv("NCCL_DEBUG", "WARN", 1) != 0 || setenv("NCCL_DEBUG_FILE", name, 1) != 0) {
        abort();
    }
}

__attribute__((destructor)) static void remove_log(void) { unlink(getenv("NCCL_DEBUG_FILE")); }

// The lines that were logged since the last call.
static const char* new_lines(void) {
    static char lines[8192];
    const ssize_t got = read(g_log, lines, sizeof(lines) - 1);
    lines[got > 0 ? got : 0] = '\0';
    return lines;
}

void check_refused(EpSite site, ncclResult_t actual, ncclResult_t expected, const char* words) {
    const char* lines = new_lines();
    if (ep_check_result(site, actual, expected)) ep_check_str_contains(site, lines, words);
}

int main(int argc, char** argv) {
    ref_ll_sum_unset = kRefExact;  // of this interface
    return ep_main(argc, argv);
}
