// The kinds of rows that a dispatch sends. Kernels are templates over them, so that rows without scales pay
// nothing for the others.
//
// A kind says how a warp fetches a chunk from the rows of a source, what it sends of it, and how it stores what
// came. On the way all kinds with scales look the same.
#pragma once

#include "../base/cast.cuh"
#include "../base/scales.cuh"
#include "scaled_chunk.cuh"

namespace nccl_ep {

// Without scales, of any type.
struct PlainRows {
    static constexpr bool kScaled = false;
    using Data = ChunkData;
    using Fetched = ChunkData;

    __device__ Chunk chunk(const LlShape& shape, uint32_t index) const { return {shape, index}; }
    __device__ __forceinline__ void fetch(const LlShape& shape, const uint8_t* rows, uint32_t token,
                                          const Chunk& chunk, Fetched& fetched) const {
        load_const(fetched, rows + row_format(shape).offset(token), chunk);
    }
    // `each_slot` calls what it is given with the chunk's slot at each peer.
    template <typename Op, typename EachSlot>
    __device__ __forceinline__ void send(const Op& op, const Fetched& fetched, const Chunk& chunk,
                                         EachSlot each_slot) const {
        const bool with_sentinel = any_lane(has_sentinel(fetched, chunk));
        each_slot([&](const BankRow<Remote>& to) { nccl_ep::send(op, to, chunk, fetched, with_sentinel); });
    }
    // Where a row of the output is, as one lane knows it.
    struct Target {
        int32_t row;
        // Of the lane. All lanes call it.
        __device__ __forceinline__ Target of(uint32_t lane) const {
            return {shuffle(row, lane)};
        }
    };
    template <typename Layout>
    __device__ __forceinline__ Target target(const LlDispatchParams&, const Layout&, EntryWord, int32_t row) const {
        return {row};
    }
    __device__ __forceinline__ void store(const LlDispatchParams& params, const LlShape& shape,
                                          const Target& to, const Chunk& chunk,
                                          const Data& data) const {
        nccl_ep::store(data, params.out + row_format(shape).offset(to.row), chunk);
    }
};

// What all kinds with scales have in common.
struct ScaledKind {
    static constexpr bool kScaled = true;
    using Data = ScaledData;
    static constexpr uint32_t kVecs = Data::kVecs;
    const ScaledRows& rows;

    __device__ ScaledChunk chunk(const LlShape& shape, uint32_t index) const {
        return {shape, rows, index};
    }
    template <typename Op, typename EachSlot>
    __device__ __forceinline__ static void send_whole(const Op& op, const Data& data,
                                                      const ScaledChunk& chunk,
                                                      EachSlot each_slot) {
        const bool with_sentinel = any_lane(has_sentinel(data, chunk));
        each_slot([&](const BankRow<Remote>& to) { nccl_ep::send(op, to, chunk, data, with_sentinel); });
    }

    struct Target {
        uint8_t* payload;
        uint8_t* scales;
        __device__ __forceinline__ Target of(uint32_t lane) const {
            return {shuffle(payload, lane), shuffle(scales, lane)};
        }
    };
    template <typename Layout>
    __device__ __forceinline__ Target target(const LlDispatchParams& params, const Layout& output, EntryWord entry,
                                             int32_t row) const {
        if (row < 0) {
            return {nullptr, nullptr};
        }
        const uint32_t slot = output.ordinal(row, entry.expert());
        return {params.out + uint64_t(row) * rows.payload_bytes,
                scales_of_row(rows, rows.out, entry.expert(), slot)};
    }
    __device__ __forceinline__ void store(const LlDispatchParams&, const LlShape&, const Target& to,
                                          const ScaledChunk& chunk, const Data& data) const {
#pragma unroll
        for (uint32_t i = 0; i < kVecs; ++i) {
            if (chunk.has_payload(i)) {
                st_row(reinterpret_cast<Vec16*>(to.payload + chunk.payload_byte(i)), data.payload[i]);
            }
        }
        Data::each_scales(data, chunk, [&](const Vec16& scales, uint32_t turn) {
            ScalePart{rows, rows.out, to.scales, chunk.scale_byte(turn)}.store(scales);
        });
    }
};

// Rows and scales as the caller has them.
struct ForwardedRows : ScaledKind {
    // Scales that take more than one access are loaded when they are sent: with a branch between them, the loads of a
    // chunk would wait for each other.
    struct Fetched {
        ScaledData data;
        uint32_t token;
    };

