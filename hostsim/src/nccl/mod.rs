//! The NCCL subset, with the signatures and result codes of NCCL 2.28.
//!
//! | module | holds |
//! |---|---|
//! | [`error`] | result codes and texts |
//! | [`unique_id`], [`comm`], [`split`] | how ranks find each other; communicators and their splitting |
//! | [`group`] | `ncclGroupStart` and `ncclGroupEnd` |
//! | [`collective`], [`p2p`] | the operations' entry points and what streams execute for them |
//! | [`memory`] | `ncclMemAlloc` and `ncclMemFree` |
//!
//! A communicator is one shared-memory segment (`segment`), in which ranks meet at futex barriers
//! (`meeting`). Operations run on the workers of the streams they were given, in stream order.
#![allow(unsafe_code)]

pub mod collective;
pub mod comm;
mod datatype;
pub mod error;
mod futex;
pub mod group;
mod launch;
mod meeting;
pub mod memory;
mod minifloat;
mod operation;
pub mod p2p;
mod reduce;
mod segment;
pub mod split;
mod transfer;
pub mod unique_id;

use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::presence;
use error::{Code, Failure, Outcome, ncclResult_t};

pub use unique_id::{ncclGetUniqueId, ncclUniqueId};

/// Runs the body of one entry point: refuses where a GPU is, keeps panics from unwinding into C,
/// keeps the text of a failure, and lets an open group remember that a call in it failed.
pub(crate) fn boundary(body: impl FnOnce() -> Outcome<()>) -> ncclResult_t {
    let outcome = if presence::permitted() {
        catch_unwind(AssertUnwindSafe(body))
            .unwrap_or_else(|_| Err(Failure::new(Code::InternalError, "panic in the stand-in")))
    } else {
        Err(Failure::new(
            Code::UnhandledCudaError,
            "no CUDA-capable device is detected",
        ))
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
        return Err(Failure::new(
            Code::InvalidArgument,
            "an output pointer is NULL",
        ));
    }
    // SAFETY: not null, and then valid for a write by this function's contract.
    unsafe { out.write(value) };
    Ok(())
}
