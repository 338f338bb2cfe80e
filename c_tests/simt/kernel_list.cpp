// The kernels of a library of kernels, by name: those of cuda/ that it has, in a unit that begins with this file.
#include "params/kernels.h"
#include "kernel.h"

#define DECLARED(name, params, ...) extern "C" __attribute__((weak)) void name(nccl_ep::params);
NCCL_EP_KERNELS(DECLARED)

#define LISTED(name, ...) simt::Entry<&(name)>::Named(&(name) == nullptr ? "" : #name),
extern "C" const simt::Kernel simt_kernels[] = {NCCL_EP_KERNELS(LISTED){}};
