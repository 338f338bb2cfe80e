// Which ranks take part in the group's operations.
//
// Loops over peers that send or wait ask here, so that a masked rank can be left out in one place. Today
// every rank is active; the arguments why banks and slots are free (ll/protocol.cuh, ht/rings.cuh) rest
// on that.
#pragma once

#include "params/common.h"

namespace nccl_ep {

__device__ __forceinline__ constexpr bool is_active(const PeerTable&, uint32_t /*rank*/) {
    return true;
}

}  // namespace nccl_ep
