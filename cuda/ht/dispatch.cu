// High-throughput dispatch: every row goes once to each rank that hosts one of its token's experts, into a
// ring there, and from the ring to its row of the output.
//
// Grid: sending blocks, then receiving blocks, no more than fit on the GPU at once; every warp that has a
// staging buffer works on its own. A sending warp takes a token, loads its row once and stores it to the
// rings of all its peers; one warp more of its block, the notifier, notifies the peers. One warp of a
// receiving block polls what has arrived for the block; the others take any such row, give its credit as
// soon as the row is in shared memory, and store it where it belongs: sources ascending, then tokens. Ids
// and weights, if any, travel behind the row. While nothing has arrived receivers do what is left on this
// rank: rows of its own tokens for its own experts, and the rows of the outputs that no token fills, which
// get zeros and ids of -1.

#include "credits.cuh"
#include "notify.cuh"
#include "scheduler.cuh"
#include "scope.cuh"
#include "tail.cuh"

namespace nccl_ep::ht_dispatch_impl {

// ---- What all warps see ------------------------------------------------------------------------

struct SharedStorage {
    HtPairs pairs;
    Scheduler scheduler;
    // Of each source, how many turns of this block are known to have come.
    uint32_t arrived[MAX_PEERS];
    NotifyState notify_state;
    uint32_t next_own;
    uint32_t next_token;
    uint32_t next_unused;
    uint64_t barriers[HT_DISPATCH_THREADS / kWarpSize];
};

template <typename Scope>
struct Block {
    using Place = typename Scope::Place;

    const HtDispatchParams& params;
    Scope scope;
    const HtCommon& common;
    SharedStorage& shared;
    Share senders;
    Share receivers;
    // Shared memory that holds zeros, HT_ZERO_BYTES.
    const uint8_t* zeros;
    // Whether these outputs are wanted.
    bool keeps_rows;
    bool keeps_routing;

    __device__ uint32_t rank() const { return common.peers.rank; }
    __device__ uint32_t ranks() const { return common.peers.ranks; }
    __device__ uint32_t top_k() const { return common.handle.top_k; }
    __device__ GivenRouting given_routing(uint32_t token, Place place) const {
        if (!scope.has_routing(params) || token >= common.handle.tokens) {
            return {};
        }
        return {scope.routing(params, place, token), top_k()};
    }
    __device__ const uint8_t* row_of_token(uint32_t token, Place place) const {
        return scope.row_of_token(params.tokens, row_format(common), place, token);
    }
    __device__ uint8_t* out_row(uint32_t row) const {
        return params.out + row_format(common).offset(row);
    }
};

// One warp writes the ids and weights of a received row, one entry per lane.
template <typename Block>
__device__ __forceinline__ void write_routing(const Block& block, uint32_t row,
                                              const RoutingEntry& entry) {
    if (block.keeps_routing && lane_idx() < block.top_k()) {
        const uint64_t index = uint64_t{row} * block.top_k() + lane_idx();
        block.params.out_idx[index] = entry.id;
        block.params.out_weights[index] = entry.weight;
    }
}

template <typename Block>
__device__ __forceinline__ void load_chunk_of(const Block& block, const uint8_t* row,
                                              uint32_t offset, Staging& staging) {
    staging.load(row + offset, row_format(block.common).chunk_at(offset), nullptr, 0);
}

// ---- Sending -----------------------------------------------------------------------------------

// What is known of a token: loaded well before it is needed, as loads wait behind the SM's stores.
template <typename Block>
struct Upcoming {
    uint32_t token;
    typename Block::Place place;
    HtEntry entry;
    GivenRouting given;
};

// A token that a warp is about to send, and in each lane that is a rank's first, where it goes there.
template <typename Block>
struct Outgoing {
    uint32_t token;
    typename Block::Place place;
    TokenEntries entries;
    GivenRouting given;

