// How a communicator of NCCL ends beside a collective that a rank never joins. ncclCommAbort frees memory, which
// waits for all that is on the device; inside a group (ncclGroupStart) it only ends the operations, and frees when
// the group is closed. src/backend/nccl/own.rs relies on that. The other rank notices the abort only then, too.
//
//     nvcc -std=c++17 -arch=native -o abort_calls abort_calls.cu -lcuda -lnccl && ./abort_calls
//
// Needs two GPUs, or one for both processes, which take themselves for two hosts.
#include <sys/wait.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <thread>

#include "two_hosts.h"

namespace {

using Clock = std::chrono::steady_clock;
constexpr auto kLongEnough = std::chrono::milliseconds(500);

double since(Clock::time_point start) {
    return std::chrono::duration<double, std::milli>(Clock::now() - start).count();
}

Host connected(int rank, int pipe) {
    Host made{rank, pipe};
    made.Join();
    made.Allocate();
    made.Enqueue();
    CHECK(cudaStreamSynchronize(made.stream));
    return made;
}

// Calls on a thread of its own, and says how long it took if it has returned after a while.
struct Watched {
    std::thread thread;
    std::atomic<bool> is_over{false};

    Watched(const char* name, const std::function<void()>& call) {
        const auto start = Clock::now();
        thread = std::thread([this, call] {
            CHECK(cudaSetDevice(0));
            call();
            is_over = true;
        });
        while (!is_over && Clock::now() - start < kLongEnough) std::this_thread::yield();
        std::printf("%-58s %s after %.1f ms\n", name, is_over ? "has returned" : "still waits", since(start));
    }
    ~Watched() { thread.join(); }
};

void say_idle(const char* name, cudaStream_t stream) {
    const auto start = Clock::now();
    cudaError_t state = cudaErrorNotReady;
    while (state == cudaErrorNotReady && Clock::now() - start < kLongEnough) state = cudaStreamQuery(stream);
    std::printf("%-58s %s after %.1f ms\n", name, cudaGetErrorString(state), since(start));
}

void abort_in_group(const Host& stuck, const Host& other) {
    stuck.Enqueue();
    other.Enqueue();
    std::atomic<bool> go{false};
    std::atomic<bool> aborted{false};
    Watched aborter("ncclGroupStart, ncclCommAbort, wait, ncclGroupEnd", [&] {
        const auto start = Clock::now();
        CHECK(ncclGroupStart());
        CHECK(ncclCommAbort(other.comm));
        std::printf("%-58s returns after %.1f ms\n", "  ncclCommAbort in it", since(start));
        aborted = true;
        while (!go) std::this_thread::yield();
        CHECK(ncclGroupEnd());
    });
    if (!aborted) std::printf("ncclCommAbort waits in the group, too\n");
    say_idle("the stream of the aborted communicator", other.stream);
    // NCCL's threads look at their flags twice a second.
    std::this_thread::sleep_for(4 * kLongEnough);
    Watched event("cudaEventCreate 2 s later", [] {
        cudaEvent_t event;
        CHECK(cudaEventCreate(&event));
    });
    {
        Watched late("ncclCommAbort of the stuck one", [&] { CHECK(ncclCommAbort(stuck.comm)); });
    }
    say_idle("its stream", stuck.stream);
    const auto start = Clock::now();
    go = true;
    aborter.thread.join();
    aborter.thread = std::thread([] {});
    std::printf("%-58s returns after %.1f ms\n", "ncclGroupEnd then", since(start));
}

void abort_alone(const Host& stuck, const Host& other) {
    stuck.Enqueue();
    other.Enqueue();
    Watched aborter("ncclCommAbort", [&] { CHECK(ncclCommAbort(other.comm)); });
    say_idle("its stream", other.stream);
    std::this_thread::sleep_for(4 * kLongEnough);
    Watched event("cudaEventCreate 2 s later", [] {
        cudaEvent_t event;
        CHECK(cudaEventCreate(&event));
    });
    Watched late("ncclCommAbort of the stuck one", [&] { CHECK(ncclCommAbort(stuck.comm)); });
}

// How long memory is being freed where nothing else is on the device, so long after the operations have ended.
void abort_and_wait(const Host& other, std::chrono::milliseconds pause) {
    other.Enqueue();
    CHECK(ncclGroupStart());
    CHECK(ncclCommAbort(other.comm));
    std::this_thread::sleep_for(pause);
    const auto start = Clock::now();
    CHECK(ncclGroupEnd());
    std::printf("ncclGroupEnd %4d ms after ncclCommAbort, on an idle device  %.1f ms\n", int(pause.count()),
                since(start));
}

// The other rank of abort_unnoticed: how long after the abort its waiting operation has ended or failed.
void notice(const Host& waiting, int begun) {
    waiting.Enqueue();
    char go;
    if (read(begun, &go, 1) != 1) std::exit(1);
    const auto start = Clock::now();
    ncclResult_t state = ncclSuccess;
    while (state == ncclSuccess && cudaStreamQuery(waiting.stream) == cudaErrorNotReady && since(start) < 8000) {
        CHECK(ncclCommGetAsyncError(waiting.comm, &state));
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    std::printf("%-58s %s after %.0f ms\n", "the other rank notices the abort:", ncclGetErrorString(state),
                since(start));
}

// Closes the group four seconds after the abort.
void abort_unnoticed(const Host& awaited, int tell) {
    std::this_thread::sleep_for(kLongEnough);
    CHECK(ncclGroupStart());
    CHECK(ncclCommAbort(awaited.comm));
    if (write(tell, "", 1) != 1) std::exit(1);
    std::this_thread::sleep_for(std::chrono::seconds(4));
    CHECK(ncclGroupEnd());
    std::printf("%-58s after 4000 ms\n", "ncclGroupEnd");
    std::this_thread::sleep_for(kLongEnough);
}

void run(int rank, int ids, int until, int tell) {
    const int version = be_host(rank);
    int devices;
    CHECK(cudaGetDeviceCount(&devices));
    CHECK(cudaSetDevice(rank % devices));
    Host comms[9];
    for (Host& comm : comms) comm = connected(rank, ids);
    char over = 1;
    if (rank == 1) {
        notice(comms[8], until);
        if (read(until, &over, 1) < 0) std::exit(1);
        _exit(0);
    }
    std::printf("NCCL %d; an operation that the other rank never joins is on the device, and another one\n", version);
    abort_unnoticed(comms[8], tell);
    abort_in_group(comms[0], comms[1]);
    abort_alone(comms[2], comms[3]);
    int next = 4;
    for (const int pause : {0, 250, 500, 1000}) abort_and_wait(comms[next++], std::chrono::milliseconds(pause));
}

}  // namespace

int main() {
    std::setvbuf(stdout, nullptr, _IOLBF, 0);
    int ids[2], end[2];
    if (pipe(ids) != 0 || pipe(end) != 0) return 1;
    const pid_t child = fork();
    if (child == 0) run(1, ids[0], end[0], -1);
    run(0, ids[1], -1, end[1]);
    const char over = 1;
    const bool written = write(end[1], &over, 1) == 1;
    waitpid(child, nullptr, 0);
    std::fflush(stdout);
    _exit(written ? 0 : 1);
}
