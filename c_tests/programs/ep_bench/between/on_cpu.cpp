// The instruction caches of a CPU are not what is measured.
#include "programs/ep_bench/between/between.h"

namespace ep_bench {

cudaError_t EnqueueCode(cudaStream_t, unsigned) { return cudaSuccess; }

double TakeCodeUs() { return 0; }

}  // namespace ep_bench
