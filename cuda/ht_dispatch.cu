// High-throughput dispatch: every row goes once to each rank that hosts one of its token's experts,
// into a ring there, and from the ring to its final place in the output.
//
// Grid: sending blocks, then receiving blocks, no more than fit on the GPU at once; every warp that
// has a carrier works on its own. A sending warp takes a token, loads its row once and stores it to
// the rings of all its peers; one warp more of its block, the herald, announces what was sent. A
// receiving warp takes any row that has arrived, gives the slot back as soon as the row is in shared
// memory, and stores it where it belongs: sources ascending, then tokens.
// Ids and weights, if any, travel behind the row. While nothing has arrived receivers do what is left
// on this rank: rows of its own tokens for its own experts, and the rows of the outputs that no token
// fills, which get zeros and ids of -1.

#include "primitives.cuh"

namespace nccl_ep::ht_dispatch_impl {

struct Shared {
    HtPairs pairs;
    Claims claims;
    Mailboxes mailboxes;
    uint32_t next_own;
    uint32_t next_token;
    uint32_t next_unused;
    uint64_t barriers[HT_DISPATCH_THREADS / kWarpSize];
};

struct Block {
    const HtDispatchParams& params;
    const HtCommon& common;
    Shared& shared;
    Ring ring;
    Share senders;
    Share receivers;
    // Shared memory that holds zeros, HT_ZERO_BYTES.
    const uint8_t* zeros;
    // Outputs that do not hold all rows are left alone.
    bool keeps_rows;
    bool keeps_routing;

    __device__ uint32_t rank() const { return common.peers.rank; }
    __device__ uint32_t ranks() const { return common.peers.ranks; }
    __device__ uint32_t top_k() const { return common.handle.top_k; }
    // The weight of this lane's expert.
    __device__ float weight_of(uint32_t token, const TokenEntries& entries) const {
        const uint64_t first = uint64_t{token} * top_k();
        return find_weight(params.topk_idx + first, params.weights + first, top_k(), entries);
    }
    __device__ uint8_t* out_row(uint32_t row) const {
        return params.out + uint64_t{row} * common.row_bytes;
    }
};

// One warp writes the ids and weights of a received row, one entry per lane.
__device__ __forceinline__ void write_routing(const Block& block, uint32_t row,
                                              const RoutingEntry& entry) {
    if (block.keeps_routing && lane_idx() < block.top_k()) {
        const uint64_t index = uint64_t{row} * block.top_k() + lane_idx();
        block.params.out_idx[index] = entry.id;
        block.params.out_weights[index] = entry.weight;
    }
}

// ---- Sending -----------------------------------------------------------------------------------

// A token that a warp is about to send, and in each lane that is a rank's first, where it goes there.
struct Outgoing {
    uint32_t token;
    TokenEntries entries;

