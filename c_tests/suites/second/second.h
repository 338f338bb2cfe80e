// What the tests of the later interface share (include/nccl_ep_2): structs of any generation, tensors over buffers,
// groups and handles.
#pragma once

#include <nccl_ep.h>

#include "harness/base.h"
#include "reference/buffer.h"
#include "reference/routing.h"
#include "reference/rows.h"

// Programs of three generations, and of one that is yet to come.
typedef enum { kGeneration5, kLaterGeneration, kGeneration4, kGeneration3, kNumGenerations } Generation;

// The structs that have grown.
typedef enum { kGroupConfig, kLayoutInfo, kDispatchConfig, kCombineInputs, kCombineConfig } Grown;
// A copy of a struct as a program of `generation` has it: shorter, or longer with garbage behind. It lies at the end of
// its memory; the caller frees it.
void* old_struct(Grown kind, const void* now, Generation generation);

// A tensor whose extents are in the view itself.
typedef struct {
    ncclEpTensor_t tensor;
    size_t sizes[3];
} View;
// Extents of 0 end the list, but for the first.
void view_of(View* view, void* data, ncclDataType_t datatype, size_t size0, size_t size1, size_t size2);
// From here on views have no address, but a window each, which only the stand-ins make without the other ranks: false
// if there are none. Until the end, which deregisters them.
bool views_into_windows(const EpEnv* env);
void views_end_windows(const EpEnv* env);

// How rows lie: LL expert-major and rank-major, HT flat and expert-major.
typedef enum { kLlExperts, kLlRanks, kHtFlat, kHtZones } Kind;

// An operation's mode, sizes and routing.
typedef struct {
    unsigned local_experts, max_tokens, top_k;
    ncclDataType_t datatype;
    unsigned hidden;
    RefStyle style;
    bool uneven;
    Kind kind;
    unsigned recv_rows;  // HT: the group's bound; 0 for none
    unsigned alignment;  // of zones
    bool no_offsets;     // nor are these told
    bool drops;          // HT: what is beyond the bound
    Generation generation;
    bool updated;       // the handle is made in two steps
    bool send_only;     // in two phases, without effect in HT
    bool narrow_ids;    // 32 bits
    bool global_ids;    // received ones
    bool scaled;        // rows have scales, which are forwarded
    bool in_memory;     // handles lie in the caller's
} Case;

// Small ones.
extern const Case kSmallLl, kSmallHt;
bool is_ll(const Case* test);

ncclEpGroupConfig_t config_of(const EpEnv* env, const Case* test);
ncclEpGroup_t group_of(const EpEnv* env, const Case* test);
ncclEpLayout_t layout_of(const Case* test);
ncclEpHandleConfig_t handle_config_of(const Case* test);
// Whether handles may lie in memory of callers, and updates be captured: on one node.
bool ranks_share_a_node(void);

// One check of a refused call: its result, and words of the line that the library logs.
#define CHECK_REFUSED(call, expected, words) \
    (EP_REACHED, check_refused(EP_HERE(#call), (call), (expected), (words)))
void check_refused(EpSite site, ncclResult_t actual, ncclResult_t expected, const char* words);
// Skips lines that no check reads.
void forget_lines(void);
// Whether there are some; then they are skipped.
bool has_new_lines(void);

enum { kPathBytes = 32 };

// Creates a file in memory and writes its path to `name`; returns its descriptor, with which it ends.
int make_file(char name[kPathBytes]);
