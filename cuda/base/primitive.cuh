// What kernels need of the machine that they run on: a GPU's, or those of the header that a build for another
// machine names. Nothing else in cuda/ knows of such a build.
#pragma once

#ifdef NCCL_EP_PRIMITIVE
#include NCCL_EP_PRIMITIVE
#else
#include "ptx.cuh"
#endif
