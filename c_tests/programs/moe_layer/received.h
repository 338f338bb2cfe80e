// The rows that a dispatch delivers, as bfloat16 or as e4m3 with a float32 scale for every 128 elements: the presence
// of the scales alone asks the library to cast.
#pragma once

#include <optional>
#include <vector>

#include "harness/harness.h"

namespace moe {

// A tensor of the library with its memory; a C++ scope is its lifetime.
class Tensor {
   public:
    Tensor(ncclEpGroup_t group, ncclDataType_t datatype, ncclEpTensorTag_t tag, const std::vector<size_t>& sizes)
        : group_(group), tensor_() {
        unsigned size[3] = {1, 1, 1};
        EP_REQUIRE(!sizes.empty() && sizes.size() <= 3);
        for (size_t i = 0; i < sizes.size(); ++i) size[i] = static_cast<unsigned>(sizes[i]);
        EP_REQUIRE_NCCL(ncclEpTensorCreate(group, &tensor_, static_cast<unsigned>(sizes.size()),
                                           datatype, tag, size[0], size[1], size[2]));
    }
    ~Tensor() { EP_REQUIRE_NCCL(ncclEpTensorDestroy(group_, &tensor_)); }
    Tensor(const Tensor&) = delete;
    Tensor& operator=(const Tensor&) = delete;

    ncclNDTensor_t* get() { return &tensor_; }

    template <typename T>
    void Upload(const std::vector<T>& values) {
        EP_REQUIRE(values.size() * sizeof(T) == ep_tensor_bytes(&tensor_));
        ep_tensor_upload(&tensor_, values.data());
    }

    template <typename T>
    std::vector<T> Download() const {
        std::vector<T> values(ep_tensor_bytes(&tensor_) / sizeof(T));
        ep_tensor_download(&tensor_, values.data());
        return values;
    }

   private:
    ncclEpGroup_t group_;
    ncclNDTensor_t tensor_;
};

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
