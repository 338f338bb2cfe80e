// Rank-major low-latency dispatch into a view: rows stay where they arrive (view.cuh), so receivers only wait for them.
// For whole operations on one node.
//
// Everything beside rows is sent and stored as in rank_dispatch.cu. Grid: any number of blocks that fit on the GPU at
// once. A block takes some chunks of a token's row, sends them to each rank that hosts one of the token's experts, then
// waits for the chunks with the same numbers from each source; its last warp does the same with the token's ids and
// weights.
//
// At the end the bank has what came, and everything else is as after rank_dispatch.cu. Unused rows are undefined.

#include "../base/entry.cuh"
#include "view_receive.cuh"

namespace nccl_ep::ll_rank_dispatch_view_impl {

// The first block's last warp sends the counts; and the fingerprint, if this rank's bank is clean, else clean_bank
// does.
template <typename Rows>
__device__ __forceinline__ void notify_counts(const Block& block) {
    const Op& op = block.op;
    const uint32_t local = block.shape.local_experts;
    const uint32_t clean = clean_word(block.shared.owner, block.view.bank);
#pragma unroll 1
    for (uint32_t peer = lane_idx(); peer < op.peers(); peer += kWarpSize) {
        if (!is_active(op.common.peers, peer)) {
            continue;
        }
        const Bank<Remote> bank = op.at(peer);
        const Remote<uint64_t> counts = bank.counts(op.rank());
        if (block.shared.owner[block.view.bank] == 0) {
            put_value(bank.fingerprint(op.rank()), op.packet(op.common.fingerprint));
        }
        if constexpr (Rows::kScaled) {
            put_value(bank.scales_word(op.rank()), op.packet(op.common.scales_word));
        }
        put_value(counts, op.packet(block.shared.all[peer] | clean));
        put_value(counts + local, op.packet(block.shape.tokens));
    }
}

// What a lane sends of a token, loaded before it is known where the token goes: its part of a chunk, or an entry.
template <typename Rows>
struct Outgoing {
    typename Rows::Fetched fetched;
    int64_t id;
    float weight;

