// What the two halves of the test-only NCCL share: a communicator.
#pragma once

#include <cuda_runtime.h>
#include <nccl.h>

#include "meeting.h"

// Everything else in this library stays hidden.
#define FAKE_NCCL_EXPORT __attribute__((visibility("default")))

// NCCL orders the operations of a communicator whatever their streams, and so does `last`.
struct ncclComm {
    Meeting meeting;
    int device;
    cudaEvent_t last;       // the end of the operation before
    unsigned char* staged;  // pinned: this rank's bytes, then those of all ranks
    atomic_bool failed;     // an operation ended without its result
    atomic_int waiting;     // operations that the stream has not got through
};
