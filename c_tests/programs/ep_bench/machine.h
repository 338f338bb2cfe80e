// The machine of a measurement, for the file of --json: without it a time means little later.
#pragma once

#include <string>

#include "harness/base.h"

namespace ep_bench {

struct Machine {
    std::string gpu;          // of process 0; empty on the CPU stand-ins, or if it cannot be found
    std::string driver;       // version of the driver package; empty under the same conditions
    std::string library;      // version of the measured libnccl_ep; empty if it does not say
    int cuda_of_driver = 0;   // the CUDA that the driver supports, 1000 * major + 10 * minor
    int nccl = 0;             // 10000 * major + 100 * minor + patch
    int multiprocessors = 0;  // of the GPU of process 0
};

std::string LibraryVersion();  // of libnccl_ep; empty if it does not say

Machine DescribeMachine(const EpEnv& env);

int CountMultiprocessors(const EpEnv& env);

// Blocks of the largest kernel in a graph: what the library launched, not its limit. 0 if the driver does not say.
unsigned LargestGrid(cudaGraph_t graph);

}  // namespace ep_bench
