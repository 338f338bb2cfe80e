// Device memory that frees itself. A program of yours has its own, or a framework's.
#pragma once

#include <memory>
#include <vector>

#include "../c/example.h"

template <typename T>
class DeviceArray {
   public:
    explicit DeviceArray(std::size_t count) : count_(count) {
        void* memory = nullptr;
        TRY_CUDA(cudaMalloc(&memory, count * sizeof(T)));
        memory_.reset(static_cast<T*>(memory));
    }
    explicit DeviceArray(const std::vector<T>& host) : DeviceArray(host.size()) { Write(host); }

    T* data() const { return memory_.get(); }
    void Write(const std::vector<T>& host) {
        TRY_CUDA(cudaMemcpy(data(), host.data(), count_ * sizeof(T), cudaMemcpyHostToDevice));
    }
    // Waits for the stream whose work the content comes from.
    std::vector<T> Read(cudaStream_t stream) const {
        std::vector<T> host(count_);
        TRY_CUDA(cudaStreamSynchronize(stream));
        TRY_CUDA(cudaMemcpy(host.data(), data(), count_ * sizeof(T), cudaMemcpyDeviceToHost));
        return host;
    }

   private:
    struct Free {
        void operator()(T* memory) const { cudaFree(memory); }
    };
    std::size_t count_;
    std::unique_ptr<T, Free> memory_;
};
