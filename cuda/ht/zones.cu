// Finds where the rows of a handle lie by expert. Runs after ht_route, which has counted them; over several nodes after
// ht_route_nodes, in a launch for each rank that this one forwards for, the last of which has the blocks of experts.
//
// Each rank that gets a row is notified of which of its experts the row is for: by ht_route, over several nodes by the
// first blocks of this kernel.
//
// Grid: one block for each local expert and source rank. It goes through all rows from there in their order, numbers
// those for the expert, and stores the slot of each. The slots before them are known, as ht_route has received how many
// rows each rank sends for each expert. Over several nodes that is not known, so the block of an expert goes through
// the rows of all sources.
//
// Packets have the epoch of ht_route, n, which selects one of two banks. While the ht_route of n + 1 writes to the
// other bank, this kernel of n may still run elsewhere. That of n - 1 has ended everywhere: the ht_route of n, which
// has ended here, was notified by every rank's, and each of these began after it. Over several nodes this kernel writes
// the packets itself, after the ht_route_nodes of the same handle, which was notified by every rank's; each of these
// began after this kernel of the previous handle had ended there: so one bank is enough. The counts that ht_route
// received are overwritten by that of handle n + 2, later still. If the ranks disagree nobody waits; after a failure
// nobody sends.

#include "../base/entry.cuh"
#include "params/ht_nodes.h"
#include "zones.cuh"

namespace nccl_ep::ht_zones_impl {

constexpr uint32_t kWarps = HT_ZONES_THREADS / kWarpSize;
// Most rows that a thread looks at together.
constexpr uint32_t kRows = 8;

struct SharedStorage {
    uint32_t of_warp[kWarps];
    uint32_t begin;
    // The data of the packets of each thread's rows.
    uint32_t data[kRows][HT_ZONES_THREADS];
    // Those of each warp that are for the expert, by their number among the warp's.
    uint16_t found[kWarps][kRows * kWarpSize];
};

struct Block {
    const HtZonesParams& params;
    SharedStorage& shared;
    uint32_t epoch;

    __device__ uint32_t ranks() const { return params.sources; }
    // The rows before those from `source`; past the last source, all rows.
    __device__ uint32_t begin_of(uint32_t source) const {
        return source < ranks() ? params.handle.begins[source] : *params.rows;
    }
    __device__ bool is_over_nodes() const { return params.epochs == nullptr; }
    __device__ uint32_t local_experts() const { return params.zones.experts; }
    // How many rows of `source` are for `expert`, by the counts that ht_route received.
    __device__ uint32_t rows_for(uint32_t source, uint32_t expert) const {
        return row_count(params, epoch, source, expert);
    }
    __device__ uint32_t padded(uint32_t count) const {
        const uint32_t mask = params.zones.alignment - 1;
        return (count + mask) & ~mask;
    }
};

// The rows from a source, and their packets for the word of one expert.
struct Rows {
    uint32_t source;
    uint32_t begin;
    uint32_t count;
    // Groups of kWarpSize rows that a warp takes at a time.
    uint32_t groups;
    const uint64_t* packets;

    __device__ Rows(const Block& block, uint32_t from, uint32_t expert) : source(from), begin(block.begin_of(from)) {
        const HtZonesParams& params = block.params;
        const uint32_t word = source * zone_words(block.local_experts()) + expert / HT_ZONE_WORD_EXPERTS;
        count = block.begin_of(source + 1) - begin;
        groups = min((count + HT_ZONES_THREADS - 1) / HT_ZONES_THREADS, kRows);
        packets = packets_of<Own>(params.packets, block.epoch, own_window(params.peers)) +
                  uint64_t{word} * params.max_tokens;
    }
    // This thread's first row of those from `tile` on.
    __device__ uint32_t first(uint32_t tile) const { return tile + warp_idx() * groups * kWarpSize + lane_idx(); }
};

// Where the slots of rows from `source` for `expert` begin. All threads call it.
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
    report_zone(params.report, params.zones, expert, begin, end);
    if (expert + 1 == block.local_experts()) {
        params.zones.begins[expert + 1] = end;
        report_slots(params.report, end);
    }
}

// Stores a slot of `row`, whose packet says `data`; if it is that of its last expert, also that no more follow.
__device__ void store_slot(const Block& block, uint32_t row, uint32_t data, uint32_t bit, uint32_t slot) {
    const HtZones& zones = block.params.zones;
    uint32_t* slots = zones.slots + uint64_t{row} * zones.most_slots;
    const uint32_t before = (data >> kZoneBeforeShift) % HT_MAX_TOP_K + LaneMask{data & ((1u << bit) - 1)}.count();
    const uint32_t later =
        (data >> kZoneMoreShift) << HT_ZONE_WORD_EXPERTS | (data & ((1u << HT_ZONE_WORD_EXPERTS) - 1));
    if (before < zones.most_slots) {
        slots[before] = slot < zones.limit ? slot : HT_DROPPED;
    }
#pragma unroll 1
    for (uint32_t i = before + 1; later >> bit == 1 && i < zones.most_slots; ++i) {
        slots[i] = HT_NO_SLOT;
    }
}

