// CHECK of cuda_check.h for calls of NCCL, too.
#ifndef BENCH_NCCL_CHECK_H_
#define BENCH_NCCL_CHECK_H_

#include <nccl.h>

#include "cuda_check.h"

inline void check(ncclResult_t result, const char* what) {
    if (result != ncclSuccess) {
        std::printf("%s: %s\n", what, ncclGetErrorString(result));
        std::exit(1);
    }
}

#endif  // BENCH_NCCL_CHECK_H_
