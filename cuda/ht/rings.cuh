// The rings between pairs of ranks through which rows of high-throughput operations travel, and how an operation
// begins.
//
// Sequences
//
// For each ordered pair (sender s, receiver d) there is a ring of slots in d's window. A slot has two *units*. Short
// rows take one unit and other rows both, so that a ring holds twice as many short rows. All units that s ever sends to
// d, whatever the operation, are numbered 0, 1, 2, ... modulo 2^32; unit q goes to index q % units of the ring. When a
// row is complete there, s raises the arrival packets of its units q to q + 1 after a fence; when d has read the row, d
// raises their credits in s's window to q + 1, and s writes unit q + units only after that. Arrivals and credits are
// compared as "this or later", so nothing is ever cleared; both are raised for every unit, so no word is ever older
// than a lap. Each operation begins with a new slot: if the last row of one would leave half a slot free, it takes that
// half, too. A row at the beginning of a slot waits for both credits.
//
// Both ranks know from the handle how many rows an operation adds to each sequence. So the last block to begin an
// operation already stores where the next one starts, in device memory, and a replayed graph continues where the last
// replay ended. An operation ends on a rank when its rows are sent and its peers' rows have come; it need not know
// whether the peers have ended. The next operation, of any kind and any handle, waits for credits if it is early.
//
// Why every wait terminates
//
// Sequences are independent of each other, and warps that send do not wait for warps that receive on the same rank.
// Dispatch: a receiver takes any row that has arrived, of any source, and knows its row of the output. So every arrival
// is answered by a credit, whatever else happens, and every sender goes on. Combine: a home rank sums its tokens in
// ascending order, each by one warp that waits for all rows of the token; the rows of a sequence are numbered in the
// order of the home's tokens. Take a row that has not arrived, of the smallest token not yet summed: all rows before it
// in its sequence belong to tokens that have been summed, so they have been credited. The units that its slot had a lap
// ago are among them, as a ring has more than one slot; so its slot is free, and so were those of all rows before it.
// Its sender takes any row whose slot is free, or whose slot and those of all rows before it are (credits.cuh), of any
// sequence that has one: no warp there is stuck with a row of another sequence. Before it waits it posts what it has
// sent. So the row is sent. The block that owns the token hands out its tokens in ascending order, so some warp has
// taken this one or is free to. All blocks of a kernel run at the same time: the host launches no more than fit.
//
// After a failure
//
// An operation that fails on a rank leaves rows unsent there and slots unread, while its sequences count them as done.
// Nobody reads a wrong row because of that: unit q + units is written only after the credit for q, which only the
// reader of q gives, whichever operation q belongs to. The slot of a row that was never sent or never read stays taken.
// So what a late peer still reads does not change, even if other warps go on with rows whose slots they know to be free
// before they learn of the failure. A warp that gives up a wait sends nothing more. A kernel that knows of a failure,
// its own rank's or a peer's, does not begin.
#pragma once

#include "../base/row.cuh"
#include "params/ht.h"
#include "../peer/wait.cuh"
#include "caller_block.cuh"

