// What the two halves of the test-only NCCL share: a communicator.
#ifndef C_TESTS_FAKE_NCCL_COMM_H_
#define C_TESTS_FAKE_NCCL_COMM_H_

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

#endif  // C_TESTS_FAKE_NCCL_COMM_H_
