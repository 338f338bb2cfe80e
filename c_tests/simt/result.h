// Results of the driver, which are those of the CPU stand-ins that do its work.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

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

}  // namespace simt
