// How a warp moves one chunk of a row, and how a row arrives.
//
// Rows carry no flag: a fence before a flag costs a round trip over NVLink, and more under load.
// All words of a bank's rows hold kMark between operations; a word that is not kMark has arrived.
// Every chunk that is sent is awaited by one warp there, which puts kMark back when it has read it,
// and so the bank is ready before the argument of ll.cuh lets anybody write it again. Data that
// contains kMark itself is rare (as two 16-bit floats or as one 32-bit float it is no number) and
// allowed: after such a chunk its sender raises the chunk's flag, a packet, by a release, and a
// receiver that finds kMark looks there.
#pragma once

#include "ll.cuh"

namespace nccl_ep {

constexpr uint32_t kChunkVecs = LL_CHUNK_VECS;
// Up to this many tokens of a rank, waiting warps poll for whole chunks: faster, and few enough.
constexpr uint32_t kPollWholeTokens = 16;
constexpr uint32_t kPollsPerFlag = 4;
// A word of a row that has not arrived.
constexpr uint32_t kMark = LL_MARK;

// One chunk of a row: where it begins and how many 16-byte accesses it has.
struct Chunk {
    uint32_t index;
    uint32_t offset;
    uint32_t vecs;

    __device__ Chunk(const LlShape& shape, uint32_t chunk_idx) : index(chunk_idx) {
        offset = index * shape.chunk_bytes;
        const uint32_t left = shape.row_bytes - offset;
        vecs = (left < shape.chunk_bytes ? left : shape.chunk_bytes) / sizeof(Vec16);
    }
    // Whether this lane has a part in the warp's access number `turn`, and which.
    __device__ bool holds(uint32_t turn) const { return turn * kWarpSize + lane_idx() < vecs; }
    __device__ uint32_t vec(uint32_t turn) const {
        return offset / sizeof(Vec16) + turn * kWarpSize + lane_idx();
    }
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

    __device__ __forceinline__ void store_to_peer(uint8_t* row, const Chunk& chunk) const {
#pragma unroll
        for (uint32_t i = 0; i < kChunkVecs; ++i) {
            if (chunk.holds(i)) {
                st_relaxed_sys(reinterpret_cast<Vec16*>(row) + chunk.vec(i), vec[i]);
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
                found |= vec[i].word[0] == kMark || vec[i].word[1] == kMark ||
                         vec[i].word[2] == kMark || vec[i].word[3] == kMark;
            }
        }
        return __ballot_sync(kAllLanes, found) != 0;
    }
};

// A row of a bank: where it is, and the flags of its chunks.
struct BankRow {
    uint8_t* data;
    uint64_t* flags;
};

__device__ __forceinline__ BankRow bank_row(const Op& op, uint32_t owner, uint32_t row) {
    return {op.row(owner, row), op.flags(owner, row)};
}

// A warp sends a chunk; `has_mark` is that of the data.
__device__ __forceinline__ void send(const Op& op, const BankRow& to, const Chunk& chunk,
                                     const ChunkData& data, bool has_mark) {
    data.store_to_peer(to.data, chunk);
    if (has_mark) {
        __syncwarp();
        if (lane_idx() == 0) {
            st_release_sys(to.flags + chunk.index, op.packet(0));
        }
    }
}

// A lane waits until the end of a chunk has come from `peer`; the rest is not far then. Cheap,
// where polling for the whole chunk would take bandwidth from those who still work.
__device__ __forceinline__ void wait_for_end(const Op& op, const BankRow& from, const Chunk& chunk,
                                             uint32_t peer) {
    const uint32_t* last = reinterpret_cast<const uint32_t*>(from.data + chunk.offset) +
                           chunk.vecs * (sizeof(Vec16) / sizeof(uint32_t)) - 1;
    const Awaited awaited = op.from(peer, WAIT_ROW);
    wait_until(
        op.common, awaited,
        [&] {
            const uint64_t flag = ld_relaxed_sys(from.flags + chunk.index);
            return ld_relaxed_sys(last) != kMark ? op.packet(0) : flag;
        },
        [&](uint32_t epoch) { return epoch == awaited.epoch; });
}

// Completes what load_arriving of `from` gave, waiting for `peer` as long as something is missing,
// and makes the bank ready for its next use. After a failed wait the data is arbitrary; the group
// is of no use then.
__device__ __forceinline__ void take(const Op& op, const BankRow& from, const Chunk& chunk,
                                     uint32_t peer, ChunkData& data) {
    if (data.has_mark(chunk)) {
        uint32_t polls = 0;
        bool told = false;
        wait_as_warp(op.common, op.from(peer, WAIT_ROW), [&] {
            // The flag matters only for data that contains kMark: seldom, so it is read seldom.
            if (++polls % kPollsPerFlag == 0) {
                const uint64_t flag = ld_acquire_sys(from.flags + chunk.index);
                told = __ballot_sync(kAllLanes, packet_epoch(flag) == op.epoch) == kAllLanes;
            }
            data.load_arriving(from.data, chunk);
            return !data.has_mark(chunk) || told;
        });
        // Epochs come again after 2^32 operations; a flag that was left would speak for other data.
        if (told && lane_idx() == 0) {
            st_relaxed_sys(from.flags + chunk.index, 0);
        }
    }
    ChunkData marks;
    marks.fill(kMark);
    marks.store(from.data, chunk);
}

}  // namespace nccl_ep
