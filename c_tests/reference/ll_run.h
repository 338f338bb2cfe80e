// One low-latency handle with its buffers, and its operations in three steps: prepare the inputs
// and poison the outputs, launch, and, once the device is done, compare all outputs with the
// reference. Steps of several handles can be interleaved at will.
#pragma once

#include "reference/buffer.h"
#include "reference/format.h"
#include "reference/ll.h"
#include "reference/rank_major.h"

__BEGIN_DECLS

typedef struct {
    const EpEnv* env;
    RefShape shape;
    unsigned local_experts;
    RefLayout layout;    // of what arrives, and of the experts' rows
    uint64_t seed;       // of the next inputs
    unsigned variation;  // of the next list of tensors
    bool without_counter;
    bool by_rank;             // dispatches are rank-major from now on; a combine is as its dispatch
    bool sent_by_rank;        // the last one was
    bool as_view;             // rank-major ones leave their rows in a view from now on
    bool in_place;            // the experts write into it, and the combine reads it
    void* view;               // of the last dispatch, until the combine; NULL if it had none
    bool keeps_view;          // its rows are yet to be copied for the check
    bool sent_as_view;        // the last dispatch had one
    ncclEpGroup_t own_group;  // which ends with the run; NULL if it is the caller's
    ncclEpHandle_t handle;
    RefRouting* now;       // what the ids and weights in device memory are
    RefRouting* sent;      // what they were in the last dispatch
    RefFormat format;      // of dispatches; opaque rows of the shape unless set otherwise
    uint64_t tokens_seed;  // of the last dispatch
    RefRows results;       // of the experts, for the last combine
    RefLlSum sums;         // how the last combine summed; the group's way unless set otherwise
    RefBuffer ids, weights, tokens_in, scales_in, packed, scales_out, counter;
    RefBuffer ids_out, weights_out;  // of a rank-major dispatch
    RefBuffer results_in, combined;
} LlRun;

// Takes over `routing`, whose numbers must match the shape.
LlRun ll_run_open(const EpEnv* env, ncclEpGroup_t group, const RefShape* shape, RefRouting* routing, uint64_t seed);
// A run with the given style and token counts full or uneven.
LlRun ll_run_open_with(const EpEnv* env, ncclEpGroup_t group, const RefShape* shape, RefStyle style, bool uneven,
                       uint64_t seed);
// The same in a group of its own.
LlRun ll_run_open_alone(const EpEnv* env, const RefShape* shape, RefStyle style, bool uneven, uint64_t seed);
// Destroys the handle, unless the caller did and set it to NULL, and frees the buffers.
void ll_run_close(LlRun* run);

// Dispatches have rows of `format` from now on; combines keep those of the shape.
void ll_run_set_format(LlRun* run, const RefFormat* format);

// Puts another routing of the same token counts into the same device memory; takes it over.
void ll_run_reroute(LlRun* run, RefRouting* routing);
// Masks about one id in `every` of all ranks in place.
void ll_run_mask(LlRun* run, unsigned every);
// Changes the ids of all ranks in place. A combine draws new weights in any case.
void ll_run_change(LlRun* run, RefChange change);

void ll_prepare_dispatch(LlRun* run);
ncclResult_t ll_launch_dispatch(LlRun* run, cudaStream_t stream, bool send_only);
bool ll_check_dispatch(LlRun* run);
// Copies the rows of a view for the check, behind the dispatch. Whole ones do so themselves, staged ones at the latest
// when they are checked.
void ll_keep_view(LlRun* run, cudaStream_t stream);

void ll_prepare_combine(LlRun* run);
ncclResult_t ll_launch_combine(LlRun* run, cudaStream_t stream, bool send_only);
bool ll_check_combine(LlRun* run);

// Both operations' first and last steps.
void ll_prepare(LlRun* run);
bool ll_check(LlRun* run);

// All three steps of a blocking operation, on the stream of the environment.
void ll_dispatch(LlRun* run);
void ll_combine(LlRun* run);

// Overwrites all inputs, as a caller may once they have been sent.
void ll_overwrite_inputs(LlRun* run);

__END_DECLS
