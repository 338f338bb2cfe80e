// Includes the primitives of the machine: ptx.cuh on GPUs, or the header that a CPU build names. Nothing else in cuda/
// knows of that build.
#pragma once

#ifdef NCCL_EP_PRIMITIVE
#include NCCL_EP_PRIMITIVE
#else
#include "ptx.cuh"
#endif
