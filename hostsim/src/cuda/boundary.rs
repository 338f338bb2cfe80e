//! What every CUDA entry point does around its body.
#![allow(unsafe_code)]

use std::panic::{AssertUnwindSafe, catch_unwind};

use super::error::{self, CudaError, cudaError_t};
use crate::presence;

/// Runs the body of one entry point: refuses where a GPU is and in a forked process, keeps panics from unwinding into C,
/// and records a failure as the thread's last error.
pub(crate) fn boundary(body: impl FnOnce() -> Result<(), CudaError>) -> cudaError_t {
    let result = if presence::is_child() {
        Err(CudaError::InitializationError)
    } else if presence::permitted() {
        catch_unwind(AssertUnwindSafe(body)).unwrap_or(Err(CudaError::Unknown))
    } else {
        Err(CudaError::NoDevice)
    };
    error::record(result)
}

/// Writes a result through a caller's pointer; NULL is an invalid value.
///
/// # Safety
/// `out` is null or valid for a write of `T`.
pub(crate) unsafe fn store<T>(out: *mut T, value: T) -> Result<(), CudaError> {
    if out.is_null() {
        return Err(CudaError::InvalidValue);
    }
    // SAFETY: not null, and then valid for a write by this function's contract.
    unsafe { out.write(value) };
    Ok(())
}
