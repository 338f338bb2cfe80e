// The rows that a dispatch delivers; see received.h.

#include "programs/moe_layer/received.h"

#include <cmath>

#include "programs/moe_layer/model.h"

namespace moe {
namespace {

constexpr auto kE4m3 = static_cast<ncclDataType_t>(10);
constexpr size_t kBlock = 128;

size_t NumScales(size_t hidden) { return (hidden + kBlock - 1) / kBlock; }

std::vector<size_t> WithColumns(std::vector<size_t> rows, size_t columns) {
    rows.push_back(columns);
    return rows;
}

// A sign, 4 bits of exponent with bias 7, 3 bits of mantissa.
float FromE4m3(uint8_t bits) {
    const int exponent = bits >> 3 & 0xf;
    const int mantissa = bits & 7;
    if ((bits & 0x7f) == 0x7f) return NAN;
    const float magnitude = exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -9)
                                          : std::ldexp(static_cast<float>(8 + mantissa), exponent - 10);
    return (bits & 0x80) != 0 ? -magnitude : magnitude;
}

}  // namespace

ReceivedRows::ReceivedRows(ncclEpGroup_t group, const std::vector<size_t>& rows, size_t hidden, bool fp8)
    : hidden_(hidden),
      tokens_(group, fp8 ? kE4m3 : ncclBfloat16, NCCL_EP_TENSOR_TAG_TOKENS, WithColumns(rows, hidden)) {
    if (fp8) {
        scales_.emplace(group, ncclFloat32, NCCL_EP_TENSOR_TAG_SCALES, WithColumns(rows, NumScales(hidden)));
    }
}

std::vector<ncclNDTensor_t*> ReceivedRows::outputs() {
    if (!scales_) return {tokens_.get()};
    return {tokens_.get(), scales_->get()};
}

void ReceivedRows::Download() {
    if (!scales_) {
        bf16_rows_ = tokens_.Download<uint16_t>();
        return;
    }
    e4m3_rows_ = tokens_.Download<uint8_t>();
    row_scales_ = scales_->Download<float>();
}

std::vector<float> ReceivedRows::Row(size_t index) const {
    if (!scales_) return ToFloat(&bf16_rows_[index * hidden_], hidden_);
    std::vector<float> row(hidden_);
    for (size_t i = 0; i < hidden_; ++i) {
        const float scale = row_scales_[index * NumScales(hidden_) + i / kBlock];
        row[i] = FromE4m3(e4m3_rows_[index * hidden_ + i]) * scale;
    }
    return row;
}

}  // namespace moe
