// Where the rows of a handle lie by expert: behind ht_route, which has counted them. Over several nodes behind
// ht_route_nodes, a launch for each rank that this one forwards for: the last has the blocks of experts.
//
// Grid: blocks that send, then one for each local expert and source rank. A sending thread takes a token and tells each
// rank that gets its row which of that rank's experts it is for. The block of an expert and a source goes through all rows
// from there in their order, numbers those that are for it, and stores the slot of each. The slots before it are known:
// ht_route has heard how many rows each rank sends for each expert. Over several nodes that is not known, so the block of
// an expert goes through the rows of all sources.
//
// Packets have the epoch of ht_route. They lie in one bank: a rank writes those of handle n + 1 behind its ht_route of
// that handle, which has heard all ranks' ht_route of it; and each of these began when this kernel of handle n was over
// there. So nobody reads packets of handle n any more. What ht_route has heard is written again by that of handle n + 2,
// later still. Where ranks do not agree nobody sends or waits, and after a failure nobody sends.

#include "../base/entry.cuh"
#include "params/ht_nodes.h"
#include "zones.cuh"

namespace nccl_ep::ht_zones_impl {

constexpr uint32_t kWarps = HT_ZONES_THREADS / kWarpSize;
// Most rows that a thread looks at together.
constexpr uint32_t kRows = 8;
constexpr uint32_t kBeforeShift = HT_ZONE_WORD_EXPERTS;
constexpr uint32_t kMoreShift = 31;
static_assert(HT_MAX_TOP_K <= 1u << (kMoreShift - kBeforeShift), "a row has fewer experts before one of its");

struct SharedStorage {
    uint32_t of_warp[kWarps];
    uint32_t begin;
    // What each thread has heard of its rows.
    uint32_t data[kRows][HT_ZONES_THREADS];
};

struct Block {
    const HtZonesParams& params;
    SharedStorage& shared;
    uint32_t epoch;

