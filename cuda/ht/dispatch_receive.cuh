// How a dispatch receives: warps take any row that has arrived, and store it where it belongs.
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

// Whether row `index` of `source` is here. One of another shape never is: it ends the operation.
template <typename Block>
__device__ __forceinline__ bool has_arrived(const Block& block, uint32_t source, uint32_t index) {
    const uint32_t sequence =
        unit_of_row(AnyUnits{block.common}, block.shared.pairs.received[source], index);
    const uint64_t packet = ld_acquire_sys(own_rings(block.common).arrival(source, sequence));
    if (!is_or_follows(packet_epoch(packet), sequence + 1)) {
        return false;
    }
    const bool fits = packet_data(packet) == block.common.shape.fingerprint;
    // Rows of another shape may take whole slots: it is those at the beginning of a slot that tell.
    if (!fits && sequence % kSlotUnits == 0) {
        fail_for_shape(block.common, source, sequence, packet_data(packet),
                       block.rows.scales_word());
    }
    return fits;
}

// One warp polls for the block which of its rows have come, a few of each source at once. False once none is
// left.
template <typename Block>
__device__ bool poll_arrivals(const Block& block) {
    const PeerTable& peers = block.common.peers;
    const PollLanes poll(peers.ranks);
    bool left = false;
    for (uint32_t base = 0; base < poll.others; base += poll.peers_at_once()) {
        const uint32_t source = poll.peer(peers, base);
        const bool is_source = source != kNoPeer;
        const uint32_t known = is_source ? block.shared.arrived[source] : 0;
        const uint32_t index = row_of_turn(block.receivers, source, known + poll.index());
        const bool is_row = is_source && index < block.shared.pairs.to_receive[source];
        left = left || is_row;
        const uint32_t turns = poll.leading(is_row && has_arrived(block, source, index));
        if (poll.index() == 0 && turns != 0) {
            st_release_cta_shared(&block.shared.arrived[source], known + turns);
        }
        sync_warp();
    }
    return ballot(left).any();
}

template <typename Block>
__device__ void receive_rows(const Block& block, Staging& staging) {
    const HtCommon& common = block.common;
    const HtPairs& pairs = block.shared.pairs;
    const auto is_ready = [&](uint32_t source, uint32_t, uint32_t turn) {
        return is_or_follows(ld_acquire_cta_shared(&block.shared.arrived[source]), turn + 1);
    };
    for (bool has_local_work = true;;) {
        const Work work = next_row(common, {WAIT_STREAMED_ROW, kNoPeer, pairs.operation},
                                   block.shared.scheduler, pairs.to_receive, block.receivers,
                                   block.ranks(), is_ready, [&] { return has_local_work; });
        if (work.peer != kNoPeer) {
            take_row(block, work.peer, work.index, staging);
        } else if (has_local_work) {
            has_local_work = work_locally(block, staging);
        } else {
            break;
        }
    }
}

}  // namespace nccl_ep::ht_dispatch_impl
