// Low-latency combine: each token's rows return from the ranks that host its experts and are summed
// with the token's weights.
//
// Grid: any number of blocks that fit on the GPU at once. Three things happen, each in units that
// all warps take in turn: the home rank of a token tells the expert ranks its weights; an expert
// rank sends, per token and home, one row (or, in exact mode, one row per entry); the home sums.
// Blocks that send are enough for the most tokens that any rank may have, as nobody knows at the launch
// how many the others have.
//
// Which row an id means. Entry k names an expert by its id of now, and means the row that the dispatch
// sent for the same id of the token, wherever that stood then (gates.cuh).
//
// Order of summation. An expert rank that a token names once sends the expert's row as it is; one
// that it names more often sends round(p), p = 0; p = fma(w[j], y[j], p) for its entries j ascending,
// as the dispatch had them. Home: a = 0; for expert ranks ascending: a = fma(w[j], y, a) for a row sent
// as it is, a = a + y for a sum; then out = round(a). In exact mode all rows travel as they are and
// a = fma(w[k], y[k], a) for k ascending, as the combine has them. All sums are in fp32, "round" is to
// nearest even in the type of the rows. An entry that dispatch dropped counts as a row of zeros. One
// that no id means any more (it was masked since the dispatch) travels, but is added to nothing.

#include "scheduler.cuh"
#include "slots.cuh"
#include "sum.cuh"

