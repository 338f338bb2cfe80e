// Rank-major low-latency combine on one node: each rank returns one row per token, in which the caller has summed its
// experts' rows, and the token's home adds these rows.
//
// Rows travel like the sums of ll_combine, through the same slots of the bank. Beside them a rank only sends its
// fingerprint, and which of its banks of views are clean (view.cuh). The dispatch has left in the handle's memory which
// row belongs to which token and which ranks have rows of a token. If the dispatch was into a view, the combine cleans
// the view's bank.
//
// Grid: any number of blocks that fit on the GPU at once, in groups; each block of a group has some chunks of every
// token's row. A single group sends these chunks for the tokens of all other ranks, then adds those for this rank's.
// For few tokens there are several groups: the last one adds, and each of the others sends to some of the ranks.
//
// Order of summation. a = 0; a = a + y for the ranks of a token in the order of the first k that names each, in fp32;
// out = round(a).

#include "../base/entry.cuh"
#include "sum.cuh"
#include "scheduler.cuh"
#include "view.cuh"

namespace nccl_ep::ll_rank_combine_impl {

using Op = Operation<OneNode>;

struct SharedStorage {
    StartState start;
    uint32_t owner[LL_VIEW_BANKS];
    // If the operation cleans its bank of views, the bytes of a row there, else 0.
    uint32_t cleans;
    // The number of tokens of each rank.
    uint32_t tokens_of[MAX_PEERS];
};

struct Block {
    const LlRankCombineParams& params;
    const Op& op;
    SharedStorage& shared;

    const LlCombineParams& combine = params.combine;
    const LlShape& shape = combine.common.shape;
    const LlView& view = params.view;
    // The block's group, as the quotient, and its number in the group, as the remainder.
    DivMod group = divide(blockIdx.x, params.group_blocks, params.group_reciprocal);
    ViewUnit first = ViewUnit(view, group.remainder);
    BankSlots bank_slots = {shape, op.peers()};

    // The number of groups that send, and whether this block's does.
    __device__ uint32_t senders() const { return max(params.groups - 1, 1u); }
    __device__ bool sends() const { return op.sends() && group.quotient < senders(); }
    __device__ bool receives() const { return op.receives() && group.quotient == params.groups - 1; }
    // The caller's row for a token of `home`, to be checked with is_row, as the handle's memory is undefined if no
    // dispatch has run.
    __device__ __forceinline__ uint32_t row_of(uint32_t home, uint32_t token) const {
        return combine.common.handle.row_of[(home * shape.max_tokens + token) * shape.top_k];
    }
    __device__ __forceinline__ bool is_row(uint32_t row) const { return row < RankMajor{shape, op.ranks()}.rows(); }
    // Loads this lane's part of a chunk of it.
    __device__ __forceinline__ void load(uint32_t row, const Chunk& chunk, Vec16& vec) const {
        if (is_row(row) && chunk.holds()) {
            vec = ld_relaxed_sys(as<Vec16>(const_cast<uint8_t*>(combine.rows) + row_format(shape).offset(row) +
                                           chunk.lane_byte()));
        }
    }
};

// Sends the fingerprint to all peers, so that an operation never ends on a rank before all peers have begun it; and
// which banks of views are clean, which the next whole operation reads.
__device__ __forceinline__ void notify_peers(const Block& block) {
    const Op& op = block.op;
    const uint32_t clean = clean_word(block.shared.owner, LL_VIEW_BANKS);
#pragma unroll 1
    for (uint32_t peer = lane_idx(); peer < op.peers(); peer += kWarpSize) {
        if (is_active(op.common.peers, peer)) {
            const Bank<Remote> bank = op.at(peer);
            put_value(bank.fingerprint(op.rank()), op.packet(op.common.fingerprint));
            put_value(bank.counts(op.rank()), op.packet(clean));
        }
    }
}

// The chunk that a warp sends next; the token's home is `number` places after this rank. A send phase also sends the
// rows for this rank's own tokens, as the caller may overwrite them before the receive phase.
struct Outgoing {
    uint32_t number;
    ViewUnit unit;
    uint32_t row;
    Vec16 vec = {{0, 0, 0, 0}};

