// Memory that is put together of pieces: see driver_vmm.cpp.
#pragma once

#include <cuda.h>

namespace simt {

// The mapping that has the byte at `address`; false if none has.
bool FindMapped(CUdeviceptr address, CUdeviceptr* begin, size_t* bytes);

}  // namespace simt
