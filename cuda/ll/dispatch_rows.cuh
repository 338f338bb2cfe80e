// The kinds of rows that a dispatch sends. Kernels are templates over them, so that rows without scales pay nothing for
// the others.
//
// A kind says how a warp fetches a chunk of a source's row, how it sends the chunk, and how a receiver stores it. In
// transit all kinds with scales have the same format.
#pragma once

#include "../base/cast.cuh"
#include "../base/scales.cuh"
#include "scaled_chunk.cuh"

namespace nccl_ep {

// Rows without scales, of any type.
struct PlainRows {
    static constexpr bool kScaled = false;
    using Data = ChunkData;
    using Fetched = ChunkData;

    __device__ Chunk chunk(const LlShape& shape, uint32_t index) const { return {shape, index}; }
    __device__ __forceinline__ void fetch(const LlShape& shape, const uint8_t* rows, uint32_t token,
                                          const Chunk& chunk, Fetched& fetched) const {
        load_const(fetched, rows + row_format(shape).offset(token), chunk);
    }
    // `each_slot(send)` calls `send` with the row's slot at each peer.
    template <typename Op, typename EachSlot>
    __device__ __forceinline__ void send(const Op& op, const Fetched& fetched, const Chunk& chunk,
                                         EachSlot each_slot) const {
        const bool with_sentinel = any_lane(has_sentinel(fetched, chunk));
        each_slot([&](const BankRow<Remote>& to) { nccl_ep::send(op, to, chunk, fetched, with_sentinel); });
    }
    // Where one lane's row of the output is.
    struct Target {
        int32_t row;
        // The target of `lane`. All lanes call it.
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

// What all kinds with scales have in common; kVecs and kScaleVecs are those of ScaledData.
template <uint32_t kVecs, uint32_t kScaleVecs>
struct ScaledKind {
    static constexpr bool kScaled = true;
    using Data = ScaledData<kVecs, kScaleVecs>;
    const ScaledRows& rows;

    __device__ ScaledChunk chunk(const LlShape& shape, uint32_t index) const {
        return {shape, rows, index};
    }
    template <typename Op, typename EachSlot>
    __device__ __forceinline__ static void send_whole(const Op& op, const Data& data,
                                                      const ScaledChunk& chunk,
                                                      EachSlot each_slot) {
        const uint32_t found = data.sentinels(chunk);
        // Only the flags that the receiver checks, as it also clears them.
        uint32_t flags = 0;
        if (any_lane(found != 0)) {
#pragma unroll 1
            for (uint32_t i = 0; i < kVecs; ++i) {
                flags |= any_lane(static_cast<int>(found >> i & 1)) ? 1u << i : 0;
            }
        }
        each_slot([&](const BankRow<Remote>& to) {
            put_to(data, to.data, chunk);
            if (flags != 0) {
                sync_warp();
                if ((flags >> lane_idx() & 1) != 0) {
                    signal(to.flags + chunk.index * kVecs + lane_idx(), op.packet(0));
                }
            }
        });
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
        const auto part_of = [&](uint32_t turn) {
            return ScalePart{rows, rows.out, to.scales, chunk.scale_byte(turn)};
        };
        bool are_slow = false;
        Data::each_scales(data, chunk, [&](const Vec16& scales, uint32_t turn) {
            const ScalePart part = part_of(turn);
            if (part.is_vec_access()) {
                part.store_vec(scales);
            } else {
                are_slow = true;
            }
        });
        if (are_slow) {
            each_slow_turn(chunk, part_of,
                           [&](const ScalePart& part, uint32_t turn) { part.store_elementwise(data.scales_of(turn)); });
        }
    }

