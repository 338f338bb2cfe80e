// Cutting an object into tensors.
#include "programs/ep_bench/heap.h"

namespace ep_bench {
namespace {

struct Heap {
    char* begin = nullptr;
    char* end = nullptr;
    char* next = nullptr;
    bool is_open = false;
};
Heap heap;

}  // namespace

cudaError_t HeapAlloc(void** device, size_t bytes) {
    constexpr size_t kAlign = 256;
    if (!heap.is_open) return ep_counted_alloc(device, bytes);
    const size_t taken = (bytes + kAlign - 1) / kAlign * kAlign;
    if (taken > static_cast<size_t>(heap.end - heap.next)) return cudaErrorMemoryAllocation;
    *device = heap.next;
    heap.next += taken;
    return cudaSuccess;
}

cudaError_t HeapFree(void* device) {
    const char* const at = static_cast<const char*>(device);
    return at >= heap.begin && at < heap.end ? cudaSuccess : ep_counted_free(device);
}

void OpenHeap(ncclEpGroup_t group, size_t bytes) {
    void* memory = nullptr;
    EP_REQUIRE_NCCL(ncclEpMemAlloc(group, &memory, bytes));
    heap.begin = heap.next = static_cast<char*>(memory);
    heap.end = heap.begin + bytes;
    heap.is_open = true;
}

void CloseHeap() { heap.is_open = false; }

}  // namespace ep_bench
