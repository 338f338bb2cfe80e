//! The CUDA runtime subset, with the names, signatures and error numbers of CUDA 13.
//!
//! | module | holds |
//! |---|---|
//! | [`error`] | error numbers, names, the calling thread's last error |
//! | [`device`] | devices, their streams, device-wide synchronisation |
//! | [`memory`], [`copy`] | allocation with poison and guards, copies and fills |
//! | [`stream`], [`event`] | ordered work and its marks |
//! | [`capture`] | graph capture, which is answered "not supported" |
#![allow(unsafe_code)]

mod arena;
pub mod capture;
pub mod copy;
pub mod device;
pub mod error;
pub mod event;
pub(crate) mod heap;
pub mod memory;
pub(crate) mod queue;
pub mod stream;

use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::presence;
use error::{CudaError, cudaError_t};

/// Runs the body of one entry point: refuses where a GPU is, keeps panics from unwinding into C,
/// and records a failure as the thread's last error.
pub(crate) fn boundary(body: impl FnOnce() -> Result<(), CudaError>) -> cudaError_t {
    let result = if presence::permitted() {
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
