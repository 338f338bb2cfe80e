#include "suites/fuzz/rows.h"

#include <climits>

namespace test_fuzz {
namespace {

using ep::Dice;

constexpr unsigned kPiece = 16;
constexpr unsigned kMostScaleBytes = 8;

// Whether no order of scales has such strides: scales of a row, and rows, lie apart.
bool AreRefused(const Strides& strides, unsigned num_scales, unsigned rows) {
    return rows > 1 && num_scales > 1 && strides[1] != 1 && strides[2] != 1;
}

bool Fit(const Strides& strides, unsigned num_scales, Extents extents, size_t room) {
    const unsigned sizes[] = {extents.experts, extents.rows, num_scales};
    uint64_t last = 0;
    for (size_t i = 0; i < strides.size(); ++i) {
        if (sizes[i] > 0) last += uint64_t{sizes[i] - 1} * strides[i];
    }
    return (last + 1) * kMostScaleBytes <= room;
}

}  // namespace

Row PlainRow(Dice& dice, unsigned most_bytes) {
    static const ncclDataType_t kTypes[] = {ncclBfloat16, ncclFloat16, ncclFloat32};
    const ncclDataType_t datatype = dice.Pick(kTypes);
    const unsigned most = most_bytes / kPiece;
    const unsigned pieces = dice.OneIn(2) ? most : dice.Between(1, most);
    return {ref_format_opaque(datatype, pieces * kPiece / static_cast<unsigned>(ep_datatype_size(datatype))), 0, false};
}

Row ScaledRow(Dice& dice, unsigned most_bytes) {
    static const unsigned kNumbers[] = {0, 1, 2, 1u << 30, 1u << 31, UINT_MAX};
    Row row = {ref_format_draw(dice.Seed(), most_bytes), 0, dice.OneIn(3)};
    row.scale_type = row.format.scale_type;
    if (row.is_wild && dice.OneIn(3)) row.format.num_scales = dice.Pick(kNumbers);
    if (row.is_wild && dice.OneIn(3)) row.scale_type = dice.OneIn(4) ? UINT_MAX : dice.Below(14);
    return row;
}

Strides AnyStrides(Dice& dice, const Row& row, RefOrder order, Extents extents, bool anything, size_t room) {
    const unsigned rows = extents.rows, num_scales = row.format.num_scales;
    Strides usual = {1, 1, 1};
    if (order != kRefDense || dice.OneIn(2)) ref_scale_strides(&row.format, order, rows, usual.data());
    const unsigned values[] = {0,        1,    2,        num_scales - 1, num_scales, num_scales + 1,
                               rows - 1, rows, rows + 1, 1u << 31,       UINT_MAX};
    Strides wild;
    for (unsigned& stride : wild) stride = dice.Pick(values);
    if (!row.is_wild) return usual;
    const bool safe = Fit(wild, num_scales, extents, room) || AreRefused(wild, num_scales, rows);
    if (anything && safe) return wild;
    return Fit(usual, num_scales, extents, room) ? usual : Strides{1, 1, 1};
}

}  // namespace test_fuzz