    __device__ __forceinline__ void fetch(const LlShape&, const uint8_t* from, uint32_t token,
                                          const ScaledChunk& chunk, Fetched& fetched) const {
        const uint8_t* payload = from + uint64_t{token} * rows.payload_bytes;
#pragma unroll
        for (uint32_t i = 0; i < kVecs; ++i) {
            if (chunk.has_payload(i)) {
                fetched.data.payload[i] =
                    ld_const(reinterpret_cast<const Vec16*>(payload + chunk.payload_byte(i)));
            }
        }
        fetched.token = token;
        const ScalePart part = part_of(token, chunk, 0);
        if (chunk.has_scales(0) && part.is_one_access()) {
            fetched.data.scales[0] = part.load_at_once();
        }
    }
    __device__ __forceinline__ const Data& as_sent(Fetched& fetched,
                                                   const ScaledChunk& chunk) const {
        Data::each_scales(fetched.data, chunk, [&](Vec16& scales, uint32_t turn) {
            const ScalePart part = part_of(fetched.token, chunk, turn);
            if (turn != 0 || !part.is_one_access()) {
                scales = part.load();
            }
        });
        return fetched.data;
    }
    template <typename Op, typename EachSlot>
    __device__ __forceinline__ void send(const Op& op, Fetched& fetched, const ScaledChunk& chunk,
                                         EachSlot each_slot) const {
        send_whole(op, as_sent(fetched, chunk), chunk, each_slot);
    }

   private:
    __device__ ScalePart part_of(uint32_t token, const ScaledChunk& chunk, uint32_t turn) const {
        uint8_t* scales = scales_of_row(rows, rows.from, 0, token);
        return {rows, rows.from, scales, chunk.scale_byte(turn)};
    }
};

// Rows and scales as they travel, since they came over the network, or go there, too.
struct PackedRows : ScaledKind {
    using Fetched = ScaledData;

    __device__ __forceinline__ void fetch(const LlShape& shape, const uint8_t* from, uint32_t token,
                                          const ScaledChunk& chunk, Fetched& fetched) const {
        load_const(fetched, from + row_format(shape).offset(token), chunk);
    }
    template <typename Op, typename EachSlot>
    __device__ __forceinline__ void send(const Op& op, const Fetched& fetched,
                                         const ScaledChunk& chunk, EachSlot each_slot) const {
        send_whole(op, fetched, chunk, each_slot);
    }
};

// Rows of type `Number`, which are cast when they are sent: the loads are under way together by then.
template <typename Number>
struct CastRows : ScaledKind {
    struct Fetched {
        Uncast<Number> part[kVecs];
    };

    __device__ __forceinline__ void fetch(const LlShape&, const uint8_t* from, uint32_t token,
                                          const ScaledChunk& chunk, Fetched& fetched) const {
        constexpr uint32_t kWidth = Uncast<Number>::kBytesPerElement;
        const uint8_t* row = from + uint64_t{token} * rows.payload_bytes * kWidth;
#pragma unroll
        for (uint32_t i = 0; i < kVecs; ++i) {
            if (chunk.has_payload(i)) {
                const auto* at = reinterpret_cast<const Vec16*>(row + chunk.payload_byte(i) * kWidth);
#pragma unroll
                for (uint32_t j = 0; j < Uncast<Number>::kVecs; ++j) {
                    fetched.part[i].vec[j] = ld_const(at + j);
                }
            }
        }
    }

