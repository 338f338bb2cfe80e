// test_lifecycle: what may be destroyed when, and who frees it: groups, handles, tensors and communicators in the
// orders that programs use, with their own allocation functions, on several communicators, streams and threads. Its
// parts share a trip, which is a group with a handle and the tensors of a round trip, all made by the library.
// Functions of a trip count no checks, so threads may use them: they return what can fail in a test, and any other
// failure ends all processes.
#pragma once

#include "harness/harness.h"

enum { kLocalExperts = 2, kTokens = 5, kTopK = 2, kHidden = 24 };

// Where a group lives.
typedef struct {
    ncclComm_t comm;
    cudaStream_t stream;
    ncclEpAllocFn_t alloc_fn;
    ncclEpFreeFn_t free_fn;
} Place;

Place place_of(const EpEnv* env);

enum { kNumTensors = 7, kNumTensorsOfBoth = 5 };

typedef struct {
    ncclEpAlgorithm_t algorithm;
    int rank;
    int size;
    cudaStream_t stream;
    ncclEpGroup_t group;
    ncclEpHandle_t handle;
    union {
        ncclNDTensor_t all[kNumTensors];
        struct {
            ncclNDTensor_t ids, weights, tokens;                      // [T, K], [T, K], [T, H]
            ncclNDTensor_t received, received_ids, received_weights;  // LL: the first only
            ncclNDTensor_t combined;                                  // [T, H]
        };
    };
} Trip;

// Opens group, tensors and handle, in this order.
Trip open_trip(ncclEpAlgorithm_t algorithm, Place place);

ncclResult_t start_dispatch(Trip* trip);
ncclResult_t start_combine(Trip* trip);
// Dispatches and combines; returns whether every token came back unchanged. May be repeated.
bool make_trip(Trip* trip);
// Waits for the stream and compares.
bool came_back(const Trip* trip);

// Each returns whether every call succeeded. Tensors are destroyed with the given group.
bool destroy_tensors(Trip* trip, ncclEpGroup_t group);
bool close_trip(Trip* trip);
// Checks a last trip and the end.
void finish_trip(Trip* trip);

// Resources of the process. The least that any of several batches adds to its memory; so what is only made once does
// not count.
enum { kBatches = 4 };
int64_t least_growth(void (*batch)(void* context, int rounds), void* context, int rounds);
void check_growth(int64_t growth, int64_t most);
// What NCCL does not give back of a communicator between nodes, of which a group there has one.
int64_t bytes_kept_by_nccl(EpEnv* env);
