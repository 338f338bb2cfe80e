// High-throughput combine over several nodes: the headers of a pass's messages, whose rows another kernel has summed.

#include "../base/entry.cuh"
#include "messages.cuh"

namespace nccl_ep {

ENTRY(ht_header) { write_headers(params); }

}  // namespace nccl_ep
