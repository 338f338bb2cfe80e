// What high-throughput dispatch and combine share: the sequences of rows between pairs of ranks and
// their rings, the experts of a token, and how a warp looks at many peers at once.
//
// Sequences
//
// For each ordered pair (sender s, receiver d) there is a ring of `depth` slots in d's window. All
// rows that s ever sends to d, whatever the operation, are numbered 0, 1, 2, ... modulo 2^32; row q
// goes to slot q % depth. When it is complete there, s raises the slot's arrival packet to q + 1 after a
// fence; when d has read it, d raises the slot's credit in s's window to q + 1, and s writes row
// q + depth only after that. Both are compared as "this or later", so nothing is ever
// cleared. Both ranks know from the handle how many rows an operation adds to each sequence, so the
// last block to begin an operation already notes where the next one starts, in device memory: a
// replayed graph continues where the last replay ended. An operation ends on a rank when its rows are
// sent and its peers' rows are here; it need not know whether the peers have ended. The next one,
// of any kind and of any handle, waits for credits where it is early.
//
// Why nobody waits for ever
//
// Sequences are independent of each other, and blocks that send do not wait for blocks that receive
// on the same rank. Dispatch: a receiver takes any row that has arrived, of any source, and knows
// its place in the output. So every arrival is answered by a credit, whatever else happens, so every
// sender goes on. Combine: a home rank sums its tokens in ascending order, each by one warp that
// waits for all rows of the token; the rows of a sequence are numbered in the order of the home's
// tokens. Of the smallest token not yet summed, take a row not yet arrived: all rows before it in
// its sequence belong to tokens that have been summed, so they have been credited, so its slot is
// free, and so were those of all rows before it. And its sender takes any row whose slot is free, or
// whose slot and those of all rows before it are (ht_places.cuh), of any sequence that has such: no
// warp there is stuck with a row of another sequence. Before it waits it posts what it has sent. So
// this row is sent. The block that owns the token hands out its tokens in ascending order, so some
// warp has taken this one or is free to. All blocks of a kernel run at the same time: the host
// launches no more than fit.
//
// After a failure
//
// An operation that fails on a rank leaves rows unsent there and slots unread, while its sequences
// count them as done. Nobody reads the wrong row for that: what is written to a slot is row q + depth
// only after the credit for q, and q gets that only from who has read it, whichever operation that is
// of. A row that was never sent or never read keeps its slot for ever. So what a late peer still reads
// stays as it is, even if other warps go on with rows whose slots they know to be free before they
// hear of the failure. Whoever gives up a wait sends nothing more, and no kernel begins that knows of
// a failure, its rank's or one that a peer has told of: its rows would be of no use to anybody.
#pragma once

#include "../params_ht.h"
#include "ll.cuh"