    __device__ bool is_left(const Block& block) const {
        return token < block.common.handle.tokens;
    }
    __device__ bool goes_to_peer(const Block& block) const {
        return entries.is_first() && static_cast<uint32_t>(entries.rank) != block.rank();
    }
    __device__ uint32_t to_peers(const Block& block) const {
        return __ballot_sync(kAllLanes, goes_to_peer(block));
    }
    __device__ void load_chunk(const Block& block, uint32_t offset, Staging& staging) const {
        load_chunk_of(block, block.row_of_token(token, place), offset, staging);
    }
    __device__ uint32_t sequence(const Block& block) const {
        return block.shared.pairs.sent[entries.rank] + entries.entry.index;
    }
};

template <typename Block>
__device__ __forceinline__ Upcoming<Block> next_token(const Block& block) {
    const uint32_t token = block.senders.next_unit(&block.shared.next_token);
    const typename Block::Place place = block.scope.place(block.common, token);
    return {token, place, TokenEntries::load_entry(block.common.handle, token),
            block.given_routing(token, place)};
}

// Takes the next token that goes to any peer, and starts loading its row. `upcoming` is the warp's.
template <typename Block>
__device__ __forceinline__ Outgoing<Block> fetch(const Block& block, Upcoming<Block>& upcoming,
                                                 Staging& staging) {
    for (;;) {
        const Outgoing<Block> outgoing = {
            upcoming.token, upcoming.place, {block.common, upcoming.entry}, upcoming.given};
        if (!outgoing.is_left(block)) {
            return outgoing;
        }
        upcoming = next_token(block);
        if (outgoing.to_peers(block) != 0) {
            staging.wait_reusable();
            outgoing.load_chunk(block, 0, staging);
            return outgoing;
        }
    }
}

// Prepares the tails, one for each peer.
template <typename Block>
__device__ void write_tails(const Block& block, const Outgoing<Block>& outgoing, Staging& staging) {
    const float weight =
        outgoing.given.weight_of(block.scope.id_of(block.common, outgoing.entries), block.top_k());
    uint64_t* tail = reinterpret_cast<uint64_t*>(staging.tails());
    for (uint32_t left = outgoing.to_peers(block); left != 0; left &= left - 1) {
        const RoutingEntry routing(block.common, outgoing.entries, __ffs(left) - 1, weight);
        if (lane_idx() < block.top_k()) {
            tail[lane_idx()] = routing.packed();
        }
        tail += block.common.shape.tail_bytes / sizeof(uint64_t);
    }
}

// Whether the row has a credit of the lane's peer, if it goes to one.
template <typename Block>
__device__ __forceinline__ bool has_credit(const Block& block, const Outgoing<Block>& outgoing) {
    return !outgoing.goes_to_peer(block) ||
           has_credit(block.shared.pairs, outgoing.entries.rank, outgoing.sequence(block));
}

// Waits until the row has the credits of all its peers, after posting what has departed.
template <typename Block>
__device__ bool wait_for_credits(const Block& block, const Outgoing<Block>& outgoing,
                                 NotifyQueue& queue) {
    if (__ballot_sync(kAllLanes, has_credit(block, outgoing)) == kAllLanes) {
        return true;
    }
    queue.flush();
    Awaited awaited = {WAIT_CREDIT, kNoPeer, block.shared.pairs.operation};
    return wait_as_warp(block.common, awaited, [&] {
        poll_credits(block.common, block.shared.pairs);
        const uint32_t without = ~__ballot_sync(kAllLanes, has_credit(block, outgoing));
        if (without != 0) {
            awaited.peer = __shfl_sync(kAllLanes, outgoing.entries.rank, __ffs(without) - 1);
        }
        return without == 0;
    });
}

// Stores the row, whose first chunk was loaded, and its tails to all its peers.
template <typename Block>
__device__ void store_row(const Block& block, const Outgoing<Block>& outgoing, Staging& staging) {
    const HtCommon& common = block.common;
    const RowFormat row = row_format(common);
    Remote<uint8_t> slot;
    if (outgoing.goes_to_peer(block)) {
        slot = rings_at(common, outgoing.entries.rank)
                   .row(block.rank(), outgoing.sequence(block));
    }
    const uint32_t peers = outgoing.to_peers(block);
    for (uint32_t offset = 0; offset < row.bytes; offset += row.chunk_bytes) {
        if (offset != 0) {
            staging.commit();
            staging.wait_reusable();
            outgoing.load_chunk(block, offset, staging);
        }
        staging.wait_loaded();
        for (uint32_t left = peers; left != 0; left &= left - 1) {
            staging.store(remote_of_lane(slot, __ffs(left) - 1) + offset, row.chunk_at(offset));
        }
    }
    const uint8_t* tail = staging.tails();
    for (uint32_t left = common.shape.tail_bytes != 0 ? peers : 0; left != 0; left &= left - 1) {
        staging.store_shared(tail, remote_of_lane(slot, __ffs(left) - 1) + row.bytes,
                             common.shape.tail_bytes);
        tail += common.shape.tail_bytes;
    }
    staging.commit();
}

template <typename Block>
__device__ void send_rows(const Block& block, Staging& staging, NotifyQueue& queue) {
    Upcoming<Block> upcoming = next_token(block);
    Outgoing<Block> outgoing = fetch(block, upcoming, staging);
    while (outgoing.is_left(block)) {
        if (block.common.shape.tail_bytes != 0) {
            write_tails(block, outgoing, staging);
        }
        const bool ok = wait_for_credits(block, outgoing, queue);
        staging.settle_tails();
        if (!ok) {
            staging.wait_loaded();
            break;
        }
        store_row(block, outgoing, staging);
        const Outgoing<Block> next = fetch(block, upcoming, staging);
        const bool to_peer = outgoing.goes_to_peer(block);
        queue.depart(to_peer, outgoing.entries.rank, to_peer ? outgoing.sequence(block) : 0);
        outgoing = next;
    }
    queue.close();
}

// ---- What stays on this rank -------------------------------------------------------------------

// One warp copies a token to its row of this rank's own output; false if it does not go there.
template <typename Block>
__device__ bool keep_token(const Block& block, uint32_t token, Staging& staging) {
    const RowFormat format = row_format(block.common);
    const TokenEntries entries(block.common, token);
    const uint32_t own = __ballot_sync(
        kAllLanes, entries.is_first() && static_cast<uint32_t>(entries.rank) == block.rank());
    if (own == 0) {
        return false;
    }
    const uint32_t lane = __ffs(own) - 1;
    const uint32_t index = __shfl_sync(kAllLanes, entries.entry.index, lane);
    const uint32_t row = block.scope.row(block.shared.pairs, block.rank(), index);
    const typename Block::Place place = block.scope.place(block.common, token);
    for (uint32_t offset = 0; block.keeps_rows && offset < format.bytes;
         offset += format.chunk_bytes) {
        staging.wait_reusable();
        load_chunk_of(block, block.row_of_token(token, place), offset, staging);
        staging.wait_loaded();
        staging.store(block.out_row(row) + offset, format.chunk_at(offset));
        staging.commit();
    }
    if (block.scope.has_routing(block.params)) {
        const float weight = block.given_routing(token, place).weight_of(
            block.scope.id_of(block.common, entries), block.top_k());
        const RoutingEntry routing(block.common, entries, lane, weight);
        write_routing(block, row, routing);
    }
    return true;
}

// One warp fills a row of each output that no token fills; false if there is no such row.
template <typename Block>
__device__ bool fill_unused_row(const Block& block, uint64_t number, Staging& staging) {
    const bool has_row = block.keeps_rows && number < block.params.out_rows;
    const bool has_routing = block.keeps_routing && number < block.params.routing_rows;
    const uint32_t row = static_cast<uint32_t>(number);
    if (has_row) {
        const uint32_t row_bytes = block.common.shape.row_bytes;
        for (uint32_t offset = 0; offset < row_bytes; offset += HT_ZERO_BYTES) {
            staging.store_shared(block.zeros, block.out_row(row) + offset,
                                 min(row_bytes - offset, HT_ZERO_BYTES));
        }
        staging.commit();
    }
    if (has_routing) {
        write_routing(block, row, {-1, 0.0f});
    }
    return has_row || has_routing;
}

// One warp does the block's next unit of local work; false if there is none left.
template <typename Block>
__device__ bool work_locally(const Block& block, Staging& staging) {
    SharedStorage& shared = block.shared;
    const uint32_t tokens = block.common.handle.tokens;
    for (;;) {
        const uint32_t token = block.receivers.next_unit(&shared.next_own);
        if (token >= tokens) {
            break;
        }
        if (keep_token(block, token, staging)) {
            return true;
        }
    }
    if (!block.scope.is_own()) {
        return false;
    }
    // With outputs of nearly 2^32 rows, 32 bits do not hold the numbers past the last one.
    const Share own_turns = {blockIdx.x, 1};
    const uint64_t turn = own_turns.next_unit(&shared.next_unused);
    const uint64_t unused = turn * block.receivers.blocks + block.receivers.index();
    return fill_unused_row(block, shared.pairs.total + unused, staging);
}

// ---- Receiving ---------------------------------------------------------------------------------

// One warp copies row `index` of `source` from its slot to the output.
template <typename Block>
__device__ void take_row(const Block& block, uint32_t source, uint32_t index, Staging& staging) {
    const HtCommon& common = block.common;
    const RowFormat format = row_format(common);
    const uint32_t sequence = block.shared.pairs.received[source] + index;
    const uint32_t row = block.scope.row(block.shared.pairs, source, index);
    const uint8_t* slot = own_rings(common).row(source, sequence);
    for (uint32_t offset = 0; offset < format.bytes; offset += format.chunk_bytes) {
        const bool is_last = format.is_last_chunk(offset);
        const uint32_t bytes = format.chunk_at(offset);
        staging.wait_reusable();
        staging.load(slot + offset, bytes, slot + format.bytes, is_last ? common.shape.tail_bytes : 0);
        staging.wait_loaded();
        if (is_last && lane_idx() == 0) {
            give_credit(common, source, sequence);
        }
        if (block.keeps_rows) {
            staging.store(block.out_row(row) + offset, bytes);
            staging.commit();
        }
    }
    if (common.shape.tail_bytes != 0) {
        if (lane_idx() < block.top_k()) {
            const auto* tail = reinterpret_cast<const uint64_t*>(staging.tails());
            write_routing(block, row, RoutingEntry(common, tail[lane_idx()]));
        }
        staging.settle_tails();
    }
}

// Whether row `index` of `source` is here. One of another shape never is: it ends the operation.
template <typename Block>
__device__ __forceinline__ bool has_arrived(const Block& block, uint32_t source, uint32_t index) {
    const uint32_t sequence = block.shared.pairs.received[source] + index;
    const uint64_t packet = ld_acquire_sys(own_rings(block.common).arrival(source, sequence));
    if (!is_or_follows(packet_epoch(packet), sequence + 1)) {
        return false;
    }
    if (packet_data(packet) != block.common.shape.shape_word) {
        fail_for_shape(block.common, source, packet_data(packet));
        return false;
    }
    return true;
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
        __syncwarp();
    }
    return __ballot_sync(kAllLanes, left) != 0;
}

