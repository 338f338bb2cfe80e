// The receiving half of a dispatch: a warp takes those of its rows that have arrived and stores them to the outputs.
#pragma once

#include "dispatch_local.cuh"

namespace nccl_ep::ht_dispatch_impl {

// One warp copies row `index` of `source` from its slot to the output.
template <typename Block>
__device__ void take_row(const Block& block, uint32_t source, uint32_t index, Staging& staging) {
    const HtCommon& common = block.common;
    const RowFormat format = row_format(common);
    const uint32_t sequence = unit_of_row(AnyUnits{common}, block.shared.pairs.received[source], index);
    const uint32_t row = block.row_from(source, index);
    const uint8_t* slot = own_rings(common).row(source, sequence);
    for (uint32_t offset = 0; offset < format.bytes; offset += format.chunk_bytes) {
        const bool is_last = format.is_last_chunk(offset);
        const uint32_t bytes = format.chunk_at(offset);
        staging.wait_reusable();
        staging.load_arrived(slot + offset, bytes, slot + format.bytes,
                             is_last ? common.shape.tail_bytes : 0);
        staging.wait_loaded();
        if (!block.rows.check(block, source, offset, bytes, staging.chunk())) {
            return;
        }
        if (is_last && lane_idx() == 0) {
            give_credit(common, AnyUnits{common}, block.shared.pairs, source, sequence);
        }
        block.rows.deliver(block, row, offset, bytes, staging.chunk(), staging);
        staging.commit();
    }
    if (common.shape.tail_bytes != 0) {
        if (lane_idx() < block.top_k()) {
            const auto* tail = reinterpret_cast<const uint64_t*>(staging.tails());
            write_routing(block, row, RoutingEntry(common, tail[lane_idx()]));
        }
        staging.settle();
    }
}

// A row of another shape that has arrived.
struct MismatchedRow {
    uint32_t source = kNoPeer;
    uint32_t sequence = 0;
    uint32_t fingerprint = 0;
};

// Whether row `index` from `source` has arrived. A row of another shape never has, and goes to `odd`: it ends the
// operation.
template <typename Block>
__device__ __forceinline__ bool has_arrived(const Block& block, uint32_t source, uint32_t index, MismatchedRow& odd) {
    const uint32_t sequence =
        unit_of_row(AnyUnits{block.common}, block.shared.pairs.received[source], index);
    const uint64_t packet = ld_acquire_sys(own_rings(block.common).arrival(source, sequence));
    if (!is_or_follows(packet_epoch(packet), sequence + 1)) {
        return false;
    }
    const bool fits = packet_data(packet) == block.common.shape.fingerprint;
    // Rows of another shape may take whole slots, so only the first unit of a slot is conclusive.
    if (!fits && sequence % kSlotUnits == 0) {
        odd = {source, sequence, packet_data(packet)};
    }
    return fits;
}

// One warp polls, for its block, which of the block's rows have arrived, a few of each source at once; false once none
// is left.
template <typename Block>
__device__ bool poll_arrivals(const Block& block, MismatchedRow& odd) {
    const PeerTable& peers = block.common.peers;
    const PollLanes poll(peers.ranks);
    bool left = false;
    for (uint32_t base = 0; base < poll.others; base += poll.peers_at_once()) {
        const uint32_t source = poll.peer(peers, base);
        const bool is_source = source != kNoPeer;
        const uint32_t known = is_source ? block.shared.arrived[source] : 0;
        const uint32_t index = known + poll.index() * block.receivers.blocks;
        const bool is_row = is_source && index < block.shared.pairs.to_receive[source];
        left = left || is_row;
        const uint32_t rows = poll.leading(is_row && has_arrived(block, source, index, odd));
        if (poll.index() == 0 && rows != 0) {
            st_release_cta_shared(&block.shared.arrived[source], known + rows * block.receivers.blocks);
        }
        sync_warp();
    }
    return ballot(left).any();
}

// Polls until no row is left or the operation has failed. It needs no deadline, as the warps that take the rows have
// one.
template <typename Block>
__device__ void poll_arrivals(const Block& block) {
    MismatchedRow odd;
    while (poll_arrivals(block, odd) && !any_lane(odd.source != kNoPeer || has_failed(block.common.wait))) {
    }
    if (odd.source != kNoPeer) {
        fail_for_shape(block.common, odd.source, odd.sequence, odd.fingerprint, block.rows.scales_word());
    }
}

// The rows that a warp takes. The rows of a source are dealt to the receiving blocks in turn, and those of a block to
// its warps, so that no two warps compete for a row: when they did, a block took at most one row in 250 ns
// (docs/development/high-throughput.md). Each lane has the warp's next rows from some sources.
class AssignedRows {
   public:
    template <typename Block>
    __device__ explicit AssignedRows(const Block& block)
        : step_(block.receivers.blocks * block.common.shape.copy_warps) {
#pragma unroll 1
        for (uint32_t base = 0; base < kRounds * kWarpSize; base += kWarpSize) {
            const uint32_t source = base + lane_idx();
            // Every other source deals in the opposite order, so that not all last rows go to the same warps.
            const uint32_t turn = source % 2 != 0 ? block.common.shape.copy_warps - 1 - warp_idx() : warp_idx();
            rotate(row_of_turn(block.receivers, source, turn));
        }
    }

