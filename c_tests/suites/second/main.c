// What the tests of the later interface share, and where they begin; see second.h.
#define _GNU_SOURCE  // memfd_create, setenv
#include "suites/second/second.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include "harness/nodes.h"
#include "reference/ll.h"

const Case kSmallLl = {2, 4, 2, ncclBfloat16, 32, kRefDistinct, .kind = kLlExperts};
const Case kSmallHt = {2, 4, 2, ncclBfloat16, 32, kRefDistinct, .kind = kHtFlat, .send_only = true};

bool is_ll(const Case* test) { return test->kind == kLlExperts || test->kind == kLlRanks; }

// The backends of the CPU have both modes.
bool ep_has_high_throughput(const EpEnv* env) {
    (void)env;
    return true;
}

enum { kMore = 16, kGarbage = 0xee };

void* old_struct(Grown kind, const void* now, Generation generation) {
    // In generation 3, in 4, now.
    static const unsigned kBytes[][3] = {[kGroupConfig] = {96, 112, sizeof(ncclEpGroupConfig_t)},
                                         [kLayoutInfo] = {40, 48, sizeof(ncclEpLayoutInfo_t)},
                                         [kDispatchConfig] = {20, 24, sizeof(ncclEpDispatchConfig_t)},
                                         [kCombineInputs] = {24, 32, sizeof(ncclEpCombineInputs_t)},
                                         [kCombineConfig] = {16, 20, sizeof(ncclEpCombineConfig_t)}};
    const unsigned* bytes = kBytes[kind];
    const unsigned known = generation == kGeneration3 ? bytes[0] : generation == kGeneration4 ? bytes[1] : bytes[2];
    const unsigned size = known + (generation == kLaterGeneration ? kMore : 0);
    void* copy = malloc(size);
    EP_REQUIRE(copy != NULL);
    memset(copy, kGarbage, size);
    memcpy(copy, now, known);
    memcpy(copy, &size, sizeof(size));
    return copy;
}

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

void view_of(View* view, void* data, ncclDataType_t datatype, size_t size0, size_t size1, size_t size2) {
    *view = (View){NCCL_EP_TENSOR_INIT, {size0, size1, size2}};
    view->tensor.ndim = size2 > 0 ? 3 : size1 > 0 ? 2 : 1;
    view->tensor.datatype = datatype;
    view->tensor.data = size0 > 0 ? data : NULL;
    view->tensor.sizes = view->sizes;
    if (g_windows && view->tensor.data != NULL) into_window(&view->tensor);
}

ncclEpGroupConfig_t config_of(const EpEnv* env, const Case* test) {
    ncclEpGroupConfig_t config = NCCL_EP_GROUP_CONFIG_INIT;
    config.algorithm = is_ll(test) ? NCCL_EP_ALGO_LOW_LATENCY : NCCL_EP_ALGO_HIGH_THROUGHPUT;
    config.num_experts = test->local_experts * (unsigned)env->size;
    config.max_dispatch_tokens_per_rank = test->max_tokens;
    config.max_recv_tokens_per_rank = test->recv_rows;
    if (test->drops) config.overflow_policy = NCCL_EP_OVERFLOW_DROP;
    config.num_topk = test->kind == kHtZones && test->recv_rows == 0 ? test->top_k : 0;
    config.max_token_bytes = test->hidden * (unsigned)ep_datatype_size(test->datatype);
    // Scales of a row are no longer than this.
    config.max_token_bytes += test->scaled ? 16 : 0;
    return config;
}

ncclEpGroup_t group_of(const EpEnv* env, const Case* test) {
    const ncclEpGroupConfig_t now = config_of(env, test);
    EP_SCOPED void* config = old_struct(kGroupConfig, &now, test->generation);
    ncclEpGroup_t group = NULL;
    EP_REQUIRE_NCCL(ncclEpCreateGroup(&group, env->comm, config));
    return group;
}

ncclEpLayout_t layout_of(const Case* test) {
    return test->kind == kHtFlat    ? NCCL_EP_LAYOUT_FLAT
           : test->kind == kLlRanks ? NCCL_EP_LAYOUT_RANK_MAJOR
                                    : NCCL_EP_LAYOUT_EXPERT_MAJOR;
}

ncclEpHandleConfig_t handle_config_of(const Case* test) {
    ncclEpHandleConfig_t config = NCCL_EP_HANDLE_CONFIG_INIT;
    config.dispatch_output_per_expert_alignment = test->alignment;
    return config;
}

bool ranks_share_a_node(void) { return ep_num_nodes() == 1; }

int make_file(char name[kPathBytes]) {
    const int file = memfd_create("nccl_ep_second", 0);
    snprintf(name, kPathBytes, "/proc/self/fd/%d", file);
    return file;
}

// Texts are told by NCCL_DEBUG alone, which the library reads before its first line.
static int g_log = -1;

__attribute__((constructor)) static void open_log(void) {
    char name[kPathBytes];
    const int made = make_file(name);
    g_log = open(name, O_RDONLY);
    snprintf(name, sizeof(name), "/proc/self/fd/%d", g_log);
    const bool is_open = g_log >= 0 && close(made) == 0;
    if (!is_open || setenv("NCCL_DEBUG", "WARN", 1) != 0 || setenv("NCCL_DEBUG_FILE", name, 1) != 0) {
        abort();
    }
}

// The lines that were logged since the last call.
static const char* new_lines(void) {
    static char lines[8192];
    const ssize_t got = read(g_log, lines, sizeof(lines) - 1);
    lines[got > 0 ? got : 0] = '\0';
    return lines;
}

bool has_new_lines(void) { return new_lines()[0] != '\0'; }

void forget_lines(void) { EP_REQUIRE(lseek(g_log, 0, SEEK_END) >= 0); }

void check_refused(EpSite site, ncclResult_t actual, ncclResult_t expected, const char* words) {
    const char* lines = new_lines();
    if (ep_check_result(site, actual, expected)) ep_check_str_contains(site, lines, words);
}

int main(int argc, char** argv) {
    ref_ll_sum_unset = kRefExact;  // of this interface
    return ep_main(argc, argv);
}