    __device__ explicit Outgoing(const Block& block)
        : number((block.op.receives() ? 1 : 0) + block.group.quotient), unit(block.first) {}
    __device__ __forceinline__ bool is_left(const Block& block) const { return number < block.op.peers(); }
    __device__ __forceinline__ uint32_t home(const Block& block) const {
        const uint32_t rank = block.op.rank() + number;
        return rank - (rank < block.op.peers() ? 0 : block.op.peers());
    }
    // May be called before the home's number of tokens is known, as the handle's memory has room for the most.
    __device__ __forceinline__ void load(const Block& block) {
        if (is_left(block) && unit.row < block.shape.max_tokens) {
            row = block.row_of(home(block), unit.row);
            block.load(row, unit.chunk(block.shape, block.view), vec);
        }
    }
    __device__ __forceinline__ void next(const Block& block) {
        unit.next(block.view);
        if (unit.row >= block.shared.tokens_of[home(block)]) {
            unit = block.first;
            number += block.senders();
        }
    }
};

// A warp cleans its share of a row of the view, which is its chunk if rows have the same length there.
__device__ __forceinline__ void clean_row(const Block& block, uint32_t row, const Chunk& chunk) {
    const uint32_t bytes = block.shared.cleans;
    uint8_t* at = block.view.rows + uint64_t{row} * bytes;
#pragma unroll 1
    for (uint32_t i = chunk.lane_byte(); i < bytes; i += block.shape.chunks * block.shape.chunk_bytes) {
        st_row(as<Vec16>(at + i), all_sentinels());
    }
}

// A warp sends its chunks of the rows for other ranks' tokens, and cleans the view if that is to be done: the view may
// hold the very rows that are sent, so a lane cleans words after it has loaded them. `begin` is called after the first
// loads were issued, and says whether the operation goes on; so does the result.
template <typename Begin>
__device__ __forceinline__ bool send_rows(const Block& block, Begin begin) {
    const Op& op = block.op;
    Outgoing outgoing(block);
    const bool sends = warp_idx() < block.view.warps && block.sends();
#pragma unroll 1
    for (bool has_begun = false;; has_begun = true) {
        if (sends) {
            outgoing.load(block);
        }
        if (!has_begun && !begin()) {
            return false;
        }
        if (!sends || !outgoing.is_left(block)) {
            return true;
        }
        const uint32_t home = outgoing.home(block);
        const Chunk chunk = outgoing.unit.chunk(block.shape, block.view);
        if (outgoing.unit.row < block.shared.tokens_of[home] && block.is_row(outgoing.row) &&
            is_active(op.common.peers, home)) {
            const uint32_t slot = block.bank_slots.of_sum(0, outgoing.unit.row, op.rank());
            const bool with_sentinel = any_lane(chunk.holds() && has_sentinel(outgoing.vec));
            send_chunk_to(op, home, op.at(home).row(slot).data, slot, chunk, outgoing.vec, with_sentinel);
            clean_row(block, outgoing.row, chunk);
        }
        outgoing.next(block);
    }
}

// How far a warp has come with summing the rows of this rank's tokens.
template <typename Type>
struct Progress {
    ViewUnit unit;
    // Whether the ranks of the unit's token are known, and one lane for each rank whose row has not been added yet.
    bool has_begun = false;
    LaneMask left;
    Sum<Type, 1> sum;
    // The awaited row: its slot, its sender, and whether its flag says that it has arrived although it has kSentinel.
    uint32_t slot;
    uint32_t peer;
    bool is_there = false;

