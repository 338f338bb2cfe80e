// Rank-major low-latency combine on one node: each rank returns one row of a token, which the caller has made of its
// experts', and the token's home adds them.
//
// Rows travel as the sums of ll_combine do, through the same slots of the bank; nothing is told beside them but the
// fingerprint, and which banks of views are clean (view.cuh). Which row is whose, and who has rows of a token, is what
// the dispatch left in the handle's memory. If that was into a view, the combine cleans its bank.
//
// Grid: any number of blocks that fit on the GPU at once. A block takes some chunks of a token's row: it sends those of
// the token with that number of each other rank, then adds those of this rank's.
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
    Start start;
    uint32_t owner[LL_VIEW_BANKS];
    // Of each rank.
    uint32_t tokens_of[MAX_PEERS];
};

struct Block {
    const LlRankCombineParams& params;
    const Op& op;
    const SharedStorage& shared;

    const LlCombineParams& combine = params.combine;
    const LlShape& shape = combine.common.shape;
    const LlView& view = params.view;
    BankSlots bank_slots = {shape, op.peers()};

    // Whether the operation cleans its bank of views, and the address of a row there.
    __device__ bool cleans() const {
        return view.bank != LL_VIEW_BANKS && shared.owner[min(view.bank, LL_VIEW_BANKS - 1)] == view.handle;
    }
    __device__ uint8_t* view_at(uint32_t row) const { return view.rows + view_row(shape, row); }
    // The caller's row for a token of `home`, or none. The handle's memory holds anything if its dispatch has not
    // run; no such row is taken at its word.
    __device__ __forceinline__ const uint8_t* row_of(uint32_t home, uint32_t token, uint32_t& row) const {
        row = static_cast<uint32_t>(op.rows_of(home, token)[0]);
        const bool is_row = row < RankMajor{shape, op.ranks()}.rows();
        return is_row ? combine.rows + row_format(shape).offset(row) : nullptr;
    }
};

