// What a program's own kernel needs in the CPU build: included before the kernel and behind the headers of CUDA
// that it uses.
#pragma once

#include <cuda_runtime_api.h>

// The shim has its own.
#undef __device__
#undef __global__
#undef __host__
#undef __forceinline__
#undef __noinline__
#undef __grid_constant__
#undef __launch_bounds__
#undef __align__
#undef __shared__
#include "cuda_cpu.h"
#include "launch.h"

namespace cpu_build {

inline thread_local uint3 block;

// Runs a grid whose blocks need nothing from each other: one at a time, which saves threads.
template <typename Kernel>
void RunGrid(unsigned blocks, unsigned threads, Kernel kernel) {
    for (unsigned index = 0; index < blocks; ++index) {
        simt::Launch({1, threads, 0}, index, [&] {
            block = {index, 0, 0};
            kernel();
        });
    }
}

}  // namespace cpu_build

#undef blockIdx
#define blockIdx cpu_build::block