    // Looks once for a row that has arrived.
    template <typename Block>
    __device__ TakenRow take(const Block& block) {
        TakenRow work = {kNoPeer, 0, kNoPeer};
#pragma unroll 1
        for (uint32_t base = 0; base < kRounds * kWarpSize; base += kWarpSize) {
            if (base < block.ranks() && work.peer == kNoPeer) {
                look(block, base, work);
            }
            rotate(next_[0]);
        }
        return work;
    }

   private:
    static constexpr uint32_t kRounds = (MAX_PEERS + kWarpSize - 1) / kWarpSize;

    // Drops the first round's rows and appends `last`: so the code for a round exists once, with its rows in registers.
    __device__ __forceinline__ void rotate(uint32_t last) {
#pragma unroll
        for (uint32_t i = 0; i + 1 < kRounds; ++i) {
            next_[i] = next_[i + 1];
        }
        next_[kRounds - 1] = last;
    }

    // Looks among the sources from `base` on, beginning after the source of the last row.
    template <typename Block>
    __device__ void look(const Block& block, uint32_t base, TakenRow& work) {
        const uint32_t source = base + lane_idx();
        const bool is_left = source < block.ranks() && next_[0] < block.shared.pairs.to_receive[source];
        const bool has_come = is_left && next_[0] < ld_acquire_cta_shared(&block.shared.arrived[source]);
        const LaneMask left = ballot(is_left);
        if (left.any() && work.left == kNoPeer) {
            work.left = base + left.first();
        }
        const LaneMask come = ballot(has_come);
        if (!come.any()) {
            return;
        }
        const uint32_t lane = come.first_from(first_lane_);
        first_lane_ = (lane + 1) % kWarpSize;
        work.peer = base + lane;
        work.index = shuffle(next_[0], lane);
        next_[0] += lane_idx() == lane ? step_ : 0;
        sync_warp();
    }

    uint32_t step_;
    uint32_t first_lane_ = 0;
    uint32_t next_[kRounds] = {};
};

template <typename Block>
__device__ void receive_rows(const Block& block, Staging& staging) {
    AssignedRows rows(block);
    TakenRow work;
    WaitLimit limit;
    bool has_local_work = true;
    bool gives_up = false;
    do {
        work = rows.take(block);
        if (work.peer != kNoPeer) {
            take_row(block, work.peer, work.index, staging);
            limit = {};
        } else if (has_local_work) {
            has_local_work = work_locally(block, staging);
        } else if (work.left != kNoPeer) {
            gives_up = limit.is_over(block.common.wait);
        }
        sync_warp();
    } while ((work.peer != kNoPeer || work.left != kNoPeer || has_local_work) && !gives_up);
    staging.wait_stored();
    if (gives_up) {
        limit.report(block.common, {WAIT_STREAMED_ROW, work.left, block.shared.pairs.operation});
    }
}

}  // namespace nccl_ep::ht_dispatch_impl
