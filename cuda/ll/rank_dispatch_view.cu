// Rank-major low-latency dispatch into a view: rows stay where they arrive (view.cuh), so receivers only wait for
// them.
//
// What is told beside rows, and what is left for the combine, is as in rank_dispatch.cu. Grid: any number of blocks
// that fit on the GPU at once. A block takes some chunks of a token's row, sends them to each rank that hosts one of
// the token's experts, then waits for the chunks with the same numbers from each source; its last warp does the same
// with the token's ids and weights. Only whole operations of rows without scales, on one node.
//
// At the end the bank holds what came, all else is as after rank_dispatch.cu. Rows that nothing came for hold
// anything.

#include "../base/entry.cuh"
#include "rank_notices.cuh"
#include "view_block.cuh"

namespace nccl_ep::ll_rank_dispatch_view_impl {

using ll_dispatch_impl::store_id;

// ---- Sending -----------------------------------------------------------------------------------

// The first block's last warp tells the peers what comes. Where this rank's bank is not clean, its fingerprint follows.
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
        put_value(counts, op.packet(block.shared.all[peer] | clean));
        put_value(counts + local, op.packet(block.shape.tokens));
    }
}

// What a block sends of a token, loaded before it is known where it goes: a lane's part of a chunk, or an entry.
struct Outgoing {
    Vec16 vec;
    int64_t id;
    float weight;

    __device__ __forceinline__ void load(const Block& block, const ViewUnit& unit) {
        if (unit.token >= block.shape.tokens) {
            return;
        }
        if (block.moves_rows()) {
            const Chunk chunk = unit.chunk(block.shape, block.view);
            const uint8_t* row = block.dispatch.tokens + row_format(block.shape).offset(unit.token);
            if (chunk.holds()) {
                vec = ld_const(reinterpret_cast<const Vec16*>(row + chunk.lane_byte()));
            }
        } else if (is_last_warp() && lane_idx() < block.shape.top_k) {
            const uint32_t entry = unit.token * block.shape.top_k + lane_idx();
            id = __ldg(reinterpret_cast<const long long*>(block.dispatch.topk_idx) + entry);
            weight = block.params.dispatch.beside.weights[entry];
        }
    }
};

// A warp sends its chunk to the ranks that the token goes to, this one last.
__device__ __forceinline__ void send_chunk(const Block& block, const ViewUnit& unit, const Outgoing& outgoing) {
    const Op& op = block.op;
    const Chunk chunk = unit.chunk(block.shape, block.view);
    const bool with_sentinel = any_lane(chunk.holds() && has_sentinel(outgoing.vec));
#pragma unroll 1
    for (uint32_t number = 1; number <= op.peers(); ++number) {
        const uint32_t turned = op.rank() + number;
        const uint32_t peer = turned - (turned < op.peers() ? 0 : op.peers());
        if (!block.goes_to(peer) || !is_active(op.common.peers, peer)) {
            continue;
        }
        const uint32_t row = op.rank() * block.shape.max_tokens + block.shared.before[peer];
        const Remote<uint8_t> to = window_of(block.params.banks, peer) + view_row(block.shape, row);
        // Nobody polls own rows.
        send_chunk_to(op, peer, to, row, chunk, outgoing.vec, with_sentinel && peer != op.rank());
    }
}

// The last warp tells every peer of the token's entries, with their weights if its row goes there. Each entry has the
// row's index then, those of other ranks beside an expert that is none.
__device__ __forceinline__ void send_entries(const Block& block, const ViewUnit& unit, const Outgoing& outgoing) {
    const Op& op = block.op;
    if (lane_idx() >= block.shape.top_k) {
        return;
    }
    const int32_t expert = expert_of_id(outgoing.id, int64_t{op.ranks()} * block.shape.local_experts);
    const int32_t host = rank_of_expert(block.shape, expert);
    op.experts_of(0, unit.token)[lane_idx()] = expert;
#pragma unroll 1
    for (uint32_t peer = 0; peer < op.peers(); ++peer) {
        if (!is_active(op.common.peers, peer)) {
            continue;
        }
        const Bank<Remote> bank = op.at(peer);
        const bool goes_there = block.goes_to(peer);
        EntryWord word = EntryWord::elsewhere();
        if (goes_there) {
            const bool is_here = host == static_cast<int32_t>(peer);
            word = EntryWord::here(is_here ? expert - peer * block.shape.local_experts : word.expert(),
                                   block.shared.before[peer]);
        }
        put_value(bank.entries(op.rank(), unit.token) + lane_idx(), op.packet(word.data));
        if (goes_there) {
            put_value(bank.weights(op.rank(), unit.token, op.ranks()) + lane_idx(),
                      op.packet(__float_as_uint(outgoing.weight)));
        }
    }
}