namespace nccl_ep::ll_combine_impl {

struct SharedStorage {
    Start start;
    uint32_t next_send;
    uint32_t next_receive;
};

template <typename Op>
struct Block {
    const LlCombineParams& params;
    const LlShape& shape;
    const Op& op;
    SharedStorage& shared;
    // Of each rank.
    uint32_t* tokens_of;
    BankSlots bank_slots;
    OutputSlots output;
    Share senders;
    Share receivers;
};

// A token of one of this rank's sources.
struct SourceToken {
    uint32_t number;
    uint32_t token;
};

// How many tokens the sources have at most, and which one is number `index` of them.
template <typename Op>
__device__ __forceinline__ uint32_t tokens_of_sources(const Block<Op>& block) {
    if constexpr (Op::kSeveral) {
        const LlNodes& nodes = block.op.nodes.nodes;
        return max(block.shape.tokens, nodes.most_tokens) * nodes.sources;
    }
    return block.shape.tokens;
}

template <typename Op>
__device__ __forceinline__ SourceToken token_of_sources(const Block<Op>& block, uint32_t index) {
    if constexpr (Op::kSeveral) {
        const uint32_t sources = block.op.nodes.nodes.sources;
        return {index % sources, index / sources};
    }
    return {0, index};
}

template <typename Op>
__device__ __forceinline__ bool exists(const Block<Op>& block, const SourceToken& at) {
    if constexpr (Op::kSeveral) {
        if (at.number != 0) {
            return at.token < block.op.nodes.tokens_of(block.shape, at.number);
        }
    }
    return at.token < block.shape.tokens;
}

// What this lane's entry of a token has to do with the combine.
template <typename Op>
__device__ __forceinline__ Gate gate_of(const Block<Op>& block, const SourceToken& at) {
    if constexpr (Op::kSeveral) {
        if (at.number != 0) {
            return gate_of_source(block.op, at.number, at.token);
        }
    }
    GateWords words;
    words.load(block.params, at.token);
    return make_gate(block.op, words);
}

// Which turn of the block's units a warp takes first. With one token for a block, the first warp has
// its weights to tell, so the second begins with the rows.
__device__ __forceinline__ uint32_t first_send_turn() {
    return (warp_idx() == 0 ? num_warps() : warp_idx()) - 1;
}

template <typename Op>
__device__ __forceinline__ bool is_signing_warp(const Block<Op>& block) {
    return block.receivers.index() == 0 && warp_idx() == num_warps() / 2;
}

// Everyone signs to everyone, so that an operation never ends before all peers have begun it.
template <typename Op>
__device__ void sign(const Block<Op>& block) {
    const Op& op = block.op;
    for (uint32_t peer = lane_idx(); peer < op.peers(); peer += kWarpSize) {
        if (!is_active(op.common.peers, peer)) {
            continue;
        }
        put_value(op.at(peer).signature(op.rank()), op.packet(op.common.signature));
        if constexpr (Op::kSeveral) {
            const LlNodes& nodes = op.nodes.nodes;
            for (uint32_t number = 1; number < nodes.sources; ++number) {
                put_value(op.at(peer).signature(nodes.rank_of_source[number]),
                          op.packet(op.common.signature));
            }
        }
    }
}

// One warp per token: each weight goes to the rank of its expert, if that is a peer. `early` is of the warp's
// first token.
template <typename Op>
__device__ void send_weights(const Block<Op>& block, const GateWords& early) {
    const Op& op = block.op;
    if (is_signing_warp(block)) {
        sign(block);
    }
    const uint32_t tokens = tokens_of_sources(block);
    for (uint32_t turn = warp_idx(); block.receivers.unit(turn) < tokens; turn += num_warps()) {
        const SourceToken at = token_of_sources(block, block.receivers.unit(turn));
        if (Op::kSeveral && !exists(block, at)) {
            continue;
        }
        const bool is_early = turn == warp_idx() && at.number == 0;
        const Gate gate = is_early ? make_gate(op, early) : gate_of(block, at);
        const int32_t peer = op.nodes.peer_of(rank_of_expert(block.shape, gate.expert));
        if (peer >= 0 && is_active(op.common.peers, peer)) {
            uint32_t home = op.rank();
            if constexpr (Op::kSeveral) {
                home = at.number == 0 ? home : op.nodes.nodes.rank_of_source[at.number];
            }
            put_value(op.at(peer).entries(home, at.token) + lane_idx(),
                      op.packet(__float_as_uint(gate.weight)));
        }
    }
}

// The bits of the weight of this lane's entry of (home, token), for lanes of `which`.
template <typename Op>
__device__ __forceinline__ Arrival wait_for_weight(const Block<Op>& block, uint32_t which,
                                                   uint32_t home, uint32_t token) {
    if ((which >> lane_idx() & 1) == 0) {
        return {true, 0};
    }
    const Op& op = block.op;
    return wait_for_first_packet(op, op.here().entries(home, token) + lane_idx(),
                                 op.from(home, WAIT_WEIGHT));
}

// The output row of dispatch for this lane's entry of (home, token), kNowhere or kDropped.
template <typename Op>
__device__ __forceinline__ int32_t row_of_lane(const Block<Op>& block, uint32_t home, uint32_t token) {
    return lane_idx() < block.shape.top_k ? block.op.rows_of(home, token)[lane_idx()] : kNowhere;
}

// One warp sends a chunk; `found` is what row_of_lane says. The handle's memory holds anything if its
// dispatch has not run; no such row is taken at its word.
template <typename Type, typename Op>
__device__ void send_chunk(const Block<Op>& block, const UnitOfAll& outgoing, int32_t found) {
    const Op& op = block.op;
    const uint32_t home = outgoing.rank;
    const uint32_t token = outgoing.token;
    const bool is_row = found < 0 || static_cast<uint32_t>(found) < block.output.rows();
    const int32_t row = is_row ? found : kNowhere;
    const uint32_t named = __ballot_sync(kAllLanes, row != kNowhere);
    if (named == 0) {
        return;
    }
    const Chunk chunk(block.shape, outgoing.chunk_idx);
    const auto load = [&](uint32_t lane, ChunkData& data) {
        const int32_t from = __shfl_sync(kAllLanes, row, lane);
        data.fill(0);
        if (from >= 0) {
            data.load_const(block.params.rows + row_format(block.shape).offset(from), chunk);
        }
    };
    const auto send_to = [&](uint32_t slot, const ChunkData& data) {
        const bool has_mark = data.has_mark(chunk);
        send(op, op.at(op.nodes.carrier_of(home)).row(slot), chunk, data, has_mark);
    };
    const uint32_t sum_slot =
        block.bank_slots.of_sum(op.nodes.number_of(home), token, op.common.peers.rank);
    if (block.params.exact != 0) {
        in_batches(named, load, [&](uint32_t k, const ChunkData& data) {
            send_to(block.bank_slots.of_entry(token, k), data);
        });
    } else if (__popc(named) == 1) {
        ChunkData data;
        load(__ffs(named) - 1, data);
        send_to(sum_slot, data);
    } else {
        Sum<Type> sum;
        Arrival weight = {true, 0};
        bool waited = false;
        in_batches(named, load, [&](uint32_t k, const ChunkData& data) {
            if (!waited) {
                weight = wait_for_weight(block, named, home, token);
                waited = true;
                __syncwarp();
            }
            sum.add(data, chunk, __uint_as_float(__shfl_sync(kAllLanes, weight.data, k)));
        });
        // The home may be late, not gone, and would take a sum without its weights for a right one.
        if (__all_sync(kAllLanes, weight.ok)) {
            send_to(sum_slot, sum.rounded());
        }
    }
}

// The chunks to send if the other ranks have as many tokens as this one; how many they have is not known
// yet. Warps without a chunk should not find out which one they do not have: that takes divisions, and the
// block waits for all.
template <typename Op>
__device__ __forceinline__ uint32_t early_units(const Block<Op>& block) {
    return block.shape.tokens * block.op.ranks() * block.shape.chunks;
}

// `early` is what row_of_lane says of the warp's first unit.
template <typename Type, typename Op>
__device__ void send_rows(const Block<Op>& block, int32_t early) {
    const uint32_t ranks = block.op.ranks();
    uint32_t most_tokens = 0;
    for (uint32_t home = 0; home < ranks; ++home) {
        most_tokens = max(most_tokens, block.tokens_of[home]);
    }
    const uint32_t units = most_tokens * ranks * block.shape.chunks;
    const uint32_t first = block.senders.unit(first_send_turn());
    for (uint32_t unit = first; unit < units;
         unit = block.senders.next_unit(&block.shared.next_send)) {
        const UnitOfAll outgoing(block.op, unit);
        if (outgoing.token < block.tokens_of[outgoing.rank]) {
            const bool is_early = unit == first && unit < early_units(block);
            const int32_t row =
                is_early ? early : row_of_lane(block, outgoing.rank, outgoing.token);
            send_chunk<Type>(block, outgoing, row);
        }
    }
}

// What a lane adds to the sum of a token: the row in a slot of the bank, from a peer, with a weight.
struct Term {
    uint32_t slot;
    int32_t peer;
    float weight;
};

// Terms are entries, as they are, in the order of the combine's ids.
template <typename Op>
__device__ Term term_of_entry(const Block<Op>& block, uint32_t token, int32_t peer) {
    const Gate gate = gate_of(block, {0, token});
    const uint32_t from = lane_in_order(gate);
    const uint32_t slot = block.bank_slots.of_entry(token, from);
    return {slot, __shfl_sync(kAllLanes, peer, from), __shfl_sync(kAllLanes, gate.weight, from)};
}

// One term per expert rank, ranks ascending in the lanes.
template <typename Op>
__device__ Term term_of_peer(const Block<Op>& block, const SourceToken& at, int32_t peer) {
    const uint32_t same = __match_any_sync(kAllLanes, peer);
    const uint32_t firsts = first_of_each_peer(peer);
    const bool first = (firsts >> lane_idx() & 1) != 0;
    const bool is_alone = first && __popc(same) == 1;
    float weight = 1.0f;
    if (__any_sync(kAllLanes, is_alone)) {
        const Gate gate = gate_of(block, at);
        weight = is_alone ? gate.weight : weight;
    }
    Term term = {0, kNowhere, 0.0f};
    for (uint32_t left = firsts; left != 0; left &= left - 1) {
        const uint32_t lane = __ffs(left) - 1;
        const int32_t other = __shfl_sync(kAllLanes, peer, lane);
        const float other_weight = __shfl_sync(kAllLanes, weight, lane);
        if (lane_idx() == __popc(__ballot_sync(kAllLanes, first && peer < other))) {
            const uint32_t slot = block.bank_slots.of_sum(at.number, at.token, other);
            term = {slot, other, other_weight};
        }
    }
    return term;
}

// The rank that hosts this lane's entry, as it was dispatched; kNowhere if none does.
template <typename Op>
__device__ __forceinline__ int32_t host_of_entry(const Block<Op>& block, const SourceToken& at) {
    if (lane_idx() >= block.shape.top_k) {
        return kNowhere;
    }
    const int32_t sent = block.op.experts_of(at.number, at.token)[lane_idx()];
    return rank_of_expert(block.shape, dispatched_expert(block.op, sent));
}

// Adds what other nodes give for a token of this rank: the sums of those that have a part in it, the node
// before this one first. `host` is that of this lane's entry.
template <typename Type, typename Op>
__device__ void add_other_nodes(const Block<Op>& block, uint32_t token, int32_t host,
                                const Chunk& chunk, Sum<Type>& sum) {
    constexpr uint32_t kNone = 0xffffffffu;
    const Op& op = block.op;
    // A row that travels alone takes no part if it is masked; a sum always does.
    const uint32_t same = __match_any_sync(kAllLanes, host);
    const Gate gate = gate_of(block, {0, token});
    const bool takes_part = __popc(same) > 1 || !is_masked(gate.weight);
    uint32_t next = kNone;
    if (host >= 0 && takes_part && op.nodes.at(host).distance != 0) {
        next = op.nodes.at(host).distance;
    }
    while (true) {
        uint32_t nearest = next;
        for (uint32_t lanes = kWarpSize / 2; lanes != 0; lanes /= 2) {
            nearest = min(nearest, __shfl_xor_sync(kAllLanes, nearest, lanes));
        }
        if (nearest == kNone) {
            return;
        }
        next = next == nearest ? kNone : next;
        const uint64_t row = op.nodes.first_token(block.shape, nearest) + token;
        ChunkData data;
        data.load_const(op.nodes.nodes.sums_of_nodes + row * block.shape.row_bytes, chunk);
        sum.add(data, chunk, 1.0f);
    }
}

// Where the sum of a token goes; NULL if it is thrown away.
template <typename Op>
__device__ __forceinline__ uint8_t* out_row(const Block<Op>& block, const SourceToken& at) {
    const RowFormat format = row_format(block.shape);
    if constexpr (Op::kSeveral) {
        if (at.number != 0) {
            const uint64_t first = block.op.nodes.first_token(block.shape, at.number);
            return block.op.nodes.nodes.sums + format.offset(first + at.token);
        }
    }
    return block.params.out == nullptr ? nullptr : block.params.out + format.offset(at.token);
}

// One warp sums a chunk of a token and writes it out.
template <typename Type, typename Op>
__device__ void receive_chunk(const Block<Op>& block, const SourceToken& at, uint32_t chunk_idx) {
    const Op& op = block.op;
    const Chunk chunk(block.shape, chunk_idx);
    const int32_t host = host_of_entry(block, at);
    int32_t peer = op.nodes.peer_of(host);
    peer = peer >= 0 && is_active(op.common.peers, peer) ? peer : kNowhere;
    const Term term = !Op::kSeveral && block.params.exact != 0
                          ? term_of_entry(block, at.token, peer)
                          : term_of_peer(block, at, peer);
    const uint32_t which = __ballot_sync(kAllLanes, term.peer != kNowhere);
    if (term.peer != kNowhere && block.shape.tokens > kPollWholeTokens) {
        wait_for_end(op, op.here().row(term.slot), chunk, op.nodes.rank_of_peer(term.peer));
    }
    __syncwarp();
    const auto row_of = [&](uint32_t lane) {
        return op.here().row(__shfl_sync(kAllLanes, term.slot, lane));
    };
    Sum<Type> sum;
    in_batches(
        which,
        [&](uint32_t lane, ChunkData& data) { data.load_arriving(row_of(lane).data, chunk); },
        [&](uint32_t lane, ChunkData& data) {
            const uint32_t from = __shfl_sync(kAllLanes, term.peer, lane);
            take(op, row_of(lane), chunk, op.nodes.rank_of_peer(from), data);
            sum.add(data, chunk, __shfl_sync(kAllLanes, term.weight, lane));
        });
    uint8_t* out = out_row(block, at);
    if (out == nullptr) {
        return;
    }
    if constexpr (Op::kSeveral) {
        if (at.number == 0) {
            add_other_nodes(block, at.token, host, chunk, sum);
        }
    }
    sum.rounded().store(out, chunk);
}

template <typename Op>
__device__ void check_signatures(const Block<Op>& block) {
    for (uint32_t rank = lane_idx(); rank < block.op.ranks(); rank += kWarpSize) {
        if (is_active(block.op.common.peers, block.op.nodes.carrier_of(rank))) {
            check_signature(block.op, rank);
        }
    }
    __syncwarp();
}

template <typename Type, typename Op>
__device__ void receive_rows(const Block<Op>& block) {
    const uint32_t chunks = block.shape.chunks;
    const uint32_t units = block.shape.tokens * chunks;
    if (is_signing_warp(block)) {
        check_signatures(block);
    }
    for (uint32_t unit = block.receivers.next_unit(&block.shared.next_receive); unit < units;
         unit = block.receivers.next_unit(&block.shared.next_receive)) {
        receive_chunk<Type>(block, {0, unit / chunks}, unit % chunks);
    }
}

// Sums what the peers return for the ranks that this one carries.
template <typename Type, typename Op>
__device__ void relay_sums(const Block<Op>& block) {
    const LlNodes& nodes = block.op.nodes.nodes;
    const uint32_t chunks = block.shape.chunks;
    const uint32_t others = nodes.sources - 1;
    const uint32_t units = nodes.most_tokens * others * chunks;
    for (uint32_t unit = block.receivers.next_unit(&block.shared.next_receive); unit < units;
         unit = block.receivers.next_unit(&block.shared.next_receive)) {
        const uint32_t pair = unit / chunks;
        const SourceToken at = {1 + pair % others, pair / others};
        if (exists(block, at)) {
            receive_chunk<Type>(block, at, unit % chunks);
        }
    }
}

// What a warp loads before all else: of its first token, and of the first chunk that it may send.
struct Begun {
    GateWords gate;
    int32_t row;
};

template <typename Op>
__device__ __forceinline__ void begin_sending(const Block<Op>& block, Begun& begun) {
    if (block.receivers.has_this_block()) {
        const uint32_t index = block.receivers.unit(warp_idx());
        const SourceToken at = token_of_sources(block, index);
        if (index < tokens_of_sources(block) && at.number == 0 && exists(block, at)) {
            begun.gate.load(block.params, at.token);
        }
    }
    const uint32_t unit = block.senders.unit(first_send_turn());
    if (block.senders.has_this_block() && unit < early_units(block)) {
        const UnitOfAll first(block.op, unit);
        begun.row = row_of_lane(block, first.rank, first.token);
    }
}

template <typename Type, typename Nodes>
__device__ __forceinline__ void run(const LlCombineParams& params, const Nodes& nodes) {
    using Op = Operation<Nodes>;
    __shared__ SharedStorage shared;
    __shared__ uint32_t tokens_of[Op::kSeveral ? LL_MAX_RANKS : MAX_PEERS];
    Op op(params.common, nodes);
    const Block<Op> block{params,
                          params.common.shape,
                          op,
                          shared,
                          tokens_of,
                          {params.common.shape, params.common.peers.ranks},
                          {params.common.shape, nodes.ranks()},
                          senders_of(params.common),
                          receivers_of(params.common)};
    Start start;
    if (threadIdx.x == 0) {
        start.load(params.common);
    }
    Begun begun;
    if (op.sends()) {
        begin_sending(block, begun);
    }
    LlHello head = {};
    if constexpr (Op::kSeveral) {
        head = first_head(op);
    }
    for (uint32_t rank = threadIdx.x; rank < op.ranks(); rank += blockDim.x) {
        tokens_of[rank] =
            min(params.common.handle.tokens_of[rank], params.common.shape.max_tokens);
    }
    if (threadIdx.x == 0) {
        shared.next_send = num_warps();
        shared.next_receive = 0;
        shared.start = start;
    }
    __syncthreads();
    const bool is_wanted = op.begin(shared.start);
    advance_epoch(op);
    if (!is_wanted || (op.sends() && !wait_until_bank_is_free(op))) {
        return;
    }
    if constexpr (Op::kSeveral) {
        if ((op.sends() && !sources_agree(op, head)) ||
            (op.receives() && !gateways_succeeded(op))) {
            return;
        }
    }
    if (op.sends() && block.receivers.has_this_block()) {
        send_weights(block, begun.gate);
    }
    if (op.sends() && block.senders.has_this_block()) {
        send_rows<Type>(block, begun.row);
    }
    if constexpr (Op::kSeveral) {
        if (op.relays() && block.receivers.has_this_block()) {
            relay_sums<Type>(block);
        }
    }
    if (op.receives() && block.receivers.has_this_block()) {
        receive_rows<Type>(block);
    }
    acknowledge(op);
}

template <typename Type>
__device__ __forceinline__ void run_on_one_node(const LlCombineParams& params) {
    run<Type>(params, OneNode{params.common.peers});
}

template <typename Type>
__device__ __forceinline__ void run_over_nodes(const LlCombineNodesParams& params) {
    run<Type>(params.combine, SeveralNodes{params.nodes});
}

}  // namespace nccl_ep::ll_combine_impl

