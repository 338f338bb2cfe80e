//! What every NCCL entry point does around its body.
#![allow(unsafe_code)]

use std::panic::{AssertUnwindSafe, catch_unwind};

use super::error::{self, Code, Failure, Outcome, ncclResult_t};
use super::group;
use crate::{fork, presence};

/// Runs the body of one entry point: refuses where a GPU is and in a forked process, keeps panics from unwinding into C,
/// keeps the text of a failure, and lets an open group remember that a call in it failed.
pub(crate) fn boundary(body: impl FnOnce() -> Outcome<()>) -> ncclResult_t {
    let outcome = if fork::is_child() {
        Err(Failure::new(Code::UnhandledCudaError, "initialization error"))
    } else if presence::permitted() {
        catch_unwind(AssertUnwindSafe(body))
            .unwrap_or_else(|_| Err(Failure::new(Code::InternalError, "panic in the stand-in")))
    } else {
        Err(Failure::new(Code::UnhandledCudaError, "no CUDA-capable device is detected"))
    };
    if let Err(failure) = &outcome {
        group::note_failure(failure.code);
    }
    error::record(outcome)
}

/// Writes a result through a caller's pointer; NULL is an invalid argument.
///
/// # Safety
/// `out` is null or valid for a write of `T`.
pub(crate) unsafe fn store<T>(out: *mut T, value: T) -> Outcome<()> {
    if out.is_null() {
        return Err(Failure::argument("an output pointer is NULL"));
    }
    // SAFETY: not null, and then valid for a write by this function's contract.
    unsafe { out.write(value) };
    Ok(())
}
