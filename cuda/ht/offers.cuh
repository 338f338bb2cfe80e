// Offers: how the ranks agree, within an operation, that its rows need no rings, because the tensors to which a
// dispatch stores rows (direct_rows.cuh), or from which a combine loads them (pull_rows.cuh), are mapped by the peers.
//
// Protocol
//
// In groups with objects every operation on rows begins with offers. Each rank, the *owner* of its tensor, offers it to
// each peer: an object, and the offset of the peer's first row there; or it says that it offers nothing. All ranks see
// all offers, so all conclude the same without another message: if every rank offers its tensor, rows go directly, and
// the rings' sequences stay as they are; if any does not, all use the rings as if there had been no offers. Object and
// offset are parameters, and epochs are counted in device memory, so graphs can be replayed.
//
// A peer that has stored (dispatch) or read (combine) all its rows in the owner's tensor says so by its *done* packet.
//
// Why no tensor is touched too early or too late
//
// - An owner's kernel releases its offer after everything that its stream did to the tensor before, and only once it
//   knows that the tensor has room. Peers store there only after acquiring an offer of this operation's epoch.
// - A block of a peer completes its bulk stores, fences, and counts itself in `blocks_done`; the last block of the grid
//   signals done. So what any block stored, or read, comes before done, and the owner's kernel does not end before the
//   done packets of all peers have come. So to the caller the kernel looks like any other that uses the tensor.
// - Scales, ids and weights go to the owner's window, where each source has a region. A source writes there as it does
//   to rows: after the offer, before done. The owner's blocks read the region after done. The next writes follow the
//   next offer, which another kernel of the owner makes.
//
// Why no packet is overwritten too early
//
// An offer of epoch n lies in bank n % 2. Every kernel sees all ranks' offers of its epoch before it ends, even where
// it does not need them. So when a rank makes offer n + 2, its kernel n + 1 has seen every peer's offer n + 1, so that
// peer's kernel n has ended, and has seen this rank's offer n. A done packet of epoch n is overwritten only after an
// offer of a later epoch, which the owner makes when its kernel n has ended. Both are valid with exactly this epoch.
//
// Why every wait terminates
//
// An offer depends only on its owner's kernel having begun, and done only on offers. No block waits for another block
// of its kernel. A rank that offers nothing does not wait for offers before it uses the rings, as the conclusion is
// known; it waits for them at the end.
//
// Operations that do not use the rings change nothing there: all rows of a ring have been read when the receiver's
// kernel ends, and slots stay as they are.
//
// After a failure a kernel that begins offers nothing, and a peer's wait for its offer is given up. A kernel that has
// made an offer cannot take it back: peers may store to its tensor until their kernels end.
#pragma once

#include "params/ht_mapped.h"
#include "rings.cuh"

