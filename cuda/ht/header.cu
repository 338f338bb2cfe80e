// Sends a stage's messages of a combine over several nodes; another kernel has summed their rows.

#include "../base/entry.cuh"
#include "messages.cuh"

namespace nccl_ep {

ENTRY(ht_header) { send_messages<TwoSided>(params); }

}  // namespace nccl_ep