    __device__ explicit Progress(const Block& block) : unit(block.first) {}
};

// A warp polls for its chunk of the awaited row, and fills it with kSentinel again; false after a number of polls.
template <typename Type>
__device__ __forceinline__ bool receive_chunk(const Block& block, Progress<Type>& progress, const Chunk& chunk,
                                              Vec16& vec) {
    auto* from = as<Vec16>(block.op.here().row(progress.slot).data + chunk.lane_byte());
    const bool holds = chunk.holds();
    vec = {{0, 0, 0, 0}};
#pragma unroll 1
    for (uint32_t polls = 0;; ++polls) {
        if (holds) {
            vec = ld_relaxed_sys(from);
        }
        if (!any_lane(has_sentinel(vec)) || progress.is_there) {
            break;
        }
        if (polls == kPollsOfChunk) {
            return false;
        }
        spin_hint();
        if (block.view.gently != 0) {
            spin_gently();
        }
    }
    progress.is_there = false;
    if (holds) {
        st_row(from, all_sentinels());
    }
    return true;
}

// A warp adds its chunks of the rows of this rank's tokens. It returns false after a number of polls for one of them,
// and the next call continues there. So only `progress` has to be kept while the caller checks for failures.
template <typename Type>
__device__ __forceinline__ bool receive_rows(const Block& block, Progress<Type>& progress) {
    const Op& op = block.op;
#pragma unroll 1
    for (; progress.unit.row < block.shape.tokens; progress.unit.next(block.view)) {
        const uint32_t token = progress.unit.row;
        const Chunk chunk = progress.unit.chunk(block.shape, block.view);
        const bool has_entry = lane_idx() < block.shape.top_k;
        const int32_t sent = has_entry ? op.experts_of(0, token)[lane_idx()] : kNowhere;
        // In a whole operation own rows are read from the caller's tensor.
        Vec16 own = {{0, 0, 0, 0}};
        if (op.sends()) {
            block.load(block.row_of(op.rank(), token), chunk, own);
        }
        int32_t host = rank_of_expert(block.shape, dispatched_expert(op, sent));
        host = host >= 0 && is_active(op.common.peers, host) ? host : kNowhere;
        if (!progress.has_begun) {
            progress.has_begun = true;
            progress.left = first_of_each_peer(host);
            progress.sum = {};
        }
#pragma unroll 1
        for (; progress.left.any(); progress.left.drop_first()) {
            Vec16 vec[1] = {own};
            progress.peer = static_cast<uint32_t>(shuffle(host, progress.left.first()));
            if (!op.sends() || progress.peer != op.rank()) {
                progress.slot = block.bank_slots.of_sum(0, token, progress.peer);
                if (!receive_chunk(block, progress, chunk, vec[0])) {
                    return false;
                }
            }
            progress.sum.add(vec, 1.0f);
        }
        if (block.combine.out != nullptr && chunk.holds()) {
            st_row(as<Vec16>(block.combine.out + row_format(block.shape).offset(token) + chunk.lane_byte()),
                   progress.sum.rounded(0));
        }
        progress.has_begun = false;
    }
    return true;
}

// Receives all rows; checks flags and the clock between the calls of receive_rows.
template <typename Type>
__device__ __forceinline__ void receive_all(const Block& block) {
    const Op& op = block.op;
    Progress<Type> progress(block);
    uint32_t slot = ~uint32_t{0};
    uint64_t start = 0;
#pragma unroll 1
    while (!receive_rows(block, progress)) {
        start = progress.slot == slot ? start : 0;
        slot = progress.slot;
        progress.is_there = is_flagged(op, slot, progress.unit.chunk(block.shape, block.view).index);
        if (!progress.is_there) {
            start = keep_waiting_in(op.common, op.nodes, op.epoch, op.from(progress.peer, WAIT_ROW), start, 0);
            progress.is_there = any_lane(start == kGivenUp);
        }
    }
}

// The last warp loads the state with which the operation begins.
__device__ __forceinline__ void load_start_state(const Block& block) {
    const LlCommon& common = block.op.common;
    StartState start;
    uint32_t owner[LL_VIEW_BANKS];
    start.load(common);
    load_owners(block.view, owner);
    uint32_t row_bytes = 0;
    if (block.view.bank != LL_VIEW_BANKS) {
        // All loads are in flight together: dispatch and combine of 128 tokens took 0.2 us longer when one load
        // depended on another.
        const uint32_t filled = *filled_by(common, block.op.ranks());
        const uint32_t owned_by = ld_relaxed_gpu(&block.view.state->owner[block.view.bank]);
        row_bytes = ld_relaxed_gpu(&block.view.state->row_bytes[block.view.bank]);
        const bool owns = filled != 0 && owned_by == filled;
        // If the input is in the bank with another row length, some words would be cleaned before they are loaded.
        const bool cleans = owns && (block.view.input_in_bank == 0 || row_bytes == block.shape.row_bytes);
        row_bytes = cleans ? row_bytes : 0;
    }
#pragma unroll 1
    for (uint32_t rank = lane_idx(); rank < block.op.ranks(); rank += kWarpSize) {
        block.shared.tokens_of[rank] = min(common.handle.tokens_of[rank], block.shape.max_tokens);
    }
    if (lane_idx() == 0) {
        block.shared.start = start;
        block.shared.cleans = row_bytes;
#pragma unroll
        for (uint32_t bank = 0; bank < LL_VIEW_BANKS; ++bank) {
            block.shared.owner[bank] = owner[bank];
        }
    }
}

template <typename Type>
__device__ __forceinline__ void run(const LlRankCombineParams& params) {
    follow_grid();
    __shared__ SharedStorage shared;
    const LlCommon& common = params.combine.common;
    Op op(common, OneNode{common.peers});
    const Block block = {params, op, shared};
    const bool notifies = blockIdx.x == 0 && is_last_warp();
    if (is_last_warp()) {
        load_start_state(block);
    }
    const bool goes_on = send_rows(block, [&] {
        __syncthreads();
        if (!op.begin(shared.start) || (op.sends() && !wait_until_bank_is_free(op, warp_idx_of_all()))) {
            return false;
        }
        if (notifies && op.sends()) {
            notify_peers(block);
        }
        return true;
    });
    const uint32_t counted = count_block(op);
    if (goes_on && op.receives()) {
        if (notifies) {
            if (params.combine.waits != nullptr) {
                time_ranks(common, op.nodes, op.epoch, op.here().fingerprint(0), params.combine.waits);
            }
            for (uint32_t peer = lane_idx(); peer < op.peers(); peer += kWarpSize) {
                if (is_active(common.peers, peer)) {
                    check_fingerprint(op, peer);
                }
            }
        } else if (block.receives() && warp_idx() < params.view.warps) {
            receive_all<Type>(block);
        }
    }
    if (advance(op, counted) && goes_on && shared.cleans != 0) {
        set_owner(params.view, 0);
    }
    if (goes_on) {
        acknowledge(op);
    }
}

ENTRY_BY_TYPE(ll_rank_combine, run<T>(params))

}  // namespace nccl_ep::ll_rank_combine_impl