namespace nccl_ep {

// The packets of an offer.
enum OfferWord : uint32_t {
    kOfferFingerprint,
    kOfferScales,
    // The object and HT_OFFER_MAPPED; 0 if nothing is offered.
    kOfferObject,
    // The offset of the peer's first row there, in HT_OFFER_UNIT.
    kOfferFirst,
    // The number of that peer's rows.
    kOfferRows,
};

// How rows travel in an operation.
enum class RowPath : uint32_t { kRings, kDirect, kFailed };

// What the threads of a block share while the ranks agree and while rows go directly. It is at the beginning of the
// block's dynamic shared memory, which is otherwise used by the path through rings.
struct SharedOffers {
    // Where this rank's rows begin in each rank's tensor.
    Remote<uint8_t> first[MAX_PEERS];
    uint32_t epoch;
    uint32_t total;
    uint32_t failure;
    uint32_t is_last_block;
    // Whether this rank offers its tensor; whether all others do; and whether this block gave up: an offer or a done
    // packet did not come, or an offer was of another operation.
    uint32_t is_mapped;
    uint32_t are_mapped;
    uint32_t has_failed;
    uint64_t barriers[HT_MAPPED_WARPS * HT_MAPPED_STAGES];
};
static_assert(sizeof(SharedOffers) <= HT_MAPPED_SHARED_BYTES, "rows begin behind it");

struct Agreement {
    RowPath path;
    uint32_t epoch;
    // Whether the offers of all ranks were seen.
    bool has_all_offers;
};

// The packets of the offer of `epoch` from `owner`, in the window that begins at `window`.
template <template <typename> class Address>
__device__ __forceinline__ Address<uint64_t> offer_in(const HtCommon& common, const HtMapped& mapped,
                                                      Address<uint8_t> window, uint32_t owner, uint32_t epoch) {
    const uint32_t number = (epoch & 1) * common.peers.ranks + owner;
    return as<uint64_t>(window + mapped.layout.offers) + uint64_t{number} * HT_OFFER_PACKETS;
}

// How many rows of `peer` this rank's tensor has.
__device__ __forceinline__ uint32_t rows_of(const HtCommon& common, uint32_t peer) {
    return common.handle.begins[peer + 1] - common.handle.begins[peer];
}

// One thread makes the offer to `peer`, behind a fence.
__device__ __forceinline__ void make_offer(const HtCommon& common, const HtMapped& mapped, uint32_t peer,
                                           const SharedOffers& offers) {
    const uint32_t epoch = offers.epoch;
    const uint64_t first = mapped.offset + uint64_t{common.handle.begins[peer]} * mapped.row_bytes;
    const Remote<uint64_t> to =
        offer_in<Remote>(common, mapped, window_of(common.peers, peer), common.peers.rank, epoch);
    put_values(to, make_packet(epoch, common.shape.fingerprint), make_packet(epoch, mapped.scales_word));
    put_values(to + 2, make_packet(epoch, offers.is_mapped != 0 ? mapped.object : 0),
               make_packet(epoch, static_cast<uint32_t>(first / HT_OFFER_UNIT)));
    put_values(to + 4, make_packet(epoch, rows_of(common, peer)), make_packet(epoch, 0));
}

// One thread waits for the first `count` packets of the offer from `owner`, and loads them into `packets`.
template <uint32_t count>
__device__ __forceinline__ bool wait_for_offer(const HtCommon& common, const HtMapped& mapped, uint32_t owner,
                                               uint32_t epoch, uint64_t (&packets)[count]) {
    const uint64_t* at = offer_in<Own>(common, mapped, own_window(common.peers), owner, epoch);
    const auto have_come = [&] {
        bool all = true;
#pragma unroll
        for (uint32_t i = 0; i < count; ++i) {
            packets[i] = ld_acquire_sys(at + i);
            all = all && packet_epoch(packets[i]) == epoch;
        }
        return all;
    };
    return poll_until(have_come, [&](uint64_t start) {
        return keep_waiting(common, {WAIT_BEGIN, owner, epoch}, start, packet_epoch(packets[0]));
    });
}

// One thread waits for the offer from `owner`, checks it, and records where this rank's rows begin there.
__device__ inline void receive_offer(const HtCommon& common, const HtMapped& mapped, uint32_t owner,
                                     SharedOffers& offers) {
    uint64_t packets[kOfferRows + 1];
    bool ok = wait_for_offer(common, mapped, owner, offers.epoch, packets);
    const auto word = [&](OfferWord which) { return packet_data(packets[which]); };
    const uint32_t object_word = word(kOfferObject);
    const uint32_t object = object_word & ~HT_OFFER_MAPPED;
    const bool is_same =
        word(kOfferFingerprint) == common.shape.fingerprint && word(kOfferScales) == mapped.scales_word;
    const bool has_same_rows = word(kOfferRows) == common.handle.departures[owner] && object < HT_MAX_OBJECTS;
    if (ok && !(is_same && has_same_rows)) {
        // A different number of rows means another handle, for which the report must show a difference.
        const uint32_t other = is_same ? 1u << HT_FINGERPRINT_PAYLOAD_BITS : 0;
        fail_for_scales(common, owner, word(kOfferFingerprint) ^ other, {mapped.scales_word, word(kOfferScales)});
        ok = false;
    }
    if (!ok) {
        offers.has_failed = 1;
    } else if ((object_word & HT_OFFER_MAPPED) == 0) {
        offers.are_mapped = 0;
    } else {
        offers.first[owner] = object_of(mapped.objects, common.peers, object, owner) +
                              uint64_t{word(kOfferFirst)} * HT_OFFER_UNIT;
    }
}

// One thread begins: it loads what all threads need.
__device__ inline void begin_offers(const HtCommon& common, const HtMapped& mapped, SharedOffers& offers) {
    offers.epoch = epoch_after(ld_relaxed_gpu(&mapped.state->epoch));
    offers.failure = known_failure(common);
    offers.total = common.handle.begins[common.peers.ranks];
    offers.is_mapped = mapped.object;
    offers.are_mapped = 1;
    offers.has_failed = 0;
}

// One thread of each block that has begun calls it; the last one advances the epoch for the next kernel.
__device__ inline void advance_epoch(const HtMapped& mapped, const SharedOffers& offers) {
    HtOfferState* state = mapped.state;
    const bool is_alone = mapped.object == 0;
    if (is_alone || inc_acq_rel_gpu(&state->blocks_started, gridDim.x - 1) == gridDim.x - 1) {
        st_relaxed_gpu(&state->epoch, offers.epoch);
    }
}

// Calls `use(peer)` for each peer, with one thread per peer.
template <typename Use>
__device__ __forceinline__ void for_each_peer(const HtCommon& common, Use use) {
#pragma unroll 1
    for (uint32_t peer = threadIdx.x; peer < common.peers.ranks; peer += blockDim.x) {
        if (peer != common.peers.rank && is_active(common.peers, peer)) {
            use(peer);
        }
    }
}

// Counts an operation that uses rings although this rank's tensor is in an object. One thread of the grid does it, and
// no other kernel writes the count at the same time.
__device__ __noinline__ static void note_fallback(const HtMapped& mapped) {
    if (blockIdx.x == 0 && threadIdx.x == 0 && mapped.object != 0) {
        st_relaxed_sys(mapped.fallbacks, ld_relaxed_sys(mapped.fallbacks) + 1);
    }
}

// Makes this rank's offers, and waits for the others' unless it offers nothing itself. All threads of the grid call it;
// if the launch offers nothing, the first block does all of it and the others go on. `has_room(total)` says whether the
// operation can run here. If it cannot, or must not, no offer is made, and the path through rings reports why. `watch`
// is called between this rank's offers and the wait for the others'.
template <typename HasRoom, typename Watch>
__device__ inline Agreement agree(const HtCommon& common, const HtMapped& mapped, const HasRoom& has_room,
                                  SharedOffers& offers, Watch watch) {
    if (mapped.object == 0 && blockIdx.x != 0) {
        return {RowPath::kRings, 0, false};
    }
    if (threadIdx.x == 0) {
        begin_offers(common, mapped, offers);
    }
    __syncthreads();
    const uint32_t epoch = offers.epoch;
    const bool can_offer = offers.failure == 0 && (offers.total & HT_DISAGREED) == 0 && has_room(offers.total);
    if (can_offer) {
        for_each_peer(common, [&](uint32_t peer) {
            if (uint64_t{rows_of(common, peer)} * mapped.side_row_bytes > mapped.layout.side_bytes) {
                offers.is_mapped = 0;
            }
        });
    }
    __syncthreads();
    if (can_offer && blockIdx.x == 0) {
        fence_acq_rel_sys();
        for_each_peer(common, [&](uint32_t peer) { make_offer(common, mapped, peer, offers); });
    }
    // After the offers, and by a thread that waits for none, as the atomic takes most of a microsecond.
    if (threadIdx.x == blockDim.x - 1) {
        advance_epoch(mapped, offers);
    }
    if (!can_offer) {
        return {RowPath::kRings, epoch, false};
    }
    if (offers.is_mapped == 0) {
        note_fallback(mapped);
        return {RowPath::kRings, epoch, false};
    }
    watch();
    for_each_peer(common, [&](uint32_t peer) { receive_offer(common, mapped, peer, offers); });
    __syncthreads();
    const RowPath path = offers.are_mapped != 0 ? RowPath::kDirect : RowPath::kRings;
    if (path == RowPath::kRings) {
        note_fallback(mapped);
    }
    return {offers.has_failed != 0 ? RowPath::kFailed : path, epoch, true};
}

// One block waits until all ranks have begun, unless it has already seen their offers.
__device__ inline void wait_for_all_offers(const HtCommon& common, const HtMapped& mapped, const Agreement& agreement) {
    if (blockIdx.x == 0 && !agreement.has_all_offers) {
        for_each_peer(common, [&](uint32_t peer) {
            uint64_t first[1];
            wait_for_offer(common, mapped, peer, agreement.epoch, first);
        });
    }
}

// Which tokens a warp takes after its first one, `kAtOnce` at a time: a counter of the grid gives them out, beginning
// after the first `warps` tokens. The atomic is issued well before its result is needed, as that waits behind the SM's
// stores.
template <uint32_t kAtOnce>
class TokenScheduler {
   public:
    // Without `takes` the counter is not used.
    __device__ TokenScheduler(const HtMapped& mapped, uint32_t warps, bool takes = true) : warps_(warps) {
        if (takes) {
            fetch(mapped);
        }
    }

