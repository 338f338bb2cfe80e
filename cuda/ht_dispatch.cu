// High-throughput dispatch: every row goes once to each rank that hosts one of its token's experts,
// into a ring there, and from the ring to its final place in the output.
//
// Grid: sending blocks, then receiving blocks, no more than fit on the GPU at once; every warp that
// has a carrier works on its own. A sending warp takes a token, loads its row once and stores it to
// the rings of all its peers; one warp more of its block, the herald, announces what was sent. One
// warp of a receiving block looks what has arrived for the block; the others take any such row, give
// the slot back as soon as the row is in shared memory, and store it where it belongs: sources
// ascending, then tokens.
// Ids and weights, if any, travel behind the row. While nothing has arrived receivers do what is left
// on this rank: rows of its own tokens for its own experts, and the rows of the outputs that no token
// fills, which get zeros and ids of -1.

#include "primitives.cuh"

#include "common/ht_dispatch_send.cuh"

namespace nccl_ep::ht_dispatch_impl {

// ---- What stays on this rank -------------------------------------------------------------------

// One warp brings a token to its place in this rank's own output; false if it does not go there.
__device__ bool keep_token(const Block& block, uint32_t token, Carrier& carrier) {
    const HtCommon& common = block.common;
    const TokenEntries entries(common, token);
    const uint32_t own = __ballot_sync(
        kAllLanes, entries.is_first() && static_cast<uint32_t>(entries.rank) == block.rank());
    if (own == 0) {
        return false;
    }
    const uint32_t lane = __ffs(own) - 1;
    const uint32_t row = block.shared.pairs.begins[block.rank()] +
                         __shfl_sync(kAllLanes, entries.entry.place, lane);
    for (uint32_t offset = 0; block.keeps_rows && offset < common.row_bytes;
         offset += common.piece_bytes) {
        carrier.wait_reusable();
        load_piece(block, token, offset, carrier);
        carrier.wait_loaded();
        carrier.store(block.out_row(row) + offset,
                      min(common.row_bytes - offset, common.piece_bytes));
        carrier.commit();
    }
    if (block.params.topk_idx != nullptr) {
        const float weight = block.given_routing(token).weight_of(entries, block.top_k());
        const RoutingEntry routing(block.common, entries, lane, weight);
        write_routing(block, row, routing);
    }
    return true;
}

// One warp fills a row of each output that no token fills; false if there is no such row.
__device__ bool fill_unused_row(const Block& block, uint64_t number, Carrier& carrier) {
    const bool has_row = block.keeps_rows && number < block.params.out_rows;
    const bool has_routing = block.keeps_routing && number < block.params.routing_rows;
    const uint32_t row = static_cast<uint32_t>(number);
    if (has_row) {
        const uint32_t row_bytes = block.common.row_bytes;
        for (uint32_t offset = 0; offset < row_bytes; offset += HT_ZERO_BYTES) {
            carrier.store_shared(block.zeros, block.out_row(row) + offset,
                                 min(row_bytes - offset, HT_ZERO_BYTES));
        }
        carrier.commit();
    }
    if (has_routing) {
        write_routing(block, row, {-1, 0.0f});
    }
    return has_row || has_routing;
}

// One warp does the block's next piece of local work; false if there is none left.
__device__ bool work_locally(const Block& block, Carrier& carrier) {
    Shared& shared = block.shared;
    const uint32_t tokens = block.common.handle.tokens;
    for (;;) {
        const uint32_t token = block.receivers.next_unit(&shared.next_own);
        if (token >= tokens) {
            break;
        }
        if (keep_token(block, token, carrier)) {
            return true;
        }
    }
    // With outputs of nearly 2^32 rows, 32 bits do not hold the numbers past the last one.
    const Share own_turns = {blockIdx.x, 1};
    const uint64_t turn = own_turns.next_unit(&shared.next_unused);
    const uint64_t unused = turn * block.receivers.blocks + block.receivers.index();
    return fill_unused_row(block, shared.pairs.total + unused, carrier);
}

// ---- Receiving ---------------------------------------------------------------------------------

// One warp brings row `index` of `source` from its slot to its place.
__device__ void take_row(const Block& block, uint32_t source, uint32_t index, Carrier& carrier) {
    const HtCommon& common = block.common;
    const uint32_t sequence = block.shared.pairs.received[source] + index;
    const uint32_t row = block.shared.pairs.begins[source] + index;
    const uint8_t* slot = block.ring.row(block.rank(), source, sequence);
    for (uint32_t offset = 0; offset < common.row_bytes; offset += common.piece_bytes) {
        const uint32_t left = common.row_bytes - offset;
        const bool is_last = left <= common.piece_bytes;
        const uint32_t bytes = min(left, common.piece_bytes);
        carrier.wait_reusable();
        carrier.load(slot + offset, bytes, slot + common.row_bytes,
                     is_last ? common.tail_bytes : 0);
        carrier.wait_loaded();
        if (is_last && lane_idx() == 0) {
            release_row(block.ring, source, sequence);
        }
        if (block.keeps_rows) {
            carrier.store(block.out_row(row) + offset, bytes);
            carrier.commit();
        }
    }
    if (common.tail_bytes != 0) {
        if (lane_idx() < block.top_k()) {
            const auto* tail = reinterpret_cast<const uint64_t*>(carrier.tails());
            write_routing(block, row, RoutingEntry(common, tail[lane_idx()]));
        }
        carrier.settle_tails();
    }
}

// Whether row `index` of `source` is here. One of another shape never is: it ends the operation.
__device__ __forceinline__ bool has_come(const Block& block, uint32_t source, uint32_t index) {
    const uint32_t sequence = block.shared.pairs.received[source] + index;
    const uint64_t packet = ld_acquire_sys(block.ring.arrival(block.rank(), source, sequence));
    if (!is_or_follows(packet_epoch(packet), sequence + 1)) {
        return false;
    }
    if (packet_data(packet) != block.common.shape_word) {
        fail_for_shape(block.common, source, packet_data(packet));
        return false;
    }
    return true;
}

// One warp looks for the block which of its rows have come, a few of each source at once. False once
// none is left.
__device__ bool look_for_rows(const Block& block) {
    const PeerTable& peers = block.common.peers;
    const Lookout lookout(peers.ranks);
    bool left = false;
    for (uint32_t base = 0; base < lookout.others; base += lookout.peers_at_once()) {
        const uint32_t source = lookout.peer(peers, base);
        const bool is_source = source != kNoPeer;
        const uint32_t known = is_source ? block.shared.arrived[source] : 0;
        const uint32_t index = row_of_turn(block.receivers, source, known + lookout.look());
        const bool is_row = is_source && index < block.shared.pairs.to_receive[source];
        left = left || is_row;
        const uint32_t turns =
            leading_looks(lookout, is_row && has_come(block, source, index));
        if (lookout.look() == 0 && turns != 0) {
            st_release_cta_shared(&block.shared.arrived[source], known + turns);
        }
        __syncwarp();
    }
    return __ballot_sync(kAllLanes, left) != 0;
}

__device__ void receive_rows(const Block& block, Carrier& carrier) {
    const HtCommon& common = block.common;
    const HtPairs& pairs = block.shared.pairs;
    const auto is_ready = [&](uint32_t source, uint32_t, uint32_t turn) {
        return is_or_follows(ld_acquire_cta_shared(&block.shared.arrived[source]), turn + 1);
    };
    bool has_local_work = true;
    const auto idle = [&] { has_local_work = has_local_work && work_locally(block, carrier); };
    for (;;) {
        const Claimed claimed = claim(common, {WAIT_STREAMED_ROW, kNoPeer, pairs.operation},
                                      block.shared.claims, pairs.to_receive, block.receivers,
                                      block.ranks(), is_ready, idle);
        if (claimed.peer == kNoPeer) {
            break;
        }
        take_row(block, claimed.peer, claimed.index, carrier);
    }
    while (has_local_work) {
        idle();
    }
}

// ---- The kernel --------------------------------------------------------------------------------

// Whether the outputs hold what comes; a missing one holds any number of rows. Else the operation fails:
// here at once, on peers that wait for this rank, now or when they begin their next one.
__device__ bool check_outputs(const Block& block) {
    const HtDispatchParams& params = block.params;
    const uint32_t total = block.shared.pairs.total;
    const bool rows_fit = params.out_rows >= total;
    const bool routing_fits = params.routing_rows >= total;
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        if (!rows_fit) {
            fail(params.common, FAULT_TOKEN_ROWS, block.rank(), total, params.out_rows);
        } else if (!routing_fits) {
            fail(params.common, FAULT_ROUTING_ROWS, block.rank(), total, params.routing_rows);
        }
    }
    return rows_fit && routing_fits;
}

