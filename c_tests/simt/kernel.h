// A kernel by name: what the library of kernels (kernel_list.cpp) offers for each.
#pragma once

#include <cstddef>

namespace simt {

struct Kernel {
    const char* name;
    std::size_t params_bytes;
    // One thread of the kernel.
    void (*run)(const void* params);
};

// A kernel takes one struct by value.
template <typename Params, void (*kKernel)(Params)>
void RunKernel(const void* params) {
    kKernel(*static_cast<const Params*>(params));
}

template <auto kKernel>
struct Entry;

template <typename Params, void (*kKernel)(Params)>
struct Entry<kKernel> {
    static constexpr Kernel Named(const char* name) { return {name, sizeof(Params), &RunKernel<Params, kKernel>}; }
};

}  // namespace simt
