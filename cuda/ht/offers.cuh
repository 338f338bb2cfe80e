// Offers: how the ranks agree, within an operation, that its rows need no rings because they lie in tensors that the
// peers map: where a dispatch stores rows (direct_rows.cuh), or a combine loads them (pull_rows.cuh).
//
// Protocol
//
// In groups with objects every operation on rows begins so. Each rank, the *owner* of its tensor, offers it to each
// peer: an object, and the offset of the peer's first row there; or it says that it offers nothing. All ranks see all
// offers, so all conclude the same without another message: if every rank offers its tensor, rows go straight, and the
// rings' sequences stay as they are; if any does not, all use the rings as if there had been no offers. Object and
// offset are parameters, and epochs are counted in device memory, so graphs replay.
//
// A peer that has stored (dispatch) or read (combine) all its rows in the owner's tensor says so by its *done* packet.
//
// Why no tensor is touched too early or too late
//
// - An owner's kernel releases its offer, so after all that its stream did to the tensor before, and only once it has
//   seen that the tensor has room. Peers store there only after acquiring an offer of this operation's epoch.
// - A block of a peer completes its bulk stores, fences, and counts itself in `blocks_done`; the last block of the grid
//   signals done. So what any block stored, or read, comes before done, and the owner's kernel does not end before the
//   done packets of all peers have come. For the caller it is an ordinary kernel, which alone uses its tensor; whatever
//   follows on the stream may use it again.
// - What comes beside rows lies in the owner's window, with a place for each source. A source writes it as it does
//   rows: after the offer, before done. The owner's blocks read it after done. The next writes follow the next offer,
//   which another kernel of the owner makes.
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
// of its kernel. A rank without a tensor that peers map does not wait for offers before it uses the rings, as the
// conclusion is known; it sees them at the end.
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
    // The object and HT_OFFER_MAPPED.
    kOfferWay,
    // The offset of the peer's first row there, in HT_OFFER_UNIT.
    kOfferFirst,
    // Rows of that peer.
    kOfferRows,
};

// How rows travel.
enum class Way : uint32_t { kRings, kStraight, kFailed };

// What the threads of a block share while they agree, and while rows go straight; it lies in front of the block's
// dynamic shared memory, which rings use otherwise.
struct Agreed {
    // Where this rank's rows begin in each rank's tensor.
    Remote<uint8_t> first[MAX_PEERS];
    uint32_t epoch;
    uint32_t total;
    uint32_t failure;
    uint32_t is_last_block;
    // Whether this rank offers its tensor; and what the others say.
    uint32_t is_mapped;
    uint32_t are_mapped;
    uint32_t is_missing;
    uint64_t barriers[HT_MAPPED_WARPS * HT_MAPPED_STAGES];
};
static_assert(sizeof(Agreed) <= HT_MAPPED_SHARED_BYTES, "rows begin behind it");

struct Agreement {
    Way way;
    uint32_t epoch;
    // Whether the offers of all ranks were seen.
    bool has_heard;
};

// Where the offer of epoch `epoch` from `owner` lies in the window that begins at `window`.
template <template <typename> class Address>
__device__ __forceinline__ Address<uint64_t> offer_in(const HtCommon& common, const HtMapped& mapped,
                                                      Address<uint8_t> window, uint32_t owner, uint32_t epoch) {
    const uint32_t number = (epoch & 1) * common.peers.ranks + owner;
    return as<uint64_t>(window + mapped.layout.offers) + uint64_t{number} * HT_OFFER_PACKETS;
}

// Rows of `peer` in this rank's tensor.
__device__ __forceinline__ uint32_t rows_of(const HtCommon& common, uint32_t peer) {
    return common.handle.begins[peer + 1] - common.handle.begins[peer];
}

// One thread: the offer to `peer`, behind a fence.
__device__ __forceinline__ void make_offer(const HtCommon& common, const HtMapped& mapped, uint32_t peer,
                                           const Agreed& agreed) {
    const uint32_t epoch = agreed.epoch;
    const uint64_t first = mapped.offset + uint64_t{common.handle.begins[peer]} * mapped.row_bytes;
    const Remote<uint64_t> to =
        offer_in<Remote>(common, mapped, window_of(common.peers, peer), common.peers.rank, epoch);
    put_values(to, make_packet(epoch, common.shape.fingerprint), make_packet(epoch, mapped.scales_word));
    put_values(to + 2, make_packet(epoch, agreed.is_mapped != 0 ? mapped.way : 0),
               make_packet(epoch, static_cast<uint32_t>(first / HT_OFFER_UNIT)));
    put_values(to + 4, make_packet(epoch, rows_of(common, peer)), make_packet(epoch, 0));
}