namespace nccl_ep {

constexpr uint32_t kNoPeer = 0xffffffffu;

// Where the operation stands with each peer, in shared memory. Rows of the own rank are in no
// sequence: there all counts are zero.
struct HtPairs {
    // Rows that went before, and rows of this operation.
    uint32_t sent[MAX_PEERS];
    uint32_t received[MAX_PEERS];
    uint32_t to_send[MAX_PEERS];
    uint32_t to_receive[MAX_PEERS];
    // What this block knows of the rings: rows to each peer before these have a free slot.
    uint32_t free_until[MAX_PEERS];
    // The first row of each source among those that this rank receives in dispatch, and their number.
    uint32_t begins[MAX_PEERS];
    uint32_t total;
    // The number of this operation in the group, for reports.
    uint32_t operation;
    uint32_t is_last_block;
    // What was known of a failure when the operation began.
    uint32_t failure;
};

constexpr uint32_t kOwnFailure = 0xffffffffu;

// One thread: what is known of a failure of the group. Zero if nothing, kOwnFailure, or 1 + the peer
// that has told of its own.
__device__ __forceinline__ uint32_t known_failure(const WaitParams& wait) {
    const uint32_t own = ld_relaxed_gpu(wait.failed);
    const uint32_t teller = ld_relaxed_sys(wait.told);
    return own != 0 ? kOwnFailure : teller;
}

// One thread: the operation cannot be carried out here, FAULT_...; `peer` has to do with it.
__device__ inline void fail(const HtCommon& common, uint32_t fault, uint32_t peer,
                            uint32_t expected, uint32_t got) {
    report_failure(common.wait, fault, {WAIT_STREAMED_ROW, peer, 0}, expected, got);
    tell_failure(common.peers, common.wait);
}

// Fills `pairs` and advances the group's sequences past this operation. All threads call it. In
// combine rows travel in the opposite direction.
//
// False if the operation must not run, and then the sequences stay as they are. Either the group has
// failed. Or the ranks do not agree on the handle, and the operation was enqueued before the host could
// know that: it fails, on every rank that does this.
__device__ inline bool begin_operation(const HtCommon& common, bool is_combine, HtPairs& pairs) {
    const HtHandleMemory& handle = common.handle;
    HtSequences* sequences = common.sequences;
    for (uint32_t peer = threadIdx.x; peer < common.peers.ranks; peer += blockDim.x) {
        const bool own = peer == common.peers.rank;
        const uint32_t begin = handle.begins[peer];
        const uint32_t arrivals = own ? 0 : handle.begins[peer + 1] - begin;
        const uint32_t departures = own ? 0 : handle.departures[peer];
        pairs.begins[peer] = begin;
        pairs.to_send[peer] = is_combine ? arrivals : departures;
        pairs.to_receive[peer] = is_combine ? departures : arrivals;
        pairs.sent[peer] = ld_relaxed_gpu(&sequences->sent[peer]);
        pairs.free_until[peer] = pairs.sent[peer];
        pairs.received[peer] = ld_relaxed_gpu(&sequences->received[peer]);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        // All loads before the first store: they are under way together.
        const uint32_t total = handle.begins[common.peers.ranks];
        const uint32_t operation = ld_relaxed_gpu(&sequences->operations) + 1;
        pairs.failure = known_failure(common.wait);
        pairs.total = total;
        pairs.operation = operation;
        pairs.is_last_block =
            inc_acq_rel_gpu(&sequences->blocks_started, gridDim.x - 1) == gridDim.x - 1;
    }
    __syncthreads();
    if (pairs.failure != 0) {
        // In every block: others may have begun before the peer told.
        if (pairs.failure != kOwnFailure && threadIdx.x == 0) {
            const uint32_t peer = pairs.failure - 1;
            report_failure(common.wait, FAULT_PEER_FAILED,
                           {WAIT_STREAMED_ROW, peer, pairs.operation}, pairs.operation, peer);
        }
        return false;
    }
    if ((pairs.total & HT_DISAGREED) != 0) {
        if (blockIdx.x == 0 && threadIdx.x == 0) {
            fail(common, FAULT_DISAGREED, 0, handle.top_k, pairs.total);
        }
        return false;
    }
    if (pairs.is_last_block != 0) {
        if (threadIdx.x == 0) {
            st_relaxed_gpu(&sequences->operations, pairs.operation);
        }
        for (uint32_t peer = threadIdx.x; peer < common.peers.ranks; peer += blockDim.x) {
            st_relaxed_gpu(&sequences->sent[peer], pairs.sent[peer] + pairs.to_send[peer]);
            st_relaxed_gpu(&sequences->received[peer],
                           pairs.received[peer] + pairs.to_receive[peer]);
        }
    }
    return true;
}

// Row number `sequence` from `source` to `owner`: its slot, and the words that speak of it.
struct Ring {
    const HtCommon& common;

    __device__ uint32_t slot(uint32_t sequence) const {
        return sequence & (common.layout.depth - 1);
    }
    __device__ uint8_t* row(uint32_t owner, uint32_t source, uint32_t sequence) const {
        const uint64_t index = uint64_t{source} * common.layout.depth + slot(sequence);
        return common.peers.window[owner] + common.layout.slots + index * common.layout.slot_bytes;
    }
    __device__ uint64_t* arrival(uint32_t owner, uint32_t source, uint32_t sequence) const {
        return reinterpret_cast<uint64_t*>(common.peers.window[owner] + common.layout.arrivals) +
               uint64_t{source} * common.layout.depth + slot(sequence);
    }
    __device__ uint32_t* credit(uint32_t owner, uint32_t receiver, uint32_t sequence) const {
        return reinterpret_cast<uint32_t*>(common.peers.window[owner] + common.layout.credits) +
               uint64_t{receiver} * common.layout.depth + slot(sequence);
    }
};

// One lane, after a fence behind which row `sequence` is complete in the slot of `peer`: says so.
__device__ __forceinline__ void announce_row(const Ring& ring, uint32_t peer, uint32_t sequence) {
    st_relaxed_sys(ring.arrival(peer, ring.common.peers.rank, sequence),
                   make_packet(sequence + 1, ring.common.shape_word));
}

// One lane: gives the slot of row `sequence` back to `source`. All of the slot has been read: it is in
// shared memory, or in registers that were used. A credit follows reads only, and what has been read
// cannot change any more, so it needs no fence.
__device__ __forceinline__ void release_row(const Ring& ring, uint32_t source, uint32_t sequence) {
    st_relaxed_sys(ring.credit(source, ring.common.peers.rank, sequence), sequence + 1);
}

// One lane waits for a row; `awaited` names the operation, not the row.
__device__ __forceinline__ Arrival wait_for_row(const HtCommon& common, const uint64_t* arrival,
                                                uint32_t sequence, const Awaited& awaited) {
    return wait_until(
        common, awaited, [arrival] { return ld_acquire_sys(arrival); },
        [&](uint32_t arrived) { return is_or_follows(arrived, sequence + 1); });
}

// One thread: `peer` runs an operation of another shape. Nothing sensible can follow.
__device__ inline void fail_for_shape(const HtCommon& common, uint32_t peer, uint32_t shape_word) {
    fail(common, FAULT_SHAPE_DIFFERS, peer, common.shape_word, shape_word);
}

// A token's experts, one in each lane, ascending; so the ranks that it goes to are ascending too.
struct TokenEntries {
    HtEntry entry;
    int32_t rank;
    // Lanes with an expert; and those whose expert is the first on its rank.
    uint32_t valid;
    uint32_t firsts;

