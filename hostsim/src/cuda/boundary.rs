//! What every CUDA entry point does around its body.

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
pub(crate) fn store<T>(out: Option<&mut T>, value: T) -> Result<(), CudaError> {
    *out.ok_or(CudaError::InvalidValue)? = value;
    Ok(())
}
