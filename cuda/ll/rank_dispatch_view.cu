// Rank-major low-latency dispatch into a view: rows stay where they arrive (view.cuh), so receivers only wait for them.
//
// What is told beside rows, and what is left for the combine, is as in rank_dispatch.cu. Grid: any number of blocks that
// fit on the GPU at once. A block takes some chunks of a token's row, sends them to each rank that hosts one of the
// token's experts, then waits for the chunks with the same numbers from each source; its last warp does the same with
// the token's ids and weights. Only whole operations of rows without scales, on one node.
//
// At the end the bank holds what came, all else is as after rank_dispatch.cu. Rows that nothing came for hold anything.

#include "../base/entry.cuh"
#include "rank_notices.cuh"
#include "view.cuh"

namespace nccl_ep::ll_rank_dispatch_view_impl {

using Op = Operation<OneNode>;
using ll_dispatch_impl::store_id;

// Ranks whose bits are together in a word.
constexpr uint32_t kRanksOfWord = 32;
// Ids of a token that are loaded together.
constexpr uint32_t kIdsAtOnce = 8;

struct SharedStorage {
    Start start;
    uint32_t owner[LL_VIEW_BANKS];
    // Ranks to which the block's token goes.
    uint32_t goes_to[(MAX_PEERS + kRanksOfWord - 1) / kRanksOfWord];
    // By rank: this rank's tokens that go there, those before the block's token and all. Then by source: rows that come
    // from there, and its tokens.
    uint32_t before[MAX_PEERS];
    uint32_t all[MAX_PEERS];
};

struct Block {
    const LlRankDispatchViewParams& params;
    const Op& op;
    SharedStorage& shared;

    const LlDispatchParams& dispatch = params.dispatch.dispatch;
    const LlShape& shape = dispatch.common.shape;
    const LlView& view = params.view;

    __device__ bool is_first() const { return blockIdx.x == 0; }
    __device__ bool moves_rows() const { return warp_idx() < view.warps; }
    __device__ bool goes_to(uint32_t rank) const {
        return (shared.goes_to[rank / kRanksOfWord] >> rank % kRanksOfWord & 1) != 0;
    }
};

// The ranks from `base` on that host experts of a token of this rank.
__device__ __forceinline__ uint32_t hosts_of(const Block& block, uint32_t token, uint32_t base) {
    const LlShape& shape = block.shape;
    const uint32_t experts = block.op.ranks() * shape.local_experts;
    const auto* ids = reinterpret_cast<const long long*>(block.dispatch.topk_idx) + uint64_t{token} * shape.top_k;
    uint32_t hosts = 0;
#pragma unroll 1
    for (uint32_t left = shape.top_k; left != 0; left -= min(left, kIdsAtOnce), ids += kIdsAtOnce) {
        // Under way together, then one after the other through the first: code for each of them would be long.
        long long id[kIdsAtOnce];
        uint32_t expert[kIdsAtOnce];
#pragma unroll
        for (uint32_t i = 0; i < kIdsAtOnce; ++i) {
            id[i] = i < left ? __ldg(ids + i) : kNowhere;
        }
#pragma unroll
        for (uint32_t i = 0; i < kIdsAtOnce; ++i) {
            expert[i] = id[i] >> 32 == 0 ? static_cast<uint32_t>(id[i]) : ~uint32_t{0};
        }
#pragma unroll 1
        for (uint32_t number = min(left, kIdsAtOnce); number != 0; --number) {
            const uint32_t host = divide(expert[0], shape.local_experts, shape.local_experts_reciprocal).quotient - base;
            if (expert[0] < experts && host < kRanksOfWord) {
                hosts |= 1u << host;
            }
#pragma unroll
            for (uint32_t i = 1; i < kIdsAtOnce; ++i) {
                expert[i - 1] = expert[i];
            }
        }
    }
    return hosts;
}

// Counts this rank's tokens by the ranks that they go to, and finds those of `token`. Counts are 0 before.
__device__ __forceinline__ void count_tokens(const Block& block, uint32_t token) {
    const uint32_t ranks = block.op.ranks();
#pragma unroll 1
    for (uint32_t base = 0; base < ranks; base += kRanksOfWord) {
#pragma unroll 1
        for (uint32_t i = threadIdx.x; i - lane_idx() < block.shape.tokens; i += blockDim.x) {
            const uint32_t hosts = i < block.shape.tokens ? hosts_of(block, i, base) : 0;
            if (i == token) {
                block.shared.goes_to[base / kRanksOfWord] = hosts;
            }
            const LaneMask earlier = ballot(i < token);
#pragma unroll 1
            for (uint32_t rank = base; rank < min(ranks, base + kRanksOfWord); ++rank) {
                const LaneMask going = ballot(static_cast<int>(hosts >> (rank - base) & 1));
                if (lane_idx() == 0 && going.any()) {
                    atomicAdd(&block.shared.all[rank], going.count());
                    atomicAdd(&block.shared.before[rank], (going & earlier).count());
                }
            }
        }
    }
}

// ---- Whether peers' banks are clean -------------------------------------------------------------

// What `peer` has told in the banks of both parities, as loaded before it is known which is that of the operation before.
struct CleanWords {
    uint64_t packet[2];

