// The rows of one operation: plain ones, rows whose scales travel with them, and rows that a dispatch
// casts. Everything here is equal on all ranks that make the same call.
#pragma once

#include <array>
#include <cstddef>

#include "harness/dice.hpp"

namespace test_fuzz {

enum class Scales { kNone, kForwarded, kCast };

struct Row {
    ncclDataType_t datatype;  // as it is sent
    ncclDataType_t received;
    unsigned hidden;
    Scales scales = Scales::kNone;
    unsigned scale_type = 0;  // may be none of NCCL's
    unsigned num_scales = 0;  // may be any number
    bool is_wild = false;     // type, number and strides of the scales may break a rule
};

Row PlainRow(ep::Dice& dice, unsigned most_bytes);
Row ScaledRow(ep::Dice& dice, unsigned most_bytes);

// Strides of scales [experts, rows, scales]: dense ones, or some with a pitch. `anything` says that
// they may also be others; what a call accepts of those fits into `room` bytes.
using Strides = std::array<unsigned, 3>;
Strides AnyStrides(ep::Dice& dice, const Row& row, unsigned experts, unsigned rows, bool anything, size_t room);

}  // namespace test_fuzz
