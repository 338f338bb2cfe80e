// Zones: how rows lie by expert in the output. The rows of a local expert are together, by source rank, then token; a
// zone is filled up with zeros to a multiple of an alignment. A row that came for several experts is in a slot of each.
//
// Which slots a row has was found when the handle was made (zones.cu), so operations only look them up.
#pragma once

#include "../base/warp.cuh"
#include "../peer/wait.cuh"
#include "caller_block.cuh"
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

// How many rows of `source` are for local expert `expert`, by the counts that the ht_route of this epoch received.
template <typename Params>
__device__ __forceinline__ uint32_t row_count(const Params& params, uint32_t epoch, uint32_t source, uint32_t expert) {
    const uint64_t packets = params.layout.local_experts + HT_COUNTS_BESIDE_EXPERTS;
    const uint64_t bank = epoch % 2;
    const Own<uint64_t> received = as<uint64_t>(own_window(params.peers) + params.layout.counts);
    const uint64_t* of_source = source == params.peers.rank
                                    ? params.own_counts + bank * packets
                                    : received + (bank * params.peers.ranks + source) * packets;
    return is_active(params.peers, source) ? min(packet_data(ld_relaxed_sys(of_source + expert)), params.max_tokens)
                                           : 0;
}

// ---- Notifications: which experts a row is for

// A packet has a bit for each expert of its word, how many of the row's experts come before these, and whether more
// follow.
constexpr uint32_t kZoneBeforeShift = HT_ZONE_WORD_EXPERTS;
constexpr uint32_t kZoneMoreShift = 31;
static_assert(HT_MAX_TOP_K <= 1u << (kZoneMoreShift - kZoneBeforeShift), "a row has fewer experts before one of its");

__device__ __forceinline__ uint32_t zone_words(uint32_t local_experts) {
    return (local_experts + HT_ZONE_WORD_EXPERTS - 1) / HT_ZONE_WORD_EXPERTS;
}

// The bank of this epoch, in the window that begins at `window`.
template <template <typename> class Address>
__device__ __forceinline__ Address<uint64_t> packets_of(const HtPackets& packets, uint32_t epoch,
                                                        Address<uint8_t> window) {
    return as<uint64_t>(window + packets.offset + epoch % 2 * packets.bank_bytes);
}

// One thread notifies every rank that gets the row of `token` from `source` of which of that rank's experts it is for,
// among those of one word.
template <typename Params>
__device__ void notify_experts(const Params& params, uint32_t epoch, uint32_t source, uint32_t token, uint32_t word) {
    const uint32_t top_k = params.handle.top_k;
    const uint32_t local_experts = params.layout.local_experts;
    const uint64_t packet = uint64_t{source} * zone_words(local_experts) + word;
    const HtEntry* entries = params.handle.entries + uint64_t{token} * top_k;
    // Past the last one, the largest number.
    const auto expert_at = [&](uint32_t k) { return k < top_k ? static_cast<uint32_t>(entries[k].expert) : ~0u; };
    const uint32_t experts = params.peers.ranks * local_experts;
    uint32_t k = 0;
#pragma unroll 1
    while (expert_at(k) < experts) {
        const uint32_t peer = expert_at(k) / local_experts;
        const uint32_t index = entries[k].index;
        const uint32_t first = peer * local_experts + word * HT_ZONE_WORD_EXPERTS;
        uint32_t data = 0;
#pragma unroll 1
        for (uint32_t expert; (expert = expert_at(k)) < (peer + 1) * local_experts; ++k) {
            const uint32_t bit = expert - first;
            data += expert < first                ? 1u << kZoneBeforeShift
                    : bit < HT_ZONE_WORD_EXPERTS ? 1u << bit
                                                  : 0;
            data |= expert >= first + HT_ZONE_WORD_EXPERTS ? 1u << kZoneMoreShift : 0;
        }
        put_value(packets_of<Remote>(params.packets, epoch, window_of(params.peers, peer)) +
                      packet * params.max_tokens + index,
                  make_packet(epoch, data));
    }
}

// Warps notify of the tokens [first, last), a token for each lane: this one of unit `unit`, then of every `step`-th.
// After a failure nobody is notified.
template <typename Params>
__device__ __noinline__ void notify_tokens(const Params& params, uint32_t epoch, uint32_t source, uint32_t first,
                                           uint32_t last, uint32_t unit, uint32_t step) {
    const uint32_t groups = (last - first + kWarpSize - 1) / kWarpSize;
    const uint32_t units = groups * zone_words(params.layout.local_experts);
#pragma unroll 1
    for (; unit < units && known_failure(params.wait) == 0; unit += step) {
        const uint32_t token = first + unit % groups * kWarpSize + lane_idx();
        if (token < last) {
            notify_experts(params, epoch, source, token, unit / groups);
        }
    }
}

// ---- What a routing reports to its caller, in numbers as wide as the caller wants

__device__ inline void report_number(const HtNumbers& numbers, uint32_t i, uint32_t value) {
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
__device__ inline void report_zone(const HtReport& report, const HtZones& zones, uint32_t expert, uint32_t begin,
                                   uint32_t end) {
    begin = min(begin, zones.limit);
    report_number(report.experts, expert, min(end, zones.limit) - begin);
    report_number(report.offsets, expert, begin);
}

// One thread: of all zones, also to the host.
__device__ inline void report_slots(const HtReport& report, uint32_t slots) {
    report_number(report.total, 0, slots);
    if (report.page != nullptr) {
        st_release_sys(reinterpret_cast<uint64_t*>(report.page), make_packet(report.epoch, slots));
    }
}

}  // namespace nccl_ep
