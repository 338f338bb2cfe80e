// One high-throughput handle with its buffers, and its operations in three steps: prepare the
// inputs and poison the outputs, launch, and, once the device is done, compare all outputs with the
// reference. Steps of several handles can be interleaved at will.
#pragma once

#include "reference/buffer.h"
#include "reference/format.h"
#include "reference/ht.h"

__BEGIN_DECLS

// Rows of the output tensors.
typedef enum {
    kHtRowsAsTold,  // ncclEpHandleGetNumRecvTokens
    kHtRowsExact,   // as many as are received
    kHtRowsSpare    // a few more than told
} HtRows;

// Where a handle's creation shall count the received tokens.
typedef enum { kHtNoCounter, kHtDeviceCounter, kHtHostCounter } HtCounter;

// What a dispatch passes.
typedef struct {
    bool forward;     // ids and weights in
    bool no_tokens;   // forward: no TOKENS output
    bool no_routing;  // forward: no TOPK_IDX and TOPK_WEIGHTS outputs
    bool counter;     // a device counter among the local tensors
    bool send_only;   // documented to have no effect
} HtPass;

typedef struct {
    const EpEnv* env;
    RefShape shape;
    unsigned local_experts;
    unsigned received;        // rows that this rank receives
    unsigned num_rows;        // of the output tensors
    uint64_t seed;            // of the next inputs
    unsigned variation;       // of the next list of tensors
    HtPass pass;              // of the last dispatch
    bool backward;            // whether the last combine had gradients
    ncclEpGroup_t own_group;  // which ends with the run; NULL if it is the caller's
    ncclEpHandle_t handle;
    RefRouting* routing;   // the handle's
    RefRouting* given;     // ids and weights that dispatches are called with
    RefFormat format;      // of dispatches; opaque rows of the shape unless set otherwise
    uint64_t tokens_seed;  // of the last dispatch
    RefRows results;       // of the experts, for the last combine
    unsigned columns;      // of the gradients; top_k unless set otherwise
    RefBuffer ids, weights, tokens_in;
    RefBuffer scales_in, scales_out;
    RefBuffer tokens_out, ids_out, weights_out, counter;
    RefBuffer results_in, gradients_in, combined, gradients_out;
} HtRun;

// How a handle is made.
typedef struct {
    HtRows rows;
    HtCounter counter;
    uint64_t seed;
} HtOpening;

// Takes over `routing`. The ids that the handle is made from are overwritten at once.
HtRun ht_run_open(const EpEnv* env, ncclEpGroup_t group, const RefShape* shape, RefRouting* routing, HtOpening opening);
// A run with the given style and `most` tokens, on every rank or at most.
HtRun ht_run_open_with(const EpEnv* env, ncclEpGroup_t group, const RefShape* shape, RefStyle style, bool uneven,
                       HtOpening opening);
// The same in a group of its own.
HtRun ht_run_open_alone(const EpEnv* env, const RefShape* shape, RefStyle style, bool uneven, HtOpening opening);
void ht_run_close(HtRun* run);

// Dispatches have rows of `format` from now on; combines keep those of the shape.
void ht_run_set_format(HtRun* run, const RefFormat* format);

// Other ids and weights than the handle's for the dispatches to come; takes them over.
void ht_run_give(HtRun* run, RefRouting* given);

void ht_prepare_dispatch(HtRun* run);
ncclResult_t ht_launch_dispatch(HtRun* run, HtPass pass, cudaStream_t stream);
bool ht_check_dispatch(HtRun* run);

void ht_prepare_combine(HtRun* run);
ncclResult_t ht_launch_combine(HtRun* run, bool backward, cudaStream_t stream);
bool ht_check_combine(HtRun* run);

// Both operations' first and last steps.
void ht_prepare(HtRun* run);
bool ht_check(HtRun* run);

// All three steps of an operation, on the stream of the environment.
void ht_dispatch(HtRun* run, HtPass pass);
void ht_forward(HtRun* run);
void ht_cached(HtRun* run);
void ht_combine(HtRun* run, bool backward);

__END_DECLS
