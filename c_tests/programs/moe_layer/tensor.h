// A tensor of the library with its memory; a C++ scope is its lifetime.
#pragma once

#include <vector>

#include "harness/harness.h"

namespace moe {

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

}  // namespace moe
