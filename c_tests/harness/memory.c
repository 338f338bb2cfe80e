// Device buffers, and gates of streams; see base.h.
#define _GNU_SOURCE  // usleep
#include <dirent.h>
#include <unistd.h>

#include "base.h"

void* ep_device_alloc(size_t bytes) {
    void* device = NULL;
    EP_REQUIRE_CUDA(cudaMalloc(&device, bytes > 0 ? bytes : 1));
    return device;
}

void* ep_device_upload(const void* host, size_t bytes) {
    void* device = ep_device_alloc(bytes);
    ep_upload(device, host, bytes);
    return device;
}

void ep_device_free(void* device) { EP_REQUIRE_CUDA(cudaFree(device)); }

void ep_download(void* host, const void* device, size_t bytes) {
    if (bytes > 0) EP_REQUIRE_CUDA(cudaMemcpy(host, device, bytes, cudaMemcpyDeviceToHost));
}

void ep_upload(void* device, const void* host, size_t bytes) {
    if (bytes > 0) EP_REQUIRE_CUDA(cudaMemcpy(device, host, bytes, cudaMemcpyHostToDevice));
}

static void wait_at(void* argument) {
    enum { kPauseUs = 100 };
    const EpGate* gate = argument;
    while (!__atomic_load_n(&gate->is_open, __ATOMIC_ACQUIRE)) usleep(kPauseUs);
}

void ep_gate_close(EpGate* gate, cudaStream_t stream) {
    gate->is_open = false;
    EP_REQUIRE_CUDA(cudaLaunchHostFunc(stream, wait_at, gate));
}

void ep_gate_open(EpGate* gate) { __atomic_store_n(&gate->is_open, true, __ATOMIC_RELEASE); }

int ep_open_descriptors(void) {
    DIR* directory = opendir("/proc/self/fd");
    EP_REQUIRE(directory != NULL);
    int count = 0;
    while (readdir(directory) != NULL) ++count;
    closedir(directory);
    return count;
}

size_t ep_free_bytes(void) {
    size_t left = 0;
    size_t total = 0;
    EP_REQUIRE_CUDA(cudaMemGetInfo(&left, &total));
    return left;
}