   protected:
    // Calls `with` for those of the lane's scales that take more than one access. Not unrolled, as their code is long.
    template <typename PartOf, typename With>
    __device__ __forceinline__ static void each_slow_turn(const ScaledChunk& chunk, PartOf part_of, With with) {
#pragma unroll 1
        for (uint32_t turn = 0; turn < kScaleVecs && chunk.has_scales(turn); ++turn) {
            const ScalePart part = part_of(turn);
            if (!part.is_vec_access()) {
                with(part, turn);
            }
        }
    }
};

// Rows and scales in the caller's tensors.
template <uint32_t kVecs = LL_SCALED_CHUNK_VECS>
struct ForwardedRows : ScaledKind<kVecs, kVecs> {
    using Kind = ScaledKind<kVecs, kVecs>;
    using typename Kind::Data;
    using Kind::rows;

    // Scales that take more than one access are only loaded when they are sent: a branch between the loads of a chunk
    // would make them wait for each other.
    struct Fetched {
        Data data;
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
        if (chunk.has_scales(0) && part.is_vec_access()) {
            fetched.data.scales[0] = part.load_vec();
        }
    }
    __device__ __forceinline__ const Data& as_sent(Fetched& fetched,
                                                   const ScaledChunk& chunk) const {
        bool are_slow = false;
        Data::each_scales(fetched.data, chunk, [&](Vec16& scales, uint32_t turn) {
            const ScalePart part = part_of(fetched.token, chunk, turn);
            if (!part.is_vec_access()) {
                are_slow = true;
            } else if (turn != 0) {
                scales = part.load_vec();
            }
        });
        if (are_slow) {
            Kind::each_slow_turn(chunk, [&](uint32_t turn) { return part_of(fetched.token, chunk, turn); },
                                 [&](const ScalePart& part, uint32_t turn) {
                                     fetched.data.set_scales_of(turn, part.load_elementwise());
                           });
        }
        return fetched.data;
    }
    template <typename Op, typename EachSlot>
    __device__ __forceinline__ void send(const Op& op, Fetched& fetched, const ScaledChunk& chunk,
                                         EachSlot each_slot) const {
        Kind::send_whole(op, as_sent(fetched, chunk), chunk, each_slot);
    }
    __device__ __forceinline__ void write(Fetched& fetched, const ScaledChunk& chunk, uint8_t* to) const {
        nccl_ep::store(as_sent(fetched, chunk), to, chunk);
    }

   private:
    __device__ ScalePart part_of(uint32_t token, const ScaledChunk& chunk, uint32_t turn) const {
        uint8_t* scales = scales_of_row(rows, rows.from, 0, token);
        return {rows, rows.from, scales, chunk.scale_byte(turn)};
    }
};

// Rows with scales in the format of transit, as they come in messages.
struct PackedRows : ScaledKind<LL_SCALED_CHUNK_VECS, LL_SCALED_CHUNK_VECS> {
    using Fetched = Data;

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

// Rows of type `Number`, cast when they are sent, so that the loads of a chunk are in flight together.
template <typename Number, uint32_t kVecs = LL_SCALED_CHUNK_VECS>
struct CastRows : ScaledKind<kVecs, 1> {
    using Kind = ScaledKind<kVecs, 1>;
    using typename Kind::Data;
    using Kind::rows;

    struct Fetched {
        CastInput<Number> part[kVecs];
    };

    __device__ __forceinline__ void fetch(const LlShape&, const uint8_t* from, uint32_t token,
                                          const ScaledChunk& chunk, Fetched& fetched) const {
        constexpr uint32_t kWidth = CastInput<Number>::kBytesPerElement;
        const uint8_t* row = from + uint64_t{token} * rows.payload_bytes * kWidth;
#pragma unroll
        for (uint32_t i = 0; i < kVecs; ++i) {
            if (chunk.has_payload(i)) {
                const auto* at = reinterpret_cast<const Vec16*>(row + chunk.payload_byte(i) * kWidth);
#pragma unroll
                for (uint32_t j = 0; j < CastInput<Number>::kVecs; ++j) {
                    fetched.part[i].vec[j] = ld_const(at + j);
                }
            }
        }
    }

