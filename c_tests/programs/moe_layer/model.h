// The model of moe_layer: embedding, router and experts.
//
// Plain arithmetic on host memory; knows nothing of ranks and nothing of the library under test. Rows of tokens travel
// as bf16 bit patterns (uint16_t), row-major [tokens, hidden]; all sums are in fp32.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace moe {

struct ModelConfig {
    size_t hidden = 256;
    size_t ffn = 512;
    size_t num_experts = 0;  // 0: not yet decided
    size_t top_k = 4;
    size_t num_layers = 2;
    size_t seed = 1;
};

// Which experts each token goes to and how much each of them counts, row-major [tokens, top_k].
// The experts of one token are distinct; its weights add up to one.
struct Routing {
    std::vector<int64_t> expert_ids;
    std::vector<float> weights;
};

// What an expert rounds to bf16.
enum class Precision {
    kFp32,  // nothing
    kBf16,  // the activations between the two matrices and the outputs, as a bf16 layer does
};

std::vector<float> ToFloat(const uint16_t* row, size_t count);

// Rows for tokens that stand at first_position, first_position + 1, ... of the text.
std::vector<uint16_t> Embed(const ModelConfig& config, const std::vector<uint64_t>& tokens, size_t first_position);

// A linear layer hidden -> experts, softmax, top-k, weights renormalised over the selected k.
class Router {
   public:
    Router(const ModelConfig& config, size_t layer);
    Routing Route(const std::vector<uint16_t>& rows) const;

   private:
    std::vector<float> Probabilities(const std::vector<float>& x) const;

    ModelConfig config_;
    std::vector<float> matrix_;  // [num_experts, hidden]
};

// A two-matrix feed-forward network, y = W2 * silu(W1 * x). Its parameters depend on the layer and
// on the expert's global id only, so that any rank can build any expert.
class Expert {
   public:
    Expert(const ModelConfig& config, size_t layer, size_t expert_id);

    // x and the result have hidden elements; every element of x is a bf16 value.
    std::vector<float> Forward(const std::vector<float>& x, Precision precision) const;

   private:
    ModelConfig config_;
    std::vector<float> w1_;  // [ffn, hidden]
    std::vector<float> w2_;  // [hidden, ffn]
};

// The input of the next layer: rms_norm(input + output of this layer), rounded to bf16.
std::vector<uint16_t> NextLayerInput(const ModelConfig& config, const std::vector<uint16_t>& input,
                                     const std::vector<uint16_t>& output);

// ---- The yardstick: a whole layer computed on one rank, without any exchange -------------------

struct DenseResult {
    std::vector<float> rows;   // [tokens, hidden]
    std::vector<float> sizes;  // [tokens]: the largest element of sum over k of weight * |output|
};

// One layer of the model in fp32: router, and for each token its top-k experts.
DenseResult DenseForward(const ModelConfig& config, size_t layer, const std::vector<uint16_t>& rows);

// The largest |actual - dense| of any element, relative to the size of its row. A NaN, a row of the
// dense result without size, or a wrong number of rows gives infinity.
double MaxRelativeError(const DenseResult& dense, const std::vector<uint16_t>& actual);

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
double MaxRelativeErrorBound(bool fp8);

// Swaps the results of the first and the last token. The comparison must then fail; otherwise it
// could not detect a wrong destination.
void SwapFirstAndLastRow(const ModelConfig& config, std::vector<uint16_t>* rows);

}  // namespace moe
