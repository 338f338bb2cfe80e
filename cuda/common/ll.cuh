// What low-latency dispatch and combine share: which bank an operation uses, where things lie in
// it, and who of a grid does what.
//
// Why a bank is never written while somebody still reads it
//
// Whole operations (track 0) alternate between banks 0 and 1. In every operation each rank sends to
// each peer at least one packet (its signature), and an operation ends on a rank only after the
// packets of all peers came. So when a rank starts whole operation n + 2, its operation n + 1 has
// ended, so every peer has begun n + 1, so every peer's operation n had ended in the group's order:
// nobody reads the bank of n any more. Staged operations in between change nothing in this, since
// whole operations are counted on their own.
//
// A staged operation has its track, and that track's only bank, from its send phase until its
// receive phase has run. The receive phase ends by telling every peer "consumed epoch e" (an
// acknowledgement); a send phase starts by waiting until all peers acknowledged the epoch before
// its own. The host gives a track to a new operation only after Complete was called for the old
// one, and makes the send phase wait on its stream for that receive phase: so the acknowledgement
// that a rank waits for comes from kernels that need nothing of later operations, and the wait
// ends.
//
// All this needs the group's operations one after the other on every rank, receive phases of staged
// ones aside: the host sees to it, whatever their streams. Send phases are among them: a combine's may
// wait for weights of its peers, and takes SMs that a peer's earlier operation needs.
//
// And it needs operations that end because everything came. One that ends because a wait was given up
// says nothing about the peers, so operations that begin after it send nothing (`Start::failed`). A rank
// that has not heard of it yet cannot get past the next operation: it waits for the failed rank's signature.
//
// Epochs live in device memory, so that replaying a captured graph advances them. Each track has
// its own. Packets are not cleared, but for flags of chunks: one means something only with the epoch of
// the operation, which comes again after 2^32 of them.
#pragma once

#include "wait.cuh"

namespace nccl_ep {

constexpr uint32_t kWarpSize = 32;
constexpr uint32_t kAllLanes = 0xffffffffu;
// In LlHandleMemory: the entry takes part in nothing; it found no place.
constexpr int32_t kNowhere = -1;
constexpr int32_t kDropped = -2;

__device__ __forceinline__ uint32_t lane_idx() { return threadIdx.x % kWarpSize; }
// How many of `lanes`, a mask, come before this one.
__device__ __forceinline__ uint32_t lanes_before(uint32_t lanes) {
    return __popc(lanes & ((1u << lane_idx()) - 1));
}
__device__ __forceinline__ uint32_t warp_idx() { return threadIdx.x / kWarpSize; }
__device__ __forceinline__ uint32_t num_warps() { return blockDim.x / kWarpSize; }

// The epoch after `epoch`. Skips 0, the state of fresh memory, and keeps odd and even in turn.
__device__ __forceinline__ uint32_t epoch_after(uint32_t epoch) {
    return epoch == 0xffffffffu ? 2 : epoch + 1;
}

// What a block must know before it does anything. One thread loads it, for loads of one word by all
// warps of a GPU stand in line for most of a microsecond; what else is known beforehand is loaded meanwhile.
struct Start {
    // Of the track: its last operation, and the last that was received.
    uint32_t epoch;
    uint32_t received;
    // Whether an operation of this rank has failed. What peers have told is not needed: this rank waits
    // for their signatures, or has their leave to write to a bank.
    uint32_t failed;

    __device__ void load(const LlCommon& common) {
        epoch = ld_relaxed_gpu(&common.track_state->epoch);
        received = ld_relaxed_gpu(&common.track_state->received);
        failed = ld_relaxed_gpu(common.wait.failed);
    }
};

// One operation as a thread sees it.
struct Op {
    const LlCommon& common;
    uint32_t epoch;
    uint32_t epoch_before;
    uint64_t bank;

    __device__ explicit Op(const LlCommon& params) : common(params) {}

    // All threads call it; says whether there is anything to do. The epoch is advanced by the phase that
    // sends; the receive phase of a staged operation finds it.
    __device__ bool begin(const Start& start) {
        epoch_before = start.epoch;
        epoch = sends() ? epoch_after(epoch_before) : epoch_before;
        bank = bank_of_track(common.track, epoch);
        // A receive phase without its send phase, whose graph was never launched: nothing will come.
        const bool is_void = !sends() && start.received == epoch;
        return start.failed == 0 && !is_void;
    }

    // Offset in a window of the bank that an operation of `track` uses.
    __device__ uint64_t bank_of_track(uint32_t track, uint32_t track_epoch) const {
        const uint32_t index = track == LL_WHOLE_TRACK ? track_epoch & 1 : track + 1;
        return common.layout.banks + index * common.layout.bank_bytes;
    }

    __device__ bool sends() const { return (common.phases & LL_PHASE_SEND) != 0; }
    __device__ bool receives() const { return (common.phases & LL_PHASE_RECEIVE) != 0; }
    __device__ uint32_t rank() const { return common.peers.rank; }
    __device__ uint32_t ranks() const { return common.peers.ranks; }