// Polls once the packets of this thread's rows from `tile` on, one of each group; returns a bit for each that is late.
__device__ __forceinline__ uint32_t look(const Block& block, const Rows& rows, uint32_t tile) {
    uint64_t packet[kRows];
#pragma unroll
    for (uint32_t i = 0; i < kRows; ++i) {
        const uint32_t index = rows.first(tile) + i * kWarpSize;
        const bool is_there = i < rows.groups && index < rows.count;
        packet[i] = is_there ? ld_relaxed_sys(rows.packets + index) : make_packet(block.epoch, 0);
    }
    uint32_t late = 0;
#pragma unroll
    for (uint32_t i = 0; i < kRows; ++i) {
        block.shared.data[i][threadIdx.x] = packet_data(packet[i]);
        late |= packet_epoch(packet[i]) != block.epoch ? 1u << i : 0;
    }
    return late;
}

// A block numbers the rows for `expert` among `rows` from `tile` on, which it has polled; the first gets slot `next`.
// Returns the slot after the last.
__device__ uint32_t number_rows(const Block& block, const Rows& rows, uint32_t tile, uint32_t expert, uint32_t next,
                                uint32_t late) {
    const uint32_t named = block.is_over_nodes() ? HT_RANK_OF_GROUP | rows.source : rows.source;
    const uint32_t bit = expert % HT_ZONE_WORD_EXPERTS;
    const uint32_t first = rows.first(tile);
    uint16_t* found = block.shared.found[warp_idx()];
    uint32_t count = 0;
#pragma unroll 1
    for (uint32_t i = 0; i < rows.groups; ++i, late >>= 1) {
        uint32_t& data = block.shared.data[i][threadIdx.x];
        if (late % 2 != 0) {
            const Arrival arrival = wait_for_packet(block.params, rows.packets + first + i * kWarpSize,
                                                    {WAIT_COUNTS, named, block.epoch});
            data = arrival.ok ? arrival.data : 0;
        }
        sync_warp();
        const LaneMask lanes = ballot((data >> bit & 1) != 0);
        if (lanes.has_this()) {
            found[count + lanes.count_before()] = static_cast<uint16_t>(i * kWarpSize + lane_idx());
        }
        count += lanes.count();
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
    // Few rows are for the expert, so each lane has one of those.
#pragma unroll 1
    for (uint32_t i = lane_idx(); i < count; i += kWarpSize) {
        const uint32_t row = found[i];
        const uint32_t data = block.shared.data[row / kWarpSize][threadIdx.x - lane_idx() + row % kWarpSize];
        store_slot(block, rows.begin + first - lane_idx() + row, data, bit, slot + i);
    }
    __syncthreads();
    return next;
}

__device__ void run(const HtZonesParams& params) {
    // A route that is launched beside this kernel holds it up (docs/development/high-throughput.md).
    wait_for_grid();
    __shared__ SharedStorage shared;
    const HtHandleMemory& handle = params.handle;
    const uint32_t epoch = params.epochs == nullptr ? params.epoch : ld_relaxed_gpu(params.epochs);
    const Block block = {params, shared, epoch};
    const bool is_valid = (*params.rows & HT_DISAGREED) == 0;
    if (blockIdx.x < params.send_blocks) {
        if (is_valid) {
            notify_tokens(params, epoch, params.source, 0, handle.tokens, warp_idx() * params.send_blocks + blockIdx.x,
                          params.send_blocks * kWarps);
        }
        return;
    }
    const uint32_t expert = (blockIdx.x - params.send_blocks) % block.local_experts();
    const uint32_t source = (blockIdx.x - params.send_blocks) / block.local_experts();
    if (!is_valid) {
        if (threadIdx.x == 0 && source == 0) {
            report_zone(params.report, params.zones, expert, 0, 0);
            report_slots(params.report, 0);
        }
        return;
    }
    uint32_t next = 0;
    const uint32_t end = block.is_over_nodes() ? block.ranks() : source + 1;
    for (uint32_t from = source; from < end; ++from) {
        const Rows rows(block, from, expert);
        uint32_t tile = 0;
        do {
            // Before the slots are known, as both take a while.
            const uint32_t late = look(block, rows, tile);
            if (from == source && tile == 0) {
                next = find_begin(block, source, expert);
                if (threadIdx.x == 0 && source == 0) {
                    store_zone(block, expert, next);
                }
            }
            next = number_rows(block, rows, tile, expert, next, late);
            tile += rows.groups * HT_ZONES_THREADS;
        } while (tile < rows.count);
    }
}

ENTRY(ht_zones) {
    run(params);
    finish_block(params.finish, params.wait, params.rows);
}

}  // namespace nccl_ep::ht_zones_impl
