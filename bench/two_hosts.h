// Two processes that take themselves for two hosts, a communicator of theirs, and CHECK for calls of NCCL, too.
#pragma once

#include <nccl.h>
#include <unistd.h>

#include "cuda_check.h"

inline void check(ncclResult_t result, const char* what) {
    if (result != ncclSuccess) {
        std::printf("%s: %s\n", what, ncclGetErrorString(result));
        std::exit(1);
    }
}

constexpr size_t kBytes = 1 << 20;

// This process, one end of the pipe by which the first tells ids, and a communicator with messages both ways.
struct Host {
    int rank, pipe;
    ncclComm_t comm = nullptr;
    cudaStream_t stream = nullptr;
    char* memory = nullptr;

    void Join() {
        ncclUniqueId id;
        if (rank == 0) CHECK(ncclGetUniqueId(&id));
        const auto moved = rank == 0 ? write(pipe, &id, sizeof(id)) : read(pipe, &id, sizeof(id));
        if (moved != sizeof(id)) std::exit(1);
        CHECK(ncclCommInitRank(&comm, 2, id, rank));
    }

    void Allocate() {
        CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
        CHECK(cudaMalloc(&memory, 2 * kBytes));
    }

    void Enqueue() const {
        CHECK(ncclGroupStart());
        CHECK(ncclSend(memory, kBytes, ncclUint8, 1 - rank, comm, stream));
        CHECK(ncclRecv(memory + kBytes, kBytes, ncclUint8, 1 - rank, comm, stream));
        CHECK(ncclGroupEnd());
    }
};

// Returns NCCL's version.
inline int be_host(int rank) {
    setenv("NCCL_HOSTID", rank == 0 ? "node0" : "node1", 1);
    setenv("NCCL_SOCKET_IFNAME", "lo", 0);
    int version;
    CHECK(ncclGetVersion(&version));
    return version;
}