// Everyone sends everyone its fingerprint, so that an operation never ends before all peers have begun it; and in a
// whole operation, whose packets the next one looks at, which banks of views are clean.
__device__ __forceinline__ void tell_peers(const Block& block) {
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

// A chunk that a warp sends: of the row for a token of the rank that is `number` further on. A send phase sends own rows,
// too: the caller may have others there by the receive phase.
struct Outgoing {
    uint32_t number;
    uint32_t unit = blockIdx.x;
    uint32_t token;
    uint32_t row;
    bool is_row = false;
    Vec16 vec = {{0, 0, 0, 0}};

    __device__ explicit Outgoing(const Op& op) : number(op.receives() ? 1 : 0) {}
    __device__ __forceinline__ bool is_left(const Block& block) const { return number < block.op.peers(); }
    __device__ __forceinline__ uint32_t home(const Block& block) const {
        const uint32_t turned = block.op.rank() + number;
        return turned - (turned < block.op.peers() ? 0 : block.op.peers());
    }
    // Also before it is known how many tokens there are: the handle's memory has room for the most.
    __device__ __forceinline__ Chunk load(const Block& block) {
        const ViewUnit at(block.view, unit);
        const Chunk chunk = at.chunk(block.shape, block.view);
        token = at.token;
        is_row = false;
        if (is_left(block) && token < block.shape.max_tokens) {
            const uint8_t* from = block.row_of(home(block), token, row);
            is_row = from != nullptr;
            if (is_row && chunk.holds()) {
                vec = ld_relaxed_sys(reinterpret_cast<const Vec16*>(from + chunk.lane_byte()));
            }
        }
        return chunk;
    }
    __device__ __forceinline__ void next(const Block& block) {
        unit += gridDim.x;
        if (unit >= block.shared.tokens_of[home(block)] * block.view.parts) {
            unit = blockIdx.x;
            ++number;
        }
    }
};

// A warp sends its chunks of the rows of other ranks' tokens. Where the view is cleaned, its words may be what is
// sent, so the same lane overwrites them after it has loaded them. `begin` is called once the first is under way, and
// says whether the operation goes on; returns that.
template <typename Begin>
__device__ __forceinline__ bool send_rows(const Block& block, Begin begin) {
    const Op& op = block.op;
    Outgoing outgoing(op);
    bool sends = warp_idx() < block.view.warps && op.sends();
#pragma unroll 1
    for (bool has_begun = false;; has_begun = true) {
        Chunk chunk(block.shape, 0);
        if (sends) {
            chunk = outgoing.load(block);
        }
        if (!has_begun && !begin()) {
            return false;
        }
        sends = sends && outgoing.is_left(block);
        if (!sends) {
            return true;
        }
        const uint32_t home = outgoing.home(block);
        if (outgoing.is_row && outgoing.token < block.shared.tokens_of[home] && is_active(op.common.peers, home)) {
            const uint32_t slot = block.bank_slots.of_sum(0, outgoing.token, op.rank());
            const bool with_sentinel = any_lane(chunk.holds() && has_sentinel(outgoing.vec));
            send_chunk_to(op, home, op.at(home).row(slot).data, slot, chunk, outgoing.vec, with_sentinel);
            if (block.cleans() && chunk.holds()) {
                st_row(as<Vec16>(block.view_at(outgoing.row) + chunk.lane_byte()), all_sentinels());
            }
        }
        outgoing.next(block);
    }
}

// A warp waits for its chunk of what `peer` returns for a token, and makes the slot ready for its next use.
__device__ __forceinline__ Vec16 receive_chunk(const Block& block, uint32_t token, uint32_t peer, const Chunk& chunk) {
    const uint32_t slot = block.bank_slots.of_sum(0, token, peer);
    uint8_t* from = block.op.here().row(slot).data;
    const Vec16 vec = await_chunk(block.op, from, slot, chunk, peer, block.view.gently != 0);
    if (chunk.holds()) {
        st_row(as<Vec16>(from + chunk.lane_byte()), all_sentinels());
    }
    return vec;
}

// A warp adds its chunks of the rows of this rank's tokens.
template <typename Type>
__device__ __forceinline__ void receive_rows(const Block& block) {
    const Op& op = block.op;
    const uint32_t units = block.shape.tokens * block.view.parts;
#pragma unroll 1
    for (uint32_t index = blockIdx.x; index < units; index += gridDim.x) {
        const ViewUnit unit(block.view, index);
        const Chunk chunk = unit.chunk(block.shape, block.view);
        const bool has_entry = lane_idx() < block.shape.top_k;
        const int32_t sent = has_entry ? op.experts_of(0, unit.token)[lane_idx()] : kNowhere;
        int32_t host = rank_of_expert(block.shape, dispatched_expert(op, sent));
        host = host >= 0 && is_active(op.common.peers, host) ? host : kNowhere;
        // In a whole operation own rows are where the caller has them.
        Vec16 own = {{0, 0, 0, 0}};
        uint32_t row;
        const uint8_t* from = op.sends() ? block.row_of(op.rank(), unit.token, row) : nullptr;
        if (from != nullptr && chunk.holds()) {
            own = ld_relaxed_sys(reinterpret_cast<const Vec16*>(from + chunk.lane_byte()));
        }
        Sum<Type, 1> sum;
#pragma unroll 1
        for (LaneMask left = first_of_each_peer(host); left.any(); left.drop_first()) {
            const uint32_t peer = static_cast<uint32_t>(shuffle(host, left.first()));
            const bool is_own = op.sends() && peer == op.rank();
            const Vec16 vec[1] = {is_own ? own : receive_chunk(block, unit.token, peer, chunk)};
            sum.add(vec, 1.0f);
        }
        if (block.combine.out != nullptr && chunk.holds()) {
            st_row(as<Vec16>(block.combine.out + row_format(block.shape).offset(unit.token) + chunk.lane_byte()),
                   sum.rounded(0));
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
    if (threadIdx.x == blockDim.x - 1) {
        shared.start.load(common);
        load_owners(params.view, common.shape.row_bytes, shared.owner);
    }
    if (threadIdx.x < op.ranks()) {
        shared.tokens_of[threadIdx.x] = min(common.handle.tokens_of[threadIdx.x], common.shape.max_tokens);
    }
    const bool tells = blockIdx.x == 0 && is_last_warp();
    const bool moves_rows = warp_idx() < params.view.warps;
    const bool goes_on = send_rows(block, [&] {
        __syncthreads();
        if (!op.begin(shared.start) || (op.sends() && !wait_until_bank_is_free(op))) {
            return false;
        }
        if (tells && op.sends()) {
            tell_peers(block);
        }
        return true;
    });
    advance(op, params.view, goes_on && block.cleans(), 0);
    if (!goes_on) {
        return;
    }
    if (op.receives()) {
        if (tells) {
            for (uint32_t peer = lane_idx(); peer < op.peers(); peer += kWarpSize) {
                if (is_active(common.peers, peer)) {
                    check_fingerprint(op, peer);
                }
            }
        } else if (moves_rows) {
            receive_rows<Type>(block);
        }
    }
    acknowledge(op);
}

ENTRY(ll_rank_combine_bf16) { run<Bf16>(params); }
ENTRY(ll_rank_combine_f16) { run<F16>(params); }
ENTRY(ll_rank_combine_f32) { run<F32>(params); }

}  // namespace nccl_ep::ll_rank_combine_impl
