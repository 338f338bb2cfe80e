// Writes the headers of a stage's messages in a combine over several nodes; another kernel has summed the rows.

#include "../base/entry.cuh"
#include "messages.cuh"

namespace nccl_ep {

ENTRY(ht_header) { send_messages<TwoSided>(params); }

}  // namespace nccl_ep
