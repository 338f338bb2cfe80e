// The kinds of rows that a dispatch into a view sends, and their scales.
//
// Only the payload of a row stays in the view, in chunks like those of a row without scales. Scales travel beside it
// and are copied to the caller's tensor. Each word of scales has a packet of its own, as a cast computes scales word by
// word, in several warps and blocks. The packets are behind all rows of the bank. Their epoch is the operation's, xor
// kSentinel: so memory that holds kSentinel has epoch 0, which no operation has, and packets need no cleaning while the
// bank's rows keep their length (view.cuh).
#pragma once

#include "../base/cast.cuh"
#include "../base/scales.cuh"
#include "view_block.cuh"

namespace nccl_ep::ll_rank_dispatch_view_impl {

// The packets with the scales of a row, in the bank that begins at `bank`.
template <template <typename> class Address>
__device__ __forceinline__ Address<uint64_t> scales_at(const Block& block, Address<uint8_t> bank, uint32_t row) {
    const uint64_t rows = block.op.ranks() * block.shape.max_tokens;
    return as<uint64_t>(bank + rows * block.shape.row_bytes + uint64_t{row} * block.view.scale_bytes);
}
__device__ __forceinline__ Remote<uint64_t> scales_at_peer(const Block& block, uint32_t peer, uint32_t row) {
    return scales_at<Remote>(block, window_of(block.params.banks, peer), row);
}
__device__ __forceinline__ uint32_t scales_epoch(const Op& op) { return op.epoch ^ kSentinel; }
__device__ __forceinline__ uint64_t scales_packet(const Op& op, uint32_t word) {
    return make_packet(scales_epoch(op), word);
}

// Rows without scales, of any type.
struct PlainView {
    static constexpr bool kScaled = false;
    using Fetched = Vec16;
    struct Scales {};

    __device__ __forceinline__ void fetch(const Block& block, uint32_t token, const Chunk& chunk, Fetched& vec) const {
        const uint8_t* row = block.dispatch.tokens + row_format(block.shape).offset(token);
        if (chunk.holds()) {
            vec = ld_const(reinterpret_cast<const Vec16*>(row + chunk.lane_byte()));
        }
    }
    __device__ __forceinline__ Vec16 as_sent(const Fetched& vec, const Chunk&, Scales&) const { return vec; }
};

// Rows with the caller's scales. Each lane of a chunk sends 16 bytes of the scales, as far as there are so many.
struct ForwardedView {
    static constexpr bool kScaled = true;
    const ScaledRows& rows;

    // In place of where a lane's part begins: it has none.
    static constexpr uint32_t kNoScales = ~uint32_t{0};

    struct Scales {
        uint32_t first;
        Vec16 part;

        __device__ __forceinline__ void put(const Block& block, const ForwardedView& view, uint32_t peer,
                                            uint32_t row) const {
            if (first < view.rows.scale_bytes) {
                const Remote<uint64_t> to = scales_at_peer(block, peer, row) + first / sizeof(uint32_t);
#pragma unroll
                for (uint32_t i = 0; i < 4; i += 2) {
                    // Not past the scales: a packet that nobody awaits might arrive after the bank was cleaned.
                    if (first + i * sizeof(uint32_t) < view.rows.scale_bytes) {
                        put_values(to + i, scales_packet(block.op, part.word[i]),
                                   scales_packet(block.op, part.word[i + 1]));
                    }
                }
            }
        }
    };
    struct Fetched {
        Vec16 payload;
        Scales scales;
    };

    __device__ __forceinline__ void fetch(const Block& block, uint32_t token, const Chunk& chunk, Fetched& part) const {
        PlainView{}.fetch(block, token, chunk, part.payload);
        const bool is_chunk = chunk.index < block.shape.chunks;
        part.scales.first = is_chunk ? (lane_idx() * block.shape.chunks + chunk.index) * sizeof(Vec16) : kNoScales;
        if (part.scales.first < rows.scale_bytes) {
            part.scales.part =
                ScalePart{rows, rows.from, scales_of_row(rows, rows.from, 0, token), part.scales.first}.load();
        }
    }
    __device__ __forceinline__ Vec16 as_sent(const Fetched& part, const Chunk&, Scales& scales) const {
        scales = part.scales;
        return part.payload;
    }
};

// Rows of type `Number`, cast when they are sent.
template <typename Number>
struct CastView {
    static constexpr bool kScaled = true;
    using Fetched = CastInput<Number>;
    const ScaledRows& rows;

    // A word of the row's scales, if this lane has computed one.
    struct Scales {
        bool has_word;
        uint32_t number;
        uint32_t word;

