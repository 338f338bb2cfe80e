// What the parts of the driver share.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include "support.h"

// Of the stand-ins: see hostsim/src/cuda/error.rs and stream.rs.
extern "C" void ncclEpHostsimForgetFailure();
extern "C" cudaError_t ncclEpHostsimWaitForDevice(int minds_captures);

namespace simt {

// Both interfaces number their results alike. A failure here is reported by the result alone, not also
// by the runtime's last error.
inline CUresult Result(cudaError_t error) {
    if (error != cudaSuccess) ncclEpHostsimForgetFailure();
    return static_cast<CUresult>(error);
}

// driver.cpp: ends the process if this thread is in no context. The first thread has called CUDA's runtime, which
// gives it one; others have only what they enter.
void CheckContext();

// driver_vmm.cpp: the mapping that has the byte at `address`; false if none has.
bool FindMapped(CUdeviceptr address, CUdeviceptr* begin, size_t* bytes);

}  // namespace simt
