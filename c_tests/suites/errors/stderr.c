// What a refusal prints: one line on stderr if NCCL_DEBUG asks for warnings, otherwise nothing; and what is printed for
// variables that have no effect. The library reads NCCL_DEBUG once per process, so this program is started again for
// each setting.
#define _GNU_SOURCE  // environ, fileno
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include "suites/errors/errors.h"

// The new process makes one refused call and nothing else.
int refuse_once(void) {
    const ncclResult_t result = ncclEpCreateGroup(NULL, NULL, NULL, NULL, NULL, NULL);
    return result == ncclInvalidArgument ? 0 : 1;
}

// The new process makes two groups of one rank.
int make_groups(void) {
    ncclUniqueId id;
    ncclComm_t comm = NULL;
    const ncclEpGroupConfig_t config = ep_group_config(NCCL_EP_ALGO_LOW_LATENCY, 1, 1, 16);
    bool good = cudaSetDevice(0) == cudaSuccess && ncclGetUniqueId(&id) == ncclSuccess &&
                ncclCommInitRank(&comm, 1, id, 0) == ncclSuccess;
    for (int i = 0; i < 2 && good; ++i) {
        ncclEpGroup_t group = NULL;
        good = ncclEpCreateGroup(&group, comm, &config, NULL, NULL, NULL) == ncclSuccess &&
               ncclEpGroupDestroy(group, NULL) == ncclSuccess;
    }
    return good && ncclCommDestroy(comm) == ncclSuccess ? 0 : 1;
}

// The new process has a group that fails on the device, and then a refused call.
int fail_and_be_refused(void) {
    enum { kRows = 2, kElements = 16 };
    ncclUniqueId id;
    ncclComm_t comm = NULL;
    ncclEpGroup_t group = NULL;
    ncclEpHandle_t handle = NULL;
    const ncclEpGroupConfig_t config = ep_group_config(NCCL_EP_ALGO_HIGH_THROUGHPUT, kRows, kRows, 2 * kElements);
    EP_REQUIRE_CUDA(cudaSetDevice(0));
    EP_REQUIRE_NCCL(ncclGetUniqueId(&id));
    EP_REQUIRE_NCCL(ncclCommInitRank(&comm, 1, id, 0));
    EP_REQUIRE_NCCL(ncclEpCreateGroup(&group, comm, &config, NULL, NULL, NULL));
    const int64_t numbers[kRows] = {0, 1};
    void* data[] = {ep_device_upload(numbers, sizeof(numbers)), ep_device_alloc(kRows * 2 * kElements)};
    EpView ids, rows, out;
    ep_view_2d(&ids, data[0], ncclInt64, NCCL_EP_TENSOR_TAG_TOPK_IDX, kRows, 1);
    ep_view_2d(&rows, data[1], ncclBfloat16, NCCL_EP_TENSOR_TAG_TOKENS, kRows, kElements);
    ep_view_2d(&out, data[1], ncclBfloat16, NCCL_EP_TENSOR_TAG_TOKENS, 1, kElements);
    EP_REQUIRE_NCCL(ncclEpCreateHandle(&handle, group, &ids.tensor, NULL, 0, NULL, NULL, false));
    const ncclNDTensor_t* inputs[] = {&rows.tensor};
    ncclNDTensor_t* outputs[] = {&out.tensor};
    EP_REQUIRE_NCCL(ncclEpDispatch(handle, inputs, 1, outputs, 1, NULL, 0, 0, NULL, NULL));
    EP_REQUIRE_CUDA(cudaStreamSynchronize(NULL));
    const ncclResult_t refused = ncclEpDispatch(handle, NULL, 1, outputs, 1, NULL, 0, 0, NULL, NULL);
    EP_REQUIRE_NCCL(ncclEpHandleDestroy(handle));
    EP_REQUIRE_NCCL(ncclEpGroupDestroy(group, NULL));
    EP_REQUIRE_CUDA(cudaFree(data[0]));
    EP_REQUIRE_CUDA(cudaFree(data[1]));
    return refused == ncclInvalidArgument && ncclCommDestroy(comm) == ncclSuccess ? 0 : 1;
}

// Starts this program with one option and with stderr going to `output`; returns its process id once it has ended
// successfully.
static pid_t run_again(const char* with, FILE* output) {
    char path[] = "/proc/self/exe";
    char option[32];
    snprintf(option, sizeof(option), "%s", with);
    char* const arguments[] = {path, option, NULL};
    posix_spawn_file_actions_t actions;
    EP_REQUIRE(posix_spawn_file_actions_init(&actions) == 0);
    EP_REQUIRE(posix_spawn_file_actions_adddup2(&actions, fileno(output), STDERR_FILENO) == 0);
    pid_t child = 0;
    EP_REQUIRE(posix_spawn(&child, path, &actions, NULL, arguments, environ) == 0);
    int status = -1;
    EP_REQUIRE(waitpid(child, &status, 0) == child);
    EP_CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    posix_spawn_file_actions_destroy(&actions);
    return child;
}

