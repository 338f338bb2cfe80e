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
// Senders and announcers are as many as this rank's tokens want, receivers as many as the most tokens
// of any rank may want, as nobody knows at the launch how many the others have. Receivers without a
// chunk end when they have heard how many tokens there are: that costs little
// (docs/performance.md, Uneven tokens).
//
// Slots of an expert: source rank ascending, then token, then k. At the end `out` holds the rows,
// `counter` the rows per expert, and the handle's memory what combine needs.

#include "primitives.cuh"

namespace nccl_ep::ll_dispatch_impl {

constexpr uint32_t kRouterWarps = 4;
constexpr uint32_t kRouterThreads = kRouterWarps * kWarpSize;
constexpr uint32_t kRouterBarrier = 1;

// An entry packet's data: local expert in the high bits, place among the source's rows below.
constexpr uint32_t kPlaceBits = LL_PLACE_BITS;
constexpr uint32_t kMaxPlace = (1u << kPlaceBits) - 1;
constexpr uint32_t kElsewhere = 0xffffffffu;

struct Shared {
    Start start;
    uint32_t next_send;
    uint32_t next_receive;
    uint32_t most_tokens;
    // Barriers whose one phase ends when the routers know how many tokens each source has, and
    // where its rows begin.
    uint64_t tokens_known;
    uint64_t begins_known;
    uint32_t tokens_of[MAX_PEERS];
};

// What all functions of the kernel see.
struct Block {
    const LlDispatchParams& params;
    const LlShape& shape;
    const Op& op;
    Shared& shared;
    // Two words per expert of the group. First the routers' histograms; then, by source and local
    // expert, the slot where the source's rows begin.
    uint32_t* per_expert;
    Share senders;
    Share announcers;
    Share receivers;
};

__device__ __forceinline__ void meet_routers() { named_barrier(kRouterBarrier, kRouterThreads); }

__device__ __forceinline__ uint32_t num_experts(const Block& block) {
    return block.op.ranks() * block.shape.local_experts;
}

__device__ __forceinline__ int32_t expert_of_entry(const Block& block, uint32_t index) {
    return nccl_ep::expert_of_entry(block.op, block.params.topk_idx, index);
}

// Counts the rows per expert: those of entries before `first` in the block's histogram and, in
// blocks that tell a peer its counts, those of all entries in `all`. `early` is the expert of this
// thread's first entry.
__device__ void count_entries(const Block& block, uint32_t first, uint32_t* all, int32_t early) {
    const uint32_t entries = block.shape.tokens * block.shape.top_k;
    const uint32_t last = all != nullptr ? entries : first;
#pragma unroll 4
    for (uint32_t i = threadIdx.x; i < last; i += blockDim.x) {
        const int32_t expert = i == threadIdx.x ? early : expert_of_entry(block, i);
        if (expert != kNowhere && i < first) {
            atomicAdd(&block.per_expert[expert], 1u);
        }
        if (expert != kNowhere && all != nullptr) {
            atomicAdd(&all[expert], 1u);
        }
    }
}

// Tells every rank about entry `index`: its own rank the place, the others that it is not theirs.
__device__ void announce_entry(const Block& block, uint32_t index, int32_t expert, uint32_t place) {
    const Op& op = block.op;
    const uint32_t token = index / block.shape.top_k;
    const uint32_t k = index % block.shape.top_k;
    const uint32_t local = block.shape.local_experts;
    for (uint32_t peer = 0; peer < op.ranks(); ++peer) {
        uint32_t data = kElsewhere;
        if (expert != kNowhere && expert / local == peer) {
            data = (expert % local) << kPlaceBits | (place < kMaxPlace ? place : kMaxPlace);
        }
        st_relaxed_sys(op.entries(peer, op.rank(), token) + k, op.packet(data));
    }
    block.params.common.handle.expert_of[index] = expert;
}

// One warp walks entries [first, last) in order; the histogram holds all entries before them, and
// them as well afterwards.
__device__ void announce_entries(const Block& block, uint32_t first, uint32_t last) {
    for (uint32_t base = first; base < last; base += kWarpSize) {
        const uint32_t index = base + lane_idx();
        const int32_t expert = index < last ? expert_of_entry(block, index) : kNowhere;
        const uint32_t same = __match_any_sync(kAllLanes, expert);
        const uint32_t before = lanes_before(same);
        uint32_t place = 0;
        if (expert != kNowhere) {
            place = block.per_expert[expert] + before;
        }
        __syncwarp();
        if (expert != kNowhere && before == 0) {
            block.per_expert[expert] += __popc(same);
        }
        __syncwarp();
        if (index < last) {
            announce_entry(block, index, expert, place);
        }
    }
}

// Tells the peers that are this block's to tell how many rows their experts get from here.
__device__ void announce_counts(const Block& block, const uint32_t* all) {
    const Op& op = block.op;
    const uint32_t local = block.shape.local_experts;
    for (uint32_t peer = block.announcers.index(); peer < op.ranks();
         peer += block.announcers.blocks) {
        uint64_t* counts = op.counts(peer, op.rank());
        for (uint32_t i = threadIdx.x; i <= local; i += kRouterThreads) {
            const uint32_t count = i < local ? all[peer * local + i] : block.shape.tokens;
            st_relaxed_sys(counts + i, op.packet(count));
        }
        if (threadIdx.x == 0) {
            st_relaxed_sys(op.signature(peer, op.rank()), op.packet(op.common.signature));
        }
    }
}

// The chunks that may come to this rank.
__device__ __forceinline__ uint32_t arriving_units(const Block& block) {
    return block.shared.most_tokens * block.op.ranks() * block.shape.chunks;
}

// From the sources' counts: where the rows of each begin, and how many an expert gets in all.
__device__ void find_begins(const Block& block) {
    const Op& op = block.op;
    const uint32_t local = block.shape.local_experts;
    const uint32_t most_rows = op.ranks() * block.shape.max_tokens;
    for (uint32_t source = threadIdx.x; source < op.ranks(); source += kRouterThreads) {
        if (block.receivers.index() == 0) {
            check_signature(op, source);
        }
        const uint32_t told = wait_for_packet(op.common, op.counts(op.rank(), source) + local,
                                              op.from(source, WAIT_COUNTS))
                                  .data;
        // What a peer tells becomes an address: no number that cannot be is taken at its word.
        const uint32_t tokens = min(told, block.shape.max_tokens);
        block.shared.tokens_of[source] = tokens;
        atomicMax(&block.shared.most_tokens, tokens);
        if (block.receivers.index() == 0) {
            block.params.common.handle.tokens_of[source] = tokens;
        }
    }
    mbarrier_arrive(&block.shared.tokens_known);
    meet_routers();  // the histograms are done with, too
    if (block.receivers.index() != 0 && block.receivers.index() >= arriving_units(block)) {
        return;
    }
    for (uint32_t i = threadIdx.x; i < num_experts(block); i += kRouterThreads) {
        const uint32_t source = i / local;
        block.per_expert[i] = wait_for_packet(op.common, op.counts(op.rank(), source) + i % local,
                                              op.from(source, WAIT_COUNTS))
                                  .data;
    }
    meet_routers();
    for (uint32_t expert = threadIdx.x; expert < local; expert += kRouterThreads) {
        uint32_t total = 0;
        for (uint32_t source = 0; source < op.ranks(); ++source) {
            const uint32_t count = block.per_expert[source * local + expert];
            block.per_expert[source * local + expert] = total;
            total += count;
        }
        if (block.receivers.index() == 0 && block.params.counter != nullptr) {
            block.params.counter[expert] = total < most_rows ? total : most_rows;
        }
    }
    mbarrier_arrive(&block.shared.begins_known);
}

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

// What the receivers tell the peers: each the entries of its share of the tokens, the first ones
// also the counts. All threads of the block call it; the routers tell.
__device__ void announce(const Block& block, int32_t early) {
    const uint32_t tokens = block.shape.tokens;
    const uint32_t index = block.announcers.index();
    const uint32_t blocks = block.announcers.blocks;
    const uint32_t first = uint64_t{tokens} * index / blocks * block.shape.top_k;
    const uint32_t last = uint64_t{tokens} * (index + 1) / blocks * block.shape.top_k;
    uint32_t* all = index < block.op.ranks() ? block.per_expert + num_experts(block) : nullptr;
    count_entries(block, first, all, early);
    __syncthreads();
    if (warp_idx() >= kRouterWarps) {
        return;
    }
    if (all != nullptr) {
        announce_counts(block, all);
    }
    if (warp_idx() == 0) {
        announce_entries(block, first, last);
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
    const uint32_t ranks = block.op.ranks();
    const uint32_t chunks = block.shape.chunks;
    const uint32_t units = arriving_units(block);
    for (uint32_t unit = block.receivers.next_unit(&block.shared.next_receive); unit < units;
         unit = block.receivers.next_unit(&block.shared.next_receive)) {
        const uint32_t pair = unit / chunks;
        const uint32_t source = (pair + block.op.rank()) % ranks;
        const uint32_t token = pair / ranks;
        if (token < block.shared.tokens_of[source]) {
            receive_chunk(block, source, token, unit % chunks);
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
