// A combine whose rows need no ring, as the rows of all ranks' experts lie in tensors that the peers map (offers.cuh).
//
// Every warp takes a part of a token: it loads that part of the rows of all ranks that have the token from there to
// shared memory, some parts ahead, and sums them. Rows of the own rank are loaded like any others. The order of the
// sum is that of the way through rings.
#pragma once

#include "entries.cuh"
#include "offers.cuh"
#include "pipeline.cuh"
#include "sum.cuh"

namespace nccl_ep::ht_pull_impl {

using namespace ht_combine_impl;

struct Block {
    const HtCombineParams& params;
    const HtMapped& mapped;
    const Agreed& agreed;

    const HtCommon& common = params.common;

    // Where the rows of this rank's tokens that `rank` has begin.
    __device__ Remote<uint8_t> rows_at(uint32_t rank) const {
        if (rank != common.peers.rank) {
            return agreed.first[rank];
        }
        return Remote<uint8_t>(const_cast<uint8_t*>(params.rows)) +
               uint64_t{common.handle.begins[rank]} * mapped.row_bytes;
    }
};

// Loads a part of the rows of a token, one behind the other; returns how many there are.
__device__ __forceinline__ uint32_t load_parts(const Block& block, const Parts& parts, const HtEntry& entry,
                                               Pipeline& pipeline) {
    const TokenEntries entries(block.common, entry);
    Remote<uint8_t> from;
    if (entries.is_first()) {
        from = block.rows_at(entries.rank) + uint64_t{entries.entry.index} * block.mapped.row_bytes;
    }
    const uint32_t rows = entries.firsts.count();
    uint8_t* to = pipeline.begin_filling(rows * parts.bytes());
    for (LaneMask left = entries.firsts; left.any(); left.drop_first()) {
        pipeline.fill(to, remote_of_lane(from, left.first()) + parts.offset, parts.bytes());
        to += block.mapped.part_bytes;
    }
    pipeline.end_filling();
    return rows;
}

// Sums `rows` rows of `vecs` accesses each; one begins `part_bytes` behind the other.
template <typename Type>
__device__ __forceinline__ void sum_parts(const uint8_t* parts, uint32_t rows, uint32_t part_bytes, uint32_t vecs,
                                          Vec16* out) {
    for (uint32_t first = 0; first < vecs; first += kVecs * kWarpSize) {
        float sum[kVecs][Type::kPerVec] = {};
        const uint8_t* row = parts;
#pragma unroll 1
        for (uint32_t i = 0; i < rows; ++i, row += part_bytes) {
            const Vec16* from = reinterpret_cast<const Vec16*>(row) + first + lane_idx();
#pragma unroll
            for (uint32_t v = 0; v < kVecs; ++v) {
                if (first + v * kWarpSize + lane_idx() < vecs) {
                    float addend[Type::kPerVec];
                    Type::unpack(from[v * kWarpSize], addend);
#pragma unroll
                    for (uint32_t j = 0; j < Type::kPerVec; ++j) {
                        sum[v][j] += addend[j];
                    }
                }
            }
        }
        store_sum<Type>(sum, first, vecs, out);
    }
}

template <typename Type>
__device__ void sum_tokens(const Block& block, Pipeline& pipeline) {
    const HtMapped& mapped = block.mapped;
    const HtHandleMemory& handle = block.common.handle;
    Parts parts = {warp_idx() * gridDim.x + blockIdx.x, gridDim.x * mapped.warps, mapped.part_bytes,
                   mapped.row_bytes};
    Parts loading = parts;
    HtEntry entry = TokenEntries::load_entry(handle, loading.token);
    // Of each stage, in its lane: rows that it has.
    uint32_t rows_of_stage = 0;
    const auto load_next = [&] {
        if (loading.token < handle.tokens) {
            const uint32_t stage = pipeline.filling();
            const uint32_t rows = load_parts(block, loading, entry, pipeline);
            rows_of_stage = lane_idx() == stage ? rows : rows_of_stage;
        }
        loading.advance();
        // Well before it is needed.
        entry = TokenEntries::load_entry(handle, loading.token);
    };
    for (uint32_t i = 0; i < mapped.stages; ++i) {
        load_next();
    }
    for (; parts.token < handle.tokens; parts.advance()) {
        const uint32_t rows = shuffle(rows_of_stage, pipeline.in_use());
        const uint8_t* full = pipeline.wait_full();
        uint8_t* out = block.params.out + uint64_t{parts.token} * mapped.row_bytes + parts.offset;
        sum_parts<Type>(full, rows, mapped.part_bytes, parts.bytes() / sizeof(Vec16),
                        reinterpret_cast<Vec16*>(out));
        pipeline.settle();
        pipeline.end_using();
        load_next();
    }
}

template <typename Type>
__device__ void run(const Block& block, Agreed& agreed, uint8_t* buffers) {
    const HtMapped& mapped = block.mapped;
    if (warp_idx() < mapped.warps) {
        Pipeline pipeline(buffers + warp_idx() * mapped.stages * mapped.stage_bytes, mapped.stage_bytes,
                          mapped.stages, agreed.barriers + warp_idx() * mapped.stages);
        sum_tokens<Type>(block, pipeline);
    }
    finish_straight(block.common, mapped, agreed);
    if (blockIdx.x == 0) {
        wait_until_done(block.common, mapped, agreed);
    }
}

}  // namespace nccl_ep::ht_pull_impl
