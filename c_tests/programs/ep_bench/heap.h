// Where the rows of experts lie: each tensor in an allocation of its own, or with --memory symmetric all in one object
// of the group, which the peers map.
#pragma once

#include "harness/harness.h"

namespace ep_bench {

// For ncclEpCreateGroup, which takes functions without a context: tensors that the library makes while a heap is open
// lie there.
cudaError_t HeapAlloc(void** device, size_t bytes);
cudaError_t HeapFree(void* device);

// Makes an object of the group. Collective; it ends with the group.
void OpenHeap(ncclEpGroup_t group, size_t bytes);
// Tensors that are made from now on are not in it.
void CloseHeap();

}  // namespace ep_bench
