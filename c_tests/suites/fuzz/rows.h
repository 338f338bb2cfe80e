// The rows of one operation: plain ones, rows whose scales travel with them, and rows that a dispatch
// casts. Everything here is equal on all ranks that make the same call.
#pragma once

#include <array>
#include <cstddef>

#include "harness/dice.hpp"
#include "reference/format.h"

namespace test_fuzz {

struct Row {
    RefFormat format;
    unsigned scale_type;  // that of the format, or any number
    bool is_wild;         // type, number and strides of the scales may break a rule
};

Row PlainRow(ep::Dice& dice, unsigned most_bytes);
Row ScaledRow(ep::Dice& dice, unsigned most_bytes);

// Strides of scales [experts, rows, scales]: in that order, or as a dense tensor of the reference has them. `anything`
// says that they may also be others; what a call accepts of those fits into `room` bytes.
using Strides = std::array<unsigned, 3>;
struct Extents {
    unsigned experts, rows;
};
Strides AnyStrides(ep::Dice& dice, const Row& row, RefOrder order, Extents extents, bool anything, size_t room);

}  // namespace test_fuzz