namespace nccl_ep {

__device__ __forceinline__ RowFormat row_format(const HtCommon& common) {
    return {common.shape.row_bytes, common.shape.chunk_bytes};
}

// The progress of the operation with each peer, in shared memory. There is no ring to this rank itself, so its counts
// are zero.
struct HtPairs {
    // Sequence numbers of units: where this operation begins, and the end of its last row.
    uint32_t sent[MAX_PEERS];
    uint32_t received[MAX_PEERS];
    uint32_t sent_end[MAX_PEERS];
    uint32_t received_end[MAX_PEERS];
    // Numbers of rows of this operation.
    uint32_t to_send[MAX_PEERS];
    uint32_t to_receive[MAX_PEERS];
    // This block knows that the units to each peer below this number are free.
    uint32_t credited_until[MAX_PEERS];
    // The output row of dispatch where each source's rows begin, and the number of rows.
    uint32_t begins[MAX_PEERS];
    uint32_t total;
    // The number of this operation in the group, for reports.
    uint32_t operation;
    uint32_t is_last_block;
    // The result of known_failure when the operation began.
    uint32_t failure;
};

// The rows of a launch between this rank and a peer, in the direction of dispatch.
struct PairRows {
    // Where the peer's rows begin in this rank's output.
    uint32_t begin;
    uint32_t arrivals;
    uint32_t departures;
};

// One thread reports, as `fault`, that the operation cannot run; `peer` is the rank concerned.
__device__ inline void fail(const HtCommon& common, uint32_t fault, uint32_t peer,
                            uint32_t expected, uint32_t got) {
    report_failure(common.wait, fault, {WAIT_STREAMED_ROW, peer, 0}, {expected}, {got});
    broadcast_failure(common.peers, common.wait);
}

constexpr uint32_t kSlotUnits = 2;

// Rounds `end` up to the beginning of a slot, where the next operation begins.
__device__ __forceinline__ uint32_t next_slot(uint32_t end) {
    return (end + kSlotUnits - 1) & ~(kSlotUnits - 1);
}

// Fills `pairs` and advances the group's sequences past this operation. `scope` says which rows this launch has
// (scope.cuh); in a combine they travel in the opposite direction. All threads call it.
//
// False if the operation must not run; the sequences then stay as they are. Either the group has failed, or the ranks
// disagree on the handle and the operation was enqueued before the host could know: then it fails on each such rank.
template <typename Scope>
__device__ inline bool begin_operation(const HtCommon& common, const Scope& scope, bool is_combine,
                                       HtPairs& pairs) {
    HtSequences* sequences = common.sequences;
    for (uint32_t peer = threadIdx.x; peer < common.peers.ranks; peer += blockDim.x) {
        const bool has_ring = peer != common.peers.rank && is_active(common.peers, peer);
        const PairRows rows = scope.rows(common, peer, has_ring);
        pairs.begins[peer] = rows.begin;
        pairs.to_send[peer] = is_combine ? rows.arrivals : rows.departures;
        pairs.to_receive[peer] = is_combine ? rows.departures : rows.arrivals;
        pairs.sent[peer] = ld_relaxed_gpu(&sequences->sent[peer]);
        pairs.credited_until[peer] = pairs.sent[peer];
        pairs.received[peer] = ld_relaxed_gpu(&sequences->received[peer]);
        const uint32_t units = common.shape.row_units;
        pairs.sent_end[peer] = pairs.sent[peer] + pairs.to_send[peer] * units;
        pairs.received_end[peer] = pairs.received[peer] + pairs.to_receive[peer] * units;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        // All loads come before the first store, so that they are in flight together.
        const uint32_t total = scope.total(common);
        const uint32_t operation = ld_relaxed_gpu(&sequences->operations) + 1;
        pairs.failure = scope.known_failure(common);
        pairs.total = total;
        pairs.operation = operation;
        pairs.is_last_block =
            inc_acq_rel_gpu(&sequences->blocks_started, gridDim.x - 1) == gridDim.x - 1;
    }
    __syncthreads();
    if (pairs.failure != 0) {
        // In every block, as others may have begun before the peer reported its failure.
        if (pairs.failure != kOwnFailure && threadIdx.x == 0) {
            const uint32_t peer = pairs.failure - 1;
            report_failure(common.wait, FAULT_PEER_FAILED,
                           {WAIT_STREAMED_ROW, peer, pairs.operation}, {pairs.operation}, {peer});
        }
        return false;
    }
    if ((pairs.total & HT_DISAGREED) != 0) {
        if (blockIdx.x == 0 && threadIdx.x == 0) {
            fail(common, FAULT_DISAGREED, 0, common.handle.top_k, pairs.total);
        }
        return false;
    }
    if (pairs.is_last_block != 0) {
        if (threadIdx.x == 0) {
            st_relaxed_gpu(&sequences->operations, pairs.operation);
        }
        for (uint32_t peer = threadIdx.x; peer < common.peers.ranks; peer += blockDim.x) {
            st_relaxed_gpu(&sequences->sent[peer], next_slot(pairs.sent_end[peer]));
            st_relaxed_gpu(&sequences->received[peer], next_slot(pairs.received_end[peer]));
        }
    }
    scope.rebase(common, is_combine, pairs);
    return true;
}

// How many units a row takes, by the operation's shape.
struct AnyUnits {
    static constexpr uint32_t kNoticesAtOnce = 1;
    const HtCommon& common;
    __device__ uint32_t of_row() const { return common.shape.row_units; }
    // Whether the row at unit `sequence` takes its whole slot; `end` is the end of the operation's last row.
    __device__ bool takes_whole_slot(uint32_t sequence, uint32_t end) const {
        return of_row() == kSlotUnits || (sequence % kSlotUnits == 0 && sequence + 1 == end);
    }
};

// AnyUnits for a combine, whose rows all take whole slots: checking that at run time would slow its long loop down.
struct WholeSlots {
    static constexpr uint32_t kNoticesAtOnce = 4;
    __device__ static constexpr uint32_t of_row() { return kSlotUnits; }
    __device__ static constexpr bool takes_whole_slot(uint32_t, uint32_t) { return true; }
};

// The first unit of row `index` of an operation that begins at unit `begin` of the sequence.
template <typename Units>
__device__ __forceinline__ uint32_t unit_of_row(const Units& units, uint32_t begin, uint32_t index) {
    return begin + index * units.of_row();
}

// The index of unit `sequence` in its ring.
__device__ __forceinline__ uint32_t ring_index(const HtCommon& common, uint32_t sequence) {
    return sequence & (common.layout.units - 1);
}

// The rings in one rank's window: this rank's own, which it reads (Rings<Own>), or a peer's, to which it writes
// (Rings<Remote>). The first argument of each function is the other rank of the pair.
template <template <typename> class Address>
struct Rings {
    const HtCommon& common;
    Address<uint8_t> window;

