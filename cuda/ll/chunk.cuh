// A chunk of a row: how a warp moves it, and how it arrives.
//
// Rows carry no flag: a fence before a flag costs a round trip over NVLink, and more under load. All words
// of a bank's rows hold kSentinel between operations; a word that is not kSentinel has arrived. Every chunk that
// is sent is awaited by one warp there, which writes kSentinel again after reading it, so the bank is ready
// before anybody may write it again (protocol.cuh). Data that contains kSentinel itself is allowed but rare
// (as two 16-bit floats or as one 32-bit float it is no number): after such a chunk its sender signals the
// chunk's flag, a packet, and a receiver that finds kSentinel looks there.
#pragma once

#include "late.cuh"

namespace nccl_ep {

// Up to this many tokens of a rank, waiting warps poll for everything missing: that is faster, and they are few enough.
constexpr uint32_t kPollWholeTokens = 16;
// A word of a row that has not arrived.
constexpr uint32_t kSentinel = LL_SENTINEL;

// Whether one of the words is kSentinel.
__device__ __forceinline__ bool has_sentinel(const Vec16& v) {
    return v.word[0] == kSentinel || v.word[1] == kSentinel || v.word[2] == kSentinel || v.word[3] == kSentinel;
}

__device__ __forceinline__ Vec16 all_sentinels() { return {{kSentinel, kSentinel, kSentinel, kSentinel}}; }

// Consecutive chunks of a row without scales. A chunk has 16 bytes for each lane, in the last one perhaps not for all.
template <uint32_t kChunks>
struct Chunks {
    // The first one.
    uint32_t index;
    // Bytes of the row.
    uint32_t row_bytes;

    __device__ Chunks(const LlShape& shape, uint32_t number)
        : index(number * kChunks), row_bytes(shape.row_bytes) {}
    __device__ Chunks(uint32_t first, uint32_t bytes) : index(first), row_bytes(bytes) {}
    // Where this lane's part of chunk `i` of them begins in the row, and whether there is one.
    __device__ uint32_t lane_byte(uint32_t i = 0) const {
        return ((index + i) * kWarpSize + lane_idx()) * sizeof(Vec16);
    }
    __device__ bool holds(uint32_t i = 0) const { return lane_byte(i) < row_bytes; }
    // Bit i: whether this lane has a part of chunk `i`.
    __device__ __forceinline__ uint32_t held() const {
        uint32_t bits = 0;
#pragma unroll
        for (uint32_t i = 0; i < kChunks; ++i) {
            bits |= holds(i) ? 1u << i : 0;
        }
        return bits;
    }
    __device__ Chunks<1> chunk(uint32_t i) const { return {index + i, row_bytes}; }
};
using Chunk = Chunks<1>;

// This lane's part of a chunk.
struct ChunkData {
    Vec16 vec;

