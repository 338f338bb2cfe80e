// CHECK of cuda_check.h for calls of NCCL, too.
#pragma once

#include <nccl.h>

#include "cuda_check.h"

inline void check(ncclResult_t result, const char* what) {
    if (result != ncclSuccess) {
        std::printf("%s: %s\n", what, ncclGetErrorString(result));
        std::exit(1);
    }
}