    __device__ __forceinline__ void load(const Op& op, uint32_t peer) {
#pragma unroll
        for (uint32_t parity = 0; parity < 2; ++parity) {
            const Bank<Own> bank = {op.common,
                                    own_window(op.common.peers) + op.bank_of_channel(LL_WHOLE_CHANNEL, parity)};
            packet[parity] = ld_relaxed_sys(bank.counts(peer));
        }
    }
    // Whether the operation before told that the bank is clean.
    __device__ __forceinline__ bool told(const Op& op, uint32_t bank) const {
        const uint64_t before = packet[op.epoch_before & 1];
        return packet_epoch(before) == op.epoch_before && (packet_data(before) >> (kCleanShift + bank) & 1) != 0;
    }
};

// Cleans the bank, which rows of an earlier dispatch are in; the last block tells the peers. All threads call it.
__device__ __noinline__ static void clean_bank(const LlCommon& common, const LlView& view, uint32_t epoch) {
    Op op(common, OneNode{common.peers});
    op.resume(epoch);
    const uint32_t vecs = common.shape.row_bytes / sizeof(Vec16);
    uint8_t* rows = own_window(common.peers) + view.rows;
#pragma unroll 1
    for (uint32_t source = 0; source < op.ranks(); ++source) {
        const uint64_t used = source == op.rank() ? 0 : uint64_t{view.state->rows[view.bank][source]} * vecs;
        Vec16* at = as<Vec16>(rows + uint64_t{source} * common.shape.max_tokens * common.shape.row_bytes);
#pragma unroll 1
        for (uint64_t i = blockIdx.x * blockDim.x + threadIdx.x; i < used; i += gridDim.x * blockDim.x) {
            st_row(at + i, all_sentinels());
        }
    }
    __syncthreads();
    const bool cleaned_last =
        threadIdx.x == 0 && inc_acq_rel_gpu(&view.state->blocks_cleaned, gridDim.x - 1) == gridDim.x - 1;
    if (__syncthreads_or(cleaned_last) != 0 && threadIdx.x < op.peers() && is_active(common.peers, threadIdx.x)) {
        signal(op.at(threadIdx.x).fingerprint(op.rank()), op.packet(common.fingerprint));
    }
}

// Waits until the peers' banks, and this rank's, are clean; cleans this one's if its bank is not. False if that was given
// up. All threads call it.
__device__ __noinline__ static bool wait_until_clean(const LlCommon& common, const LlView& view, uint32_t epoch,
                                                     bool is_clean) {
    if (!is_clean) {
        clean_bank(common, view, epoch);
    }
    Op op(common, OneNode{common.peers});
    op.resume(epoch);
    bool held = false;
    if (threadIdx.x < op.peers() && is_active(common.peers, threadIdx.x)) {
        const uint64_t* at = op.here().fingerprint(threadIdx.x);
        uint32_t got;
        held = !wait_in(
            op, op.from(threadIdx.x, WAIT_BEGIN), [&] { return (got = packet_epoch(ld_acquire_sys(at))) == epoch; },
            [&] { return got; });
    }
    return __syncthreads_or(held) == 0;
}

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
        const Remote<uint8_t> to = window_of(op.common.peers, peer) + view_row(block.shape, block.view, row);
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
        load_owners(block.view, owner);
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
        const uint8_t* from = own_window(op.common.peers) + view_row(block.shape, block.view, row);
        await_chunk(op, from, row, unit.chunk(block.shape, block.view), source);
    }
}

// The last warp takes the ids and weights of the block's tokens of `source`, and clears the ids of rows with their
// numbers where these hold nothing.
__device__ __forceinline__ void receive_entries(const Block& block, uint32_t source) {
    const Op& op = block.op;
    const LlBeside& beside = block.params.dispatch.beside;
    const uint32_t top_k = block.shape.top_k;
    const uint32_t units = block.shape.max_tokens * block.view.parts;
#pragma unroll 1
    for (uint32_t number = blockIdx.x; number < units; number += gridDim.x) {
        const ViewUnit unit(block.view, number);
        if (unit.part != 0 || lane_idx() >= top_k) {
            continue;
        }
        const uint32_t same_row = source * block.shape.max_tokens + unit.token;
        if (unit.token >= block.shared.before[source]) {
            store_id(beside, uint64_t{same_row} * top_k + lane_idx(), kNowhere);
        }
        if (unit.token >= block.shared.all[source]) {
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
            receive_entries(block, source);
        } else if (block.moves_rows() && source != block.op.rank()) {
            await_rows(block, source);
        }
    }
}

__device__ __forceinline__ void run(const LlRankDispatchViewParams& params) {
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