template <typename Block>
__device__ void receive_rows(const Block& block, Staging& staging) {
    const HtCommon& common = block.common;
    const HtPairs& pairs = block.shared.pairs;
    const auto is_ready = [&](uint32_t source, uint32_t, uint32_t turn) {
        return is_or_follows(ld_acquire_cta_shared(&block.shared.arrived[source]), turn + 1);
    };
    bool has_local_work = true;
    const auto idle = [&] { has_local_work = has_local_work && work_locally(block, staging); };
    for (;;) {
        const Work work = next_row(common, {WAIT_STREAMED_ROW, kNoPeer, pairs.operation},
                                   block.shared.scheduler, pairs.to_receive, block.receivers,
                                   block.ranks(), is_ready, idle);
        if (work.peer == kNoPeer) {
            break;
        }
        take_row(block, work.peer, work.index, staging);
    }
    while (has_local_work) {
        idle();
    }
}

// ---- The kernel --------------------------------------------------------------------------------

// Whether the outputs have room for what comes; a missing one has room for any number of rows. Otherwise the
// operation fails: here at once, on peers that wait for this rank now or when they begin their next one.
template <typename Block>
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

template <typename Scope>
__device__ void run(const HtDispatchParams& params, const Scope& scope, uint8_t* memory) {
    __shared__ SharedStorage shared;
    uint8_t* zeros = memory;
    uint8_t* buffers = memory + HT_ZERO_BYTES;
    const HtCommon& common = params.common;
    const Block<Scope> block = {params,
                                scope,
                                common,
                                shared,
                                {0, common.shape.send_blocks},
                                {common.shape.send_blocks,
                                 gridDim.x - common.shape.send_blocks},
                                zeros,
                                params.out != nullptr,
                                params.out_idx != nullptr};
    for (uint32_t peer = threadIdx.x; peer < MAX_PEERS; peer += blockDim.x) {
        shared.scheduler.next[peer] = 0;
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
    clear_queues(shared.notify_state);
    if (!begin_operation(common, scope, false, shared.pairs) ||
        !scope.heads_fit(common, shared.pairs) || !check_outputs(block)) {
        return;
    }
    if (params.counter != nullptr && blockIdx.x == gridDim.x - 1) {
        for (uint32_t i = threadIdx.x; i < common.layout.local_experts; i += blockDim.x) {
            params.counter[i] = common.handle.counts[i];
        }
    }
    const bool sends = block.senders.has_this_block();
    if (warp_idx() >= common.shape.copy_warps) {
        if (sends) {
            notify_peers(common, shared.notify_state, buffers,
                         [&] { poll_credits(common, shared.pairs); });
        } else {
            // Those who take the rows have a deadline.
            while (poll_arrivals(block) && !has_failed(common.wait)) {
            }
        }
        return;
    }
    Staging staging(buffers + warp_idx() * common.shape.warp_bytes, common.shape.chunk_bytes,
                    &shared.barriers[warp_idx()]);
    if (sends) {
        NotifyQueue queue(shared.notify_state, queue_of_warp(common, buffers, warp_idx()), staging);
        send_rows(block, staging, queue);
    } else {
        receive_rows(block, staging);
    }
    staging.wait_stored();
}

}  // namespace nccl_ep::ht_dispatch_impl

extern "C" __global__ void __launch_bounds__(nccl_ep::HT_DISPATCH_THREADS, 1)
    ht_dispatch(const __grid_constant__ nccl_ep::HtDispatchParams params) {
    DYNAMIC_SHARED(uint8_t, memory);
    nccl_ep::ht_dispatch_impl::run(params, nccl_ep::AllRows{}, memory);
}

extern "C" __global__ void __launch_bounds__(nccl_ep::HT_DISPATCH_THREADS, 1)
    ht_dispatch_nodes(const __grid_constant__ nccl_ep::HtDispatchNodesParams params) {
    DYNAMIC_SHARED(uint8_t, memory);
    nccl_ep::ht_dispatch_impl::run(params.of_node, nccl_ep::RowsOfPass{params.pass}, memory);
}
