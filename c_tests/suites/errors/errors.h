// The check of one refusal, and a session: an open group with a handle, buffers and valid tensors for every call. A
// test breaks one of them at a time. Every string that names a refusal is the id of a row of docs/errors.md.
#pragma once

#include "harness/harness.h"

// ---- One refusal -------------------------------------------------------------------------------

// Checks that a call is refused as the row `id` of docs/errors.md says: with its result and its whole text. Where these
// vary, a printf format says how, in this order: the name of another function than the row's, and a colon; a {value}
// for each {part} of the row; what stands in parentheses, otherwise the row's example if that says what it got. Parts
// without a value may be anything, and so may each '*'.
#define EP_REFUSED(id, call) EP_REFUSED_AS(id, call, "%s", "")
#define EP_REFUSED_AS(id, call, ...) EP_FAILED(id, call, ncclSuccess, __VA_ARGS__)
// The same for a row whose result is that of an earlier failure: `own`.
#define EP_FAILED(id, call, own, ...) \
    (EP_REACHED, forget_last_error(), check_refused(EP_HERE(id), (call), (own), __VA_ARGS__))
// The same where the whole text is not everywhere the row's.
#define EP_TEXT(id, call, ...) (EP_REACHED, forget_last_error(), check_text(EP_HERE(id), (call), __VA_ARGS__))

__attribute__((format(printf, 4, 5))) bool check_refused(EpSite site, ncclResult_t actual, ncclResult_t own,
                                                         const char* format, ...);
__attribute__((format(printf, 3, 4))) bool check_text(EpSite site, ncclResult_t actual, const char* format, ...);
enum { kMostText = 4096 };
// Writes the whole text of a refusal; returns what is behind the function's name.
const char* write_refusal(const char* id, const char* given, char text[kMostText]);
// Replaces the last text, so that a check never sees that of an earlier refusal.
void forget_last_error(void);
// Whether `text` as a whole matches `pattern`.
bool fits(const char* text, const char* pattern);

// With fewer than `ranks` ranks: counts the ids as skipped and returns false.
bool enough_ranks(const EpEnv* env, int ranks, const char* ids);

// Sets NCCL_EP_TIMEOUT_MS for groups created from now on; 0 is the default.
void set_timeout_ms(unsigned milliseconds);

// An exchange that lacks a rank stays open on its communicator and stream, so such a case has its own. It aborts the
// communicator, as NCCL requires after a lost rank, before it closes the rest.
EpEnv open_own(const EpEnv* env);
void close_own(const EpEnv* own);

// ---- A session ---------------------------------------------------------------------------------

enum {
    kLocalExperts = 2,
    kTokens = 4,
    kMaxTokens = 6,
    kTopK = 2,
    kHidden = 16,
    kTokenBytes = 64,  // of the group: twice a row of kHidden bfloat16
    kBytesOfRow = 2 * kHidden,
    kScales = 3,  // of a row: 12 bytes, not a multiple of 16
    kShortTimeoutMs = 500,
    kNumOutputs = 7,
};

typedef struct {
    const EpEnv* env;
    ncclEpAlgorithm_t algorithm;
    ncclEpGroup_t group;
    ncclEpHandle_t handle;
    void *ids, *tokens, *weights, *scales;  // [T, K], [T, H], [T, K], [T, S]
    union {
        void* outputs[kNumOutputs];
        struct {
            void *received, *received_ids, *received_weights;  // LL: [L, R*M, H]; HT: [R*M, H], [R*M, K]
            void* received_scales;                             // [L, R*M, S] or [R*M, S]
            void* counter;                                     // [L], or [R]
            void *combined, *gradients;                        // [T, H], [T, K]
        };
    };
} Session;

// The odd rank is the last one; rank 0 is not special.
int odd_rank(const EpEnv* env);
bool is_odd(const EpEnv* env);


Session open_session(const EpEnv* env, ncclEpAlgorithm_t algorithm);
Session open_ll_session(const EpEnv* env);
Session open_ht_session(const EpEnv* env);
// The same with this NCCL_EP_TIMEOUT_MS for its first group alone.
Session open_timed_session(const EpEnv* env, ncclEpAlgorithm_t algorithm, unsigned timeout_ms);
void close_session(Session* session);
// The same for a session that must work to its end.
void finish_session(Session* session);
// Cases with a `session`.
#define LL_SESSION_TEST(name) EP_TEST_WITH(EP_TEST, name, Session, session, open_ll_session, finish_session)
#define HT_SESSION_TEST(name) EP_TEST_WITH(EP_TEST_HT, name, Session, session, open_ht_session, finish_session)
// Replaces the group or the handle.
ncclResult_t open_group(Session* session);
ncclResult_t open_handle(Session* session);
// As open_group, high throughput, without a bound on the tokens of a rank.
ncclResult_t open_auto_group(Session* session);
ncclEpGroupConfig_t session_config(const Session* session);
unsigned max_recv_rows(const Session* session);
size_t bytes_of_output(const Session* session, unsigned index);

