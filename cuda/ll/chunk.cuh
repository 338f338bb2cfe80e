// How a warp moves a chunk of a row, and how the receiver detects that it has arrived.
//
// Rows need no flag, as a fence before a flag would cost a round trip over NVLink, and more under load. Instead all
// words of a bank's rows hold kSentinel between operations; a word that is not kSentinel has arrived. Every chunk that
// is sent is awaited by one warp of the receiver, which writes kSentinel again after reading it, so the bank is ready
// before anybody may write it again (protocol.cuh). Data that contains kSentinel is allowed but rare (it is a NaN as
// two 16-bit floats or one 32-bit float): after such a chunk its sender signals the chunk's flag, a packet, which a
// receiver checks if it keeps finding kSentinel.
#pragma once

#include "late.cuh"

namespace nccl_ep {

// Up to this many tokens of a rank, all lanes of a waiting warp poll: that is faster, and few warps wait.
constexpr uint32_t kPollWholeTokens = 16;
// A word of a row that has not arrived.
constexpr uint32_t kSentinel = LL_SENTINEL;

// Whether one of the words is kSentinel.
__device__ __forceinline__ bool has_sentinel(const Vec16& v) {
    return v.word[0] == kSentinel || v.word[1] == kSentinel || v.word[2] == kSentinel || v.word[3] == kSentinel;
}

__device__ __forceinline__ Vec16 all_sentinels() { return {{kSentinel, kSentinel, kSentinel, kSentinel}}; }

// Consecutive chunks of a row without scales. A chunk has 16 bytes for each lane; the last one may have fewer.
template <uint32_t kChunks>
struct Chunks {
    // The index of the first chunk.
    uint32_t index;
    // Bytes of the row.
    uint32_t row_bytes;

    __device__ Chunks(const LlShape& shape, uint32_t number)
        : index(number * kChunks), row_bytes(shape.row_bytes) {}
    __device__ Chunks(uint32_t first, uint32_t bytes) : index(first), row_bytes(bytes) {}
    // Where this lane's part of chunk `i` begins in the row, and whether it has one.
    __device__ uint32_t lane_byte(uint32_t i = 0) const {
        return ((index + i) * kWarpSize + lane_idx()) * sizeof(Vec16);
    }
    __device__ bool holds(uint32_t i = 0) const { return lane_byte(i) < row_bytes; }
    // Bit i: whether this lane has a part of chunk i.
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

    // Calls `with(vec, index)` for each of the lane's accesses; `index` is the access's index in the row.
    template <typename Self, typename With>
    __device__ __forceinline__ static void each(Self& self, const Chunk& chunk, With with) {
        if (chunk.holds()) {
            with(self.vec, chunk.index * kWarpSize + lane_idx());
        }
    }
    __device__ __forceinline__ void fill(uint32_t word) { vec = {{word, word, word, word}}; }
};

// ---- Loads and stores of a warp's chunk, with or without scales (scaled_chunk.cuh) ---------------
// `row` is the beginning of a row that is not written while the kernel runs.
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
// Whether a word of this lane's part is kSentinel.
template <typename Chunk, typename Data>
__device__ __forceinline__ bool has_sentinel(const Data& data, const Chunk& chunk) {
    bool found = false;
    Data::each(data, chunk, [&](const Vec16& vec, uint32_t) { found |= has_sentinel(vec); });
    return found;
}

// After the warp's stores of a chunk: signals the chunk's flag if its data contains kSentinel (`with_sentinel`).
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

// A warp sends a chunk; `with_sentinel` says whether the data contains kSentinel.
template <typename Op, typename Chunk, typename Data>
__device__ __forceinline__ void send(const Op& op, const BankRow<Remote>& to, const Chunk& chunk,
                                     const Data& data, bool with_sentinel) {
    put_to(data, to.data, chunk);
    signal_sentinel(op, to, chunk, with_sentinel);
}

// A warp stores chunks; `vec_of(i)` is this lane's part of chunk i. Bit i of the result: whether that part contains
// kSentinel.
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
// Signals the flags of the chunks that contain kSentinel, by the result of put_chunks. Not unrolled, to keep code
// small.
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

// The lanes whose flag at `flag`, if not NULL, says that a chunk has arrived although it contains kSentinel. All lanes
// call it.
template <typename Op>
__device__ __forceinline__ LaneMask flagged_lanes(const Op& op, uint64_t* flag) {
    const bool is_flagged = flag != nullptr && packet_epoch(ld_acquire_sys(flag)) == op.epoch;
    // Cleared, as epochs repeat after 2^32 operations: then an old flag would announce other data.
    if (is_flagged) {
        st_relaxed_sys(flag, 0);
    }
    const LaneMask flagged = ballot(is_flagged);
    sync_warp();  // all lanes see what one has acquired
    return flagged;
}

// The state of a warp's polling for the data of its lanes.
struct PollState {
    // The lanes that still waited for data at the last poll, and for how many polls they have been the same lanes.
    LaneMask waiting = LaneMask::all_lanes();
    uint32_t unchanged = 0;

