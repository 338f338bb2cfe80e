// Where the rows of a handle lie by expert: behind ht_route, which has counted them. Over several nodes behind
// ht_route_nodes, a launch for each rank that this one forwards for: the last has the blocks of experts.
//
// Grid: blocks that send, then one for each local expert. A sending thread takes a token and tells each rank that gets
// its row which of that rank's experts it is for, in a packet for 32 of them. The block of an expert goes through all
// rows in their order, numbers those that are for it, and stores the slot of each.
//
// Packets have the epoch of ht_route. They lie in one bank: a rank writes those of handle n + 1 behind its ht_route of
// that handle, which has heard all ranks' ht_route of it; and each of these began when this kernel of handle n was over
// there. So nobody reads packets of handle n any more. Where ranks do not agree nobody sends or waits, and after a
// failure nobody sends.

#include "../base/entry.cuh"
#include "../peer/wait.cuh"
#include "params/ht_nodes.h"
#include "zones.cuh"

namespace nccl_ep::ht_zones_impl {

constexpr uint32_t kWordBits = 8 * sizeof(uint32_t);
constexpr uint32_t kWarps = HT_ZONES_THREADS / kWarpSize;

struct SharedStorage {
    uint32_t epoch;
    uint32_t of_warp[kWarps];
    uint32_t begin;
};

// What a row is for, as the block of an expert sees it.
struct RowExperts {
    bool is_for_this;
    bool has_later;
    // How many before this one.
    uint32_t before;
};

struct Block {
    const HtZonesParams& params;
    SharedStorage& shared;

