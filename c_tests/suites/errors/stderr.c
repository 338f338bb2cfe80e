// What a refusal prints: one line on stderr if NCCL_DEBUG asks for warnings, otherwise nothing. The
// library reads NCCL_DEBUG once per process, so this program is started again for each setting.
#define _GNU_SOURCE  // environ, fileno
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "suites/errors/errors.h"

// The new process makes one refused call and nothing else.
int refuse_once(void) {
    const ncclResult_t result = ncclEpCreateGroup(NULL, NULL, NULL, NULL, NULL, NULL);
    return result == ncclInvalidArgument ? 0 : 1;
}

// Starts `path` with stderr going to `output`; returns its process id once it has ended
// successfully.
static pid_t run_refuse_once(char* path, FILE* output) {
    char option[] = "--refuse-once";
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
    char path[] = "/proc/self/exe";
    FILE* output = tmpfile();
    EP_REQUIRE(output != NULL);
    EP_REQUIRE((level != NULL ? setenv("NCCL_DEBUG", level, 1) : unsetenv("NCCL_DEBUG")) == 0);
    const pid_t child = run_refuse_once(path, output);
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
        snprintf(expected, sizeof(expected),
                 "%s:%d:%d NCCL_EP WARN ncclEpCreateGroup: comm: must not be NULL\n", host,
                 (int)child, (int)child);
    }
    if (!EP_CHECK(strcmp(printed, expected) == 0)) {
        fprintf(stderr, "got:      %s\nexpected: %s\n", printed, expected);
    }
}

void one_line_on_stderr(EpEnv* env) {
    if (env->rank != 0) return;
    const char* set = getenv("NCCL_DEBUG");
    char* before = set != NULL ? strdup(set) : NULL;
    check_printed("WARN", true);
    check_printed("INFO", true);
    check_printed("VERSION", false);
    check_printed(NULL, false);
    if (before != NULL) EP_REQUIRE(setenv("NCCL_DEBUG", before, 1) == 0);
    free(before);
}