    __device__ Awaited from(uint32_t peer, uint32_t what) const { return {what, peer, epoch}; }
    __device__ uint64_t packet(uint32_t data) const { return make_packet(epoch, data); }

    __device__ uint8_t* bank_of(uint32_t owner) const { return common.peers.window[owner] + bank; }
    // One packet per chunk of row `row` of the bank.
    __device__ uint64_t* flags(uint32_t owner, uint32_t row) const {
        return reinterpret_cast<uint64_t*>(bank_of(owner) + common.layout.flags) +
               uint64_t{row} * common.shape.chunks;
    }
    // Rows of `source` per local expert, then its tokens, then its signature.
    __device__ uint64_t* counts_in(uint8_t* its_bank, uint32_t source) const {
        return reinterpret_cast<uint64_t*>(its_bank + common.layout.counts) +
               source * (common.shape.local_experts + LL_COUNTS_BESIDE_EXPERTS);
    }
    __device__ uint64_t* signature_in(uint8_t* its_bank, uint32_t source) const {
        return counts_in(its_bank, source) + common.shape.local_experts + 1;
    }
    __device__ uint64_t* counts(uint32_t owner, uint32_t source) const {
        return counts_in(bank_of(owner), source);
    }
    __device__ uint64_t* signature(uint32_t owner, uint32_t source) const {
        return signature_in(bank_of(owner), source);
    }
    // What `source` says about each entry of its token `token`.
    __device__ uint64_t* entries(uint32_t owner, uint32_t source, uint32_t token) const {
        return reinterpret_cast<uint64_t*>(bank_of(owner) + common.layout.entries) +
               (uint64_t{source} * common.shape.max_tokens + token) * LL_MAX_TOP_K;
    }
    __device__ uint8_t* row(uint32_t owner, uint32_t row) const {
        return bank_of(owner) + uint64_t{row} * common.shape.row_bytes;
    }
    __device__ int32_t* rows_of(uint32_t source, uint32_t token) const {
        return common.handle.row_of +
               (uint64_t{source} * common.shape.max_tokens + token) * common.shape.top_k;
    }
    __device__ uint64_t* ack(uint32_t owner, uint32_t from_rank) const {
        return reinterpret_cast<uint64_t*>(common.peers.window[owner] + common.layout.acks) +
               common.track * common.peers.ranks + from_rank;
    }
};

// The expert that an id names among so many, or kNowhere.
__device__ __forceinline__ int32_t expert_of_id(int64_t id, int64_t experts) {
    return id >= 0 && id < experts ? static_cast<int32_t>(id) : kNowhere;
}

// The expert that entry `index` of this rank names, or kNowhere.
__device__ __forceinline__ int32_t expert_of_entry(const Op& op, const int64_t* topk_idx,
                                                   uint32_t index) {
    const int64_t id = __ldg(reinterpret_cast<const long long*>(topk_idx) + index);
    return expert_of_id(id, int64_t{op.ranks()} * op.common.shape.local_experts);
}

// Whether `peer` has begun an operation of another track that this rank has not, and not the one
// that we wait for. Operations have one order on all ranks, so one of the two is staged there and
// whole here, or the other way round; or both are staged, but with tracks that the ranks chose
// differently, as they completed staged operations in another order before a third.
__device__ inline bool stages_otherwise(const Op& op, uint32_t peer) {
    const LlTrackState* states = op.common.track_state - op.common.track;
    bool has_begun = false;
#pragma unroll 1  // seldom done
    for (uint32_t track = 0; track < LL_TRACKS; ++track) {
        const uint32_t next = epoch_after(ld_relaxed_gpu(&states[track].epoch));
        uint8_t* bank = op.common.peers.window[op.rank()] + op.bank_of_track(track, next);
        const uint64_t signature = ld_acquire_sys(op.signature_in(bank, peer));
        has_begun |= track != op.common.track && packet_epoch(signature) == next;
    }
    return has_begun &&
           packet_epoch(ld_relaxed_sys(op.signature(op.rank(), peer))) != op.epoch;
}

// Reports what differs on a peer, and tells all: a block of this rank that begins only now sends nothing
// any more, not even the signature from which a peer would learn it.
__device__ inline void report_difference(const Op& op, uint32_t fault, const Awaited& awaited,
                                         uint32_t theirs) {
    if (report_failure(op.common.wait, fault, awaited, op.common.signature, theirs)) {
        tell_failure(op.common.peers, op.common.wait);
    }
}

// As wait_for_packet, where a peer that stages otherwise would be waited for until the deadline.
__device__ inline Arrival wait_for_first_packet(const Op& op, const uint64_t* at,
                                                const Awaited& awaited) {
    uint32_t polls = 0;
    return wait_until(
        op.common, awaited,
        [&] {
            if (++polls % kPollsPerCheck == 0 && stages_otherwise(op, awaited.peer)) {
                report_difference(op, FAULT_STAGED_DIFFERS, awaited, 0);
            }
            return ld_relaxed_sys(at);
        },
        [&](uint32_t epoch) { return epoch == awaited.epoch; });
}

// Waits until `peer` has begun the operation, and reports it if it runs another one than we do.
__device__ inline void check_signature(const Op& op, uint32_t peer) {
    const Awaited awaited = op.from(peer, WAIT_BEGIN);
    const Arrival theirs = wait_for_first_packet(op, op.signature(op.rank(), peer), awaited);
    if (theirs.ok && theirs.data != op.common.signature) {
        report_difference(op, FAULT_DIFFERS, awaited, theirs.data);
    }
}

// Before a staged send: whether the peers have consumed what was in the bank before. All threads call
// it. "Or later": once some block of this rank has sent, a peer may be through with the new epoch before
// the last block of this rank looks.
__device__ inline bool wait_until_bank_is_free(const Op& op) {
    if (op.common.track == LL_WHOLE_TRACK) {
        return true;
    }
    bool held = false;
    for (uint32_t peer = threadIdx.x; peer < op.ranks(); peer += blockDim.x) {
        held |= !wait_for_epoch_or_later(op.common, op.ack(op.rank(), peer),
                                         {WAIT_ACK, peer, op.epoch_before})
                     .ok;
    }
    return __syncthreads_or(held) == 0;
}

// All threads call it after a barrier behind which none of the block reads the track's state. Early
// in the kernel, so that the end of the operation does not wait for it.
__device__ inline void advance_epoch(const Op& op) {
    if (threadIdx.x == blockDim.x - 1 && op.sends() &&
        inc_acq_rel_gpu(&op.common.track_state->blocks_started, gridDim.x - 1) == gridDim.x - 1) {
        st_relaxed_gpu(&op.common.track_state->epoch, op.epoch);
    }
}

// After a staged receive: the last block tells the peers. All threads call it.
__device__ inline void acknowledge(const Op& op) {
    if (op.common.track == LL_WHOLE_TRACK || !op.receives()) {
        return;
    }
    __syncthreads();  // the block has read all that it will read
    const uint32_t last = gridDim.x - 1;
    const bool finished_last =
        threadIdx.x == 0 && inc_acq_rel_gpu(&op.common.track_state->blocks_finished, last) == last;
    if (__syncthreads_or(finished_last) != 0 && !has_failed(op.common.wait)) {
        for (uint32_t peer = threadIdx.x; peer < op.ranks(); peer += blockDim.x) {
            st_release_sys(op.ack(peer, op.rank()), op.packet(0));
        }
        if (threadIdx.x == 0) {
            st_relaxed_gpu(&op.common.track_state->received, op.epoch);
        }
    }
}

// The blocks that do one kind of work. Stores to peers fill the queue between an SM and NVLink, and
// every load of that SM waits behind them; so with much to send, few blocks send and others
// receive.
struct Share {
    uint32_t first;
    uint32_t blocks;