__device__ void run(const HtDispatchParams& params, uint8_t* memory) {
    __shared__ Shared shared;
    uint8_t* zeros = memory;
    uint8_t* carriers = memory + HT_ZERO_BYTES;
    const HtCommon& common = params.common;
    const Block block = {params,
                         common,
                         shared,
                         {common},
                         {0, common.send_blocks},
                         {common.send_blocks, gridDim.x - common.send_blocks},
                         zeros,
                         params.out != nullptr,
                         params.out_idx != nullptr};
    for (uint32_t peer = threadIdx.x; peer < MAX_PEERS; peer += blockDim.x) {
        shared.claims.next[peer] = 0;
        shared.arrived[peer] = 0;
    }
    if (threadIdx.x == 0) {
        shared.next_token = 0;
        shared.next_own = 0;
        shared.next_unused = 0;
    }
    for (uint32_t i = threadIdx.x; i < HT_ZERO_BYTES / sizeof(Vec16); i += blockDim.x) {
        reinterpret_cast<Vec16*>(zeros)[i] = {{0, 0, 0, 0}};
    }
    settle_shared();
    clear_mailboxes(shared.mailboxes);
    if (!begin_operation(common, false, shared.pairs) || !check_outputs(block)) {
        return;
    }
    if (params.counter != nullptr && blockIdx.x == gridDim.x - 1) {
        for (uint32_t i = threadIdx.x; i < common.layout.local_experts; i += blockDim.x) {
            params.counter[i] = common.handle.counts[i];
        }
    }
    const bool sends = block.senders.has_this_block();
    if (warp_idx() >= common.copy_warps) {
        if (sends) {
            announce_posts(block.ring, shared.mailboxes, carriers,
                           [&] { look_for_places(block.ring, shared.pairs); });
        } else {
            // Those who take the rows have a deadline.
            while (look_for_rows(block) && !has_failed(common.wait)) {
            }
        }
        return;
    }
    Carrier carrier(carriers + warp_idx() * common.warp_bytes, common.piece_bytes,
                    &shared.barriers[warp_idx()]);
    if (sends) {
        Mailbox mailbox(shared.mailboxes, mailbox_rows(common, carriers, warp_idx()), carrier);
        send_rows(block, carrier, mailbox);
    } else {
        receive_rows(block, carrier);
    }
    carrier.wait_stored();
}

}  // namespace nccl_ep::ht_dispatch_impl

extern "C" __global__ void __launch_bounds__(nccl_ep::HT_DISPATCH_THREADS, 1)
    ht_dispatch(const __grid_constant__ nccl_ep::HtDispatchParams params) {
    DYNAMIC_SHARED(uint8_t, memory);
    nccl_ep::ht_dispatch_impl::run(params, memory);
}
