// The kernels of a library of kernels, by name: all that cuda/ lists.
#include "params/kernels.h"
#include "kernel.h"

#define DECLARED(name, params, ...) extern "C" void name(nccl_ep::params);
NCCL_EP_KERNELS(DECLARED)

#define LISTED(name, ...) simt::Entry<&(name)>::Named(#name),
extern "C" const simt::Kernel simt_kernels[] = {NCCL_EP_KERNELS(LISTED){}};