static void check_printed(const char* level, bool wanted) {
    FILE* output = tmpfile();
    EP_REQUIRE(output != NULL);
    EP_WITH_VARIABLE("NCCL_DEBUG", level);
    const pid_t child = run_again("--refuse-once", output);
    char printed[1024];
    char expected[1024] = "";
    rewind(output);
    printed[fread(printed, 1, sizeof(printed) - 1, output)] = '\0';
    fclose(output);
    if (wanted) {
        char host[256];
        EP_REQUIRE(gethostname(host, sizeof(host)) == 0);
        host[strcspn(host, ".")] = '\0';
        // NCCL's prefix; the child has one thread.
        snprintf(expected, sizeof(expected), "%s:%d:%d NCCL_EP WARN ncclEpCreateGroup: comm: must not be NULL\n", host,
                 (int)child, (int)child);
    }
    if (!EP_CHECK(strcmp(printed, expected) == 0)) {
        fprintf(stderr, "got:      %s\nexpected: %s\n", printed, expected);
    }
}

EP_TEST(one_line_on_stderr) {
    if (env->rank != 0) return;
    check_printed("WARN", true);
    check_printed("INFO", true);
    check_printed("VERSION", false);
    check_printed(NULL, false);
}

// ---- Variables ---------------------------------------------------------------------------------

typedef struct {
    const char* name;
    const char* value;
    const char* text;  // behind name and value; NULL for one that is used, or is none of the library's business
} Variable;

static const Variable kVariables[] = {
    {"NCCL_EP_TIMEOUT_MS", "abc", "; allowed: milliseconds, 1 or more"},
    {"NCCL_EP_TIMEOUT_MS", "-5", "; allowed: milliseconds, 1 or more"},
    {"NCCL_EP_TIMEOUT_MS", "0", "; allowed: milliseconds, 1 or more"},
    {"NCCL_EP_TIMEOUT_MS", "60000", NULL},
    {"NCCL_EP_TIMEOUT_MS", "", NULL},
    {"NCCL_EP_LL_COMBINE", "Exact", "; allowed: reduce or exact"},
    {"NCCL_EP_LL_COMBINE", "exact", NULL},
    {"NCCL_EP_HT_CHUNK_BYTES", "1k", "; allowed: bytes, 1 or more"},
    {"NCCL_EP_TIMEOUT", "5", "; no variable has this name, but NCCL_EP_TIMEOUT_MS may be meant"},
    {"NCCL_EP_ENABLE_RDMA", "1", "; no variable has this name"},
    {"NCCL_EP_CHECK", "yes", "; allowed: 0 or 1"},
    {"NCCL_EP_CHECK", "0", NULL},
    {"NCCL_EP_LIBRARY", "elsewhere.so", NULL},
    {"NCCL_EPS", "1", NULL},
};

// All warnings of the library in what a process printed.
static void keep_warnings(FILE* output, char* kept, size_t room) {
    char line[1024];
    kept[0] = '\0';
    rewind(output);
    while (fgets(line, sizeof(line), output) != NULL) {
        const char* warning = strstr(line, " NCCL_EP WARN ");
        if (warning == NULL) continue;
        strncat(kept, warning + strlen(" NCCL_EP WARN "), room - strlen(kept) - 1);
    }
}

// What this program, started with `option`, is warned of.
static void check_warnings(const char* option, const char* expected) {
    FILE* output = tmpfile();
    EP_REQUIRE(output != NULL);
    (void)run_again(option, output);
    char printed[4096];
    keep_warnings(output, printed, sizeof(printed));
    fclose(output);
    if (!EP_CHECK(strcmp(printed, expected) == 0)) {
        fprintf(stderr, "got:      %s\nexpected: %s\n", printed, expected);
    }
}

// A refusal for another reason is not the failure.
EP_TEST_HT(a_failure_is_told_once) {
    if (env->rank != 0) return;
    EP_WITH_VARIABLE("NCCL_DEBUG", "WARN");
    check_warnings("--fail-and-be-refused",
                   "ncclEpDispatch: inputs: must not be NULL when its count is not 0\n"
                   "ncclEpGroupDestroy: the group has failed: ncclEpDispatch (high throughput): "
                   "outputs[TOKENS].sizes[0]: must hold all tokens that this rank receives "
                   "(got 1, expected 2 or more)\n");
}

static void check_variable(const Variable* variable) {
    EP_WITH_VARIABLE(variable->name, variable->value);
    char expected[256] = "";
    if (variable->text != NULL) {
        snprintf(expected, sizeof(expected), "%s=%s is ignored%s\n", variable->name, variable->value, variable->text);
    }
    check_warnings("--make-groups", expected);
}

// Each is told once in a process, by its first group. The ranks of other processes would tell the same.
EP_TEST(variables_in_vain) {
    if (env->rank != 0) return;
    EP_WITH_VARIABLE("NCCL_DEBUG", "WARN");
    for (size_t i = 0; i < COUNT(kVariables); ++i) check_variable(&kVariables[i]);
}

// ---- Choices -----------------------------------------------------------------------------------

#define PASSED_OVER(what, operation, reason) \
    what " for " operation " is passed over: " reason "; that is said once\n"

// Each reason is told once in a group, however often it applies.
EP_TEST(choices_that_are_passed_over) {
    if (env->rank != 0) return;
    EP_WITH_VARIABLE("NCCL_DEBUG", "WARN");
    check_warnings("--pass-over", PASSED_OVER("the launch of a choice", "ll_dispatch",
                                              "threads must be a multiple of 32 up to 1024")
                                      PASSED_OVER("a choice", "ll_combine",
                                                  "ll.exact needs as many ranks as ids of a token, or a "
                                                  "group whose combines are exact")
                                          PASSED_OVER("a choice", "ll_combine", "ht.pull is of another operation"));
}
