// The libraries of both interfaces in one process.
#define _GNU_SOURCE  // dladdr
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "suites/second/second.h"

// The configuration of the first release, of which only this test knows here.
typedef struct {
    unsigned version, algorithm, num_experts, max_tokens, token_bytes;
    unsigned long rdma_buffer_size;
    unsigned num_qp, num_channels;
} FirstConfig;

static void* first_library(void) {
    Dl_info stand_ins;
    char path[4096] = "";
    if (dladdr((void*)(size_t)&cudaMalloc, &stand_ins) != 0) {
        const char* end = strrchr(stand_ins.dli_fname, '/');
        const int length = end != NULL ? (int)(end - stand_ins.dli_fname) : 0;
        snprintf(path, sizeof(path), "%.*s/libnccl_ep.so", length, stand_ins.dli_fname);
    }
    return dlopen(path, RTLD_NOW | RTLD_LOCAL);
}

// One at a time; a creation that failed counts for nothing.
EP_TEST(a_process_has_groups_of_one_library) {
    void* first = first_library();
    if (first == NULL) {
        ep_skip("the first release's library is not beside the stand-ins");
        return;
    }
    ncclResult_t (*create)(void**, ncclComm_t, const FirstConfig*, cudaStream_t, void*, void*);
    void* found = dlsym(first, "ncclEpCreateGroup");
    memcpy(&create, &found, sizeof(create));
    ncclResult_t (*destroy)(void*, cudaStream_t);
    found = dlsym(first, "ncclEpGroupDestroy");
    memcpy(&destroy, &found, sizeof(destroy));
    const FirstConfig config = {.version = 1, .num_experts = (unsigned)env->size, .max_tokens = 1,
                                .token_bytes = 16};
    ncclEpGroup_t own = group_of(env, &kSmallLl);
    void* group = NULL;
    CHECK_REFUSED(create(&group, env->comm, &config, env->stream, NULL, NULL), ncclInvalidUsage,
                  "this process: has groups of libnccl_ep.so.0");
    EP_CHECK(group == NULL);
    EP_CHECK_NCCL(ncclEpGroupDestroy(own));
    ncclEpGroupConfig_t other = config_of(env, &kSmallLl);
    other.enable_mask = 1;
    CHECK_REFUSED(ncclEpCreateGroup(&own, env->comm, &other), ncclInvalidUsage, "config.enable_mask");
    // A network of a case before may still be ending.
    ncclResult_t made = create(&group, env->comm, &config, env->stream, NULL, NULL);
    for (unsigned i = 0; made == ncclInvalidUsage && i < 1000; ++i) {
        usleep(20000);
        made = create(&group, env->comm, &config, env->stream, NULL, NULL);
    }
    EP_CHECK_NCCL(made);
    other.enable_mask = 0;
    CHECK_REFUSED(ncclEpCreateGroup(&own, env->comm, &other), ncclInvalidUsage,
                  "has groups of libnccl_ep.so, and may");
    EP_CHECK_NCCL(destroy(group, env->stream));
    EP_CHECK_NCCL(ncclEpGroupDestroy(group_of(env, &kSmallLl)));
    EP_CHECK(dlclose(first) == 0);
}