// One thread waits for the first `count` packets of the offer of `owner`, and loads them to `packets`.
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

// One thread hears the offer of `owner`, and notes where this rank's rows begin there.
__device__ inline void hear_offer(const HtCommon& common, const HtMapped& mapped, uint32_t owner, Agreed& agreed) {
    uint64_t packets[kOfferRows + 1];
    bool ok = wait_for_offer(common, mapped, owner, agreed.epoch, packets);
    const auto word = [&](OfferWord which) { return packet_data(packets[which]); };
    const uint32_t way = word(kOfferWay);
    const uint32_t object = way & ~HT_OFFER_MAPPED;
    const bool is_same =
        word(kOfferFingerprint) == common.shape.fingerprint && word(kOfferScales) == mapped.scales_word;
    const bool has_same_rows = word(kOfferRows) == common.handle.departures[owner] && object < HT_MAX_OBJECTS;
    if (ok && !(is_same && has_same_rows)) {
        // A different number of rows means another handle.
        const uint32_t other = is_same ? 1u << HT_FINGERPRINT_PAYLOAD_BITS : 0;
        fail_for_scales(common, owner, word(kOfferFingerprint) ^ other, {mapped.scales_word, word(kOfferScales)});
        ok = false;
    }
    if (!ok) {
        agreed.is_missing = 1;
    } else if ((way & HT_OFFER_MAPPED) == 0) {
        agreed.are_mapped = 0;
    } else {
        agreed.first[owner] = object_of(mapped.objects, common.peers, object, owner) +
                              uint64_t{word(kOfferFirst)} * HT_OFFER_UNIT;
    }
}

// One thread begins: reads what all need.
__device__ inline void begin_offers(const HtCommon& common, const HtMapped& mapped, Agreed& agreed) {
    agreed.epoch = epoch_after(ld_relaxed_gpu(&mapped.state->epoch));
    agreed.failure = known_failure(common.wait);
    agreed.total = common.handle.begins[common.peers.ranks];
    agreed.is_mapped = mapped.way;
    agreed.are_mapped = 1;
    agreed.is_missing = 0;
}

// One thread of each block that has begun: the last one advances the epoch for the next kernel.
__device__ inline void advance_epoch(const HtMapped& mapped, const Agreed& agreed) {
    HtOfferState* state = mapped.state;
    const bool is_alone = mapped.way == 0;
    if (is_alone || inc_acq_rel_gpu(&state->blocks_started, gridDim.x - 1) == gridDim.x - 1) {
        st_relaxed_gpu(&state->epoch, agreed.epoch);
    }
}

// Calls `use(peer)` for each peer, one thread for each.
template <typename Use>
__device__ __forceinline__ void for_each_peer(const HtCommon& common, Use use) {
#pragma unroll 1
    for (uint32_t peer = threadIdx.x; peer < common.peers.ranks; peer += blockDim.x) {
        if (peer != common.peers.rank && is_active(common.peers, peer)) {
            use(peer);
        }
    }
}

// One thread of the grid counts an operation that uses rings though this rank's tensor lies in an object; no other
// kernel writes the count meanwhile.
__device__ __noinline__ static void note_fallback(const HtMapped& mapped) {
    if (blockIdx.x == 0 && threadIdx.x == 0 && mapped.way != 0) {
        st_relaxed_sys(mapped.fallbacks, ld_relaxed_sys(mapped.fallbacks) + 1);
    }
}