    __device__ bool is_left(const Block& block) const {
        return token < block.common.handle.tokens;
    }
    __device__ bool goes_to_peer(const Block& block) const {
        return entries.is_first() && static_cast<uint32_t>(entries.rank) != block.rank();
    }
    __device__ uint32_t to_peers(const Block& block) const {
        return __ballot_sync(kAllLanes, goes_to_peer(block));
    }
    __device__ uint32_t sequence(const Block& block) const {
        return block.shared.pairs.sent[entries.rank] + entries.entry.place;
    }
};

__device__ __forceinline__ void load_piece(const Block& block, uint32_t token, uint32_t offset,
                                           Carrier& carrier) {
    const uint32_t left = block.common.row_bytes - offset;
    carrier.load(block.params.tokens + uint64_t{token} * block.common.row_bytes + offset,
                 min(left, block.common.piece_bytes), nullptr, 0);
}

// Takes the block's next token that goes to any peer, and starts loading its row.
__device__ __forceinline__ Outgoing fetch(const Block& block, Carrier& carrier) {
    const uint32_t tokens = block.common.handle.tokens;
    uint32_t token;
    for (;;) {
        token = block.senders.next_unit(&block.shared.next_token);
        const Outgoing outgoing = {token, TokenEntries(block.common, token)};
        if (token >= tokens) {
            return outgoing;
        }
        if (outgoing.to_peers(block) != 0) {
            carrier.wait_reusable();
            load_piece(block, token, 0, carrier);
            return outgoing;
        }
    }
}

// Prepares in the tails what each peer gets to know.
__device__ void write_tails(const Block& block, const Outgoing& outgoing, Carrier& carrier) {
    const float weight = block.weight_of(outgoing.token, outgoing.entries);
    uint64_t* tail = reinterpret_cast<uint64_t*>(carrier.tails());
    for (uint32_t left = outgoing.to_peers(block); left != 0; left &= left - 1) {
        const RoutingEntry routing(block.common, outgoing.entries, __ffs(left) - 1, weight);
        if (lane_idx() < block.top_k()) {
            tail[lane_idx()] = routing.packed();
        }
        tail += block.common.tail_bytes / sizeof(uint64_t);
    }
}

// Each lane waits for its slot.
__device__ __forceinline__ bool wait_for_places(const Block& block, const Outgoing& outgoing) {
    bool ok = true;
    if (outgoing.goes_to_peer(block)) {
        const uint32_t peer = outgoing.entries.rank;
        const uint32_t sequence = outgoing.sequence(block);
        ok = wait_for_place(block.ring, peer, sequence,
                            {WAIT_PLACE, peer, block.shared.pairs.operation});
    }
    return __ballot_sync(kAllLanes, ok) == kAllLanes;
}

// Stores the row, whose first piece was loaded, and what belongs to it to all its peers.
__device__ void store_row(const Block& block, const Outgoing& outgoing, Carrier& carrier) {
    const HtCommon& common = block.common;
    uint8_t* slot = nullptr;
    if (outgoing.goes_to_peer(block)) {
        slot = block.ring.row(outgoing.entries.rank, block.rank(), outgoing.sequence(block));
    }
    const uint32_t peers = outgoing.to_peers(block);
    for (uint32_t offset = 0; offset < common.row_bytes; offset += common.piece_bytes) {
        if (offset != 0) {
            carrier.wait_reusable();
            load_piece(block, outgoing.token, offset, carrier);
        }
        carrier.wait_loaded();
        for (uint32_t left = peers; left != 0; left &= left - 1) {
            carrier.store(pointer_of_lane(slot, __ffs(left) - 1) + offset,
                          min(common.row_bytes - offset, common.piece_bytes));
        }
    }
    const uint8_t* tail = carrier.tails();
    for (uint32_t left = common.tail_bytes != 0 ? peers : 0; left != 0; left &= left - 1) {
        carrier.store_shared(tail, pointer_of_lane(slot, __ffs(left) - 1) + common.row_bytes,
                             common.tail_bytes);
        tail += common.tail_bytes;
    }
}

__device__ void send_rows(const Block& block, Carrier& carrier, Mailbox& mailbox) {
    Outgoing outgoing = fetch(block, carrier);
    while (outgoing.is_left(block)) {
        if (block.common.tail_bytes != 0) {
            write_tails(block, outgoing, carrier);
        }
        const bool ok = wait_for_places(block, outgoing);
        carrier.settle_tails();
        if (!ok) {
            carrier.wait_loaded();
            break;
        }
        store_row(block, outgoing, carrier);
        const Outgoing next = fetch(block, carrier);
        carrier.wait_stored();
        const bool to_peer = outgoing.goes_to_peer(block);
        mailbox.post(to_peer, outgoing.entries.rank, to_peer ? outgoing.sequence(block) : 0);
        outgoing = next;
    }
    mailbox.close();
}

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
    }
    if (block.params.topk_idx != nullptr) {
        const RoutingEntry routing(block.common, entries, lane, block.weight_of(token, entries));
        write_routing(block, row, routing);
    }
    return true;
}

