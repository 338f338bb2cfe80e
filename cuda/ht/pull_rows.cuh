// A combine whose rows need no ring, as the peers map all ranks' inputs (offers.cuh).
//
// A warp takes tokens and handles each part by part: it loads the part of the token's rows on all ranks to shared
// memory, some parts ahead, and sums them. Rows of this rank are loaded like all others. The order of summation is that
// of the path through rings.
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
    const SharedOffers& offers;

    const HtCommon& common = params.common;

    // Where the rows of this rank's tokens begin in the input of `rank`.
    __device__ Remote<uint8_t> rows_at(uint32_t rank) const {
        if (rank != common.peers.rank) {
            return offers.first[rank];
        }
        return Remote<uint8_t>(const_cast<uint8_t*>(params.rows)) +
               uint64_t{common.handle.begins[rank]} * mapped.row_bytes;
    }
};

// Loads the tokens of a warp part by part: a part of the token's rows on all ranks goes to one stage, contiguously.
class Loader {
   public:
    __device__ explicit Loader(const Block& block)
        : tokens_(block.mapped, gridDim.x * block.mapped.warps),
          parts_{warp_idx() * gridDim.x + blockIdx.x, block.mapped.part_bytes, block.mapped.row_bytes},
          next_(parts_.token) {
        prefetch(block);
    }

    // Starts to fill the next stage; returns how many rows the token has.
    __device__ __forceinline__ uint32_t load_next(const Block& block, Pipeline& pipeline) {
        if (parts_.offset == 0) {
            begin_token(block);
        }
        const uint32_t rows = firsts_.count();
        uint8_t* to = pipeline.begin_filling(rows * parts_.bytes());
        pipeline.fill_each(to, firsts_, from_, parts_.offset, parts_.bytes(), block.mapped.part_bytes);
        pipeline.end_filling();
        parts_.advance();
        if (parts_.offset == 0) {
            parts_.token = next_;
        }
        return rows;
    }
    // The token of the next part; past the last token there is nothing left.
    __device__ uint32_t token() const { return parts_.token; }

   private:
    __device__ __forceinline__ void begin_token(const Block& block) {
        const TokenEntries entries(block.common, entry_);
        firsts_ = entries.firsts;
        if (entries.is_first()) {
            from_ = block.rows_at(entries.rank) + uint64_t{entries.entry.index} * block.mapped.row_bytes;
        }
        next_ = tokens_.next(block.mapped);
        prefetch(block);
    }
    // Loads the next token's entry well before it is needed.
    __device__ __forceinline__ void prefetch(const Block& block) {
        entry_ = TokenEntries::load_entry(block.common.handle, next_);
    }

    TokenScheduler<1> tokens_;
    PartCursor parts_;
    uint32_t next_;
    HtEntry entry_;
    LaneMask firsts_;
    // The rows' addresses, in the lanes of `firsts_`.
    Remote<uint8_t> from_;
};

// Sums `rows` parts of `vecs` accesses each, which begin `part_bytes` apart.
template <typename Type>
__device__ __forceinline__ void sum_parts(const uint8_t* parts, uint32_t rows, uint32_t part_bytes, uint32_t vecs,
                                          Vec16* out) {
#pragma unroll 1
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
                    Type::unpack(ld_shared(from + v * kWarpSize), addend);
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
    Loader loader(block);
    // Lane i has the token of stage i, which may be past the last one, and the token's number of rows.
    uint32_t token_of_stage = 0;
    uint32_t rows_of_stage = 0;
    PartCursor parts = {0, mapped.part_bytes, mapped.row_bytes};
    // The loop also fills the first stages, so that this code exists once.
#pragma unroll 1
    for (uint32_t filled = 0;;) {
        if (filled < mapped.stages) {
            ++filled;
        } else {
            parts.token = shuffle(token_of_stage, pipeline.in_use());
            if (parts.token >= handle.tokens) {
                break;
            }
            const uint32_t rows = shuffle(rows_of_stage, pipeline.in_use());
            const uint8_t* full = pipeline.wait_full();
            uint8_t* out = block.params.out + uint64_t{parts.token} * mapped.row_bytes + parts.offset;
            sum_parts<Type>(full, rows, mapped.part_bytes, parts.bytes() / sizeof(Vec16),
                            reinterpret_cast<Vec16*>(out));
            pipeline.settle();
            pipeline.end_using();
            parts.advance();
        }
        const bool is_filled = lane_idx() == pipeline.filling();
        token_of_stage = is_filled ? loader.token() : token_of_stage;
        if (loader.token() < handle.tokens) {
            const uint32_t rows = loader.load_next(block, pipeline);
            rows_of_stage = is_filled ? rows : rows_of_stage;
        }
    }
}

template <typename Type>
__device__ void run(const Block& block, SharedOffers& offers, uint8_t* buffers) {
    const HtMapped& mapped = block.mapped;
    if (warp_idx() < mapped.warps) {
        Pipeline pipeline(buffers + warp_idx() * mapped.stages * mapped.stage_bytes, mapped.stage_bytes,
                          mapped.stages, offers.barriers + warp_idx() * mapped.stages);
        sum_tokens<Type>(block, pipeline);
    }
    finish_direct(block.common, mapped, offers);
    if (blockIdx.x == 0) {
        wait_until_done(block.common, mapped, offers);
    }
}

}  // namespace nccl_ep::ht_pull_impl
