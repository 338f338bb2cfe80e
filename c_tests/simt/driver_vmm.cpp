// The driver's memory that programs put together of pieces: a piece is a memory file, and its descriptor what another
// process has it by.
#include "driver.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdint>
#include <map>
#include <mutex>


namespace {

struct Piece {
    int file;
    size_t bytes;
    bool is_exportable;
    unsigned references;
};

struct Mapping {
    size_t bytes;
    CUmemGenericAllocationHandle handle;
};

std::mutex mutex;
std::map<CUmemGenericAllocationHandle, Piece> pieces;
std::map<CUdeviceptr, Mapping> mappings;
CUmemGenericAllocationHandle last = 0;

CUmemGenericAllocationHandle Add(int file, size_t bytes, bool is_exportable) {
    const std::lock_guard<std::mutex> lock(mutex);
    pieces[++last] = {file, bytes, is_exportable, 1};
    return last;
}

// With the lock.
CUresult Release(CUmemGenericAllocationHandle handle) {
    const auto found = pieces.find(handle);
    if (found == pieces.end()) return CUDA_ERROR_INVALID_VALUE;
    if (--found->second.references == 0) {
        close(found->second.file);
        pieces.erase(found);
    }
    return CUDA_SUCCESS;
}

// With the lock.
std::map<CUdeviceptr, Mapping>::iterator Find(CUdeviceptr address) {
    auto found = mappings.upper_bound(address);
    if (found == mappings.begin()) return mappings.end();
    --found;
    return address < found->first + found->second.bytes ? found : mappings.end();
}

bool MapAt(CUdeviceptr address, size_t bytes, int file, int flags) {
    void* at = reinterpret_cast<void*>(address);
    return mmap(at, bytes, PROT_NONE, MAP_FIXED | flags, file, 0) == at;
}

}  // namespace

bool simt::FindMapped(CUdeviceptr address, CUdeviceptr* begin, size_t* bytes) {
    const std::lock_guard<std::mutex> lock(mutex);
    const auto found = Find(address);
    if (found == mappings.end()) return false;
    *begin = found->first;
    *bytes = found->second.bytes;
    return true;
}

extern "C" {

CUresult cuMemCreate(CUmemGenericAllocationHandle* handle, size_t bytes, const CUmemAllocationProp* kind,
                     unsigned long long) {
    const int file = memfd_create("ncclep_simt_piece", MFD_CLOEXEC);
    if (file < 0 || ftruncate(file, static_cast<off_t>(bytes)) != 0) return CUDA_ERROR_OUT_OF_MEMORY;
    *handle = Add(file, bytes, (kind->requestedHandleTypes & CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) != 0);
    return CUDA_SUCCESS;
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
    const std::lock_guard<std::mutex> lock(mutex);
    return Release(handle);
}

CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle* handle, void* address) {
    const std::lock_guard<std::mutex> lock(mutex);
    const auto found = Find(reinterpret_cast<CUdeviceptr>(address));
    if (found == mappings.end()) return CUDA_ERROR_INVALID_VALUE;
    *handle = found->second.handle;
    ++pieces[*handle].references;
    return CUDA_SUCCESS;
}

CUresult cuMemExportToShareableHandle(void* descriptor, CUmemGenericAllocationHandle handle, CUmemAllocationHandleType,
                                      unsigned long long) {
    const std::lock_guard<std::mutex> lock(mutex);
    const auto found = pieces.find(handle);
    if (found == pieces.end() || !found->second.is_exportable) return CUDA_ERROR_INVALID_VALUE;
    *static_cast<int*>(descriptor) = fcntl(found->second.file, F_DUPFD_CLOEXEC, 0);
    return CUDA_SUCCESS;
}

CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle* handle, void* descriptor,
                                        CUmemAllocationHandleType) {
    const int file = fcntl(static_cast<int>(reinterpret_cast<intptr_t>(descriptor)), F_DUPFD_CLOEXEC, 0);
    struct stat about;
    if (file < 0 || fstat(file, &about) != 0) return CUDA_ERROR_INVALID_VALUE;
    *handle = Add(file, static_cast<size_t>(about.st_size), true);
    return CUDA_SUCCESS;
}

CUresult cuMemAddressReserve(CUdeviceptr* address, size_t bytes, size_t, CUdeviceptr, unsigned long long) {
    void* at = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
    *address = reinterpret_cast<CUdeviceptr>(at);
    return CUDA_SUCCESS;
}

CUresult cuMemAddressFree(CUdeviceptr address, size_t bytes) {
    munmap(reinterpret_cast<void*>(address), bytes);
    return CUDA_SUCCESS;
}

CUresult cuMemMap(CUdeviceptr address, size_t bytes, size_t, CUmemGenericAllocationHandle handle, unsigned long long) {
    const std::lock_guard<std::mutex> lock(mutex);
    const auto found = pieces.find(handle);
    if (found == pieces.end() || found->second.bytes != bytes) return CUDA_ERROR_INVALID_VALUE;
    if (!MapAt(address, bytes, found->second.file, MAP_SHARED)) return CUDA_ERROR_INVALID_VALUE;
    ++found->second.references;
    mappings[address] = {bytes, handle};
    return CUDA_SUCCESS;
}

CUresult cuMemSetAccess(CUdeviceptr address, size_t bytes, const CUmemAccessDesc*, size_t) {
    const int done = mprotect(reinterpret_cast<void*>(address), bytes, PROT_READ | PROT_WRITE);
    return done == 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

// Of a whole mapping only.
CUresult cuMemUnmap(CUdeviceptr address, size_t bytes) {
    const std::lock_guard<std::mutex> lock(mutex);
    const auto found = mappings.find(address);
    if (found == mappings.end() || found->second.bytes != bytes) return CUDA_ERROR_INVALID_VALUE;
    if (!MapAt(address, bytes, -1, MAP_PRIVATE | MAP_ANONYMOUS)) simt::Fail("cannot unmap");
    Release(found->second.handle);
    mappings.erase(found);
    return CUDA_SUCCESS;
}

}  // extern "C"
