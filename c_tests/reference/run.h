// One handle of either mode with its buffers, and its operations in three steps: prepare the inputs and poison the
// outputs, launch, and, once the device is done, compare all outputs with the reference. Steps of several handles can
// be interleaved at will.
#pragma once

#include "reference/buffer.h"
#include "reference/format.h"
#include "reference/ht.h"
#include "reference/ll.h"
#include "reference/rank_major.h"
#include "reference/zones.h"

__BEGIN_DECLS

// Rows of a high-throughput dispatch's outputs.
typedef enum {
    kHtRowsAsTold,  // ncclEpHandleGetNumRecvTokens
    kHtRowsExact,   // as many as are received
    kHtRowsSpare    // a few more than told
} HtRows;

// Where the creation of a high-throughput handle shall count the received tokens.
typedef enum { kHtNoCounter, kHtDeviceCounter, kHtHostCounter } HtCounter;

// How a handle is made.
typedef struct {
    bool ht;
    HtRows rows;
    HtCounter counter;
    uint64_t seed;
    unsigned alignment;  // high throughput, unless 0: rows lie by expert, and updates route
    unsigned most;       // of these rows, beyond which an update drops others; kRefUnbounded
} RefOpening;
enum { kRefUnbounded = 1 << 30 };
static inline RefOpening ref_opening(bool ht, HtRows rows, HtCounter counter, uint64_t seed) {
    const RefOpening opening = {ht, rows, counter, seed, 0, kRefUnbounded};
    return opening;
}
static inline RefOpening ref_ht_as(HtRows rows, HtCounter counter, uint64_t seed) {
    return ref_opening(true, rows, counter, seed);
}
static inline RefOpening ref_ht_by_expert(unsigned alignment, unsigned most, uint64_t seed) {
    const RefOpening opening = {true, kHtRowsAsTold, kHtNoCounter, seed, alignment, most};
    return opening;
}
static inline RefOpening ref_ht(uint64_t seed) { return ref_ht_as(kHtRowsAsTold, kHtNoCounter, seed); }
static inline RefOpening ref_ll(uint64_t seed) { return ref_opening(false, kHtRowsAsTold, kHtNoCounter, seed); }

// What an operation passes; without effect where its mode has no such thing.
typedef struct {
    bool send_only;  // documented to have no effect in high throughput
    bool cached;     // high throughput: no ids and weights in
    bool counter;    // a device counter among the local tensors, which low latency has unless `without_counter`
    bool backward;   // a combine of high throughput: gradients
    bool no_tokens;   // high throughput: no TOKENS output
    bool no_routing;  // no TOPK_IDX and TOPK_WEIGHTS outputs
} RefPass;
static const RefPass kRefWhole = {false, false, false, false, false, false};
static const RefPass kRefStaged = {true, false, false, false, false, false};
static const RefPass kRefCached = {false, true, false, false, false, false};
static const RefPass kRefCounted = {false, false, true, false, false, false};
static const RefPass kRefBackward = {false, false, false, true, false, false};

typedef struct {
    const EpEnv* env;
    bool ht;
    RefShape shape;
    unsigned local_experts;
    uint64_t seed;            // of the next inputs
    unsigned variation;       // of the next list of tensors
    ncclEpGroup_t group;
    ncclEpGroup_t own_group;  // that, if it ends with the run; NULL if it is the caller's
    ncclEpHandle_t handle;
    RefRouting* now;       // what the ids and weights in device memory are
    RefRouting* sent;      // what they were in the last dispatch; in high throughput when the handle was routed
    RefFormat format;      // of dispatches; opaque rows of the shape unless set otherwise
    RefPass pass;          // of the last dispatch
    uint64_t tokens_seed;  // of the last dispatch
    RefRows results;       // of the experts, for the last combine
    RefBuffer ids, weights, tokens_in, scales_in, tokens_out, scales_out, counter;
    RefBuffer ids_out, weights_out;  // of a rank-major dispatch, or in high throughput
    RefBuffer results_in, combined;

    // Low latency.
    RefLayout layout;  // of what arrives, and of the experts' rows
    bool without_counter;
    bool by_rank;       // dispatches are rank-major from now on; a combine is as its dispatch
    bool sent_by_rank;  // the last one was
    bool as_view;       // rank-major ones leave their rows in a view from now on
    bool in_place;      // the experts write into it, and the combine reads it
    void* view;         // of the last dispatch, until the combine; NULL if it had none
    bool keeps_view;    // its rows are yet to be copied for the check
    bool sent_as_view;  // the last dispatch had one
    RefLlSum sums;      // how the last combine summed; the group's way unless set otherwise

    // High throughput.
    unsigned received;  // rows that this rank receives
    unsigned num_rows;  // of the output tensors
    unsigned columns;   // of the gradients; top_k unless set otherwise
    bool backward;      // whether the last combine had gradients
    unsigned alignment, most;  // as in the opening
    RefZones* zones;     // of every rank, since the last update; NULL before, and where rows are flat
    RefBuffer gradients_in, gradients_out;
} RefRun;

