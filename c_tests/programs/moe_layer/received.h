// The rows that a dispatch delivers, as bfloat16 or as e4m3 with a float32 scale for every 128 elements: the presence
// of the scales alone asks the library to cast.
#pragma once

#include <optional>
#include <vector>

#include "programs/moe_layer/tensor.h"

namespace moe {

class ReceivedRows {
   public:
    // `rows` are the tensor's dimensions in front of `hidden`.
    ReceivedRows(ncclEpGroup_t group, const std::vector<size_t>& rows, size_t hidden, bool fp8);

    // The tensors for a dispatch.
    std::vector<ncclNDTensor_t*> outputs();

    // After the dispatch, before the first row is read.
    void Download();
    std::vector<float> Row(size_t index) const;

   private:
    size_t hidden_;
    Tensor tokens_;
    std::optional<Tensor> scales_;
    std::vector<uint16_t> bf16_rows_;
    std::vector<uint8_t> e4m3_rows_;
    std::vector<float> row_scales_;
};

}  // namespace moe
