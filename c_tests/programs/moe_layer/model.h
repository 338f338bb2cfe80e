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
    uint64_t seed = 1;
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

}  // namespace moe