    // Calls `with` for each of the lane's accesses, and its number in the row.
    template <typename Self, typename With>
    __device__ __forceinline__ static void each(Self& self, const Chunk& chunk, With with) {
        if (chunk.holds()) {
            with(self.vec, chunk.index * kWarpSize + lane_idx());
        }
    }
    __device__ __forceinline__ void fill(uint32_t word) { vec = {{word, word, word, word}}; }
};

// ---- What a warp does with its chunk, also of rows with scales (scaled_chunk.cuh) ----------------
// `row` is the beginning of a row that nobody writes meanwhile.
template <typename Chunk, typename Data>
__device__ __forceinline__ void load_const(Data& data, const uint8_t* row, const Chunk& chunk) {
    Data::each(data, chunk, [&](Vec16& vec, uint32_t index) {
        vec = ld_const(reinterpret_cast<const Vec16*>(row) + index);
    });
}
template <typename Chunk, typename Data>
__device__ __forceinline__ void load_arriving(Data& data, const uint8_t* row, const Chunk& chunk) {
    Data::each(data, chunk, [&](Vec16& vec, uint32_t index) {
        vec = ld_relaxed_sys(reinterpret_cast<const Vec16*>(row) + index);
    });
}
template <typename Chunk, typename Data>
__device__ __forceinline__ void store(const Data& data, uint8_t* row, const Chunk& chunk) {
    Data::each(data, chunk, [&](const Vec16& vec, uint32_t index) {
        st_row(reinterpret_cast<Vec16*>(row) + index, vec);
    });
}
template <typename Chunk, typename Data>
__device__ __forceinline__ void put_to(const Data& data, Remote<uint8_t> row, const Chunk& chunk) {
    Data::each(data, chunk, [&](const Vec16& vec, uint32_t index) { put(as<Vec16>(row) + index, vec); });
}
// Whether some word of this lane's part is kSentinel.
template <typename Chunk, typename Data>
__device__ __forceinline__ bool has_sentinel(const Data& data, const Chunk& chunk) {
    bool found = false;
    Data::each(data, chunk, [&](const Vec16& vec, uint32_t) { found |= has_sentinel(vec); });
    return found;
}

// After the warp's stores of a chunk: signals its flag if its data is one `with_sentinel`.
template <typename Op, typename Chunk>
__device__ __forceinline__ void signal_sentinel(const Op& op, const BankRow<Remote>& to,
                                                const Chunk& chunk, bool with_sentinel) {
    if (with_sentinel) {
        sync_warp();
        if (lane_idx() == 0) {
            signal(to.flags + chunk.index, op.packet(0));
        }
    }
}

// A warp sends a chunk; `with_sentinel` says whether some word of it is kSentinel.
template <typename Op, typename Chunk, typename Data>
__device__ __forceinline__ void send(const Op& op, const BankRow<Remote>& to, const Chunk& chunk,
                                     const Data& data, bool with_sentinel) {
    put_to(data, to.data, chunk);
    signal_sentinel(op, to, chunk, with_sentinel);
}

// A warp stores some chunks, of which `vec_of` gives a lane's parts. Bit i of the result: chunk i has kSentinel there.
template <uint32_t kChunks, typename VecOf>
__device__ __forceinline__ uint32_t put_chunks(const BankRow<Remote>& to, const Chunks<kChunks>& chunks, VecOf vec_of) {
    const Remote<Vec16> first = as<Vec16>(to.data + chunks.lane_byte());
    uint32_t with_sentinel = 0;
#pragma unroll
    for (uint32_t i = 0; i < kChunks; ++i) {
        if (chunks.holds(i)) {
            const Vec16 vec = vec_of(i);
            put(first + i * kWarpSize, vec);
            with_sentinel |= has_sentinel(vec) ? 1u << i : 0;
        }
    }
    return with_sentinel;
}
// Signals the flags of the chunks that put_chunks has found. In a loop, so that its code exists once.
template <typename Op, uint32_t kChunks>
__device__ __forceinline__ void signal_sentinels(const Op& op, const BankRow<Remote>& to, const Chunks<kChunks>& chunks,
                                                 uint32_t with_sentinel) {
#pragma unroll 1
    for (uint32_t i = 0; i < kChunks; ++i) {
        signal_sentinel(op, to, chunks.chunk(i), any_lane(static_cast<int>(with_sentinel >> i & 1)));
    }
}
template <typename Op, uint32_t kChunks, typename VecOf>
__device__ __forceinline__ void send_chunks(const Op& op, const BankRow<Remote>& to, const Chunks<kChunks>& chunks,
                                            VecOf vec_of) {
    const uint32_t with_sentinel = put_chunks(to, chunks, vec_of);
    if (any_lane(with_sentinel != 0)) {
        signal_sentinels(op, to, chunks, with_sentinel);
    }
}

// The lanes whose `flag` says that a chunk is there, although it looks like kSentinel. All lanes call it; NULL for
// none.
template <typename Op>
__device__ __forceinline__ LaneMask flagged_lanes(const Op& op, uint64_t* flag) {
    const bool is_flagged = flag != nullptr && packet_epoch(ld_acquire_sys(flag)) == op.epoch;
    // Epochs repeat after 2^32 operations; a flag that was left would then vouch for other data.
    if (is_flagged) {
        st_relaxed_sys(flag, 0);
    }
    const LaneMask flagged = ballot(is_flagged);
    sync_warp();  // what one lane has acquired, all see
    return flagged;
}

// How a warp looks for what comes to its lanes.
struct Lookout {
    // Lanes that missed something at the last poll, and for how many polls they have been the same.
    LaneMask missing = LaneMask::all_lanes();
    uint32_t unchanged = 0;

