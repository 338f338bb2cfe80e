// Low-latency dispatch: every row goes once to each rank that hosts one of its token's experts, and is
// copied there to the rows of the output that the token takes (slots.cuh).
//
// Grid: any number of blocks that fit on the GPU at once. Sending blocks do nothing but send rows. In the
// others, the receivers, the first warps are routers. Those of the first receiving blocks, the notifiers,
// count this rank's entries and notify the peers, in packets that carry their epoch, how many rows each
// expert gets from here and which index each (token, k) has among them. All routers compute from the
// peers' counts where each source's rows begin. All warps take arriving chunks as they come and copy them
// out. A block may send and receive: then its routers count while the other warps load what they send.
//
// Senders and notifiers are as many as this rank's tokens need. Receivers are enough for the most tokens
// that any rank may have, as nobody knows at the launch how many the others have; those without a chunk
// end when they have heard it, which costs little (docs/performance.md, Uneven tokens).
//
// Over several nodes (nodes.cuh) a rank does all this for each of its sources: it sends their rows, which came
// over the network, to the peers, and notifies these. Receivers see no difference.
//
// At the end `out` holds the rows, `counter` the rows per expert, and the handle's memory what combine
// needs.

#include "dispatch_routers.cuh"

namespace nccl_ep::ll_dispatch_impl {

// ---- Sending -----------------------------------------------------------------------------------

// The peer that hosts this lane's entry of `token`, negative if none does.
template <typename Op>
__device__ __forceinline__ int32_t peer_of_entry(const Block<Op>& block, const typename Op::Source& source,
                                                 uint32_t token) {
    if (lane_idx() >= block.shape.top_k) {
        return kNowhere;
    }
    const uint32_t entry = token * block.shape.top_k + lane_idx();
    const int32_t expert = expert_of_entry(block, source, entry);
    return block.op.nodes.peer_of(rank_of_expert(block.shape, expert));
}

// What a warp is about to send: a chunk of a token of a source, and in each lane the peer of one of its
// entries.
struct Outgoing {
    uint32_t unit;
    int32_t peer;
    ChunkData data;
};

// A chunk of a token of one of the launch's sources.
struct Unit {
    uint32_t source;
    uint32_t token;
    uint32_t chunk_idx;
};

template <typename Op>
__device__ __forceinline__ Unit unit_at(const Block<Op>& block, uint32_t unit) {
    const uint32_t pair = unit / block.shape.chunks;
    const uint32_t chunk_idx = unit % block.shape.chunks;
    if constexpr (!Op::kSeveral) {
        return {0, pair, chunk_idx};
    }
    const uint32_t sources = block.sources();
    return {block.first_source() + pair % sources, pair / sources, chunk_idx};
}

template <typename Op>
__device__ __forceinline__ bool is_left(const Block<Op>& block, const Outgoing& outgoing) {
    return outgoing.unit < block.most_tokens() * block.sources() * block.shape.chunks;
}

// Takes unit `unit`, if it is left, and starts loading it.
template <typename Op>
__device__ __forceinline__ void fetch(const Block<Op>& block, uint32_t unit, Outgoing& outgoing) {
    outgoing.unit = unit;
    if (!is_left(block, outgoing)) {
        return;
    }
    const Unit taken = unit_at(block, unit);
    const typename Op::Source source = block.source(taken.source);
    if (Op::kSeveral && taken.token >= source.tokens()) {
        outgoing.peer = kNowhere;
        return;
    }
    const Chunk chunk(block.shape, taken.chunk_idx);
    outgoing.data.load_const(source.rows() + row_format(block.shape).offset(taken.token), chunk);
    outgoing.peer = peer_of_entry(block, source, taken.token);
}

// Sends what was fetched to every peer that hosts one of the token's experts.
template <typename Op>
__device__ void send_chunk(const Block<Op>& block, const Outgoing& outgoing) {
    const Op& op = block.op;
    const Unit taken = unit_at(block, outgoing.unit);
    const Chunk chunk(block.shape, taken.chunk_idx);
    const uint32_t source_rank = block.source(taken.source).rank();
    const uint32_t slot = block.bank_slots.of_token(source_rank, taken.token);
    const bool has_mark = outgoing.data.has_mark(chunk);
    for (uint32_t left = first_of_each_peer(outgoing.peer); left != 0; left &= left - 1) {
        const int32_t peer = __shfl_sync(kAllLanes, outgoing.peer, __ffs(left) - 1);
        if (is_active(op.common.peers, peer)) {
            send(op, op.at(peer).row(slot), chunk, outgoing.data, has_mark);
        }
    }
}

// What a warp has to send and to notify of, and what it loads of that before all else.
struct Begun {
    bool notifies;
    bool sends;
    Outgoing outgoing;
    // The expert of this thread's first entry.
    int32_t expert;
};

// The warps of the block that send have taken one unit each after this.
template <typename Op>
__device__ __forceinline__ void begin_sending(const Block<Op>& block, Begun& begun) {
    begun.notifies = block.notifiers.has_this_block();
    const uint32_t first_sender = begun.notifies ? kRouterWarps : 0;
    begun.sends = block.senders.has_this_block() && warp_idx() >= first_sender;
    if (begun.sends) {
        fetch(block, block.senders.unit(warp_idx() - first_sender), begun.outgoing);
    }
    begun.expert = kNowhere;
    if (begun.notifies) {
        const typename Op::Source source = block.source(first_notified(block));
        if (threadIdx.x < source.tokens() * block.shape.top_k) {
            begun.expert = expert_of_entry(block, source, threadIdx.x);
        }
    }
    if (threadIdx.x == 0) {
        block.shared.next_send = num_warps() - first_sender;
    }
}

template <typename Op>
__device__ void send_all(const Block<Op>& block, Begun& begun) {
    if (begun.notifies) {
        notify_all(block, begun.expert);
    }
    if (!begun.sends) {
        return;
    }
    while (is_left(block, begun.outgoing)) {
        send_chunk(block, begun.outgoing);
        fetch(block, block.senders.next_unit(&block.shared.next_send), begun.outgoing);
    }
}

// ---- Receiving ---------------------------------------------------------------------------------

// Waits until the routers of this block have come so far.
__device__ __forceinline__ void wait_for_routers(uint64_t* barrier) {
    while (!mbarrier_test_wait(barrier, 0)) {
        shared_spin_hint();
    }
    __syncwarp();
}

// What `source` says about this lane's entry of its token.
template <typename Op>
__device__ __forceinline__ EntryWord entry_of(const Block<Op>& block, uint32_t source, uint32_t token) {
    if (lane_idx() >= block.shape.top_k) {
        return EntryWord::elsewhere();
    }
    const Op& op = block.op;
    const Arrival arrival = wait_for_packet(
        op.common, op.here().entries(source, token) + lane_idx(), op.from(source, WAIT_ENTRY));
    const EntryWord entry = {arrival.data};
    const bool is_valid = arrival.ok && entry.expert() < block.shape.local_experts;
    return is_valid ? entry : EntryWord::elsewhere();
}

// One warp copies a chunk of (source, token) to the token's output rows here, if it has any.
template <typename Op>
__device__ void receive_chunk(const Block<Op>& block, uint32_t source, uint32_t token,
                              uint32_t chunk_idx) {
    const Op& op = block.op;
    const EntryWord entry = entry_of(block, source, token);
    const bool comes = __ballot_sync(kAllLanes, entry.is_here()) != 0;
    const BankRow<Own> from = op.here().row(block.bank_slots.of_token(source, token));
    const Chunk chunk(block.shape, chunk_idx);
    ChunkData data;
    if (comes) {
        if (lane_idx() == 0 && block.shared.most_tokens > kPollWholeTokens) {
            wait_for_end(op, from, chunk, source);
        }
        __syncwarp();
        data.load_arriving(from.data, chunk);
        take(op, from, chunk, source, data);
    }
    wait_for_routers(&block.shared.begins_known);
    const int32_t out_row = block.output.row(block.per_expert, source, entry);
    if (chunk_idx == 0 && lane_idx() < block.shape.top_k) {
        op.rows_of(source, token)[lane_idx()] = out_row;
    }
    if (block.params.out == nullptr) {
        return;
    }
    for (uint32_t left = __ballot_sync(kAllLanes, out_row >= 0); left != 0; left &= left - 1) {
        const int32_t to = __shfl_sync(kAllLanes, out_row, __ffs(left) - 1);
        data.store(block.params.out + row_format(block.shape).offset(to), chunk);
    }
}

template <typename Op>
__device__ void receive_rows(const Block<Op>& block) {
    wait_for_routers(&block.shared.tokens_known);
    const uint32_t units = arriving_units(block);
    for (uint32_t unit = block.receivers.next_unit(&block.shared.next_receive); unit < units;
         unit = block.receivers.next_unit(&block.shared.next_receive)) {
        const UnitOfAll arriving(block.op, unit);
        if (arriving.token < block.tokens_of[arriving.rank]) {
            receive_chunk(block, arriving.rank, arriving.token, arriving.chunk_idx);
        }
    }
}

template <typename Nodes>
__device__ __forceinline__ void run(const LlDispatchParams& params, const Nodes& nodes,
                                    uint32_t* per_expert) {
    using Op = Operation<Nodes>;
    __shared__ SharedStorage shared;
    __shared__ uint32_t tokens_of[Op::kSeveral ? LL_MAX_RANKS : MAX_PEERS];
    Op op(params.common, nodes);
    const Share receivers = receivers_of(params.common);
    const Block<Op> block{params,
                          params.common.shape,
                          op,
                          shared,
                          tokens_of,
                          per_expert,
                          {params.common.shape, params.common.peers.ranks},
                          {params.common.shape, nodes.ranks()},
                          senders_of(params.common),
                          {receivers.first, params.notify_blocks},
                          receivers};
    Start start;
    if (threadIdx.x == 0) {
        start.load(params.common);
    }
    Begun begun;
    if (op.sends() || op.relays()) {
        begin_sending(block, begun);
    }
    LlHello head = {};
    if constexpr (Op::kSeveral) {
        head = first_head(op);
    }
    if (threadIdx.x == 0) {
        shared.next_receive = 0;
        shared.most_tokens = 0;
        mbarrier_init(&shared.tokens_known, kRouterThreads);
        mbarrier_init(&shared.begins_known, kRouterThreads);
    }
    clear_histograms(block);
    if (threadIdx.x == 0) {
        shared.start = start;
    }
    __syncthreads();
    const bool is_wanted = op.begin(shared.start);
    advance_epoch(op);
    if (!is_wanted || (op.sends() && !wait_until_bank_is_free(op))) {
        return;
    }
    if constexpr (Op::kSeveral) {
        if (op.relays() && !sources_agree(op, head)) {
            return;
        }
    }
    if (op.sends() || op.relays()) {
        send_all(block, begun);
    }
    if (op.receives() && block.receivers.has_this_block()) {
        if (warp_idx() < kRouterWarps) {
            find_begins(block);
        }
        receive_rows(block);
    }
    acknowledge(op);
}

}  // namespace nccl_ep::ll_dispatch_impl

extern "C" __global__ void __launch_bounds__(nccl_ep::LL_DISPATCH_THREADS, 1)
    ll_dispatch(const __grid_constant__ nccl_ep::LlDispatchParams params) {
    DYNAMIC_SHARED(uint32_t, per_expert);
    nccl_ep::ll_dispatch_impl::run(params, nccl_ep::OneNode{params.common.peers}, per_expert);
}

extern "C" __global__ void __launch_bounds__(nccl_ep::LL_DISPATCH_THREADS, 1)
    ll_dispatch_nodes(const __grid_constant__ nccl_ep::LlDispatchNodesParams params) {
    DYNAMIC_SHARED(uint32_t, per_expert);
    nccl_ep::ll_dispatch_impl::run(params.dispatch, nccl_ep::SeveralNodes{params.nodes, false},
                                   per_expert);
}
