// A thread makes and ends objects while others do so in another group, or run operations. Only the
// main thread counts checks.
#include <pthread.h>

#include "reference/run.h"
#include "suites/memory/memory.h"

enum { kWorkers = 3, kMakers = 2, kRounds = 12, kBytes = 3 << 20 };

// With a communicator and a stream of its own, and the group of its run.
typedef struct {
    EpEnv env;
    RefRun run;
    bool good;
} Worker;

static void* make_and_end(void* argument) {
    Worker* worker = argument;
    worker->good = cudaSetDevice(worker->env.device) == cudaSuccess;
    for (int i = 0; i < kRounds && worker->good; ++i) {
        void* memory = NULL;
        ncclEpMemInfo_t info = {.size = sizeof(info)};
        worker->good = ncclEpMemAlloc(worker->run.group, &memory, kBytes) == ncclSuccess &&
                       ncclEpMemInfo(worker->run.group, memory, &info) == ncclSuccess &&
                       info.object == 0 && ncclEpMemFree(worker->run.group, memory) == ncclSuccess;
    }
    return NULL;
}

static void* operate(void* argument) {
    Worker* worker = argument;
    const cudaStream_t stream = worker->env.stream;
    worker->good = cudaSetDevice(worker->env.device) == cudaSuccess;
    for (int i = 0; i < kRounds && worker->good; ++i) {
        worker->good = ref_launch_dispatch(&worker->run, kRefWhole, stream) == ncclSuccess &&
                       ref_launch_combine(&worker->run, kRefWhole, stream) == ncclSuccess &&
                       cudaStreamSynchronize(stream) == cudaSuccess;
    }
    return NULL;
}

// Neither waits for the other: an exchange of all ranks may be on the device for as long as a rank
// does not take part, and on another rank the operation may be the one that waits.
EP_TEST(threads_beside_memory_calls) {
    if (ep_on_fake_nccl()) {
        ep_skip("communicators take turns here");
        return;
    }
    const RefShape shape = {.datatype = ncclBfloat16, .hidden = 64, .top_k = 2, .max_tokens = 5,
                            .num_experts = 2 * (unsigned)env->size};
    Worker workers[kWorkers];
    for (int i = 0; i < kWorkers; ++i) {
        Worker* worker = &workers[i];
        worker->env = *env;
        EP_REQUIRE_NCCL(ncclCommSplit(env->comm, 0, env->rank, &worker->env.comm, NULL));
        EP_REQUIRE_CUDA(cudaStreamCreateWithFlags(&worker->env.stream, cudaStreamNonBlocking));
        worker->run = ref_run_open_with(&worker->env, NULL, &shape, kRefDistinct, true, ref_ll(5));
        ref_prepare_dispatch(&worker->run);
    }
    pthread_t threads[kWorkers];
    for (int i = 0; i < kWorkers; ++i) {
        void* (*work)(void*) = i < kMakers ? make_and_end : operate;
        EP_REQUIRE(pthread_create(&threads[i], NULL, work, &workers[i]) == 0);
    }
    for (int i = 0; i < kWorkers; ++i) {
        EP_REQUIRE(pthread_join(threads[i], NULL) == 0);
        EP_CHECK(workers[i].good);
    }
    for (int i = 0; i < kWorkers; ++i) {
        ref_run_close(&workers[i].run);
        EP_CHECK_NCCL(ncclCommDestroy(workers[i].env.comm));
        EP_CHECK_CUDA(cudaStreamDestroy(workers[i].env.stream));
    }
}