// Begins the operation, and sends all of the block's units. False if there is nothing more to do.
__device__ __forceinline__ bool send_all(const Block& block, Op& op) {
    const LlCommon& common = op.common;
    CleanWords words;
    if (threadIdx.x < op.peers()) {
        words.load(op, threadIdx.x);
    }
    Start start;
    uint32_t owner[LL_VIEW_BANKS];
    if (threadIdx.x == blockDim.x - 1) {
        start.load(common);
        load_owners(block.view, block.shape.row_bytes, owner);
    }
    const uint32_t units = block.shape.tokens * block.view.parts;
#pragma unroll 1
    for (uint32_t number = blockIdx.x;; number += gridDim.x) {
        const bool begins = number == blockIdx.x;
        if (!begins && number >= units) {
            return true;
        }
        const ViewUnit unit(block.view, number);
        Outgoing outgoing;
        outgoing.load(block, unit);
        if (threadIdx.x < op.ranks()) {
            block.shared.before[threadIdx.x] = 0;
            block.shared.all[threadIdx.x] = 0;
        }
        __syncthreads();
        count_tokens(block, unit.token);
        if (begins && threadIdx.x == blockDim.x - 1) {
            block.shared.start = start;
#pragma unroll
            for (uint32_t bank = 0; bank < LL_VIEW_BANKS; ++bank) {
                block.shared.owner[bank] = owner[bank];
            }
        }
        __syncthreads();
        if (begins) {
            if (!op.begin(block.shared.start)) {
                return false;
            }
            if (block.is_first() && is_last_warp()) {
                notify_counts(block);
            }
            const bool is_unknown = threadIdx.x < op.peers() && is_active(common.peers, threadIdx.x) &&
                                    !words.told(op, block.view.bank);
            const bool is_clean = block.shared.owner[block.view.bank] == 0;
            if (__syncthreads_or(is_unknown || !is_clean) != 0 &&
                !wait_until_clean(common, block.view, op.epoch, is_clean)) {
                return false;
            }
        }
        if (number < units && block.moves_rows()) {
            send_chunk(block, unit, outgoing);
        } else if (number < units && is_last_warp() && unit.part == 0) {
            send_entries(block, unit, outgoing);
        }
        __syncthreads();  // counts are done with
    }
}

// ---- Receiving ---------------------------------------------------------------------------------

// Hears from each source how many of its rows come, and how many tokens it has. The first block stores that, and checks
// what the sources run.
__device__ __forceinline__ void hear_sources(const Block& block) {
    const Op& op = block.op;
    // A warp each for rows, tokens, the fingerprint: the last two behind a word for each local expert.
    const uint32_t word = warp_idx();
    const uint32_t ranks = word < (block.is_first() ? 3u : 2u) ? op.ranks() : 0;
#pragma unroll 1
    for (uint32_t source = lane_idx(); source < ranks; source += kWarpSize) {
        if (!is_active(op.common.peers, source)) {
            continue;
        }
        const uint64_t* at = op.here().counts(source) + (word == 0 ? 0 : block.shape.local_experts - 1 + word);
        const uint32_t data = await_packet(op, at, word == 2 ? WAIT_BEGIN : WAIT_COUNTS, source);
        if (word == 2) {
            if (data != op.common.fingerprint && !has_failed(op.common.wait)) {
                report_fingerprint(op.common, op.nodes, op.epoch, source, data);
            }
            continue;
        }
        // They become addresses.
        const uint32_t bounded = min(data & ((1u << kCleanShift) - 1), block.shape.max_tokens);
        (word == 0 ? block.shared.before : block.shared.all)[source] = bounded;
    }
    __syncthreads();
    if (block.is_first() && threadIdx.x == 0) {
        st_relaxed_gpu(&block.view.state->row_bytes[block.view.bank], block.shape.row_bytes);
    }
    if (block.is_first() && threadIdx.x < op.ranks()) {
        const uint32_t rows = block.shared.before[threadIdx.x];
        op.common.handle.tokens_of[threadIdx.x] = block.shared.all[threadIdx.x];
        block.view.state->rows[block.view.bank][threadIdx.x] = rows;
        if (block.dispatch.counter != nullptr) {
            block.dispatch.counter[threadIdx.x] = static_cast<int32_t>(rows);
        }
    }
}

