#include "suites/fuzz/rows.h"

#include <climits>

namespace test_fuzz {
namespace {

using ep::Dice;

constexpr unsigned kPiece = 16;
constexpr unsigned kMostScaleBytes = 8;
constexpr auto kE4m3 = static_cast<ncclDataType_t>(10);
const ncclDataType_t kTokenTypes[] = {ncclBfloat16, ncclFloat16, ncclFloat32};

unsigned Width(ncclDataType_t datatype) { return static_cast<unsigned>(ep_datatype_size(datatype)); }

unsigned Ceil(unsigned number, unsigned divisor) { return (number + divisor - 1) / divisor; }

Row ForwardedRow(Dice& dice, unsigned most_bytes) {
    static const ncclDataType_t kScaleTypes[] = {ncclFloat32, ncclUint8, ncclFloat16, ncclInt32};
    const unsigned pieces = most_bytes / kPiece;
    const unsigned of_scales = dice.Between(1, pieces > 2 ? pieces / 2 : 1);
    // A row of one piece has no room for scales, which breaks a rule.
    const unsigned of_row = pieces > of_scales ? dice.Between(1, pieces - of_scales) : 1;
    const auto datatype = static_cast<ncclDataType_t>(dice.Below(12));
    const ncclDataType_t scale_type = dice.Pick(kScaleTypes);
    Row row{datatype, datatype, of_row * kPiece / Width(datatype)};
    row.scales = Scales::kForwarded;
    row.scale_type = scale_type;
    row.num_scales = dice.Between(1, of_scales * kPiece / Width(scale_type));
    return row;
}

Row CastRow(Dice& dice, unsigned most_bytes) {
    static const ncclDataType_t kScaleTypes[] = {ncclFloat32, ncclUint8, ncclInt32, ncclUint32};
    static const ncclDataType_t kReceived[] = {kE4m3, ncclUint8, ncclInt8};
    const unsigned pieces = most_bytes / kPiece;
    Row row{dice.Pick(kTokenTypes), dice.Pick(kReceived), kPiece * dice.Between(1, pieces)};
    const ncclDataType_t scale_type = dice.Pick(kScaleTypes);
    const unsigned block = scale_type != ncclFloat32 && dice.OneIn(2) ? 32 : 128;
    row.scales = Scales::kCast;
    row.scale_type = scale_type;
    const bool is_packed = scale_type == ncclInt32 || scale_type == ncclUint32;
    row.num_scales = Ceil(row.hidden, is_packed ? 4 * block : block);
    return row;
}

Strides PitchedStrides(Dice& dice, const Row& row, unsigned rows) {
    constexpr unsigned kMostSpare = 4;
    const unsigned order = dice.Below(3);
    const unsigned spare = dice.Below(kMostSpare);
    const unsigned between_experts = dice.Below(kMostSpare);
    if (order == 0) return {1, 1, 1};  // as the reference writes a dense tensor
    if (order == 1) {
        const unsigned pitch = row.num_scales + spare;
        return {rows * pitch + between_experts, pitch, 1};
    }
    const unsigned pitch = rows + spare;
    return {row.num_scales * pitch + between_experts, 1, pitch};
}

// Whether no order of scales has such strides: scales of a row, and rows, lie apart.
bool AreRefused(const Strides& strides, const Row& row, unsigned rows) {
    return rows > 1 && row.num_scales > 1 && strides[1] != 1 && strides[2] != 1;
}

bool Fit(const Strides& strides, const Row& row, unsigned experts, unsigned rows, size_t room) {
    const unsigned extents[] = {experts, rows, row.num_scales};
    uint64_t last = 0;
    for (size_t i = 0; i < strides.size(); ++i) {
        if (extents[i] > 0) last += uint64_t{extents[i] - 1} * strides[i];
    }
    return (last + 1) * kMostScaleBytes <= room;
}

}  // namespace

Row PlainRow(Dice& dice, unsigned most_bytes) {
    const ncclDataType_t datatype = dice.Pick(kTokenTypes);
    const unsigned most = most_bytes / kPiece;
    const unsigned pieces = dice.OneIn(2) ? most : dice.Between(1, most);
    return {datatype, datatype, pieces * kPiece / Width(datatype)};
}

Row ScaledRow(Dice& dice, unsigned most_bytes) {
    static const unsigned kNumbers[] = {0, 1, 2, 1u << 30, 1u << 31, UINT_MAX};
    Row row = dice.OneIn(2) ? ForwardedRow(dice, most_bytes) : CastRow(dice, most_bytes);
    row.is_wild = dice.OneIn(3);
    if (row.is_wild && dice.OneIn(3)) row.num_scales = dice.Pick(kNumbers);
    if (row.is_wild && dice.OneIn(3)) row.scale_type = dice.OneIn(4) ? UINT_MAX : dice.Below(14);
    return row;
}

Strides AnyStrides(Dice& dice, const Row& row, unsigned experts, unsigned rows, bool anything, size_t room) {
    const Strides usual = PitchedStrides(dice, row, rows);
    const unsigned values[] = {0,        1,    2,        row.num_scales - 1, row.num_scales, row.num_scales + 1,
                               rows - 1, rows, rows + 1, 1u << 31,           UINT_MAX};
    Strides wild;
    for (unsigned& stride : wild) stride = dice.Pick(values);
    if (!row.is_wild) return usual;
    const bool safe = Fit(wild, row, experts, rows, room) || AreRefused(wild, row, rows);
    if (anything && safe) return wild;
    return Fit(usual, row, experts, rows, room) ? usual : Strides{1, 1, 1};
}

}  // namespace test_fuzz