    __device__ uint32_t ranks() const { return params.sources; }
    // The rows before those from `source`; all behind the last.
    __device__ uint32_t begin_of(uint32_t source) const {
        return source < ranks() ? params.handle.begins[source] : *params.rows;
    }
    __device__ bool is_over_nodes() const { return params.epochs == nullptr; }
    __device__ uint32_t local_experts() const { return params.zones.experts; }
    __device__ uint32_t words() const { return (local_experts() + kWordBits - 1) / kWordBits; }
    // The packets of row `index` from `source` in the window that begins at `window`.
    template <template <typename> class Address>
    __device__ Address<uint64_t> packets(Address<uint8_t> window, uint32_t source, uint32_t index) const {
        const uint64_t row = uint64_t{source} * params.max_tokens + index;
        return as<uint64_t>(window + params.packets) + row * words();
    }
    __device__ uint32_t padded(uint32_t count) const {
        const uint32_t mask = params.zones.alignment - 1;
        return (count + mask) & ~mask;
    }
};

// One thread tells all ranks that get the row of `token`.
__device__ void tell(const Block& block, uint32_t token) {
    const HtZonesParams& params = block.params;
    const uint32_t top_k = params.handle.top_k;
    const uint32_t local_experts = block.local_experts();
    const HtEntry* entries = params.handle.entries + uint64_t{token} * top_k;
    uint32_t k = 0;
#pragma unroll 1
    while (k < top_k && entries[k].expert >= 0) {
        const uint32_t peer = entries[k].expert / local_experts;
        const Remote<uint64_t> to =
            block.packets(window_of(params.peers, peer), params.source, entries[k].index);
#pragma unroll 1
        for (uint32_t word = 0; word < block.words(); ++word) {
            const uint32_t end = peer * local_experts + min((word + 1) * kWordBits, local_experts);
            uint32_t mask = 0;
#pragma unroll 1
            for (; k < top_k && static_cast<uint32_t>(entries[k].expert) < end; ++k) {
                mask |= 1u << (entries[k].expert - peer * local_experts) % kWordBits;
            }
            put_value(to + word, make_packet(block.shared.epoch, mask));
        }
    }
}

__device__ RowExperts hear(const Block& block, uint32_t source, uint32_t index, uint32_t expert) {
    const HtZonesParams& params = block.params;
    const uint64_t* at = block.packets<Own>(own_window(params.peers), source, index);
    const uint32_t named = block.is_over_nodes() ? HT_RANK_OF_GROUP | source : source;
    RowExperts row = {false, false, 0};
#pragma unroll 1
    for (uint32_t word = 0; word < block.words(); ++word) {
        const Arrival packet = wait_for_packet(params, at + word, {WAIT_COUNTS, named, block.shared.epoch});
        const uint32_t bit = 1u << expert % kWordBits;
        const uint32_t mask = packet.ok ? packet.data : 0;
        if (word < expert / kWordBits) {
            row.before += LaneMask{mask}.count();
        } else if (word > expert / kWordBits) {
            row.has_later = row.has_later || mask != 0;
        } else {
            row.is_for_this = (mask & bit) != 0;
            row.before += LaneMask{mask & (bit - 1)}.count();
            row.has_later = (mask & ~(bit | (bit - 1))) != 0;
        }
    }
    return row;
}

// Where the zone of `expert` begins, which all threads ask together; stored as well.
__device__ uint32_t find_begin(const Block& block, uint32_t expert) {
    const HtZonesParams& params = block.params;
    if (threadIdx.x == 0) {
        block.shared.begin = 0;
    }
    __syncthreads();
    for (uint32_t other = threadIdx.x; other < expert; other += HT_ZONES_THREADS) {
        atomicAdd(&block.shared.begin, block.padded(params.handle.counts[other]));
    }
    __syncthreads();
    const uint32_t begin = block.shared.begin;
    if (threadIdx.x == 0) {
        params.zones.begins[expert] = begin;
        if (expert + 1 == block.local_experts()) {
            params.zones.begins[expert + 1] = begin + block.padded(params.handle.counts[expert]);
        }
    }
    return begin;
}

// Stores the slot of a row for this expert, and behind that of its last one that there are no more.
__device__ void store(const Block& block, uint32_t row, const RowExperts& experts, uint32_t slot) {
    const HtZones& zones = block.params.zones;
    uint32_t* slots = zones.slots + uint64_t{row} * zones.most_slots;
    if (experts.before < zones.most_slots) {
        slots[experts.before] = slot < zones.limit ? slot : HT_DROPPED;
    }
    for (uint32_t i = experts.before + 1; !experts.has_later && i < zones.most_slots; ++i) {
        slots[i] = HT_NO_SLOT;
    }
}

// The block of `expert` numbers its rows from `source`, the first of which gets slot `next`; returns the slot behind
// the last.
__device__ uint32_t number_rows(const Block& block, uint32_t source, uint32_t expert, uint32_t next) {
    const uint32_t begin = block.begin_of(source);
    const uint32_t rows = block.begin_of(source + 1) - begin;
    for (uint32_t tile = 0; tile < rows; tile += HT_ZONES_THREADS) {
        const uint32_t index = tile + threadIdx.x;
        RowExperts row = {false, false, 0};
        if (index < rows) {
            row = hear(block, source, index, expert);
        }
        sync_warp();
        const LaneMask lanes = ballot(row.is_for_this);
        if (lane_idx() == 0) {
            block.shared.of_warp[warp_idx()] = lanes.count();
        }
        __syncthreads();
        uint32_t slot = next + lanes.count_before();
        for (uint32_t warp = 0; warp < kWarps; ++warp) {
            const uint32_t count = block.shared.of_warp[warp];
            slot += warp < warp_idx() ? count : 0;
            next += count;
        }
        if (row.is_for_this) {
            store(block, begin + index, row, slot);
        }
        __syncthreads();
    }
    return next;
}

ENTRY(ht_zones) {
    __shared__ SharedStorage shared;
    const Block block = {params, shared};
    const HtHandleMemory& handle = params.handle;
    if (threadIdx.x == 0) {
        shared.epoch = block.is_over_nodes() ? params.epoch : ld_relaxed_gpu(params.epochs);
    }
    __syncthreads();
    if ((*params.rows & HT_DISAGREED) != 0) {
        return;
    }
    if (blockIdx.x < params.send_blocks) {
        const uint32_t threads = params.send_blocks * blockDim.x;
        const uint32_t first = blockIdx.x * blockDim.x + threadIdx.x;
        for (uint32_t token = first; token < handle.tokens && known_failure(params.wait) == 0; token += threads) {
            tell(block, token);
        }
        return;
    }
    const uint32_t expert = blockIdx.x - params.send_blocks;
    uint32_t next = find_begin(block, expert);
    for (uint32_t source = 0; source < block.ranks(); ++source) {
        next = number_rows(block, source, expert, next);
    }
}

}  // namespace nccl_ep::ht_zones_impl
