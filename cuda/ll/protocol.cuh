// The protocol of low-latency operations: which bank an operation uses, how it begins and ends, and how ranks detect
// that they do not run the same operation.
//
// Why a bank is never written while somebody still reads it
//
// Whole operations (channel 0) alternate between banks 0 and 1. In every operation each rank sends each peer at least
// one packet (its fingerprint), and an operation ends on a rank only after the packets of all peers have come. So when
// a rank starts whole operation n + 2, its operation n + 1 has ended, so every peer has begun n + 1, so every peer's
// operation n had ended before: nobody reads the bank of n any more. Staged operations in between do not matter, as
// whole operations are counted separately.
//
// A staged operation owns its channel, and the channel's only bank, from its send phase until its receive phase has
// run. The receive phase ends by telling every peer "consumed epoch e" (an acknowledgement); a send phase starts by
// waiting until all peers have acknowledged the epoch before its own. The host gives a channel to a new operation only
// after Complete was called for the old one, and makes the send phase wait on its stream for that receive phase. So the
// acknowledgement depends on no later operation, and the wait terminates.
//
// Both arguments need the group's operations in one order on every rank, except for receive phases of staged
// operations: the host keeps that order, whatever the streams. Send phases are part of the order: a combine's may wait
// for weights of its peers, and takes SMs that a peer's earlier operation needs.
//
// Both also need operations to end because everything has come. An operation that ends because a wait was given up says
// nothing about the peers, so operations that begin after it send nothing (`StartState::failed`). A rank that does not
// know of the failure yet cannot get past the next operation: it waits for the failed rank's fingerprint.
//
// Epochs are in device memory, one per channel, so replaying a captured graph advances them. A packet is valid only
// with the operation's epoch, which repeats after 2^32 operations, so packets are not cleared, except flags of chunks.
#pragma once

#include "../base/row.cuh"
#include "../base/expert.cuh"
#include "../peer/wait.cuh"
#include "bank.cuh"
#include "nodes.cuh"

namespace nccl_ep {

// The epoch that the next operation of a channel takes.
__device__ __forceinline__ uint32_t next_epoch(const LlChannelState& channel) {
    return epoch_after(ld_relaxed_gpu(&channel.epoch));
}

// What a block must know before it does anything. Only one thread per block loads it, while other warps load their
// first data: loads of the same word by all warps of a GPU would queue up for most of a microsecond.
struct StartState {
    // The epochs of the channel's last operation, and of the last one that was received.
    uint32_t epoch;
    uint32_t received;
    // Whether an operation of this rank has failed. Failures of peers need no check: this rank waits for their
    // fingerprints, or has their acknowledgements that the bank is free.
    uint32_t failed;

    __device__ void load(const LlCommon& common) {
        epoch = ld_relaxed_gpu(&common.channel_state->epoch);
        received = ld_relaxed_gpu(&common.channel_state->received);
        failed = ld_relaxed_gpu(common.wait.failed);
    }
};

// One operation as a thread sees it; `Nodes` is OneNode or SeveralNodes.
template <typename Nodes>
struct Operation {
    static constexpr bool kSeveral = Nodes::kSeveral;
    using Net = typename Nodes::Net;
    using Source = typename Nodes::Source;
    const LlCommon& common;
    const Nodes nodes;
    uint32_t epoch;
    uint32_t epoch_before;
    uint64_t bank;

    __device__ Operation(const LlCommon& params, const Nodes& where)
        : common(params), nodes(where) {}

    // Begins the operation; false if there is nothing to do. A launch that sends takes the channel's next epoch; the
    // receive phase of a staged operation has the epoch of its send phase. All threads call it.
    __device__ bool begin(const StartState& start) {
        epoch_before = start.epoch;
        resume(sends() ? epoch_after(epoch_before) : epoch_before);
        // The send phase of this receive phase never ran, as its graph was not launched: nothing will come.
        const bool is_void = !sends() && start.received == epoch;
        return start.failed == 0 && !is_void;
    }

    // In place of begin(), for a function that gets the operation's epoch as an argument.
    __device__ void resume(uint32_t epoch_of_operation) {
        epoch = epoch_of_operation;
        bank = bank_of_channel(channel(), epoch);
    }

    // The offset, in a window, of the bank that an operation of `channel` uses.
    __device__ uint64_t bank_of_channel(uint32_t channel, uint32_t channel_epoch) const {
        const uint32_t index = channel == LL_WHOLE_CHANNEL ? channel_epoch & 1 : channel + 1;
        return common.layout.banks + index * common.layout.bank_bytes;
    }

