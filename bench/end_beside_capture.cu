// What a communicator of NCCL does to a capture in the global mode, which calls of any thread may end, while a thread
// that is apart from captures (cudaThreadExchangeStreamCaptureMode) uses the communicator and ends it: threads of
// NCCL's own are not apart. src/backend/net/two_sided/ending.rs relies on that.
//
//     nvcc -std=c++17 -arch=native -o end_beside_capture end_beside_capture.cu -lcuda -lnccl && ./end_beside_capture
//
// Needs one GPU, whose two processes take themselves for two hosts.
#ifndef _GNU_SOURCE
#define _GNU_SOURCE  // RTLD_NEXT
#endif
#include <dlfcn.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/wait.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <thread>

#include "two_hosts.h"

namespace {

// Whether threads that NCCL creates from now on are apart from captures.
std::atomic<bool> nccl_is_apart{false};

void be_apart() {
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    CHECK(cudaThreadExchangeStreamCaptureMode(&mode));
}

// What a thread was to begin with.
struct Begun {
    void* (*start)(void*);
    void* argument;
};

void* begin_apart(void* begun) {
    const Begun own = *static_cast<Begun*>(begun);
    delete static_cast<Begun*>(begun);
    be_apart();
    return own.start(own.argument);
}

// One of the two processes.
struct Rank : Host {
    pthread_barrier_t* both;

    // Until both have all: an abort on one side would end the exchange of the other.
    void Exchange() const {
        Enqueue();
        CHECK(cudaStreamSynchronize(stream));
        pthread_barrier_wait(both);
    }

    // Says what becomes of a capture beside `call`, in a thread that is apart from captures.
    void Beside(const char* name, const std::function<void()>& call) const {
        cudaStream_t captured;
        CHECK(cudaStreamCreateWithFlags(&captured, cudaStreamNonBlocking));
        CHECK(cudaStreamBeginCapture(captured, cudaStreamCaptureModeGlobal));
        std::thread beside([&] {
            be_apart();
            CHECK(cudaSetDevice(0));
            call();
        });
        beside.join();
        cudaGraph_t graph = nullptr;
        const cudaError_t ended = cudaStreamEndCapture(captured, &graph);
        if (graph != nullptr) CHECK(cudaGraphDestroy(graph));
        CHECK(cudaStreamDestroy(captured));
        if (rank == 0) std::printf("  %-44s %s\n", name, cudaGetErrorName(ended));
    }

    void Run() {
        if (rank == 0) std::printf("only that thread is apart from captures:\n");
        Join();
        Exchange();
        Beside("an exchange", [this] { Enqueue(); });
        CHECK(cudaStreamSynchronize(stream));
        Beside("ncclCommDestroy", [this] { CHECK(ncclCommDestroy(comm)); });
        Beside("ncclCommInitRank", [this] { Join(); });
        Exchange();
        Beside("ncclCommAbort", [this] { CHECK(ncclCommAbort(comm)); });
        Join();
        Exchange();
        AbortInGroup();
        if (rank == 0) std::printf("NCCL's threads are, too:\n");
        nccl_is_apart = true;
        Join();
        Exchange();
        Beside("ncclCommDestroy", [this] { CHECK(ncclCommDestroy(comm)); });
    }

    // NCCL's threads look at the abort twice a second.
    void AbortInGroup() const {
        std::atomic<bool> over{false}, may_free{false};
        std::thread aborter([&] {
            be_apart();
            CHECK(cudaSetDevice(0));
            CHECK(ncclGroupStart());
            CHECK(ncclCommAbort(comm));
            over = true;
            while (!may_free) usleep(1000);
            CHECK(ncclGroupEnd());
        });
        Beside("ncclCommAbort in a group, and 2 s after it", [&] {
            while (!over) usleep(1000);
            usleep(2000000);
        });
        Beside("the end of that group", [&] {
            may_free = true;
            aborter.join();
        });
    }
};

void run(int rank, int ids, pthread_barrier_t* both) {
    const int version = be_host(rank);
    CHECK(cudaSetDevice(0));
    Rank self{{rank, ids}, both};
    self.Allocate();
    if (rank == 0) std::printf("NCCL %d; a capture in the global mode, beside it in another thread\n", version);
    self.Run();
}

}  // namespace

// NCCL's calls come here.
extern "C" int pthread_create(pthread_t* made, const pthread_attr_t* attributes, void* (*start)(void*),
                              void* argument) noexcept {
    using Create = int (*)(pthread_t*, const pthread_attr_t*, void* (*)(void*), void*);
    static const auto create = reinterpret_cast<Create>(dlsym(RTLD_NEXT, "pthread_create"));
    Dl_info owner{};
    const bool is_known = dladdr(reinterpret_cast<void*>(start), &owner) != 0;
    const bool is_nccls = is_known && std::strstr(owner.dli_fname, "libnccl") != nullptr;
    if (!nccl_is_apart || !is_nccls) return create(made, attributes, start, argument);
    return create(made, attributes, begin_apart, new Begun{start, argument});
}

int main() {
    std::setvbuf(stdout, nullptr, _IOLBF, 0);
    int ids[2];
    if (pipe(ids) != 0) return 1;
    void* shared = mmap(nullptr, sizeof(pthread_barrier_t), PROT_READ | PROT_WRITE,
                        MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (shared == MAP_FAILED) return 1;
    auto* both = static_cast<pthread_barrier_t*>(shared);
    pthread_barrierattr_t attributes;
    pthread_barrierattr_init(&attributes);
    pthread_barrierattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
    pthread_barrier_init(both, &attributes, 2);
    const pid_t child = fork();
    run(child == 0 ? 1 : 0, child == 0 ? ids[0] : ids[1], both);
    int status = 0;
    if (child != 0) waitpid(child, &status, 0);
    std::fflush(stdout);
    _exit(status);
}