    __device__ __forceinline__ Data as_sent(const Fetched& fetched, const ScaledChunk& chunk) const {
        Data data;
        data.scales[0] = {{0, 0, 0, 0}};
        each_turn(fetched, chunk, data.scales[0],
                  [&](uint32_t turn, const Vec16& cast) { data.payload[turn] = cast; });
        return data;
    }
    // Stores each access as soon as it is cast, so that the network does not wait for the others.
    template <typename Op, typename EachSlot>
    __device__ __forceinline__ void send(const Op& op, const Fetched& fetched,
                                         const ScaledChunk& chunk, EachSlot each_slot) const {
        bool with_sentinel = false;
        Vec16 scales = {{0, 0, 0, 0}};
        each_turn(fetched, chunk, scales, [&](uint32_t turn, const Vec16& cast) {
            const bool is_there = chunk.has_payload(turn);
            with_sentinel |= is_there && has_sentinel(cast);
            each_slot([&](const BankRow<Remote>& to) {
                if (is_there) {
                    put(as<Vec16>(to.data) + chunk.payload_byte(turn) / sizeof(Vec16), cast);
                }
            });
        });
        with_sentinel |= chunk.has_scales(0) && has_sentinel(scales);
        with_sentinel = any_lane(with_sentinel);
        each_slot([&](const BankRow<Remote>& to) {
            if (chunk.has_scales(0)) {
                const uint32_t at = chunk.payload_bytes + chunk.scale_byte(0);
                put(as<Vec16>(to.data) + at / sizeof(Vec16), scales);
            }
            signal_sentinel(op, to, chunk, with_sentinel);
        });
    }

   private:
    // Casts the chunk, 512 elements in each turn; `with` takes each turn's. All lanes call it.
    template <typename With>
    __device__ __forceinline__ void each_turn(const Fetched& fetched, const ScaledChunk& chunk,
                                              Vec16& scales, With with) const {
        float most[kVecs];
#pragma unroll
        for (uint32_t i = 0; i < kVecs; ++i) {
            most[i] = fetched.part[i].largest_of_block(rows, chunk.has_payload(i));
        }
#pragma unroll
        for (uint32_t i = 0; i < kVecs; ++i) {
            if (i * kWarpSize < chunk.payload_vecs) {
                Vec16 cast;
                const uint32_t stored = fetched.part[i].cast(rows, most[i], cast);
                const uint32_t first_lane = lane_idx() & ~(rows.block / kCastElements - 1);
                const bool has_block = i * kWarpSize + first_lane < chunk.payload_vecs;
                with(i, cast);
                place_scales(i, has_block ? stored : 0, scales);
            }
        }
    }

    // Puts the scales of the 512 elements of turn `turn`, of which each lane has its block's, where they belong in
    // the chunk's scales. All lanes call it.
    __device__ __forceinline__ void place_scales(uint32_t turn, uint32_t stored, Vec16& scales) const {
        if (rows.form == SCALES_EXPONENT && rows.block == 128) {
            // Four bytes: a word of the chunk's only access.
            uint32_t word = stored << lane_idx() / 8 * 8;
            word |= shuffle_xor(word, 8);
            word |= shuffle_xor(word, 16);
            scales.word[turn] = word;
            return;
        }
        uint32_t word = stored;
        if (rows.form == SCALES_EXPONENT) {
            word = stored << lane_idx() % 8 / 2 * 8;
            word |= shuffle_xor(word, 2);
            word |= shuffle_xor(word, 4);
        }
        // A word for every 128 elements: four are the access of lane `turn`.
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i) {
            const uint32_t of_lane = shuffle(word, i * 8);
            scales.word[i] = lane_idx() == turn ? of_lane : scales.word[i];
        }
    }
};

}  // namespace nccl_ep