    // Whether this lane looks. With `gently` only the last lane that misses something does, until it finds it: where
    // many warps wait, polls of all lanes would take bandwidth from those that work.
    __device__ __forceinline__ bool looks(bool gently) const {
        return !gently || unchanged == 0 || missing.last() == lane_idx();
    }
    // Whether flags are asked for at this poll: data that contains kSentinel is rare.
    __device__ __forceinline__ bool asks_for_flags() const { return unchanged % 8 == 7; }
    // After a poll; returns whether no lane misses anything.
    __device__ __forceinline__ bool note(bool misses) {
        const LaneMask now = ballot(misses);
        unchanged = now.bits == missing.bits ? unchanged + 1 : 0;
        missing = now;
        return !now.any();
    }
};

// The same chunks of some rows without scales, as they come to a warp.
template <uint32_t kRows, uint32_t kChunks>
struct ArrivingRows {
    // This lane's part of the first chunk of each row; NULL for those that do not come.
    Vec16* at[kRows];
    Vec16 vec[kRows][kChunks];
    // Bit i * kChunks + j: this lane's part of chunk j of row i has not come.
    uint32_t waits;
    Lookout lookout;

    // For the first kRows of `count` rows; `row_of` gives their addresses. A warp with much to load that polls `gently`
    // does not begin with all lanes.
    template <typename RowOf>
    __device__ __forceinline__ ArrivingRows(uint32_t count, const Chunks<kChunks>& chunks, bool gently, RowOf row_of)
        : waits(0) {
        lookout.unchanged = kChunks > 1 && gently ? 1 : 0;
        const uint32_t held = chunks.held();
#pragma unroll
        for (uint32_t i = 0; i < kRows; ++i) {
            at[i] = i < count ? as<Vec16>(row_of(i) + chunks.lane_byte()) : nullptr;
            waits |= i < count ? held << (i * kChunks) : 0;
        }
    }
    // One poll; returns whether all are there. `flagged_rows` reads the flags of chunks that look missing; its bits are
    // those of `waits`.
    template <typename FlaggedRows>
    __device__ __forceinline__ bool poll(bool gently, FlaggedRows flagged_rows) {
        const uint32_t flagged = lookout.asks_for_flags() ? flagged_rows() : 0;
        const uint32_t looked_for = lookout.looks(gently) ? waits : waits & flagged;
#pragma unroll
        for (uint32_t i = 0; i < kRows * kChunks; ++i) {
            if ((looked_for >> i & 1) != 0) {
                vec[i / kChunks][i % kChunks] = ld_relaxed_sys(at[i / kChunks] + i % kChunks * kWarpSize);
            }
        }
        waits &= ~flagged;
#pragma unroll
        for (uint32_t i = 0; i < kRows * kChunks; ++i) {
            const bool is_sentinel = has_sentinel(vec[i / kChunks][i % kChunks]);
            waits &= is_sentinel ? ~0u : ~(looked_for & 1u << i);
        }
        return lookout.note(waits != 0);
    }
    // After a failed wait: a row that did not come.
    __device__ __forceinline__ uint32_t first_late() const {
        return LaneMask{shuffle(waits, lookout.missing.first())}.first() / kChunks;
    }
};

// A chunk with one flag, as it comes to a warp; scaled_chunk.cuh has others.
template <typename DataOfKind>
struct Arriving {
    using Data = DataOfKind;
    Data data;
    bool flagged = false;
    Lookout lookout;

    // One poll; returns whether the chunk is there.
    template <typename Op, typename Chunk>
    __device__ __forceinline__ bool poll(const Op& op, const BankRow<Own>& from, const Chunk& chunk, bool gently) {
        if (lookout.asks_for_flags() && !flagged) {
            flagged = flagged_lanes(op, lane_idx() == 0 ? from.flags + chunk.index : nullptr).any();
        }
        if (lookout.missing.has_this() && (lookout.looks(gently) || flagged)) {
            load_arriving(data, from.data, chunk);
        }
        return lookout.note(!flagged && has_sentinel(data, chunk));
    }
};

// Makes a chunk of the bank ready for its next use.
template <typename Data, typename Chunk>
__device__ __forceinline__ void let_go(const BankRow<Own>& from, const Chunk& chunk) {
    Data sentinels;
    sentinels.fill(kSentinel);
    store(sentinels, from.data, chunk);
}

}  // namespace nccl_ep