    // Whether this lane polls. With `gently` only the last waiting lane does, until its data arrives: where many
    // warps wait, polls by all lanes would take bandwidth from the warps that move data.
    __device__ __forceinline__ bool lane_polls(bool gently) const {
        return !gently || unchanged == 0 || waiting.last() == lane_idx();
    }
    // Whether this poll also checks flags: seldom, as data that contains kSentinel is rare.
    __device__ __forceinline__ bool checks_flags() const { return unchanged % 8 == 7; }
    // Records the result of a poll; returns whether no lane waits any more.
    __device__ __forceinline__ bool update(bool is_waiting) {
        const LaneMask now = ballot(is_waiting);
        unchanged = now.bits == waiting.bits ? unchanged + 1 : 0;
        waiting = now;
        return !now.any();
    }
};

// Rows without scales for which a warp waits: the same chunks of each.
template <uint32_t kRows, uint32_t kChunks>
struct ArrivingRows {
    // The address of this lane's part of the first chunk of each row; NULL for rows that are not awaited.
    Vec16* at[kRows];
    Vec16 vec[kRows][kChunks];
    // Bit i * kChunks + j: this lane's part of chunk j of row i is missing.
    uint32_t missing;
    PollState polling;

    // Of the first kRows of `count` rows, whose addresses `row_of` gives. A warp with several chunks to load
    // that polls `gently` does not poll with all lanes even at first.
    template <typename RowOf>
    __device__ __forceinline__ ArrivingRows(uint32_t count, const Chunks<kChunks>& chunks, bool gently, RowOf row_of)
        : missing(0) {
        polling.unchanged = kChunks > 1 && gently ? 1 : 0;
        const uint32_t held = chunks.held();
#pragma unroll
        for (uint32_t i = 0; i < kRows; ++i) {
            at[i] = i < count ? as<Vec16>(row_of(i) + chunks.lane_byte()) : nullptr;
            missing |= i < count ? held << (i * kChunks) : 0;
        }
    }
    // Polls once; returns whether everything has arrived. `flagged_rows` reads the chunks' flags; its result has the
    // bits of `missing`.
    template <typename FlaggedRows>
    __device__ __forceinline__ bool poll(bool gently, FlaggedRows flagged_rows) {
        const uint32_t flagged = polling.checks_flags() ? flagged_rows() : 0;
        const uint32_t polled = polling.lane_polls(gently) ? missing : missing & flagged;
#pragma unroll
        for (uint32_t i = 0; i < kRows * kChunks; ++i) {
            if ((polled >> i & 1) != 0) {
                vec[i / kChunks][i % kChunks] = ld_relaxed_sys(at[i / kChunks] + i % kChunks * kWarpSize);
            }
        }
        missing &= ~flagged;
#pragma unroll
        for (uint32_t i = 0; i < kRows * kChunks; ++i) {
            const bool is_sentinel = has_sentinel(vec[i / kChunks][i % kChunks]);
            missing &= is_sentinel ? ~0u : ~(polled & 1u << i);
        }
        return polling.update(missing != 0);
    }
    // After a failed wait: the index of a row that is missing.
    __device__ __forceinline__ uint32_t first_late() const {
        return LaneMask{shuffle(missing, polling.waiting.first())}.first() / kChunks;
    }
};

// A chunk with a single flag for which a warp waits; for chunks with scales see scaled_chunk.cuh.
template <typename DataOfKind>
struct Arriving {
    using Data = DataOfKind;
    Data data;
    bool flagged = false;
    PollState polling;

    // Polls once; returns whether the chunk has arrived.
    template <typename Op, typename Chunk>
    __device__ __forceinline__ bool poll(const Op& op, const BankRow<Own>& from, const Chunk& chunk, bool gently) {
        if (polling.checks_flags() && !flagged) {
            flagged = flagged_lanes(op, lane_idx() == 0 ? from.flags + chunk.index : nullptr).any();
        }
        if (polling.waiting.has_this() && (polling.lane_polls(gently) || flagged)) {
            load_arriving(data, from.data, chunk);
        }
        return polling.update(!flagged && has_sentinel(data, chunk));
    }
};

// Fills a chunk of the bank with kSentinel again, for its next use.
template <typename Data, typename Chunk>
__device__ __forceinline__ void reset_chunk(const BankRow<Own>& from, const Chunk& chunk) {
    Data sentinels;
    sentinels.fill(kSentinel);
    store(sentinels, from.data, chunk);
}

}  // namespace nccl_ep