        __device__ __forceinline__ void put(const Block& block, const CastView&, uint32_t peer, uint32_t row) const {
            if (has_word) {
                put_value(scales_at_peer(block, peer, row) + number, scales_packet(block.op, word));
            }
        }
    };

    __device__ __forceinline__ void fetch(const Block& block, uint32_t token, const Chunk& chunk, Fetched& part) const {
        constexpr uint32_t kWidth = Fetched::kBytesPerElement;
        const uint64_t at = row_format(block.shape).offset(token) + chunk.lane_byte();
        const auto* from = reinterpret_cast<const Vec16*>(block.dispatch.tokens + at * kWidth);
        if (chunk.holds()) {
#pragma unroll
            for (uint32_t i = 0; i < Fetched::kVecs; ++i) {
                part.vec[i] = ld_const(from + i);
            }
        }
    }
    // All lanes call it.
    __device__ __forceinline__ Vec16 as_sent(const Fetched& part, const Chunk& chunk, Scales& scales) const {
        Vec16 vec;
        const float amax = part.block_amax(rows, chunk.holds());
        const uint32_t stored = part.cast(rows, amax, vec);
        // A word is complete in the first lane of 128 elements, with one scale or four exponent bytes for 32 elements
        // each, or of 512 elements, with four exponent bytes for 128 each.
        const uint32_t first_lane = lane_idx() & ~(rows.block / kCastElements - 1);
        const bool has_block = (chunk.index * kWarpSize + first_lane) * sizeof(Vec16) < chunk.row_bytes;
        uint32_t word = has_block ? stored : 0;
        uint32_t lanes = kMaxBlockLanes;
        if (rows.form == SCALES_EXPONENT) {
            const uint32_t of_block = rows.block / kCastElements;
            lanes = 4 * of_block;
            word <<= lane_idx() % lanes / of_block * 8;
            word |= shuffle_xor(word, of_block);
            word |= shuffle_xor(word, 2 * of_block);
        }
        scales.word = word;
        scales.number = (chunk.index * kWarpSize + lane_idx()) / lanes;
        scales.has_word = lane_idx() % lanes == 0 && scales.number * sizeof(uint32_t) < rows.scale_bytes;
        return vec;
    }
};

// ---- Arriving scales ----------------------------------------------------------------------------

// Stores scales that take more than one access, which is rare. With ScalePart::store the kernel of forwarded rows would
// spill more registers, and dispatch and combine together take 0.1 us longer (2 H200s).
__device__ __noinline__ static void store_scales(const ScaledRows& rows, uint8_t* scales, uint32_t first,
                                                 uint32_t w0, uint32_t w1, uint32_t w2, uint32_t w3) {
    ScalePart{rows, rows.out, scales, first}.store_elementwise({{w0, w1, w2, w3}});
}

// Whether the packets at `at` have come, which have the 16 bytes of scales from byte `first` on; `part` gets the bytes.
__device__ __forceinline__ bool have_come(const Op& op, const ScaledRows& rows, const uint64_t* at, uint32_t first,
                                          Vec16& part) {
    bool has_come = true;
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) {
        const uint64_t packet = ld_relaxed_sys(at + i);
        part.word[i] = packet_data(packet);
        has_come = has_come && (packet_epoch(packet) == scales_epoch(op) ||
                                first + i * sizeof(uint32_t) >= rows.scale_bytes);
    }
    return has_come;
}

// A warp waits for the scales of row `index` from `source` and stores them.
__device__ __forceinline__ void receive_scales_of_row(const Block& block, const ScaledRows& rows, uint32_t source,
                                                      uint32_t index) {
    const Op& op = block.op;
    const uint64_t* from = scales_at<Own>(block, block.view.rows, source * block.shape.max_tokens + index);
    uint8_t* scales = scales_of_row(rows, rows.out, source, index);
#pragma unroll 1
    for (uint32_t first = lane_idx() * sizeof(Vec16); first < rows.scale_bytes; first += kWarpSize * sizeof(Vec16)) {
        Vec16 words;
        await(op, block.shared.late, WAIT_ROW, source,
              [&] { return have_come(op, rows, from + first / sizeof(uint32_t), first, words); });
        const ScalePart part = {rows, rows.out, scales, first};
        if (part.is_vec_access()) {
            part.store_vec(words);
        } else {
            store_scales(rows, scales, first, words.word[0], words.word[1], words.word[2], words.word[3]);
        }
    }
}

}  // namespace nccl_ep::ll_rank_dispatch_view_impl