    __device__ static Share of_senders(const LlCommon& common) { return {0, common.send_blocks}; }
    __device__ static Share of_receivers(const LlCommon& common) {
        return {gridDim.x - common.receive_blocks, common.receive_blocks};
    }
    __device__ bool has_this_block() const {
        return blockIdx.x >= first && blockIdx.x < first + blocks;
    }
    __device__ uint32_t index() const { return blockIdx.x - first; }
    // The block's unit number `turn` of index, index + blocks, ...
    __device__ uint32_t unit(uint32_t turn) const { return turn * blocks + index(); }
    // Hands the units to the warps, one after the other. `next` is a counter in shared memory; it starts
    // at the number of turns that were taken without asking it.
    __device__ uint32_t next_unit(uint32_t* next) const {
        uint32_t turn = 0;
        if (lane_idx() == 0) {
            turn = atomicAdd(next, 1u);
        }
        return unit(__shfl_sync(kAllLanes, turn, 0));
    }
};

// A chunk of a token of some rank: number `unit` of those of all ranks. Which rank comes first differs
// from rank to rank, so that not all turn to the same, and at random from token to token: blocks take
// every n-th unit, and otherwise each could get the tokens of one rank, of which some have few.
struct UnitOfAll {
    uint32_t rank;
    uint32_t token;
    uint32_t chunk_idx;

    __device__ UnitOfAll(const Op& op, uint32_t unit) {
        constexpr uint32_t kGoldenRatio = 0x9e3779b1u;  // of 2^32: its multiples are spread evenly
        const uint32_t pair = unit / op.common.shape.chunks;
        chunk_idx = unit % op.common.shape.chunks;
        token = pair / op.ranks();
        const uint32_t turned = uint64_t{token * kGoldenRatio} * op.ranks() >> 32;
        // Each of the three is less than the number of ranks: cheaper than a remainder.
        rank = pair % op.ranks() + op.rank();
        rank -= rank >= op.ranks() ? op.ranks() : 0;
        rank += turned;
        rank -= rank >= op.ranks() ? op.ranks() : 0;
    }
};

// Lanes that are the first of their warp to name `rank`; a negative rank names nothing.
__device__ __forceinline__ uint32_t first_of_each_rank(int32_t rank) {
    const uint32_t same = __match_any_sync(kAllLanes, rank);
    const bool first = rank >= 0 && __ffs(same) - 1 == static_cast<int32_t>(lane_idx());
    return __ballot_sync(kAllLanes, first);
}

}  // namespace nccl_ep
