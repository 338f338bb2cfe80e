// Low-latency dispatch: every row goes once to each rank that hosts one of its token's experts, and
// is copied there to the slots of the output that the token takes.
//
// Grid: any number of blocks that fit on the GPU at once. Sending blocks do nothing but send rows.
// In the others, the receivers, the first warps are routers: in the first of these blocks, the
// announcers, they count this rank's entries and tell the peers, in packets that carry their epoch,
// how many rows each expert gets from here and which place each (token, k) has among them; in all of
// them they compute from the peers' counts where each source's rows begin. All warps take arriving
// chunks as they come and copy them out. A block may send and receive: then its routers count while
// the other warps load what they will send.
//
// Senders and announcers are as many as this rank's tokens want. Receivers are enough for the most
// tokens that any rank may have, as nobody knows at the launch how many the others have; those without
// a chunk end when they have heard it, which costs little (docs/performance.md, Uneven tokens).
//
// Slots of an expert: source rank ascending, then token, then k. At the end `out` holds the rows,
// `counter` the rows per expert, and the handle's memory what combine needs.

#include "primitives.cuh"
#include "common/ll_dispatch_block.cuh"
#include "common/ll_dispatch_routers.cuh"

namespace nccl_ep::ll_dispatch_impl {

// The rank that hosts this lane's entry of `token`, or kNowhere.
__device__ __forceinline__ int32_t rank_of_entry(const Block& block, uint32_t token) {
    if (lane_idx() >= block.shape.top_k) {
        return kNowhere;
    }
    const int32_t expert = expert_of_entry(block, token * block.shape.top_k + lane_idx());
    return expert == kNowhere ? kNowhere : expert / static_cast<int32_t>(block.shape.local_experts);
}

// What a warp is about to send: a chunk of a token, and in each lane the rank of one of its
// entries.
struct Outgoing {
    uint32_t unit;
    int32_t rank;
    ChunkData data;
};

__device__ __forceinline__ bool is_left(const Block& block, const Outgoing& outgoing) {
    return outgoing.unit < block.shape.tokens * block.shape.chunks;
}

// Takes unit `unit`, if it is left, and starts loading it.
__device__ __forceinline__ void fetch(const Block& block, uint32_t unit, Outgoing& outgoing) {
    outgoing.unit = unit;
    if (is_left(block, outgoing)) {
        const uint32_t token = outgoing.unit / block.shape.chunks;
        const Chunk chunk(block.shape, outgoing.unit % block.shape.chunks);
        outgoing.data.load_const(block.params.tokens + uint64_t{token} * block.shape.row_bytes,
                                 chunk);
        outgoing.rank = rank_of_entry(block, token);
    }
}

// Sends what was fetched to every rank that hosts one of the token's experts.
__device__ void send_chunk(const Block& block, const Outgoing& outgoing) {
    const Op& op = block.op;
    const uint32_t token = outgoing.unit / block.shape.chunks;
    const Chunk chunk(block.shape, outgoing.unit % block.shape.chunks);
    const uint32_t slot = op.rank() * block.shape.max_tokens + token;
    const bool has_mark = outgoing.data.has_mark(chunk);
    for (uint32_t left = first_of_each_rank(outgoing.rank); left != 0; left &= left - 1) {
        const int32_t peer = __shfl_sync(kAllLanes, outgoing.rank, __ffs(left) - 1);
        send(op, bank_row(op, peer, slot), chunk, outgoing.data, has_mark);
    }
}

// What a warp has to send and to announce, and what it loads of that before all else.
struct Begun {
    bool announces;
    bool sends;
    Outgoing outgoing;
    // The expert of this thread's first entry.
    int32_t expert;
};

// The warps of the block that send have taken one unit each after this.
__device__ __forceinline__ void begin_sending(const Block& block, Begun& begun) {
    begun.announces = block.announcers.has_this_block();
    const uint32_t first_sender = begun.announces ? kRouterWarps : 0;
    begun.sends = block.senders.has_this_block() && warp_idx() >= first_sender;
    if (begun.sends) {
        fetch(block, block.senders.unit(warp_idx() - first_sender), begun.outgoing);
    }
    const bool has_entry = threadIdx.x < block.shape.tokens * block.shape.top_k;
    begun.expert =
        begun.announces && has_entry ? expert_of_entry(block, threadIdx.x) : kNowhere;
    if (threadIdx.x == 0) {
        block.shared.next_send = num_warps() - first_sender;
    }
}

__device__ void send_all(const Block& block, Begun& begun) {
    if (begun.announces) {
        announce(block, begun.expert);
    }
    if (!begun.sends) {
        return;
    }
    while (is_left(block, begun.outgoing)) {
        send_chunk(block, begun.outgoing);
        fetch(block, block.senders.next_unit(&block.shared.next_send), begun.outgoing);
    }
}

// Waits until the routers of this block have come so far.
__device__ __forceinline__ void wait_for_routers(uint64_t* barrier) {
    while (!mbarrier_test_wait(barrier, 0)) {
        shared_spin_hint();
    }
    __syncwarp();
}

// What `source` says about this lane's entry of its token.
__device__ __forceinline__ uint32_t entry_of(const Block& block, uint32_t source, uint32_t token) {
    if (lane_idx() >= block.shape.top_k) {
        return kElsewhere;
    }
    const Op& op = block.op;
    const Arrival entry = wait_for_packet(
        op.common, op.entries(op.rank(), source, token) + lane_idx(), op.from(source, WAIT_ENTRY));
    const bool is_here = entry.ok && entry.data >> kPlaceBits < block.shape.local_experts;
    return is_here ? entry.data : kElsewhere;
}

// The output row of an entry from `source`: kNowhere, kDropped or its place.
__device__ __forceinline__ int32_t row_of_entry(const Block& block, uint32_t source,
                                                uint32_t entry) {
    if (entry == kElsewhere) {
        return kNowhere;
    }
    const uint32_t expert = entry >> kPlaceBits;
    const uint32_t most_rows = block.op.ranks() * block.shape.max_tokens;
    const uint32_t slot =
        block.per_expert[source * block.shape.local_experts + expert] + (entry & kMaxPlace);
    return slot < most_rows ? static_cast<int32_t>(expert * most_rows + slot) : kDropped;
}

// One warp copies a chunk of (source, token) to the token's slots here, if it has any.
__device__ void receive_chunk(const Block& block, uint32_t source, uint32_t token,
                              uint32_t chunk_idx) {
    const Op& op = block.op;
    const uint32_t entry = entry_of(block, source, token);
    const bool comes = __ballot_sync(kAllLanes, entry != kElsewhere) != 0;
    const BankRow from = bank_row(op, op.rank(), source * block.shape.max_tokens + token);
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
    const int32_t out_row = row_of_entry(block, source, entry);
    if (chunk_idx == 0 && lane_idx() < block.shape.top_k) {
        op.rows_of(source, token)[lane_idx()] = out_row;
    }
    if (block.params.out == nullptr) {
        return;
    }
    for (uint32_t left = __ballot_sync(kAllLanes, out_row >= 0); left != 0; left &= left - 1) {
        const int32_t to = __shfl_sync(kAllLanes, out_row, __ffs(left) - 1);
        data.store(block.params.out + uint64_t(to) * block.shape.row_bytes, chunk);
    }
}

__device__ void receive_rows(const Block& block) {
    wait_for_routers(&block.shared.tokens_known);
    const uint32_t units = arriving_units(block);
    for (uint32_t unit = block.receivers.next_unit(&block.shared.next_receive); unit < units;
         unit = block.receivers.next_unit(&block.shared.next_receive)) {
        const UnitOfAll arriving(block.op, unit);
        if (arriving.token < block.shared.tokens_of[arriving.rank]) {
            receive_chunk(block, arriving.rank, arriving.token, arriving.chunk_idx);
        }
    }
}

__device__ void run(const LlDispatchParams& params, uint32_t* per_expert) {
    __shared__ Shared shared;
    Op op(params.common);
    const Share receivers = Share::of_receivers(params.common);
    const Block block{params,
                      params.common.shape,
                      op,
                      shared,
                      per_expert,
                      Share::of_senders(params.common),
                      {receivers.first, params.announce_blocks},
                      receivers};
    Start start;
    if (threadIdx.x == 0) {
        start.load(params.common);
    }
    Begun begun;
    if (op.sends()) {
        begin_sending(block, begun);
    }
    if (threadIdx.x == 0) {
        shared.next_receive = 0;
        shared.most_tokens = 0;
        mbarrier_init(&shared.tokens_known, kRouterThreads);
        mbarrier_init(&shared.begins_known, kRouterThreads);
    }
    for (uint32_t i = threadIdx.x; i < num_experts(block) * 2; i += blockDim.x) {
        per_expert[i] = 0;
    }
    if (threadIdx.x == 0) {
        shared.start = start;
    }
    __syncthreads();
    const bool is_wanted = op.begin(shared.start);
    advance_epoch(op);
    if (!is_wanted || (op.sends() && !wait_until_bank_is_free(op))) {
        return;
    }
    if (op.sends()) {
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
    nccl_ep::ll_dispatch_impl::run(params, per_expert);
}