    __device__ __forceinline__ void load(const Block& block, const Rows& rows, const ViewUnit& unit) {
        if (unit.row >= block.shape.tokens) {
            return;
        }
        if (block.moves_rows()) {
            rows.fetch(block, unit.row, unit.chunk(block.shape, block.view), fetched);
        } else if (is_last_warp() && lane_idx() < block.shape.top_k) {
            const uint32_t entry = unit.row * block.shape.top_k + lane_idx();
            id = __ldg(reinterpret_cast<const long long*>(block.dispatch.topk_idx) + entry);
            weight = block.params.dispatch.topk.weights[entry];
        }
    }
};

// A warp sends its chunk to the ranks to which the token goes, this rank last.
template <typename Rows>
__device__ __forceinline__ void send_chunk(const Block& block, const Rows& rows, const ViewUnit& unit,
                                           const Outgoing<Rows>& outgoing) {
    const Op& op = block.op;
    const Chunk chunk = unit.chunk(block.shape, block.view);
    typename Rows::Scales scales;
    const Vec16 vec = rows.as_sent(outgoing.fetched, chunk, scales);
    const bool with_sentinel = any_lane(chunk.holds() && has_sentinel(vec));
#pragma unroll 1
    for (uint32_t number = 1; number <= op.peers(); ++number) {
        const uint32_t peer = rank_after(op, number);
        if (!block.goes_to(peer) || !is_active(op.common.peers, peer)) {
            continue;
        }
        const uint32_t row = op.rank() * block.shape.max_tokens + block.shared.before[peer];
        const Remote<uint8_t> to = window_of(block.params.banks, peer) + view_row(block.shape, row);
        // Own rows need no flag, as nobody polls them.
        send_chunk_to(op, peer, to, row, chunk, vec, with_sentinel && peer != op.rank());
        if constexpr (Rows::kScaled) {
            scales.put(block, rows, peer, row);
        }
    }
}

// The last warp sends every peer the token's entries, and their weights if the token's row goes there. Then each entry
// has the row's index, beside an invalid expert if the expert is on another rank.
template <typename Rows>
__device__ __forceinline__ void send_entries(const Block& block, uint32_t token, const Outgoing<Rows>& outgoing) {
    const Op& op = block.op;
    if (lane_idx() >= block.shape.top_k) {
        return;
    }
    const int32_t expert = expert_of_id(outgoing.id, int64_t{op.ranks()} * block.shape.local_experts);
    const int32_t host = rank_of_expert(block.shape, expert);
    op.experts_of(0, token)[lane_idx()] = expert;
    // All windows have the same layout.
    const auto* at = reinterpret_cast<const uint8_t*>(op.here().entries(op.rank(), token) + lane_idx());
    const uint64_t offset = at - own_window(op.common.peers);
#pragma unroll 1
    for (uint32_t peer = 0; peer < op.peers(); ++peer) {
        if (!is_active(op.common.peers, peer)) {
            continue;
        }
        const Remote<uint64_t> entry = as<uint64_t>(window_of(op.common.peers, peer) + offset);
        const bool goes_there = block.goes_to(peer);
        EntryWord word = EntryWord::elsewhere();
        if (goes_there) {
            const bool is_here = host == static_cast<int32_t>(peer);
            word = EntryWord::here(is_here ? expert - peer * block.shape.local_experts : word.expert(),
                                   block.shared.before[peer]);
        }
        put_value(entry, op.packet(word.data));
        if (goes_there) {
            put_value(entry + block.weights_behind(), op.packet(__float_as_uint(outgoing.weight)));
        }
    }
}

// As Operation::begin, for whole operations only.
__device__ __forceinline__ void begin(Op& op, const StartState& start) {
    op.epoch_before = start.epoch;
    op.epoch = epoch_after(start.epoch);
    op.bank = op.bank_of_channel(LL_WHOLE_CHANNEL, op.epoch);
}

// The last warp loads the state with which the operation begins, and which of the peers' banks are clean.
__device__ __forceinline__ void load_start_state(const Block& block) {
    Op op(block.op);
    // All loads are in flight together, except those for peers beyond a warp's lanes.
    CleanWords words;
    words.load(op, min(lane_idx(), op.peers() - 1));
    StartState start;
    uint32_t owner[LL_VIEW_BANKS];
    start.load(op.common);
    load_owners(block.view, owner);
    const uint32_t row_bytes = ld_relaxed_gpu(&block.view.state->row_bytes[block.view.bank]);
    const uint32_t scale_bytes = ld_relaxed_gpu(&block.view.state->scale_bytes[block.view.bank]);
    const bool lengths_differ =
        row_bytes != 0 && (row_bytes != block.shape.row_bytes || scale_bytes != block.view.scale_bytes);
    begin(op, start);
    bool is_unknown = false;
#pragma unroll 1
    for (uint32_t peer = lane_idx(); peer < op.peers(); peer += kWarpSize) {
        if (peer >= kWarpSize) {
            words.load(op, peer);
        }
        is_unknown |= is_active(op.common.peers, peer) && !words.says_clean(op, block.view.bank);
    }
    is_unknown = any_lane(is_unknown);
    if (lane_idx() == 0) {
        block.shared.start = start;
        block.shared.is_unknown = is_unknown;
#pragma unroll
        for (uint32_t bank = 0; bank < LL_VIEW_BANKS; ++bank) {
            block.shared.owner[bank] = lengths_differ && bank == block.view.bank ? kOtherLengths : owner[bank];
        }
    }
}

// Begins the operation, and sends all of the block's rows. False if there is nothing more to do.
template <typename Rows>
__device__ __forceinline__ bool send_all(const Block& block, const Rows& rows, Op& op) {
    const uint32_t tokens = block.shape.tokens;
    bool begins = true;
#pragma unroll 1
    for (ViewUnit unit = block.first;;) {
        Outgoing<Rows> outgoing;
        outgoing.load(block, rows, unit);
        if (threadIdx.x < op.ranks()) {
            block.shared.before[threadIdx.x] = 0;
            block.shared.all[threadIdx.x] = 0;
        }
        __syncthreads();
        if (!is_last_warp()) {
            count_tokens(block, unit.row);
        } else if (begins) {
            load_start_state(block);
        }
        __syncthreads();
        if (begins) {
            begin(op, block.shared.start);
            if (block.shared.start.failed != 0) {
                return false;
            }
            if (block.is_first() && is_last_warp()) {
                notify_counts<Rows>(block);
            }
            const bool is_clean = block.shared.owner[block.view.bank] == 0;
            if ((block.shared.is_unknown != 0 || !is_clean) &&
                !wait_until_clean(op.common, block.view, block.shared.late, op.epoch, is_clean)) {
                return false;
            }
            begins = false;
        }
        if (unit.row < tokens && block.moves_rows()) {
            send_chunk(block, rows, unit, outgoing);
        } else if (unit.row < tokens && is_last_warp()) {
            // By a block other than the first, which sends the counts meanwhile.
            if (unit.part == min(1u, block.view.parts - 1)) {
                send_entries(block, unit.row, outgoing);
            }
        }
        unit.next(block.view);
        if (unit.row >= tokens) {
            return true;
        }
        __syncthreads();  // all threads have read the counts
    }
}

// Records the bank's owner and its rows' lengths for later operations. Only once all blocks have begun: a block that
// found the new length of rows but the old one of scales would clean the wrong places.
__device__ __forceinline__ void record_bank(const Block& block) {
    const LlView& view = block.view;
    set_owner(view, block.op.epoch);
    *filled_by(block.op.common, block.op.ranks()) = block.op.epoch;
    st_relaxed_gpu(&view.state->row_bytes[view.bank], block.shape.row_bytes);
    st_relaxed_gpu(&view.state->scale_bytes[view.bank], view.scale_bytes);
}

template <typename Rows>
__device__ __forceinline__ void run(const LlRankDispatchViewParams& params, const Rows& rows) {
    follow_grid();
    __shared__ SharedStorage shared;
    const LlCommon& common = params.dispatch.dispatch.common;
    Op op(common, OneNode{common.peers});
    const Block block = {params, op, shared};
    if (threadIdx.x < op.ranks()) {
        shared.rows_from[threadIdx.x] = kUnknownRows;
    }
    if (threadIdx.x == 0) {
        shared.late.awaited = 0;
    }
    const bool goes_on = send_all(block, rows, op);
    const uint32_t counted = count_block(op);
    if (goes_on) {
        receive_all(block, rows);
    }
    report_late(op, shared.late);
    if (advance(op, counted) && goes_on) {
        record_bank(block);
    }
}

ENTRY(ll_rank_dispatch_view) { run(params, PlainView{}); }
ENTRY(ll_rank_dispatch_view_scaled) { run(params.view, ForwardedView{params.rows}); }
ENTRY_BY_TYPE(ll_rank_dispatch_view_cast, run(params.view, CastView<T>{params.rows}))

}  // namespace nccl_ep::ll_rank_dispatch_view_impl