// A dispatch and a combine with correct results: the group still works.
void check_works(const Session* session);
// The latter: the last combine has returned the tokens, and the group has not failed.
void check_combined(const Session* session);

// The state of the group as soon as it has failed, or after `limit` seconds.
ncclResult_t wait_for_failure(const Session* session, double limit);
// Whether another rank reported the failure to this one.
bool was_told(void);
// Collective: whether `here` is true anywhere.
bool on_some_rank(bool here);
// Waits until the group has failed in `operation`, waiting for what `awaited` names (both are patterns). It fails by
// this rank's own deadline, whose text also names the `last` operation, or because a rank whose deadline passed earlier
// reported it. Returns whether it was the own deadline.
bool check_misses_odd_rank(const Session* session, double limit, const char* operation,
                           const char* awaited, const char* last);

// Replaces the failed group and its handle and checks that the new ones work.
void recover(Session* session);
void recover_and_close(Session* session);

// Replaces the handle by one with `top_k` ids per token.
ncclResult_t replace_handle(Session* session, unsigned top_k);
// On the other ranks: the creation of a handle that `refuser` refuses, with this text.
void check_refused_elsewhere(Session* session, int refuser, const char* text);

// ---- The tensors of a call ---------------------------------------------------------------------

typedef enum {
    kDispatch,      // LL, or HT forward
    kTokensOnly,    // HT dispatch without ids and weights
    kForward,       // a dispatch of bytes with float32 scales
    kCast,          // a dispatch of bfloat16 to e4m3 with float32 scales
    kRankMajor,         // LL
    kRankMajorForward,  // of bytes with float32 scales
    kCombine,       // LL, or HT forward
    kSummed,        // LL, of rank-major rows
    kBackward,      // HT combine with weights
    kCreateHandle,  // its only input is topk_idx
} CallKind;

typedef enum { kInputs, kOutputs, kLocals, kNumLists } ListName;

enum { kMaxTensors = 4 };

typedef struct {
    EpView views[kMaxTensors];
    ncclNDTensor_t* items[kMaxTensors];
    unsigned count;
    bool null;  // pass NULL for the array
} TensorList;

typedef struct {
    TensorList lists[kNumLists];
    unsigned round_scales;  // of a dispatch
} CallTensors;

// Valid tensors for a call. They point into the struct: do not copy it.
void valid_tensors(const Session* session, CallKind kind, CallTensors* tensors);
ncclResult_t make_call(const Session* session, CallKind kind, CallTensors* tensors, unsigned send_only);
ncclResult_t make_valid_call(const Session* session, CallKind kind, unsigned send_only);

// In the tensor with this tag, and in weights beside ids, one row less than this rank receives.
void take_a_row(CallTensors* tensors, ListName list, unsigned tag);
// Rows of half the bytes; rows of another type of the same width; no scales, which come last.
void shorten_rows(CallTensors* tensors);
void make_float16(CallTensors* tensors);
void remove_scales(CallTensors* tensors);

// ---- Calls with one thing wrong ----------------------------------------------------------------

// A refusal of a valid call that is broken in just the way that the text says. Rows may leave out what is NULL.
#pragma GCC diagnostic ignored "-Wmissing-field-initializers"
typedef struct {
    const char* id;
    const char* given;  // as for EP_REFUSED_AS; or NULL
    const char* cause;  // what to break, like a text; NULL if the text itself says it
} BrokenCall;

// Makes each broken call; checks that it is refused and changes nothing.
void check_broken_calls(const Session* session, CallKind kind, const BrokenCall* calls, size_t num_calls);

// ---- Parts of other files ----------------------------------------------------------------------

// running.c: the odd rank and every rank that hears from it in `kind` get an error. The error names a rank whose call
// differs from this one's (for the odd rank: any rank), unless another rank's failure arrives first.
void check_all_notice(Session* session, CallKind kind, const char* id, const char* values);
// A call that some ranks make otherwise than the others.
typedef struct {
    ncclEpAlgorithm_t algorithm;
    CallKind kind, odd_kind;
    void (*change)(CallTensors* tensors);  // on these ranks; or NULL
    const char* id;
    const char *usual, *odd;  // what texts say of a rank's call; or NULL
    enum { kAllWhole, kOddStaged, kOddWhole } staging;
    // These ranks' handle: that of the others, the older one of two, or one that they alone have made.
    enum { kSameHandle, kOlderHandle, kOwnHandle } handle;
    unsigned fewer_ids;  // of a token, in the last case
} OtherCall;
enum { kNumOtherLlCalls = 9, kNumOtherHtCalls = 8 };
extern const OtherCall kOtherLlCalls[kNumOtherLlCalls], kOtherHtCalls[kNumOtherHtCalls];
// The result of this rank's part. Where it fails before, as it could not make its handle, it makes no call.
ncclResult_t make_one_of(Session* session, const OtherCall* call, bool is_odd);
void check_other_call(const EpEnv* env, const OtherCall* call);
// stderr.c: what this program does when it is started again.
int refuse_once(void);
int make_groups(void);
int fail_and_be_refused(void);
int pass_over_choices(void);