// One warp fills a row of each output that no token fills; false if there is no such row.
__device__ bool fill_unused_row(const Block& block, uint32_t row, Carrier& carrier) {
    const bool has_row = block.keeps_rows && row < block.params.out_rows;
    const bool has_routing = block.keeps_routing && row < block.params.routing_rows;
    if (has_row) {
        const uint32_t row_bytes = block.common.row_bytes;
        for (uint32_t offset = 0; offset < row_bytes; offset += HT_ZERO_BYTES) {
            carrier.store_shared(block.zeros, block.out_row(row) + offset,
                                 min(row_bytes - offset, HT_ZERO_BYTES));
        }
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
    const uint32_t unused = block.receivers.next_unit(&shared.next_unused);
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
        }
    }
    if (common.tail_bytes != 0) {
        if (lane_idx() < block.top_k()) {
            const auto* tail = reinterpret_cast<const uint64_t*>(carrier.tails());
            write_routing(block, row, RoutingEntry(tail[lane_idx()]));
        }
        carrier.settle_tails();
    }
}

__device__ void receive_rows(const Block& block, Carrier& carrier) {
    const HtCommon& common = block.common;
    const HtPairs& pairs = block.shared.pairs;
    const auto look = [&](uint32_t source, uint32_t index) {
        return look_for_row(block.ring, source, pairs.received[source] + index);
    };
    bool has_local_work = true;
    const auto idle = [&] { has_local_work = has_local_work && work_locally(block, carrier); };
    for (;;) {
        const Claimed claimed = claim(common.wait, {WAIT_STREAMED_ROW, kNoPeer, pairs.operation},
                                      block.shared.claims, pairs.to_receive, block.receivers, block.ranks(), look, idle);
        if (claimed.peer == kNoPeer) {
            break;
        }
        if (claimed.data != common.shape_word) {
            if (lane_idx() == 0) {
                fail_for_shape(common, claimed.peer, claimed.data);
            }
            break;
        }
        take_row(block, claimed.peer, claimed.index, carrier);
    }
    while (has_local_work) {
        idle();
    }
}

// ---- The kernel --------------------------------------------------------------------------------

// Outputs that do not hold what comes fail the operation here, but not the peers, who see their rows
// taken as ever.
__device__ void check_outputs(Block& block) {
    const HtDispatchParams& params = block.params;
    const uint32_t total = block.shared.pairs.total;
    const bool rows_fit = params.out_rows >= total;
    const bool routing_fits = params.routing_rows >= total;
    block.keeps_rows = params.out != nullptr && rows_fit;
    block.keeps_routing =
        params.out_idx != nullptr && routing_fits && (params.out == nullptr || rows_fit);
    if (blockIdx.x != 0 || threadIdx.x != 0) {
        return;
    }
    if (params.out != nullptr && !rows_fit) {
        fail(params.common, FAULT_TOKEN_ROWS, block.rank(), total, params.out_rows);
    } else if (params.out_idx != nullptr && !routing_fits) {
        fail(params.common, FAULT_ROUTING_ROWS, block.rank(), total, params.routing_rows);
    }
}

__device__ void run(const HtDispatchParams& params, uint8_t* memory) {
    __shared__ Shared shared;
    uint8_t* zeros = memory;
    uint8_t* carriers = memory + HT_ZERO_BYTES;
    const HtCommon& common = params.common;
    Block block = {params,
                   common,
                   shared,
                   {common},
                   {0, common.send_blocks},
                   {common.send_blocks, gridDim.x - common.send_blocks},
                   zeros,
                   false,
                   false};
    for (uint32_t peer = threadIdx.x; peer < MAX_PEERS; peer += blockDim.x) {
        shared.claims.next[peer] = 0;
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
    if (!begin_operation(common, false, shared.pairs)) {
        return;
    }
    check_outputs(block);
    if (params.counter != nullptr && blockIdx.x == gridDim.x - 1) {
        for (uint32_t i = threadIdx.x; i < common.layout.local_experts; i += blockDim.x) {
            params.counter[i] = common.handle.counts[i];
        }
    }
    const bool sends = block.senders.has_this_block();
    if (warp_idx() >= common.copy_warps) {
        if (sends) {
            announce_posts(block.ring, shared.mailboxes, carriers);
        }
        return;
    }
    Carrier carrier(carriers + warp_idx() * common.warp_bytes, common.piece_bytes,
                    &shared.barriers[warp_idx()]);
    if (sends) {
        Mailbox mailbox(shared.mailboxes, announcements(common, carriers, warp_idx()));
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
