// What the tests of the later interface share (include/nccl_ep_2): structs of any generation, tensors over buffers,
// groups.
#pragma once

#include <nccl_ep.h>

#include "harness/base.h"
#include "reference/buffer.h"
#include "reference/routing.h"
#include "reference/rows.h"

// Programs of three generations, and of one that is yet to come.
typedef enum { kGeneration3, kGeneration4, kGeneration5, kLaterGeneration, kNumGenerations } Generation;

// A copy of a struct as a program of `generation` has it: shorter, or longer with garbage behind. It lies at the end of
// its memory, which `old_free` frees.
void* old_group_config(const ncclEpGroupConfig_t* config, Generation generation);
void* old_layout_info(const ncclEpLayoutInfo_t* info, Generation generation);
void* old_dispatch_config(const ncclEpDispatchConfig_t* config, Generation generation);
void* old_combine_inputs(const ncclEpCombineInputs_t* inputs, Generation generation);
void* old_combine_config(const ncclEpCombineConfig_t* config, Generation generation);
void old_free(void* copy);

// A tensor whose extents are in the view itself.
typedef struct {
    ncclEpTensor_t tensor;
    size_t sizes[3];
} View;
// Extents of 0 end the list, but for the first.
void view_of(View* view, void* data, ncclDataType_t datatype, size_t size0, size_t size1, size_t size2);
// Overwrites a view: nothing may be read after a call.
void view_scrap(View* view);
// From here on views have no address, but a window each, which only the stand-ins make without the other ranks: false
// if there are none. Until the end, which deregisters them.
bool views_into_windows(const EpEnv* env);
void views_end_windows(const EpEnv* env);

// An operation's mode, sizes and routing.
typedef struct {
    ncclEpAlgorithm_t algorithm;
    unsigned local_experts, max_tokens, top_k;
    ncclDataType_t datatype;
    unsigned hidden;
    RefStyle style;
    bool uneven;
    unsigned recv_rows;  // HT: the group's bound; 0 for none
    Generation generation;
    bool updated;    // the handle is made in two steps
    bool send_only;  // LL: in two phases
    RefBuffer* memory;  // gets the handle's memory; NULL: it is the library's
    bool narrow_ids;    // 32 bits
    bool global_ids;    // received ones
    bool by_rank;       // LL: rank-major
    unsigned alignment; // HT: of zones; 0: rows are flat
    bool drops;         // HT: what is beyond the bound
    bool scaled;        // rows have scales, which are forwarded
} Case;

// What a rank gives to the operations of a case, in either mode, and where its sums come.
typedef struct {
    const EpEnv* env;
    const Case* test;
    RefRouting* routing;
    RefRows tokens, results, scales;
    unsigned rank, num_tokens;
    size_t row_bytes;
    RefBuffer ids, weights, tokens_in, combined, scales_in;
} Inputs;
void inputs_open(Inputs* in, const EpEnv* env, const Case* test, uint64_t seed);
void inputs_close(Inputs* in);
// Other ids and weights for the same tokens, in place.
void inputs_renew(Inputs* in, uint64_t seed);
// Elements of a row's scales; they are bfloat16.
enum { kScales = 8 };
// Bytes of the scales of so many rows, if the case has some.
size_t scale_bytes(const Case* test, size_t rows);
// With scales: their views among the inputs and the outputs of a dispatch, whose leading extents are those of the
// received rows, and the recipe.
typedef struct {
    View in, out;
} ScaleViews;
void set_scales(ScaleViews* views, const Inputs* in, const RefBuffer* out, const View* rows,
                ncclEpDispatchInputs_t* inputs, ncclEpDispatchOutputs_t* outputs, ncclEpDispatchConfig_t* config);
// A view of the ids, and how the caller changes them afterwards.
void view_of_ids(View* view, const Inputs* in);
void scrap_ids(const Inputs* in);
// LL: rows that an expert has room for.
unsigned capacity_of(const EpEnv* env, const Case* test);

RefShape shape_of(const EpEnv* env, const Case* test);
ncclEpGroupConfig_t config_of(const EpEnv* env, const Case* test);
ncclEpGroup_t group_of(const EpEnv* env, const Case* test);
// Whether handles may lie in memory of callers, and updates be captured: on one node.
bool ranks_share_a_node(void);
// A handle without a routing, in memory that has `bytes`, or new memory.
ncclEpHandle_t handle_in_memory(ncclEpGroup_t group, const Case* test, const void* bytes);
// The same, or in memory of the library's, as the case says.
ncclEpHandle_t handle_without_routing(ncclEpGroup_t group, const Case* test);
// A handle for these ids, as the case says.
ncclEpHandle_t handle_of(ncclEpGroup_t group, const Case* test, const View* ids,
                         const ncclEpLayoutInfo_t* info, cudaStream_t stream);

// One check of a refused call: its result, and words of the line that the library logs.
#define CHECK_REFUSED(call, expected, words) \
    (EP_REACHED, check_refused(EP_HERE(#call), (call), (expected), (words)))
void check_refused(EpSite site, ncclResult_t actual, ncclResult_t expected, const char* words);

// Small ones.
extern const Case kSmallLl, kSmallHt;
