// Ends a program of this folder at the first call of CUDA that fails.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdio>
#include <cstdlib>

inline void check(cudaError_t result, const char* what) {
    if (result != cudaSuccess) {
        std::printf("%s: %s\n", what, cudaGetErrorString(result));
        std::exit(1);
    }
}

// By its number: not every program is linked with the driver.
inline void check(CUresult result, const char* what) {
    if (result != CUDA_SUCCESS) {
        std::printf("%s: %d\n", what, static_cast<int>(result));
        std::exit(1);
    }
}

#define CHECK(call) check((call), #call)
