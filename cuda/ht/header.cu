// High-throughput combine over several nodes: a stage's messages are sent, whose rows another kernel has summed.

#include "../base/entry.cuh"
#include "messages.cuh"

namespace nccl_ep {

ENTRY(ht_header) { send_messages<TwoSided>(params); }

}  // namespace nccl_ep
