// One group, one handle and the tensors of one measurement, and its two operations.
#pragma once

#include "harness/harness.h"
#include "programs/ep_bench/calls.h"
#include "programs/ep_bench/cast/cast.h"
#include "programs/ep_bench/options.h"
#include "programs/ep_bench/routing.h"
#include "reference/rows.h"

namespace ep_bench {

// The rows of all tokens, numbered by rank and token.
RefRows TokenRows(const Options& options);

// Free memory of the device in bytes.
double FreeBytes();

class Session {
   public:
    Session(EpEnv* env, const Options& options, const Routing& routing);
    ~Session();  // collective; the topk_idx memory goes first, as in programs of the first release
    Session(const Session&) = delete;
    Session& operator=(const Session&) = delete;

    // One call of the library each. They live no longer than this.
    Calls MakeCalls();

    // One more handle of the same routing, for the caller to destroy.
    ncclEpHandle_t CallCreateHandle();

    // Enqueue the operation and its Complete; nothing waits.
    void CastAndDispatch();  // the cast only with --cast outside
    void Dispatch();
    void Combine();

    // Call after the first operations: memory they allocated counts as the library's.
    void NoteMemoryOfUse();

    // Bytes of the device's free memory taken by the group, the handle and the first operations,
    // and by the tensors that the program created.
    double library_bytes() const { return library_bytes_; }
    double tensor_bytes() const { return tensor_bytes_; }

    // What validation compares. `received` and `expert_outputs` have the same shape.
    ncclNDTensor_t tokens{};            // [T, H], as the dispatch reads it
    ncclNDTensor_t scales{};            // [T, S], if the dispatch reads scales
    ncclNDTensor_t received{};          // ll [L, R*M, H] or [R, M, H], ht [n, H]
    ncclNDTensor_t received_scales{};   // the same rows, if rows have scales
    ncclNDTensor_t received_weights{};  // ht [n, K], rank-major [R, M, K]
    ncclNDTensor_t received_idx{};      // of the same shape
    ncclNDTensor_t counter{};           // ll [L] or [R]
    ncclNDTensor_t expert_outputs{};
    ncclNDTensor_t combined{};  // [T, H]

   private:
    void CreateGroup();
    void CreateHandle();
    void CreateInputs();
    void CreateUncast();
    void CreateOutputs();
    void CreateReceived();
    void CreateReceivedBeside();
    size_t BytesOfHeap() const;
    void FillTokens();
    void CallCast();
    void CallDispatch();
    void CallCombine();
    void CallComplete();

    EpEnv* env_;
    const Options& options_;
    const Routing& routing_;
    ncclEpGroup_t group_ = nullptr;
    ncclEpHandle_t handle_ = nullptr;
    double free_before_;
    double library_bytes_ = 0;
    double tensor_bytes_ = 0;
    void* topk_data_ = nullptr;
    EpView topk_idx_{};
    void* received_memory_ = nullptr;   // of `received`, unless that is a view
    ncclNDTensor_t weights_{};  // [T, K]
    ncclNDTensor_t uncast_{};   // [T, H], what `tokens` and `scales` are cast from, with --cast outside
    CastWork cast_{};           // that cast
};

}  // namespace ep_bench
