// Enums of NCCL EP's later interface; <nccl_ep.h> includes this file.
//
// Generated from the library's sources by `make header`; do not edit.

#pragma once

// How a group moves tokens.
typedef enum ncclEpAlgorithm_t {
  // Low latency (LL): few tokens, staged operations.
  NCCL_EP_ALGO_LOW_LATENCY = 0,
  // High throughput (HT): many tokens, routing exchanged once.
  NCCL_EP_ALGO_HIGH_THROUGHPUT = 1,
} ncclEpAlgorithm_t;

// How a rank's received rows are laid out.
typedef enum ncclEpLayout_t {
  // No layout: refused.
  NCCL_EP_LAYOUT_UNSET = 0,
  // Grouped by expert. LL: [L, R*M, H].
  NCCL_EP_LAYOUT_EXPERT_MAJOR = 1,
  // LL: grouped by source rank, [R, M, H].
  NCCL_EP_LAYOUT_RANK_MAJOR = 2,
  // HT: one row for each token that has an expert here, [n, H].
  NCCL_EP_LAYOUT_FLAT = 3,
} ncclEpLayout_t;

// Which pass of a layer an operation belongs to.
typedef enum ncclEpPassDir_t {
  // Forward.
  NCCL_EP_FWD_PASS = 0,
  // Backward: HT only.
  NCCL_EP_BWD_PASS = 1,
} ncclEpPassDir_t;

// What HT does with more rows than `max_recv_tokens_per_rank`.
typedef enum ncclEpOverflowPolicy_t {
  // As `NCCL_EP_OVERFLOW_TRAP`.
  NCCL_EP_OVERFLOW_AUTO = 0,
  // The group fails.
  NCCL_EP_OVERFLOW_TRAP = 1,
  // They are dropped.
  NCCL_EP_OVERFLOW_DROP = 2,
} ncclEpOverflowPolicy_t;

// Whether tensors are in windows of the communicator.
typedef enum ncclEpZeroCopyMode_t {
  // The library finds out.
  NCCL_EP_ZERO_COPY_AUTO = 0,
  // No.
  NCCL_EP_ZERO_COPY_OFF = 1,
  // Yes.
  NCCL_EP_ZERO_COPY_ON = 2,
} ncclEpZeroCopyMode_t;

// How received expert ids are numbered.
typedef enum ncclEpExpertIdKind_t {
  // As `NCCL_EP_EXPERT_ID_LOCAL`.
  NCCL_EP_EXPERT_ID_AUTO = 0,
  // From the rank's first expert.
  NCCL_EP_EXPERT_ID_LOCAL = 1,
  // Over the experts of all ranks.
  NCCL_EP_EXPERT_ID_GLOBAL = 2,
} ncclEpExpertIdKind_t;