    __device__ TokenEntries(const HtCommon& common, uint32_t token)
        : TokenEntries(common, load_entry(common.handle, token)) {}

    // The same in two steps: the lanes' entries, and what follows from them.
    __device__ static HtEntry load_entry(const HtHandleMemory& handle, uint32_t token) {
        if (token < handle.tokens && lane_idx() < handle.top_k) {
            return handle.entries[uint64_t{token} * handle.top_k + lane_idx()];
        }
        return {-1, 0};
    }
    __device__ TokenEntries(const HtCommon& common, const HtEntry& entry_of_lane)
        : entry(entry_of_lane) {
        const int32_t local_experts = static_cast<int32_t>(common.layout.local_experts);
        rank = entry.expert < 0 ? -1 : entry.expert / local_experts;
        const int32_t before = __shfl_sync(kAllLanes, rank, (lane_idx() + kWarpSize - 1) % kWarpSize);
        valid = __ballot_sync(kAllLanes, rank >= 0);
        firsts = __ballot_sync(kAllLanes, rank >= 0 && (lane_idx() == 0 || before != rank));
    }
    __device__ bool is_first() const { return (firsts >> lane_idx() & 1) != 0; }
    // Experts of the rank whose first one is in `lane`.
    __device__ uint32_t experts_from(uint32_t lane) const {
        const uint32_t later = lane + 1 < kWarpSize ? firsts & (kAllLanes << (lane + 1)) : 0;
        return (later != 0 ? __ffs(later) - 1 : __popc(valid)) - lane;
    }
};

// How a warp shares out looks at the words of all peers: so many lanes for each, and as many peers at
// once as that leaves room for. Peers are numbered from the own rank on.
struct Lookout {
    uint32_t lanes;
    uint32_t others;

    __device__ explicit Lookout(uint32_t ranks) : lanes(kWarpSize), others(ranks - 1) {
        while (lanes > 1 && lanes * others > kWarpSize) {
            lanes /= 2;
        }
    }
    __device__ uint32_t peers_at_once() const { return kWarpSize / lanes; }
    // This lane's peer of those from number `base` on, kNoPeer if there is none.
    __device__ uint32_t peer(const PeerTable& peers, uint32_t base) const {
        const uint32_t number = base + lane_idx() / lanes;
        return number < others ? (peers.rank + 1 + number) % peers.ranks : kNoPeer;
    }
    // The number of this lane's look at its peer, and the lane of the first one.
    __device__ uint32_t look() const { return lane_idx() % lanes; }
    __device__ uint32_t first_lane() const { return lane_idx() - look(); }
};

// Of the lanes that look at the same peer, how many have `ok` before the first that has not. All lanes
// call it; what they have seen comes before what any of them does afterwards.
__device__ __forceinline__ uint32_t leading_looks(const Lookout& lookout, bool ok) {
    __syncwarp();
    const uint32_t missing = ~(__ballot_sync(kAllLanes, ok) >> lookout.first_lane());
    return min(lookout.lanes, static_cast<uint32_t>(__ffs(missing)) - 1);
}

// A value of another lane, of 64 bits.
__device__ __forceinline__ uint8_t* pointer_of_lane(uint8_t* pointer, uint32_t lane) {
    return reinterpret_cast<uint8_t*>(
        __shfl_sync(kAllLanes, reinterpret_cast<unsigned long long>(pointer), lane));
}

}  // namespace nccl_ep
