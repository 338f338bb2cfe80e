//! Numbers of CUDA and NCCL that several files of tests use.

pub(crate) const SUCCESS: i32 = 0;
// CUDA's.
pub(crate) const INVALID_VALUE: i32 = 1;
pub(crate) const NOT_READY: i32 = 600;
pub(crate) const LAUNCH_TIMEOUT: i32 = 702;
pub(crate) const LAUNCH_FAILURE: i32 = 719;
// NCCL's.
pub(crate) const UNHANDLED_CUDA_ERROR: i32 = 1;
pub(crate) const INVALID_ARGUMENT: i32 = 4;
pub(crate) const INVALID_USAGE: i32 = 5;
pub(crate) const REMOTE_ERROR: i32 = 6;
pub(crate) const UINT8: i32 = 1;
pub(crate) const FLOAT: i32 = 7;
pub(crate) const SUM: i32 = 0;