// A warp waits for the block's chunks of the rows from `source`.
__device__ __forceinline__ void await_rows(const Block& block, uint32_t source) {
    const Op& op = block.op;
    const uint32_t units = block.shared.before[source] * block.view.parts;
#pragma unroll 1
    for (uint32_t number = blockIdx.x; number < units; number += gridDim.x) {
        const ViewUnit unit(block.view, number);
        const uint32_t row = source * block.shape.max_tokens + unit.token;
        const uint8_t* from = block.view.rows + view_row(block.shape, row);
        await_chunk(op, from, row, unit.chunk(block.shape, block.view), source, block.view.gently != 0);
    }
}

// The last warp clears the ids of the block's share of rows that hold nothing.
__device__ __forceinline__ void clear_ids(const Block& block, uint32_t source) {
    const uint32_t top_k = block.shape.top_k;
    const uint32_t used = block.shared.before[source];
#pragma unroll 1
    for (uint32_t row = blockIdx.x; row < block.shape.max_tokens; row += gridDim.x) {
        if (row >= used && lane_idx() < top_k) {
            const uint64_t at = uint64_t{source * block.shape.max_tokens + row} * top_k;
            store_id(block.params.dispatch.beside, at + lane_idx(), kNowhere);
        }
    }
}

// The last warp takes the ids and weights of the block's tokens of `source`.
__device__ __forceinline__ void receive_entries(const Block& block, uint32_t source) {
    const Op& op = block.op;
    const LlBeside& beside = block.params.dispatch.beside;
    const uint32_t top_k = block.shape.top_k;
    const uint32_t units = block.shared.all[source] * block.view.parts;
#pragma unroll 1
    for (uint32_t number = blockIdx.x; number < units; number += gridDim.x) {
        const ViewUnit unit(block.view, number);
        if (unit.part != 0 || lane_idx() >= top_k) {
            continue;
        }
        const uint64_t* entry_at = op.here().entries(source, unit.token) + lane_idx();
        const uint64_t* weight_at = op.here().weights(source, unit.token, op.ranks()) + lane_idx();
        uint64_t entry;
        uint64_t weight;
        // Both are under way together; a weight comes with a row alone.
        poll_until(
            [&] {
                entry = ld_relaxed_sys(entry_at);
                weight = ld_relaxed_sys(weight_at);
                const bool has_row = EntryWord{packet_data(entry)}.index() < block.shape.max_tokens;
                return packet_epoch(entry) == op.epoch && (!has_row || packet_epoch(weight) == op.epoch);
            },
            [&](uint64_t start) { return keep_waiting_for(op.common, WAIT_ENTRY, source, op.epoch, start); });
        const EntryWord word = {packet_data(entry)};
        const int32_t row = RankMajor{block.shape, op.ranks()}.row(source, word.index());
        op.rows_of(source, unit.token)[lane_idx()] = lane_idx() == 0 ? row : kNowhere;
        if (row >= 0) {
            const uint64_t at = uint64_t(row) * top_k + lane_idx();
            const bool is_here = word.expert() < block.shape.local_experts;
            store_id(beside, at, is_here ? static_cast<int32_t>(word.expert()) : kNowhere);
            beside.out_weights[at] = __uint_as_float(packet_data(weight));
        }
    }
}

__device__ __forceinline__ void receive_all(const Block& block) {
    hear_sources(block);
#pragma unroll 1
    for (uint32_t source = 0; source < block.op.ranks(); ++source) {
        if (is_last_warp()) {
            clear_ids(block, source);
            receive_entries(block, source);
        } else if (block.moves_rows() && source != block.op.rank()) {
            await_rows(block, source);
        }
    }
}

__device__ __forceinline__ void run(const LlRankDispatchViewParams& params) {
    follow_grid();
    __shared__ SharedStorage shared;
    const LlCommon& common = params.dispatch.dispatch.common;
    Op op(common, OneNode{common.peers});
    const Block block = {params, op, shared};
    const bool goes_on = send_all(block, op);
    advance(op, params.view, goes_on, params.view.handle);
    if (goes_on) {
        receive_all(block);
    }
}

ENTRY(ll_rank_dispatch_view) { run(params); }

}  // namespace nccl_ep::ll_rank_dispatch_view_impl
