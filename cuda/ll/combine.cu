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
//
// Over several nodes the carrier of a token's rank stands for its home on each other node: weights come over the
// network, the node's sum a is rounded and goes home as one row. The home begins with the a of its own node, not
// rounded, and adds the rows of the node before it, of the one before that, and so on around the ring.

#include "../base/entry.cuh"
#include "combine_sums.cuh"

namespace nccl_ep::ll_combine_impl {

// Loop index at which this warp starts. The first warp starts last: with one token for a block it is busy
// telling the token's weights, so the second sends the rows.
__device__ __forceinline__ uint32_t first_send_turn() {
    return (warp_idx() == 0 ? num_warps() : warp_idx()) - 1;
}

// Everyone sends everyone its fingerprint, so that an operation never ends before all peers have begun it.
template <typename Op>
__device__ void send_fingerprint(const Block<Op>& block) {
    const Op& op = block.op;
    for (uint32_t peer = lane_idx(); peer < op.peers(); peer += kWarpSize) {
        if (!is_active(op.common.peers, peer)) {
            continue;
        }
        put_value(op.at(peer).fingerprint(op.rank()), op.packet(op.common.fingerprint));
        if constexpr (Op::kSeveral) {
            const LlNodes& nodes = op.nodes.nodes;
            for (uint32_t number = 1; number < nodes.sources; ++number) {
                put_value(op.at(peer).fingerprint(nodes.rank_of_source[number]),
                          op.packet(op.common.fingerprint));
            }
        }
    }
}

// One warp per token: each weight goes to the rank of its expert, if that is a peer. `early` is of the warp's
// first token.
template <typename Op>
__device__ void send_weights(const Block<Op>& block, const GateWords& early) {
    const Op& op = block.op;
    if (is_fingerprint_warp(block)) {
        send_fingerprint(block);
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
__device__ __forceinline__ Arrival wait_for_weight(const Block<Op>& block, LaneMask which,
                                                   uint32_t home, uint32_t token) {
    if (!which.has_this()) {
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
    const LaneMask named = ballot(row != kNowhere);
    if (!named.any()) {
        return;
    }
    const Chunk chunk(block.shape, outgoing.chunk_idx);
    const auto load = [&](uint32_t lane, ChunkData& data) {
        const int32_t from = shuffle(row, lane);
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
    } else if (named.count() == 1) {
        ChunkData data;
        load(named.first(), data);
        send_to(sum_slot, data);
    } else {
        Sum<Type> sum;
        Arrival weight = {true, 0};
        bool waited = false;
        in_batches(named, load, [&](uint32_t k, const ChunkData& data) {
            if (!waited) {
                weight = wait_for_weight(block, named, home, token);
                waited = true;
                sync_warp();
            }
            sum.add(data, chunk, __uint_as_float(shuffle(weight.data, k)));
        });
        // The home may be late, not gone, and would take a sum without its weights for a right one.
        if (all_lanes(weight.ok)) {
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

template <typename Op>
__device__ __forceinline__ void fill_shared(const Block<Op>& block, const Start& start) {
    const LlCommon& common = block.params.common;
    for (uint32_t rank = threadIdx.x; rank < block.op.ranks(); rank += blockDim.x) {
        block.tokens_of[rank] = min(common.handle.tokens_of[rank], common.shape.max_tokens);
    }
    if (threadIdx.x == 0) {
        block.shared.next_send = num_warps();
        block.shared.next_receive = 0;
        block.shared.start = start;
    }
}

template <typename Type, typename Nodes>
__device__ __forceinline__ void run(const LlCombineParams& params, const Nodes& nodes) {
    using Op = CombineOperation<Nodes>;
    __shared__ SharedStorage shared;
    __shared__ uint32_t tokens_of[Op::kSeveral ? LL_MAX_RANKS : MAX_PEERS];
    Op op(params.common, nodes);
    const Block<Op> block = {params, op, shared, tokens_of};
    Start start;
    if (threadIdx.x == 0) {
        start.load(params.common);
    }
    Begun begun;
    if (op.sends()) {
        begin_sending(block, begun);
    }
    MessageHeader head = {};
    if constexpr (Op::kSeveral) {
        head = first_head(op);
    }
    fill_shared(block, start);
    __syncthreads();
    bool goes_on = op.begin(shared.start) && (!op.sends() || wait_until_bank_is_free(op));
    if constexpr (Op::kSeveral) {
        goes_on = goes_on && (!op.sends() || sources_agree(op, head)) &&
                  (!op.receives() || gateways_succeeded(op));
    }
    if (goes_on && op.sends() && block.receivers.has_this_block()) {
        send_weights(block, begun.gate);
    }
    if (goes_on && op.sends() && block.senders.has_this_block()) {
        send_rows<Type>(block, begun.row);
    }
    advance_epoch(op);
    if (!goes_on) {
        return;
    }
    if constexpr (Op::kSeveral) {
        if (op.relays() && block.receivers.has_this_block()) {
            relay_sums<Type>(block);
            finish_relay(op);
        }
    }
    if (op.receives() && block.receivers.has_this_block()) {
        receive_rows<Type>(block);
    }
    acknowledge(op);
}

template <typename Type>
__device__ __forceinline__ void run(const LlCombineParams& params) {
    run<Type>(params, OneNode{params.common.peers});
}

template <typename Type>
__device__ __forceinline__ void run(const LlCombineNodesParams& params) {
    run<Type>(params.combine, SeveralNodes{params.nodes, true});
}

ENTRY(ll_combine_bf16) { run<Bf16>(params); }
ENTRY(ll_combine_f16) { run<F16>(params); }
ENTRY(ll_combine_f32) { run<F32>(params); }
ENTRY(ll_combine_nodes_bf16) { run<Bf16>(params); }
ENTRY(ll_combine_nodes_f16) { run<F16>(params); }
ENTRY(ll_combine_nodes_f32) { run<F32>(params); }

}  // namespace nccl_ep::ll_combine_impl
