// High-throughput combine over several nodes: the heads of a pass's messages, whose rows another kernel has summed.

#include "../base/entry.cuh"
#include "messages.cuh"

namespace nccl_ep {

ENTRY(ht_head) { write_heads(params); }

}  // namespace nccl_ep