    __device__ uint32_t ranks() const { return params.sources; }
    // The rows before those from `source`; all behind the last.
    __device__ uint32_t begin_of(uint32_t source) const {
        return source < ranks() ? params.handle.begins[source] : *params.rows;
    }
    __device__ bool is_over_nodes() const { return params.epochs == nullptr; }
    __device__ uint32_t local_experts() const { return params.zones.experts; }
    __device__ uint32_t words() const {
        return (local_experts() + HT_ZONE_WORD_EXPERTS - 1) / HT_ZONE_WORD_EXPERTS;
    }
    // The packets `word` of rows from `source` in the window that begins at `window`.
    template <template <typename> class Address>
    __device__ Address<uint64_t> packets(Address<uint8_t> window, uint32_t source, uint32_t word) const {
        return as<uint64_t>(window + params.packets) + (uint64_t{source} * words() + word) * params.max_tokens;
    }
    // How many rows of `source` are for `expert`, as ht_route has heard.
    __device__ uint32_t rows_for(uint32_t source, uint32_t expert) const {
        return heard_rows(params, epoch, source, expert);
    }
    __device__ uint32_t padded(uint32_t count) const {
        const uint32_t mask = params.zones.alignment - 1;
        return (count + mask) & ~mask;
    }
};

// One thread tells all ranks that get the row of `token`.
__device__ void tell_experts(const Block& block, uint32_t token) {
    const HtZonesParams& params = block.params;
    const uint32_t top_k = params.handle.top_k;
    const uint32_t local_experts = block.local_experts();
    const HtEntry* entries = params.handle.entries + uint64_t{token} * top_k;
    // Whether entry k has an expert before `end`.
    const auto is_before = [&](uint32_t k, uint32_t end) {
        return k < top_k && static_cast<uint32_t>(entries[k].expert) < end;
    };
    const uint32_t experts = params.peers.ranks * local_experts;
    uint32_t k = 0;
#pragma unroll 1
    while (is_before(k, experts)) {
        const uint32_t peer = entries[k].expert / local_experts;
        const uint32_t index = entries[k].index;
        const uint32_t end_of_peer = (peer + 1) * local_experts;
        const uint32_t begin = k;
        uint32_t expert = peer * local_experts;
#pragma unroll 1
        for (uint32_t word = 0; word < block.words(); ++word, expert += HT_ZONE_WORD_EXPERTS) {
            uint32_t data = (k - begin) << kBeforeShift;
#pragma unroll 1
            for (; is_before(k, min(expert + HT_ZONE_WORD_EXPERTS, end_of_peer)); ++k) {
                data |= 1u << (entries[k].expert - expert);
            }
            data |= is_before(k, end_of_peer) ? 1u << kMoreShift : 0;
            put_value(block.packets(window_of(params.peers, peer), params.source, word) + index,
                      make_packet(block.epoch, data));
        }
    }
}

// Where the slots of rows from `source` for `expert` begin, which all threads ask together.
__device__ uint32_t find_begin(const Block& block, uint32_t source, uint32_t expert) {
    if (threadIdx.x == 0) {
        block.shared.begin = 0;
    }
    __syncthreads();
#pragma unroll 1
    for (uint32_t other = threadIdx.x; other < expert; other += HT_ZONES_THREADS) {
        atomicAdd(&block.shared.begin, block.padded(block.params.handle.counts[other]));
    }
#pragma unroll 1
    for (uint32_t earlier = threadIdx.x; earlier < source; earlier += HT_ZONES_THREADS) {
        atomicAdd(&block.shared.begin, block.rows_for(earlier, expert));
    }
    __syncthreads();
    return block.shared.begin;
}

// One thread: the zone of `expert`, which begins at slot `begin`, for operations and for the caller.
__device__ void store_zone(const Block& block, uint32_t expert, uint32_t begin) {
    const HtZonesParams& params = block.params;
    const uint32_t end = begin + block.padded(params.handle.counts[expert]);
    params.zones.begins[expert] = begin;
    tell_zone(params.told, params.zones, expert, begin, end);
    if (expert + 1 == block.local_experts()) {
        params.zones.begins[expert + 1] = end;
        tell_slots(params.told, end);
    }
}

// Stores a slot of `row`, of which a packet said `data`, and behind that of its last expert that there are no more.
__device__ void store_slot(const Block& block, uint32_t row, uint32_t data, uint32_t bit, uint32_t slot) {
    const HtZones& zones = block.params.zones;
    uint32_t* slots = zones.slots + uint64_t{row} * zones.most_slots;
    const uint32_t before = (data >> kBeforeShift) % HT_MAX_TOP_K + LaneMask{data & ((1u << bit) - 1)}.count();
    const uint32_t later = (data >> kMoreShift) << HT_ZONE_WORD_EXPERTS | (data & ((1u << HT_ZONE_WORD_EXPERTS) - 1));
    if (before < zones.most_slots) {
        slots[before] = slot < zones.limit ? slot : HT_DROPPED;
    }
#pragma unroll 1
    for (uint32_t i = before + 1; later >> bit == 1 && i < zones.most_slots; ++i) {
        slots[i] = HT_NO_SLOT;
    }
}

// Looks once what `packets` say of this thread's rows, one for each group of a warp's lanes, those of `rows` that there
// are; returns a bit for each that is late.
__device__ __forceinline__ uint32_t look(const Block& block, const uint64_t* packets, uint32_t groups, uint32_t first,
                                         uint32_t rows) {
    uint64_t packet[kRows];
#pragma unroll
    for (uint32_t i = 0; i < kRows; ++i) {
        const uint32_t index = first + i * kWarpSize;
        packet[i] = i < groups && index < rows ? ld_relaxed_sys(packets + index) : make_packet(block.epoch, 0);
    }
    uint32_t late = 0;
#pragma unroll
    for (uint32_t i = 0; i < kRows; ++i) {
        block.shared.data[i][threadIdx.x] = packet_data(packet[i]);
        late |= packet_epoch(packet[i]) != block.epoch ? 1u << i : 0;
    }
    return late;
}

// A block numbers the rows from `source` for `expert`, the first of which gets slot `next`; returns the slot behind the
// last.
__device__ uint32_t number_rows(const Block& block, uint32_t source, uint32_t expert, uint32_t next) {
    const uint32_t begin = block.begin_of(source);
    const uint32_t rows = block.begin_of(source + 1) - begin;
    const uint32_t named = block.is_over_nodes() ? HT_RANK_OF_GROUP | source : source;
    const uint32_t bit = expert % HT_ZONE_WORD_EXPERTS;
    const uint64_t* packets =
        block.packets<Own>(own_window(block.params.peers), source, expert / HT_ZONE_WORD_EXPERTS);
    const uint32_t groups = min((rows + HT_ZONES_THREADS - 1) / HT_ZONES_THREADS, kRows);
    for (uint32_t tile = 0; tile < rows; tile += groups * HT_ZONES_THREADS) {
        const uint32_t first = tile + warp_idx() * groups * kWarpSize + lane_idx();
        uint32_t late = look(block, packets, groups, first, rows);
        uint32_t count = 0;
#pragma unroll 1
        for (uint32_t i = 0; i < groups; ++i, late >>= 1) {
            uint32_t& data = block.shared.data[i][threadIdx.x];
            if (late % 2 != 0) {
                const Arrival arrival = wait_for_packet(block.params, packets + first + i * kWarpSize,
                                                        {WAIT_COUNTS, named, block.epoch});
                data = arrival.ok ? arrival.data : 0;
            }
            sync_warp();
            count += ballot((data >> bit & 1) != 0).count();
        }
        if (lane_idx() == 0) {
            block.shared.of_warp[warp_idx()] = count;
        }
        __syncthreads();
        uint32_t slot = next;
#pragma unroll 4
        for (uint32_t warp = 0; warp < kWarps; ++warp) {
            const uint32_t of_warp = block.shared.of_warp[warp];
            slot += warp < warp_idx() ? of_warp : 0;
            next += of_warp;
        }
#pragma unroll 1
        for (uint32_t i = 0; i < groups; ++i) {
            const uint32_t data = block.shared.data[i][threadIdx.x];
            const LaneMask lanes = ballot((data >> bit & 1) != 0);
            if (lanes.has_this()) {
                store_slot(block, begin + first + i * kWarpSize, data, bit, slot + lanes.count_before());
            }
            slot += lanes.count();
        }
        __syncthreads();
    }
    return next;
}

ENTRY(ht_zones) {
    __shared__ SharedStorage shared;
    const HtHandleMemory& handle = params.handle;
    const uint32_t epoch = params.epochs == nullptr ? params.epoch : ld_relaxed_gpu(params.epochs);
    const Block block = {params, shared, epoch};
    const bool is_valid = (*params.rows & HT_DISAGREED) == 0;
    if (blockIdx.x < params.send_blocks) {
        // Warps take tokens in turn, so that those of a few are in many blocks.
        const uint32_t first = (warp_idx() * params.send_blocks + blockIdx.x) * kWarpSize + lane_idx();
        const uint32_t threads = params.send_blocks * HT_ZONES_THREADS;
        for (uint32_t token = first; is_valid && token < handle.tokens && known_failure(params.wait) == 0;
             token += threads) {
            tell_experts(block, token);
        }
        return;
    }
    const uint32_t expert = (blockIdx.x - params.send_blocks) % block.local_experts();
    const uint32_t source = (blockIdx.x - params.send_blocks) / block.local_experts();
    uint32_t next = is_valid ? find_begin(block, source, expert) : 0;
    if (threadIdx.x == 0 && source == 0 && is_valid) {
        store_zone(block, expert, next);
    } else if (threadIdx.x == 0 && source == 0) {
        tell_zone(params.told, params.zones, expert, 0, 0);
        tell_slots(params.told, 0);
    }
    const uint32_t end = !is_valid ? source : block.is_over_nodes() ? block.ranks() : source + 1;
    for (uint32_t from = source; from < end; ++from) {
        next = number_rows(block, from, expert, next);
    }
}

}  // namespace nccl_ep::ht_zones_impl
