// Zones: how rows lie by expert in the output. The rows of a local expert are together, by source rank, then token; a
// zone is filled up with zeros to a multiple of an alignment. A row that came for several experts is in a slot of each.
//
// Which slots a row has was found when the handle was made (zones.cu), so operations only look them up.
#pragma once

#include "../base/warp.cuh"
#include "../peer/wait.cuh"
#include "params/ht_kept.h"

namespace nccl_ep {

// The slots of a row, one in each lane, by ascending expert; HT_NO_SLOT or HT_DROPPED where there is none.
__device__ __forceinline__ uint32_t slot_of_lane(const HtZones& zones, uint32_t row) {
    return lane_idx() < zones.most_slots ? zones.slots[uint64_t{row} * zones.most_slots + lane_idx()] : HT_NO_SLOT;
}

// Whether a tensor of so many rows has the slot. The table may be a caller's memory.
__device__ __forceinline__ bool is_slot(uint32_t slot, uint32_t rows) {
    return slot < HT_DROPPED && slot < rows;
}

// Slots that a tensor must have; what is beyond a bound is dropped.
__device__ __forceinline__ uint32_t slots_needed(const HtZones& zones) {
    return zones.limit == HT_NO_SLOT ? zones.begins[zones.experts] : 0;
}

// How many rows of `source` are for local expert `expert`, as the ht_route of this epoch has heard.
template <typename Params>
__device__ __forceinline__ uint32_t heard_rows(const Params& params, uint32_t epoch, uint32_t source, uint32_t expert) {
    const uint64_t packets = params.layout.local_experts + HT_COUNTS_BESIDE_EXPERTS;
    const uint64_t bank = epoch % 2;
    const Own<uint64_t> heard = as<uint64_t>(own_window(params.peers) + params.layout.counts);
    const uint64_t* of_source = source == params.peers.rank
                                    ? params.own_counts + bank * packets
                                    : heard + (bank * params.peers.ranks + source) * packets;
    return is_active(params.peers, source) ? min(packet_data(ld_relaxed_sys(of_source + expert)), params.max_tokens)
                                           : 0;
}

// ---- What a routing tells its caller, in numbers as wide as the caller wants

__device__ inline void tell(const HtNumbers& numbers, uint32_t i, uint32_t value) {
    if (numbers.data == nullptr) {
        return;
    }
    if (numbers.is_wide != 0) {
        static_cast<int64_t*>(numbers.data)[i] = value;
    } else {
        static_cast<int32_t*>(numbers.data)[i] = static_cast<int32_t>(value);
    }
}

// One thread: of the zone of `expert`, as far as its slots are there.
__device__ inline void tell_zone(const HtTold& told, const HtZones& zones, uint32_t expert, uint32_t begin,
                                 uint32_t end) {
    begin = min(begin, zones.limit);
    tell(told.experts, expert, min(end, zones.limit) - begin);
    tell(told.offsets, expert, begin);
}

// One thread: of all zones, also to the host.
__device__ inline void tell_slots(const HtTold& told, uint32_t slots) {
    tell(told.total, 0, slots);
    if (told.page != nullptr) {
        st_release_sys(reinterpret_cast<uint64_t*>(told.page), make_packet(told.epoch, slots));
    }
}

}  // namespace nccl_ep
