// The driver's allocations, and how processes share them.
//
// Memory comes from the CPU stand-ins: poisoned, and followed by a page that nobody may touch. They put what is
// exported into a memory file in place; importers open that through /proc. The page more at the end of the file counts
// who maps it: CUDA leaves undefined what becomes of a mapping whose memory is freed.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <map>
#include <mutex>
#include <string>

#include "driver.h"

// Of the stand-ins: see hostsim/src/cuda/memory.rs.
struct Block {
    void* begin;
    size_t bytes;
    int file;
    size_t file_bytes;
    size_t offset;
};
extern "C" cudaError_t ncclEpHostsimBlock(const void* pointer, int shares, Block* block);

namespace {

using simt::Result;

constexpr uintptr_t kPage = 4096;

// Importers close slowly, as if their ranks were late.
constexpr useconds_t kCloseMicroseconds = 2000;

using Count = std::atomic<uint32_t>;

struct Import {
    void* begin;  // guards included
    size_t bytes;
    Count* importers;
};

std::mutex mutex;
// Who maps them; NULL where an allocation is not exported.
std::map<uintptr_t, Count*> allocations;
std::map<uintptr_t, Import> imports;

// What an exported handle says.
struct Handle {
    pid_t process;
    int file;
    uint64_t offset;  // of the allocation, from the file's beginning
    uint64_t bytes;   // of the file, without the last page
};
static_assert(sizeof(Handle) <= sizeof(CUipcMemHandle::reserved), "fits");

// Maps the last page of a file, behind so many bytes; NULL if the system refuses.
Count* MapCount(int file, size_t bytes) {
    void* page = mmap(nullptr, kPage, PROT_READ | PROT_WRITE, MAP_SHARED, file, static_cast<off_t>(bytes));
    return page == MAP_FAILED ? nullptr : static_cast<Count*>(page);
}

// The allocation, also one of the program's own, that contains an address.
CUresult BlockOf(CUdeviceptr address, bool shares, Block* block) {
    return Result(ncclEpHostsimBlock(reinterpret_cast<void*>(address), shares, block));
}

void ForgetAllocation(uintptr_t address) {
    const std::lock_guard<std::mutex> lock(mutex);
    const auto found = allocations.find(address);
    if (found == allocations.end()) return;
    if (Count* importers = found->second; importers != nullptr) {
        if (*importers != 0) simt::Fail("memory is freed that a peer still maps");
        munmap(importers, kPage);
    }
    allocations.erase(found);
}

}  // namespace

extern "C" {

CUresult cuMemAlloc(CUdeviceptr* address, size_t bytes) {
    simt::CheckContext();
    if (simt::Setting("NCCLEP_SIMT_NO_MEMORY", 0) != 0) return CUDA_ERROR_OUT_OF_MEMORY;
    void* memory = nullptr;
    const CUresult result = Result(cudaMalloc(&memory, bytes));
    if (result != CUDA_SUCCESS) return result;
    *address = reinterpret_cast<CUdeviceptr>(memory);
    const std::lock_guard<std::mutex> lock(mutex);
    allocations[*address] = nullptr;
    return CUDA_SUCCESS;
}

CUresult cuMemFree(CUdeviceptr address) {
    simt::CheckContext();
    ForgetAllocation(address);
    return Result(cudaFree(reinterpret_cast<void*>(address)));
}

CUresult cuMemFreeAsync(CUdeviceptr address, CUstream stream) {
    simt::CheckContext();
    ForgetAllocation(address);
    return Result(cudaFreeAsync(reinterpret_cast<void*>(address), stream));
}

CUresult cuMemGetAddressRange(CUdeviceptr* begin, size_t* bytes, CUdeviceptr address) {
    simt::CheckContext();
    if (simt::FindMapped(address, begin, bytes)) return CUDA_SUCCESS;
    Block block;
    const CUresult result = BlockOf(address, false, &block);
    if (result != CUDA_SUCCESS) return result;
    *begin = reinterpret_cast<CUdeviceptr>(block.begin);
    *bytes = block.bytes;
    return CUDA_SUCCESS;
}

// A reset of the device forgets them, and the pages stay, unlike those of cuMemHostAlloc.
CUresult cuMemHostRegister(void* memory, size_t bytes, unsigned flags) {
    return Result(cudaHostRegister(memory, bytes, flags));
}

CUresult cuMemHostUnregister(void* memory) { return Result(cudaHostUnregister(memory)); }

CUresult cuMemHostGetDevicePointer(CUdeviceptr* address, void* host, unsigned flags) {
    void* device = nullptr;
    const CUresult result = Result(cudaHostGetDevicePointer(&device, host, flags));
    *address = reinterpret_cast<CUdeviceptr>(device);
    return result;
}

CUresult cuIpcGetMemHandle(CUipcMemHandle* handle, CUdeviceptr address) {
    const std::lock_guard<std::mutex> lock(mutex);
    Block block;
    const CUresult result = BlockOf(address, true, &block);
    if (result != CUDA_SUCCESS) return result;
    const auto found = allocations.find(address);
    if (found != allocations.end() && found->second == nullptr) {
        found->second = MapCount(block.file, block.file_bytes);
        if (found->second == nullptr) return CUDA_ERROR_OPERATING_SYSTEM;
    }
    const Handle said = {getpid(), block.file, block.offset, block.file_bytes};
    std::memset(handle, 0, sizeof(*handle));
    std::memcpy(handle, &said, sizeof(said));
    return CUDA_SUCCESS;
}

CUresult cuIpcOpenMemHandle(CUdeviceptr* address, CUipcMemHandle handle, unsigned) {
    if (simt::Setting("NCCLEP_SIMT_NO_IMPORT", 0) != 0) return CUDA_ERROR_MAP_FAILED;
    Handle said;
    std::memcpy(&said, &handle, sizeof(said));
    const std::string path = "/proc/" + std::to_string(said.process) + "/fd/" + std::to_string(said.file);
    const int file = open(path.c_str(), O_RDWR | O_CLOEXEC);
    if (file < 0) return CUDA_ERROR_MAP_FAILED;
    const size_t whole = said.bytes + 2 * kPage;
    void* guarded = mmap(nullptr, whole, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    void* inner = MAP_FAILED;
    if (guarded != MAP_FAILED) {
        inner = mmap(static_cast<uint8_t*>(guarded) + kPage, said.bytes, PROT_READ | PROT_WRITE,
                     MAP_SHARED | MAP_FIXED, file, 0);
    }
    Count* importers = inner == MAP_FAILED ? nullptr : MapCount(file, said.bytes);
    close(file);
    if (importers == nullptr) return CUDA_ERROR_MAP_FAILED;
    ++*importers;
    *address = reinterpret_cast<CUdeviceptr>(inner) + said.offset;
    const std::lock_guard<std::mutex> lock(mutex);
    imports[*address] = {guarded, whole, importers};
    return CUDA_SUCCESS;
}

// As on a GPU, not before everything that runs on the device has ended; like cuMemFree.
CUresult cuIpcCloseMemHandle(CUdeviceptr address) {
    (void)Result(ncclEpHostsimWaitForDevice(1));
    usleep(kCloseMicroseconds);
    const std::lock_guard<std::mutex> lock(mutex);
    const auto found = imports.find(address);
    if (found == imports.end()) return CUDA_ERROR_INVALID_VALUE;
    const Import& import = found->second;
    munmap(import.begin, import.bytes);
    --*import.importers;
    munmap(import.importers, kPage);
    imports.erase(found);
    return CUDA_SUCCESS;
}

}  // extern "C"