extern "C" __global__ void __launch_bounds__(nccl_ep::LL_COMBINE_THREADS, 1)
    ll_combine_bf16(const __grid_constant__ nccl_ep::LlCombineParams params) {
    nccl_ep::ll_combine_impl::run_on_one_node<nccl_ep::Bf16>(params);
}

extern "C" __global__ void __launch_bounds__(nccl_ep::LL_COMBINE_THREADS, 1)
    ll_combine_nodes_bf16(const __grid_constant__ nccl_ep::LlCombineNodesParams params) {
    nccl_ep::ll_combine_impl::run_over_nodes<nccl_ep::Bf16>(params);
}

extern "C" __global__ void __launch_bounds__(nccl_ep::LL_COMBINE_THREADS, 1)
    ll_combine_f16(const __grid_constant__ nccl_ep::LlCombineParams params) {
    nccl_ep::ll_combine_impl::run_on_one_node<nccl_ep::F16>(params);
}

extern "C" __global__ void __launch_bounds__(nccl_ep::LL_COMBINE_THREADS, 1)
    ll_combine_nodes_f16(const __grid_constant__ nccl_ep::LlCombineNodesParams params) {
    nccl_ep::ll_combine_impl::run_over_nodes<nccl_ep::F16>(params);
}

extern "C" __global__ void __launch_bounds__(nccl_ep::LL_COMBINE_THREADS, 1)
    ll_combine_f32(const __grid_constant__ nccl_ep::LlCombineParams params) {
    nccl_ep::ll_combine_impl::run_on_one_node<nccl_ep::F32>(params);
}

extern "C" __global__ void __launch_bounds__(nccl_ep::LL_COMBINE_THREADS, 1)
    ll_combine_nodes_f32(const __grid_constant__ nccl_ep::LlCombineNodesParams params) {
    nccl_ep::ll_combine_impl::run_over_nodes<nccl_ep::F32>(params);
}