    __device__ uint32_t channel() const { return Nodes::kWhole ? LL_WHOLE_CHANNEL : common.channel; }
    __device__ bool sends() const { return Nodes::kWhole || (common.phases & LL_PHASE_SEND) != 0; }
    __device__ bool receives() const { return Nodes::kWhole || (common.phases & LL_PHASE_RECEIVE) != 0; }
    __device__ bool relays() const {
        return kSeveral && (common.phases & LL_PHASE_RELAY) != 0;
    }
    // This rank and the number of ranks, in the group; and the number of ranks on this node, this one included.
    __device__ uint32_t rank() const { return nodes.rank(); }
    __device__ uint32_t ranks() const { return nodes.ranks(); }
    __device__ uint32_t peers() const { return common.peers.ranks; }

    __device__ Awaited from(uint32_t rank, uint32_t what) const { return {what, rank, epoch}; }
    __device__ uint64_t packet(uint32_t data) const { return make_packet(epoch, data); }

    // The operation's bank at `peer`, which may be this rank; and this rank's own, to be read.
    __device__ Bank<Remote> at(uint32_t peer) const {
        return {common, window_of(common.peers, peer) + bank};
    }
    __device__ Bank<Own> here() const { return {common, own_window(common.peers) + bank}; }
    // The word for acknowledgements from `from_peer`, in the window that begins at `window`.
    template <template <typename> class Address>
    __device__ Address<uint64_t> ack_in(Address<uint8_t> window, uint32_t from_peer) const {
        return as<uint64_t>(window + common.layout.acks) +
               common.channel * common.peers.ranks + from_peer;
    }
    // In the handle's memory: the expert of each entry of a token of source `number` (nodes.cuh).
    __device__ int32_t* experts_of(uint32_t number, uint32_t token) const {
        return common.handle.expert_of +
               (uint64_t{number} * common.shape.max_tokens + token) * common.shape.top_k;
    }
    // In the handle's memory: the output row of each entry of a token of rank `source`.
    __device__ int32_t* rows_of(uint32_t source, uint32_t token) const {
        return common.handle.row_of +
               (uint64_t{source} * common.shape.max_tokens + token) * common.shape.top_k;
    }
};

// The rank that hosts `expert`, or kNowhere for kNowhere.
__device__ __forceinline__ int32_t rank_of_expert(const LlShape& shape, int32_t expert) {
    return expert == kNowhere
               ? kNowhere
               : static_cast<int32_t>(divide(expert, shape.local_experts, shape.local_experts_reciprocal).quotient);
}

// The expert that entry `index` of `topk_idx` names, or kNowhere.
template <typename Op>
__device__ __forceinline__ int32_t expert_of_entry(const Op& op, const int64_t* topk_idx,
                                                   uint32_t index) {
    const int64_t id = __ldg(reinterpret_cast<const long long*>(topk_idx) + index);
    return expert_of_id(id, int64_t{op.ranks()} * op.common.shape.local_experts);
}

// Whether `rank` has begun an operation on another channel that this rank has not begun, instead of the one that this
// rank waits for. As operations have one order on all ranks, then one of the two ranks has staged the operation and the
// other has not; or both have, on different channels, as they completed earlier staged operations in different orders.
template <typename Op>
__device__ inline bool uses_other_channel(const Op& op, uint32_t rank) {
    if (op.nodes.number_of(rank) != 0) {
        // Its forwarder relays its rows on a side stream, in no order with whole operations; here headers of messages
        // show the difference.
        return false;
    }
    const LlChannelState* states = op.common.channel_state - op.common.channel;
    // With the window as base, to which the offset of a channel's bank is added below.
    const uint64_t* fingerprint = Bank<Own>{op.common, own_window(op.common.peers)}.fingerprint(rank);
    bool has_begun = false;
#pragma unroll 1  // seldom done
    for (uint32_t channel = 0; channel < LL_CHANNELS; ++channel) {
        const uint32_t next = next_epoch(states[channel]);
        const uint64_t packet = ld_acquire_sys(fingerprint + op.bank_of_channel(channel, next) / sizeof(uint64_t));
        has_begun |= channel != op.common.channel && packet_epoch(packet) == next;
    }
    return has_begun &&
           packet_epoch(ld_relaxed_sys(fingerprint + op.bank / sizeof(uint64_t))) != op.epoch;
}

// Reports a failure to the host and, unless a peer has reported it, to all peers: blocks of this rank that begin later
// send nothing, not even the fingerprint that a peer waits for.
__device__ __noinline__ static void fail(const LlCommon& common, uint32_t fault, const Awaited awaited, uint32_t ours,
                                         uint32_t theirs, uint64_t waited_ns = 0, uint32_t their_scales = 0) {
    const WaitParams wait = common.wait;
    if (report_failure_inline(wait, fault, awaited, {ours, common.scales_word}, {theirs, their_scales}, waited_ns) &&
        fault != FAULT_PEER_FAILED) {
        broadcast_failure_inline(common.peers, wait);
    }
}

__device__ __forceinline__ void LlReports::report(const LlCommon& common, uint32_t fault, const Awaited& awaited,
                                                  ReportedValue ours, ReportedValue theirs) {
    fail(common, fault, awaited, ours.word, theirs.word, 0, theirs.scales);
}

// Why a wait for `rank` must be given up, FAULT_NONE if it need not; `got` becomes the rank that has failed, if any. A
// peer that uses another channel is noticed before the deadline.
template <typename Op>
__device__ __forceinline__ uint32_t fault_of_wait(const Op& op, uint32_t rank, uint64_t waited_ns, uint32_t& got) {
    const WaitParams& wait = op.common.wait;
    uint32_t fault = waited_ns > wait.timeout_ns ? FAULT_TIMEOUT : FAULT_NONE;
    const uint32_t failed_rank = ld_relaxed_sys(wait.peer_failed);
    if (failed_rank != 0) {
        fault = FAULT_PEER_FAILED;
        got = failed_rank - 1;
    }
    return uses_other_channel(op, rank) ? FAULT_STAGED_DIFFERS : fault;
}

// As keep_waiting (wait.cuh), for waits within an operation.
template <typename Nodes>
__device__ __noinline__ uint64_t keep_waiting_in(const LlCommon& common, const Nodes nodes, uint32_t epoch,
                                                 const Awaited awaited, uint64_t start, uint32_t got) {
    if (has_failed(common.wait)) {
        return kGivenUp;
    }
    Operation<Nodes> op(common, nodes);
    op.resume(epoch);
    const uint64_t now = globaltimer_ns();
    start = start == 0 ? now : start;
    const uint32_t fault = fault_of_wait(op, awaited.peer, now - start, got);
    if (fault == FAULT_NONE) {
        return start;
    }
    fail(common, fault, awaited, awaited.epoch, got, now - start);
    return kGivenUp;
}

// One thread waits for a packet of the operation.
template <typename Op>
__device__ __forceinline__ Arrival wait_for_packet_in(const Op& op, const uint64_t* at, const Awaited& awaited) {
    uint64_t packet;
    const bool ok = poll_until(
        [&] { return packet_epoch(packet = ld_relaxed_sys(at)) == op.epoch; },
        [&](uint64_t start) {
            return keep_waiting_in(op.common, op.nodes, op.epoch, awaited, start, packet_epoch(packet));
        });
    return {ok, ok ? packet_data(packet) : 0};
}

// The scales word of `rank`, which has begun the operation, for a report; 0 if it sends none. It is sent before the
// fingerprint, but nothing orders the two, hence the short wait.
template <typename Op>
__device__ inline uint32_t scales_word_of(const Op& op, uint32_t rank) {
    constexpr uint64_t kLongNs = 20000000;
    const uint64_t start = globaltimer_ns();
    uint64_t packet = 0;
#pragma unroll 1
    while (packet_epoch(packet) != op.epoch && globaltimer_ns() - start < kLongNs) {
        packet = ld_relaxed_sys(op.here().scales_word(rank));
    }
    return packet_epoch(packet) == op.epoch ? packet_data(packet) : 0;
}

// Reports that the fingerprint of `rank`, `theirs`, or its scales differ from this rank's.
template <typename Op>
__device__ inline void report_difference(const Op& op, uint32_t rank, uint32_t theirs) {
    fail(op.common, FAULT_DIFFERS, op.from(rank, WAIT_BEGIN), op.common.fingerprint, theirs, 0,
         scales_word_of(op, rank));
}

// Waits until `rank` has begun the operation, and reports a failure if that is another operation than this rank's.
template <typename Op>
__device__ inline void check_fingerprint(const Op& op, uint32_t rank) {
    const Arrival theirs = wait_for_packet_in(op, op.here().fingerprint(rank), op.from(rank, WAIT_BEGIN));
    if (theirs.ok && theirs.data != op.common.fingerprint) {
        report_difference(op, rank, theirs.data);
    }
}

// A warp adds to `waits` how long each rank takes to send a certain packet among its counts; `count` is the address of
// rank 0's. It calls nothing (see LateWait) and reports nothing: it waits for half of the deadline at most, which
// leaves the other half to the warp that checks the ranks.
template <typename Nodes>
__device__ __forceinline__ void time_ranks(const LlCommon& common, const Nodes& nodes, uint32_t epoch,
                                           const uint64_t* count, uint64_t* waits) {
    const uint64_t begin = globaltimer_ns();
    const uint32_t counts = common.shape.local_experts + LL_COUNTS_BESIDE_EXPERTS;
    wait_for_ranks(
        nodes.ranks(), [&](uint32_t rank) { return is_active(common.peers, nodes.forwarder_of(rank)); },
        [&](uint32_t rank) {
            const bool has_come = packet_epoch(ld_relaxed_sys(count + rank * counts)) == epoch;
            if (has_come) {
                add_wait(waits, rank, begin);
            }
            return has_come;
        },
        [&](uint32_t, uint64_t) {
            const bool is_lost = has_failed(common.wait) || ld_relaxed_sys(common.wait.peer_failed) != 0;
            return is_lost || globaltimer_ns() - begin > common.wait.timeout_ns / 2 ? kGivenUp : begin;
        });
}

// Before a staged send: waits until all peers have acknowledged the bank's previous epoch or a later one. Later ones
// occur: once some block of this rank has sent, a peer may finish the new epoch before the last block of this rank
// looks. All threads call it.
template <typename Op>
__device__ __forceinline__ bool wait_until_consumed(const Op& op, uint32_t warp) {
    const uint32_t epoch_before = op.epoch_before;
    bool gave_up = false;
#pragma unroll 1
    for (uint32_t peer = warp; peer < op.peers(); peer += num_warps()) {
        if (!is_active(op.common.peers, peer)) {
            continue;
        }
        // All lanes poll: after a call by some of them the compiler no longer knows the warp to be converged.
        const uint64_t* ack = op.template ack_in<Own>(own_window(op.common.peers), peer);
        const Awaited awaited = {WAIT_ACK, op.nodes.rank_of_peer(peer), epoch_before};
        uint64_t start = 0;
        uint32_t acknowledged;
#pragma unroll 1
        for (uint32_t polls = 1;
             !all_lanes(is_or_follows(acknowledged = packet_epoch(ld_acquire_sys(ack)), epoch_before)); ++polls) {
            spin_hint();
            if (polls % kPollsPerCheck == 0) {
                start = keep_waiting_in(op.common, op.nodes, op.epoch, awaited, start, acknowledged);
                if (any_lane(start == kGivenUp)) {
                    gave_up = true;
                    break;
                }
            }
        }
    }
    return __syncthreads_or(gave_up) == 0;
}

// All threads call it before they send. The banks of whole operations are free anyway, as proved above.
template <typename Op>
__device__ __forceinline__ bool wait_until_bank_is_free(const Op& op, uint32_t warp) {
    return op.channel() == LL_WHOLE_CHANNEL || wait_until_consumed(op, warp);
}

// Counts this block as started; the last one to be counted advances the channel's epoch. All threads call it after a
// barrier behind which no thread of the block reads the channel's state: after the block's sends, as one thread waits
// for the atomic, and before it receives, so that the end of the operation does not. The atomic is relaxed: with
// release it would wait for the block's stores to peers, and the barrier already orders the loads of the state before
// it.
template <typename Op>
__device__ inline void advance_epoch(const Op& op) {
    if (threadIdx.x == blockDim.x - 1 && op.sends() &&
        inc_relaxed_gpu(&op.common.channel_state->blocks_started, gridDim.x - 1) == gridDim.x - 1) {
        st_relaxed_gpu(&op.common.channel_state->epoch, op.epoch);
    }
}

// After a staged receive: the last block acknowledges the epoch to the peers. All threads call it.
template <typename Op>
__device__ __forceinline__ void acknowledge_staged(const Op& op) {
    const LlCommon& common = op.common;
    __syncthreads();  // the block has read all that it will read
    const uint32_t last = gridDim.x - 1;
    const bool finished_last =
        threadIdx.x == 0 && inc_acq_rel_gpu(&common.channel_state->blocks_finished, last) == last;
    if (__syncthreads_or(finished_last) == 0 || has_failed(common.wait)) {
        return;
    }
#pragma unroll 1
    for (uint32_t peer = threadIdx.x; peer < op.peers(); peer += blockDim.x) {
        if (is_active(common.peers, peer)) {
            signal(op.template ack_in<Remote>(window_of(common.peers, peer), common.peers.rank), op.packet(0));
        }
    }
    if (threadIdx.x == 0) {
        st_relaxed_gpu(&common.channel_state->received, op.epoch);
    }
}

template <typename Op>
__device__ __forceinline__ void acknowledge(const Op& op) {
    if (op.channel() != LL_WHOLE_CHANNEL && op.receives()) {
        acknowledge_staged(op);
    }
}

}  // namespace nccl_ep