// Makes this rank's offers, and hears the others' unless its own settle the matter. All threads of the grid call it; if
// the launch has nothing to offer, the first block does it all and the others go on. `has_room(total)` says whether the
// operation can run here. If it cannot, or must not, no offer is made, and the path through rings finds out why.
// `watch` is called after this rank's offers, before the others' are heard.
template <typename HasRoom, typename Watch>
__device__ inline Agreement agree(const HtCommon& common, const HtMapped& mapped, const HasRoom& has_room,
                                  Agreed& agreed, Watch watch) {
    if (mapped.way == 0 && blockIdx.x != 0) {
        return {Way::kRings, 0, false};
    }
    if (threadIdx.x == 0) {
        begin_offers(common, mapped, agreed);
    }
    __syncthreads();
    const uint32_t epoch = agreed.epoch;
    const bool offers = agreed.failure == 0 && (agreed.total & HT_DISAGREED) == 0 && has_room(agreed.total);
    if (offers) {
        for_each_peer(common, [&](uint32_t peer) {
            if (uint64_t{rows_of(common, peer)} * mapped.side_row_bytes > mapped.layout.side_bytes) {
                agreed.is_mapped = 0;
            }
        });
    }
    __syncthreads();
    if (offers && blockIdx.x == 0) {
        fence_acq_rel_sys();
        for_each_peer(common, [&](uint32_t peer) { make_offer(common, mapped, peer, agreed); });
    }
    // After the offers, and by a thread that hears none, as the atomic takes most of a microsecond.
    if (threadIdx.x == blockDim.x - 1) {
        advance_epoch(mapped, agreed);
    }
    if (!offers) {
        return {Way::kRings, epoch, false};
    }
    if (agreed.is_mapped == 0) {
        note_fallback(mapped);
        return {Way::kRings, epoch, false};
    }
    watch();
    for_each_peer(common, [&](uint32_t peer) { hear_offer(common, mapped, peer, agreed); });
    __syncthreads();
    const Way way = agreed.are_mapped != 0 ? Way::kStraight : Way::kRings;
    if (way == Way::kRings) {
        note_fallback(mapped);
    }
    return {agreed.is_missing != 0 ? Way::kFailed : way, epoch, true};
}

// One block waits until all ranks have begun, unless it has heard their offers already.
__device__ inline void hear_all(const HtCommon& common, const HtMapped& mapped, const Agreement& agreement) {
    if (blockIdx.x == 0 && !agreement.has_heard) {
        for_each_peer(common, [&](uint32_t peer) {
            uint64_t first[1];
            wait_for_offer(common, mapped, peer, agreement.epoch, first);
        });
    }
}

// The tokens that a warp takes after its first, `kAtOnce` at a time from a counter of the grid; the first `warps`
// tokens are not counted. The counter is asked well before they are needed, as the answer waits behind the SM's stores.
template <uint32_t kAtOnce>
class TakenTokens {
   public:
    // Without `takes` the counter is not asked.
    __device__ TakenTokens(const HtMapped& mapped, uint32_t warps, bool takes = true) : warps_(warps) {
        if (takes) {
            ask(mapped);
        }
    }

    // All lanes call it, and get the same. It may be called past the last token.
    __device__ __forceinline__ uint32_t next(const HtMapped& mapped) {
        if (kAtOnce == 1 || left_ == 0) {
            left_ = kAtOnce;
            next_ = warps_ + shuffle(asked_, 0);
            ask(mapped);
        }
        --left_;
        return next_++;
    }

   private:
    __device__ __forceinline__ void ask(const HtMapped& mapped) {
        if (lane_idx() == 0) {
            asked_ = atomicAdd(&mapped.state->tokens_taken, kAtOnce);
        }
    }

    uint32_t warps_;
    uint32_t next_ = 0;
    uint32_t left_ = 0;
    uint32_t asked_ = 0;
};

// This block has stored or read all that it will in the peers' tensors, and its stores are complete. The last block to
// say so tells the peers. All threads call it.
__device__ inline void finish_straight(const HtCommon& common, const HtMapped& mapped, Agreed& agreed) {
    __syncthreads();
    if (threadIdx.x == 0) {
        fence_acq_rel_sys();
        const uint32_t last = gridDim.x - 1;
        agreed.is_last_block = inc_acq_rel_gpu(&mapped.state->blocks_done, last) == last;
        if (agreed.is_last_block != 0) {
            // No warp takes tokens any more: all blocks have come here.
            st_relaxed_gpu(&mapped.state->tokens_taken, 0u);
        }
    }
    __syncthreads();
    if (agreed.is_last_block != 0) {
        for_each_peer(common, [&](uint32_t peer) {
            const Remote<uint8_t> window = window_of(common.peers, peer);
            signal(as<uint64_t>(window + mapped.layout.done) + common.peers.rank, make_packet(agreed.epoch, 0));
        });
    }
}

// Waits until all peers have done with this rank's tensor; false if one does not say so. All threads call it.
__device__ inline bool wait_until_done(const HtCommon& common, const HtMapped& mapped, Agreed& agreed) {
    const uint64_t* done = as<uint64_t>(own_window(common.peers) + mapped.layout.done);
    const uint32_t epoch = agreed.epoch;
    for_each_peer(common, [&](uint32_t peer) {
        const Arrival arrival = wait_until(
            common, {WAIT_STREAMED_ROW, peer, epoch}, [&] { return ld_acquire_sys(done + peer); },
            [epoch](uint32_t seen) { return seen == epoch; });
        if (!arrival.ok) {
            agreed.is_missing = 1;
        }
    });
    __syncthreads();
    return agreed.is_missing == 0;
}

}  // namespace nccl_ep
