// The yardstick of moe_layer: a whole layer computed on one rank, without any exchange, and the
// comparison of the exchanged result with it.
//
// How far the two may differ: the layer under test rounds to bf16 where the dense computation keeps
// fp32. One rounding moves a value by at most u = 2^-8 of itself. The roundings are
//   1. the activations inside an expert; these errors are independent of each other and shrink in
//      the sum over ffn terms, so that one expert output moves by less than u of the row's size,
//   2. the output of each expert,
//   3. the weighted sum over the experts of one rank, which the caller forms in high-throughput
//      mode and a library may form in low-latency mode,
//   4. the combined row,
//   5. with --fp8 the tokens on their way: e4m3 moves an element by at most 2^-4 of itself. As in 1.,
//      these errors shrink in the sums, here over hidden terms.
// Each is relative to a sum of weight * |expert output|, which is what the row's size means here:
// the largest element of that sum. The error is then at most (1 + u)^4 - 1 of it, with --fp8
// (1 + 2^-4) (1 + u)^4 - 1.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "programs/moe_layer/model.h"

namespace moe {

struct DenseResult {
    std::vector<float> rows;   // [tokens, hidden]
    std::vector<float> sizes;  // [tokens]: the largest element of sum over k of weight * |output|
};

// One layer of the model in fp32: router, and for each token its top-k experts.
DenseResult DenseForward(const ModelConfig& config, size_t layer, const std::vector<uint16_t>& rows);

// The largest |actual - dense| of any element, relative to the size of its row. A NaN, a row of the
// dense result without size, or a wrong number of rows gives infinity.
double MaxRelativeError(const DenseResult& dense, const std::vector<uint16_t>& actual);

// From the reasoning above.
double MaxRelativeErrorBound(bool fp8);

// Swaps the results of the first and the last token. The comparison must then fail; otherwise it
// could not detect a wrong destination.
void SwapFirstAndLastRow(const ModelConfig& config, std::vector<uint16_t>* rows);

}  // namespace moe
