//! The enums of the interface but for recipes: the source of `nccl_ep/ep_enums.h`. A caller's value may be any number.
#![allow(non_camel_case_types)] // C names, as the ABI dictates.

/// How a group moves tokens.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ncclEpAlgorithm_t {
    /// Low latency (LL): few tokens, staged operations.
    NCCL_EP_ALGO_LOW_LATENCY = 0,
    /// High throughput (HT): many tokens, routing exchanged once.
    NCCL_EP_ALGO_HIGH_THROUGHPUT = 1,
}

/// How a rank's received rows are laid out.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ncclEpLayout_t {
    /// No layout: refused.
    NCCL_EP_LAYOUT_UNSET = 0,
    /// Grouped by expert. LL: [L, R*M, H].
    NCCL_EP_LAYOUT_EXPERT_MAJOR = 1,
    /// LL: grouped by source rank, [R, M, H].
    NCCL_EP_LAYOUT_RANK_MAJOR = 2,
    /// HT: one row for each token that has an expert here, [n, H].
    NCCL_EP_LAYOUT_FLAT = 3,
}

/// Which pass of a layer an operation belongs to.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ncclEpPassDir_t {
    /// Forward.
    NCCL_EP_FWD_PASS = 0,
    /// Backward: HT only.
    NCCL_EP_BWD_PASS = 1,
}

/// What HT does with more rows than `max_recv_tokens_per_rank`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ncclEpOverflowPolicy_t {
    /// As `NCCL_EP_OVERFLOW_TRAP`.
    NCCL_EP_OVERFLOW_AUTO = 0,
    /// The group fails.
    NCCL_EP_OVERFLOW_TRAP = 1,
    /// They are dropped.
    NCCL_EP_OVERFLOW_DROP = 2,
}

/// Whether tensors are in windows of the communicator.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ncclEpZeroCopyMode_t {
    /// The library finds out.
    NCCL_EP_ZERO_COPY_AUTO = 0,
    /// No.
    NCCL_EP_ZERO_COPY_OFF = 1,
    /// Yes.
    NCCL_EP_ZERO_COPY_ON = 2,
}

/// How received expert ids are numbered.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ncclEpExpertIdKind_t {
    /// As `NCCL_EP_EXPERT_ID_LOCAL`.
    NCCL_EP_EXPERT_ID_AUTO = 0,
    /// From the rank's first expert.
    NCCL_EP_EXPERT_ID_LOCAL = 1,
    /// Over the experts of all ranks.
    NCCL_EP_EXPERT_ID_GLOBAL = 2,
}