    // All lanes call it, and get the same token, which may be past the last one.
    __device__ __forceinline__ uint32_t next(const HtMapped& mapped) {
        if (kAtOnce == 1 || left_ == 0) {
            left_ = kAtOnce;
            next_ = warps_ + shuffle(fetched_, 0);
            fetch(mapped);
        }
        --left_;
        return next_++;
    }

   private:
    __device__ __forceinline__ void fetch(const HtMapped& mapped) {
        if (lane_idx() == 0) {
            fetched_ = atomicAdd(&mapped.state->tokens_taken, kAtOnce);
        }
    }

    uint32_t warps_;
    uint32_t next_ = 0;
    uint32_t left_ = 0;
    uint32_t fetched_ = 0;
};

// Counts this block as done with the peers' tensors; its stores must be complete. The last block sends the done
// packets. All threads call it.
__device__ inline void finish_direct(const HtCommon& common, const HtMapped& mapped, SharedOffers& offers) {
    __syncthreads();
    if (threadIdx.x == 0) {
        fence_acq_rel_sys();
        const uint32_t last = gridDim.x - 1;
        offers.is_last_block = inc_acq_rel_gpu(&mapped.state->blocks_done, last) == last;
        if (offers.is_last_block != 0) {
            // Reset for the next operation: no warp takes tokens any more.
            st_relaxed_gpu(&mapped.state->tokens_taken, 0u);
        }
    }
    __syncthreads();
    if (offers.is_last_block != 0) {
        for_each_peer(common, [&](uint32_t peer) {
            const Remote<uint8_t> window = window_of(common.peers, peer);
            signal(as<uint64_t>(window + mapped.layout.done) + common.peers.rank, make_packet(offers.epoch, 0));
        });
    }
}

// Waits until all peers are done with this rank's tensor; false if it gives up. All threads call it.
__device__ inline bool wait_until_done(const HtCommon& common, const HtMapped& mapped, SharedOffers& offers) {
    const uint64_t* done = as<uint64_t>(own_window(common.peers) + mapped.layout.done);
    const uint32_t epoch = offers.epoch;
    for_each_peer(common, [&](uint32_t peer) {
        const Arrival arrival = wait_until(
            common, {WAIT_STREAMED_ROW, peer, epoch}, [&] { return ld_acquire_sys(done + peer); },
            [epoch](uint32_t seen) { return seen == epoch; });
        if (!arrival.ok) {
            offers.has_failed = 1;
        }
    });
    __syncthreads();
    return offers.has_failed == 0;
}

}  // namespace nccl_ep
