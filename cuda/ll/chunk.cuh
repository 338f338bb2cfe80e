// A chunk of a row: how a warp moves it, and how it arrives.
//
// Rows carry no flag: a fence before a flag costs a round trip over NVLink, and more under load. All words
// of a bank's rows hold kMark between operations; a word that is not kMark has arrived. Every chunk that
// is sent is awaited by one warp there, which writes kMark again after reading it, so the bank is ready
// before anybody may write it again (protocol.cuh). Data that contains kMark itself is allowed but rare
// (as two 16-bit floats or as one 32-bit float it is no number): after such a chunk its sender signals the
// chunk's flag, a packet, and a receiver that finds kMark looks there.
#pragma once

#include "protocol.cuh"

namespace nccl_ep {

constexpr uint32_t kChunkVecs = LL_CHUNK_VECS;
// Up to this many tokens of a rank, waiting warps poll for whole chunks: faster, and few enough.
constexpr uint32_t kPollWholeTokens = 16;
constexpr uint32_t kPollsPerFlag = 4;
// A word of a row that has not arrived.
constexpr uint32_t kMark = LL_MARK;

// Whether one of the words is kMark.
__device__ __forceinline__ bool has_mark(const Vec16& v) {
    return v.word[0] == kMark || v.word[1] == kMark || v.word[2] == kMark || v.word[3] == kMark;
}

// One chunk of a row: where it begins and how many 16-byte accesses it has.
struct Chunk {
    uint32_t index;
    uint32_t offset;
    uint32_t vecs;

    __device__ Chunk(const LlShape& shape, uint32_t chunk_idx) : index(chunk_idx) {
        const RowFormat row = row_format(shape);
        offset = index * row.chunk_bytes;
        vecs = row.chunk_at(offset) / sizeof(Vec16);
    }
    // Whether this lane has a part in the warp's access number `turn`, and which.
    __device__ bool holds(uint32_t turn) const { return turn * kWarpSize + lane_idx() < vecs; }
    __device__ uint32_t vec(uint32_t turn) const {
        return offset / sizeof(Vec16) + turn * kWarpSize + lane_idx();
    }
    // Where it ends in its slot.
    __device__ uint32_t end() const { return offset + vecs * sizeof(Vec16); }
};

// This lane's part of a chunk.
struct ChunkData {
    Vec16 vec[kChunkVecs];

    // `row` is the beginning of a row that nobody writes meanwhile.
    __device__ __forceinline__ void load_const(const uint8_t* row, const Chunk& chunk) {
#pragma unroll
        for (uint32_t i = 0; i < kChunkVecs; ++i) {
            if (chunk.holds(i)) {
                vec[i] = ld_const(reinterpret_cast<const Vec16*>(row) + chunk.vec(i));
            }
        }
    }

    __device__ __forceinline__ void load_arriving(const uint8_t* row, const Chunk& chunk) {
#pragma unroll
        for (uint32_t i = 0; i < kChunkVecs; ++i) {
            if (chunk.holds(i)) {
                vec[i] = ld_relaxed_sys(reinterpret_cast<const Vec16*>(row) + chunk.vec(i));
            }
        }
    }

    __device__ __forceinline__ void store(uint8_t* row, const Chunk& chunk) const {
#pragma unroll
        for (uint32_t i = 0; i < kChunkVecs; ++i) {
            if (chunk.holds(i)) {
                st_row(reinterpret_cast<Vec16*>(row) + chunk.vec(i), vec[i]);
            }
        }
    }

    __device__ __forceinline__ void put_to(Remote<uint8_t> row, const Chunk& chunk) const {
#pragma unroll
        for (uint32_t i = 0; i < kChunkVecs; ++i) {
            if (chunk.holds(i)) {
                put(as<Vec16>(row) + chunk.vec(i), vec[i]);
            }
        }
    }

    __device__ __forceinline__ void fill(uint32_t word) {
#pragma unroll
        for (uint32_t i = 0; i < kChunkVecs; ++i) {
            vec[i] = {{word, word, word, word}};
        }
    }

    // Whether some word of the warp's chunk is kMark.
    __device__ __forceinline__ bool has_mark(const Chunk& chunk) const {
        bool found = false;
#pragma unroll
        for (uint32_t i = 0; i < kChunkVecs; ++i) {
            if (chunk.holds(i)) {
                found |= nccl_ep::has_mark(vec[i]);
            }
        }
        return ballot(found).any();
    }
};

// After the warp's stores of a chunk: signals its flag if its data `has_mark`.
template <typename Op, typename Chunk>
__device__ __forceinline__ void signal_mark(const Op& op, const BankRow<Remote>& to,
                                            const Chunk& chunk, bool has_mark) {
    if (has_mark) {
        sync_warp();
        if (lane_idx() == 0) {
            signal(to.flags + chunk.index, op.packet(0));
        }
    }
}

// A warp sends a chunk; `has_mark` is that of the data. Chunks and data may also be those of rows with scales
// (scaled_chunk.cuh).
template <typename Op, typename Chunk, typename Data>
__device__ __forceinline__ void send(const Op& op, const BankRow<Remote>& to, const Chunk& chunk,
                                     const Data& data, bool has_mark) {
    data.put_to(to.data, chunk);
    signal_mark(op, to, chunk, has_mark);
}

// A lane waits until the end of a chunk has come from `peer`; the rest follows soon. Cheap, where polling
// for the whole chunk would take bandwidth from warps that still work.
template <typename Op, typename Chunk>
__device__ __forceinline__ void wait_for_end(const Op& op, const BankRow<Own>& from,
                                             const Chunk& chunk, uint32_t peer) {
    const uint32_t* last = reinterpret_cast<const uint32_t*>(from.data + chunk.end()) - 1;
    const Awaited awaited = op.from(peer, WAIT_ROW);
    wait_until(
        op.common, awaited,
        [&] {
            const uint64_t flag = ld_relaxed_sys(from.flags + chunk.index);
            return ld_relaxed_sys(last) != kMark ? op.packet(0) : flag;
        },
        [&](uint32_t epoch) { return epoch == awaited.epoch; });
}

// Completes what load_arriving of `from` returned, waiting for `peer` while something is missing, and makes
// the bank ready for its next use. After a failed wait the data is arbitrary; the group has failed then.
template <typename Op, typename Chunk, typename Data>
__device__ __forceinline__ void take(const Op& op, const BankRow<Own>& from, const Chunk& chunk,
                                     uint32_t peer, Data& data) {
    if (data.has_mark(chunk)) {
        uint32_t polls = 0;
        bool flagged = false;
        wait_as_warp(op.common, op.from(peer, WAIT_ROW), [&] {
            // The flag matters only for data that contains kMark: seldom, so it is read seldom.
            if (++polls % kPollsPerFlag == 0) {
                const uint64_t flag = ld_acquire_sys(from.flags + chunk.index);
                flagged = ballot(packet_epoch(flag) == op.epoch).all();
            }
            data.load_arriving(from.data, chunk);
            return !data.has_mark(chunk) || flagged;
        });
        // Epochs repeat after 2^32 operations; a flag that was left would then vouch for other data.
        if (flagged && lane_idx() == 0) {
            st_relaxed_sys(from.flags + chunk.index, 0);
        }
    }
    Data marks;
    marks.fill(kMark);
    marks.store(from.data, chunk);
}

}  // namespace nccl_ep