    // The row from `source` that begins at unit `sequence`, followed by its tail.
    __device__ Address<uint8_t> row(uint32_t source, uint32_t sequence) const {
        return window + common.layout.slots + unit_index(source, sequence) * common.layout.unit_bytes;
    }
    // The packet that says which unit from `source` has arrived.
    __device__ Address<uint64_t> arrival(uint32_t source, uint32_t sequence) const {
        return as<uint64_t>(window + common.layout.arrivals) + unit_index(source, sequence);
    }
    // The word with which `receiver` returns the unit.
    __device__ Address<uint32_t> credit(uint32_t receiver, uint32_t sequence) const {
        return as<uint32_t>(window + common.layout.credits) + unit_index(receiver, sequence);
    }
    // Both credits of the unit's slot; that of the first unit is the low half.
    __device__ Address<uint64_t> credits(uint32_t receiver, uint32_t sequence) const {
        return as<uint64_t>(window + common.layout.credits) + unit_index(receiver, sequence) / kSlotUnits;
    }

   private:
    __device__ uint64_t unit_index(uint32_t rank, uint32_t sequence) const {
        return uint64_t{rank} * common.layout.units + ring_index(common, sequence);
    }
};

__device__ __forceinline__ Rings<Own> own_rings(const HtCommon& common) {
    return {common, own_window(common.peers)};
}

__device__ __forceinline__ Rings<Remote> rings_at(const HtCommon& common, uint32_t peer) {
    return {common, window_of(common.peers, peer)};
}

// One lane notifies `peer` that the row at unit `sequence` is complete there, as a fence before has ensured.
template <typename Units>
__device__ __forceinline__ void notify_row(const HtCommon& common, const Units& units,
                                           const HtPairs& pairs, uint32_t peer,
                                           uint32_t sequence) {
    const Remote<uint64_t> arrival = rings_at(common, peer).arrival(common.peers.rank, sequence);
    const uint32_t word = common.shape.fingerprint;
    if (units.takes_whole_slot(sequence, pairs.sent_end[peer])) {
        put_values(arrival, make_packet(sequence + 1, word), make_packet(sequence + 2, word));
    } else {
        put_value(arrival, make_packet(sequence + 1, word));
    }
}

// One lane returns the units of the row at `sequence` to `source`. The whole row must have been read: it is in shared
// memory, or in registers that were used. That needs no fence, as a credit follows only reads, whose values cannot
// change any more.
template <typename Units>
__device__ __forceinline__ void give_credit(const HtCommon& common, const Units& units,
                                            const HtPairs& pairs, uint32_t source,
                                            uint32_t sequence) {
    const Rings<Remote> rings = rings_at(common, source);
    if (units.takes_whole_slot(sequence, pairs.received_end[source])) {
        put_value(rings.credits(common.peers.rank, sequence),
                  make_packet(sequence + 2, sequence + 1));
    } else {
        put_value(rings.credit(common.peers.rank, sequence), sequence + 1);
    }
}

// One lane waits for a row; `awaited` has the number of the operation as epoch, not that of the row.
__device__ __forceinline__ Arrival wait_for_row(const HtCommon& common, const uint64_t* arrival,
                                                uint32_t sequence, const Awaited& awaited) {
    return wait_until(
        common, awaited, [arrival] { return ld_acquire_sys(arrival); },
        [&](uint32_t arrived) { return is_or_follows(arrived, sequence + 1); });
}

// The scales words of two ranks' rows.
struct ScalesWords {
    uint32_t own;
    uint32_t peer;
};

// One thread reports that `peer` sends rows of another shape or with other scales. The operation cannot go on.
__device__ inline void fail_for_scales(const HtCommon& common, uint32_t peer, uint32_t fingerprint,
                                       const ScalesWords& scales) {
    report_failure(common.wait, FAULT_DIFFERS, {WAIT_STREAMED_ROW, peer, 0},
                   {common.shape.fingerprint, scales.own}, {fingerprint, scales.peer});
    broadcast_failure(common.peers, common.wait);
}

// The scales word of the row from `peer` at unit `sequence`, the first of its slot; 0 if the row has none.
__device__ inline uint32_t scales_word_of(const HtCommon& common, uint32_t peer, uint32_t sequence,
                                          uint32_t fingerprint) {
    constexpr uint32_t kPayload = (1u << HT_FINGERPRINT_PAYLOAD_BITS) - 1;
    const uint64_t stamp_at = (fingerprint & kPayload) * sizeof(Vec16);
    if ((fingerprint & HT_FINGERPRINT_COMBINE) != 0 || (fingerprint & HT_FINGERPRINT_SCALED) == 0 ||
        stamp_at + HT_STAMP_BYTES > kSlotUnits * common.layout.unit_bytes) {
        return 0;
    }
    const uint8_t* row = own_rings(common).row(peer, sequence);
    return ld_relaxed_sys(reinterpret_cast<const uint32_t*>(row + stamp_at));
}

// One thread reports that `peer` runs an operation of another shape, as the row at unit `sequence`, the first of its
// slot, shows. `own_scales` is the scales word of this rank's rows.
__device__ inline void fail_for_shape(const HtCommon& common, uint32_t peer, uint32_t sequence,
                                      uint32_t fingerprint, uint32_t own_scales) {
    fail_for_scales(common, peer, fingerprint,
                    {own_scales, scales_word_of(common, peer, sequence, fingerprint)});
}

}  // namespace nccl_ep