// Takes over `routing`, whose numbers must match the shape. A group of its own if `group` is NULL.
RefRun ref_run_open(const EpEnv* env, ncclEpGroup_t group, const RefShape* shape, RefRouting* routing,
                    RefOpening opening);
// A run with the given style and token counts full or uneven.
RefRun ref_run_open_with(const EpEnv* env, ncclEpGroup_t group, const RefShape* shape, RefStyle style, bool uneven,
                         RefOpening opening);
// Ends the handle and the group of its own, whose result it returns. The buffers stay, as the device may use them.
ncclResult_t ref_run_end_group(RefRun* run);
// Destroys the handle, unless the caller did and set it to NULL, and frees the buffers.
void ref_run_close(RefRun* run);
// Before the declaration of a run: closed at the end of its block.
#define REF_SCOPED __attribute__((cleanup(ref_run_close)))
// Handles of one group, no two with the same data. The group is the first one's, which closes last.
void ref_runs_open(RefRun* runs, unsigned count, const EpEnv* env, const RefShape* shape, RefStyle style, bool uneven,
                   RefOpening first);
void ref_runs_close(RefRun* runs, unsigned count);
// How dispatched rows lie in their tensor.
RefLayout ref_run_layout(const RefRun* run, bool by_rank);

// Dispatches have rows of `format` from now on; combines keep those of the shape.
void ref_run_set_format(RefRun* run, const RefFormat* format);

// Puts other ids and weights for the same token counts into the same device memory; takes them over.
void ref_run_give(RefRun* run, RefRouting* routing);
// The same with drawn ones.
void ref_run_draw(RefRun* run, RefStyle style, uint64_t seed);
// Low latency: masks about one id in `every` of all ranks in place.
void ref_run_mask(RefRun* run, unsigned every);
// Low latency: changes the ids of all ranks in place. A combine draws new weights in any case.
void ref_run_change(RefRun* run, RefChange change);

// Rows by expert: routes the handle by the ids of now and counts the rows of each expert, which the check of the next
// dispatch expects. Only what is expected changes in the other function, before an update is replayed.
void ref_launch_update(RefRun* run, cudaStream_t stream);
void ref_note_update(RefRun* run);

void ref_prepare_dispatch(RefRun* run);
ncclResult_t ref_launch_dispatch(RefRun* run, RefPass pass, cudaStream_t stream);
// Waits for the stream of the environment first, as the other checks do.
bool ref_check_dispatch(RefRun* run);
// Copies the rows of a view for the check, behind the dispatch. Whole ones do so themselves, staged ones at the latest
// when they are checked.
void ref_keep_view(RefRun* run, cudaStream_t stream);

void ref_prepare_combine(RefRun* run);
ncclResult_t ref_launch_combine(RefRun* run, RefPass pass, cudaStream_t stream);
bool ref_check_combine(RefRun* run);

// Both operations' first and last steps.
void ref_prepare(RefRun* run);
bool ref_check(RefRun* run);

// All three steps of an operation, on the stream of the environment; a staged one is completed at once.
void ref_dispatch_as(RefRun* run, RefPass pass);
void ref_combine_as(RefRun* run, RefPass pass);
void ref_dispatch(RefRun* run);
void ref_combine(RefRun* run);
void ref_pair(RefRun* run);  // one of each

// Launches them on that stream, as work for ep_capture; combines of high throughput have gradients.
void ref_play_dispatch(void* run);
void ref_play_combine(void* run);
void ref_play_pair(void* run);

// Overwrites all inputs, as a caller may once they have been sent.
void ref_overwrite_inputs(RefRun* run);

__END_DECLS