    __device__ __forceinline__ Data as_sent(const Fetched& fetched, const ScaledChunk& chunk) const {
        Data data;
        data.scales[0] = each_turn(fetched, chunk,
                                   [&](uint32_t turn, const Vec16& cast) { data.payload[turn] = cast; });
        return data;
    }
    template <typename Op, typename EachSlot>
    __device__ __forceinline__ void send(const Op& op, const Fetched& fetched,
                                         const ScaledChunk& chunk, EachSlot each_slot) const {
        Kind::send_whole(op, as_sent(fetched, chunk), chunk, each_slot);
    }
    // Writes the chunk to a row in transit format in this rank's memory.
    __device__ __forceinline__ void write(const Fetched& fetched, const ScaledChunk& chunk, uint8_t* to) const {
        nccl_ep::store(as_sent(fetched, chunk), to, chunk);
    }

   private:
    // Casts the chunk, 512 elements per turn, and calls `with(turn, cast)`; returns this lane's access to the chunk's
    // scales. Each lane of a block computes the scale of a different turn, which takes few divisions; where a block has
    // two lanes, each computes two scales. All lanes call it.
    template <typename With>
    __device__ __forceinline__ Vec16 each_turn(const Fetched& fetched, const ScaledChunk& chunk, With with) const {
        static_assert(kVecs <= kMaxBlockLanes);
        const uint32_t lanes = rows.block / kCastElements;  // of a block
        const uint32_t own_turn = lane_idx() & (lanes - 1);
        const uint32_t first_lane = lane_idx() - own_turn;
        const bool are_bytes = rows.form == SCALES_EXPONENT;
        const bool are_small = lanes != kMaxBlockLanes;  // and bytes
        float amax[kVecs];
#pragma unroll
        for (uint32_t i = 0; i < kVecs; ++i) {
            amax[i] = fetched.part[i].block_amax(rows, chunk.has_payload(i));
        }
        const auto scale_of = [&](uint32_t turn) {
            float of_turn = amax[0];
#pragma unroll
            for (uint32_t i = 1; i < kVecs; ++i) {
                of_turn = turn == i ? amax[i] : of_turn;
            }
            return BlockScale(of_turn, rows.form);
        };
        const BlockScale scale = scale_of(own_turn);
        BlockScale second = scale;
        if (are_small) {
            second = scale_of(own_turn + lanes);
        }
        uint32_t word = own_turn * kWarpSize + first_lane < chunk.payload_vecs ? scale.stored : 0;
#pragma unroll
        for (uint32_t i = 0; i < kVecs; ++i) {
            if (i * kWarpSize < chunk.payload_vecs) {
                const uint32_t from = first_lane + (i & (lanes - 1));
                Vec16 cast;
                fetched.part[i].cast_by(shuffle(i < lanes ? scale.factor : second.factor, from), cast);
                with(i, cast);
                if (are_small) {
                    uint32_t stored = shuffle(i < lanes ? scale.stored : second.stored, from);
                    stored = i * kWarpSize + first_lane < chunk.payload_vecs ? stored : 0;
                    stored <<= lane_idx() % kMaxBlockLanes / 2 * 8;
                    stored |= shuffle_xor(stored, 2);
                    stored |= shuffle_xor(stored, 4);
                    word = lane_idx() % kMaxBlockLanes == i ? stored : word;
                }
            }
        }
        // Each of eight lanes gets the scales of a different turn, in four words or one.
        uint32_t first = lane_idx() % kMaxBlockLanes;
        uint32_t apart = kMaxBlockLanes;
        if (are_bytes && !are_small) {
            word <<= lane_idx() / kMaxBlockLanes * 8;  // a turn's four bytes are one word
            word |= shuffle_xor(word, kMaxBlockLanes);
            word |= shuffle_xor(word, 2 * kMaxBlockLanes);
            first = 0;
            apart = 1;
        }
        Vec16 scales;
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i) {
            scales.word[i] = shuffle(word, first + i * apart);
        }
        return scales;
    }
};

}  // namespace nccl_ep
