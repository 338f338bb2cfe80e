//! What every NCCL entry point does around its body, and argument checks that several share.

use std::ffi::c_int;
use std::panic::{AssertUnwindSafe, catch_unwind};

use super::error::{self, Code, Failure, Outcome, ncclResult_t};
use super::group;
use crate::cuda::heap::{self, Range};
use crate::presence;

/// Runs the body of an entry point: refuses in the presence of a GPU and in a forked process, keeps panics from
/// unwinding into C, records the text of a failure, and marks an open group as failed.
pub(crate) fn boundary(body: impl FnOnce() -> Outcome<()>) -> ncclResult_t {
    let outcome = if presence::is_child() {
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
pub(crate) fn store<T>(out: Option<&mut T>, value: T) -> Outcome<()> {
    *out.ok_or_else(|| Failure::argument("an output pointer is NULL"))? = value;
    Ok(())
}

/// Refuses memory that a GPU could not access: it must be device or pinned memory.
pub(crate) fn check_buffer(call: &str, name: &str, address: usize, bytes: usize) -> Outcome<()> {
    if bytes == 0 {
        return Ok(());
    }
    let problem = match heap::classify(address, bytes) {
        Range::Inside(_) => return Ok(()),
        Range::Pageable => "is neither device nor pinned host memory",
        Range::Invalid => "leaves its allocation or lies in freed memory",
    };
    Err(Failure::argument(format!("{call}: {name} {address:#x} ({bytes} bytes) {problem}")))
}

/// Reads an argument that names one of `ranks` ranks.
pub(crate) fn read_rank(name: &str, value: c_int, ranks: usize) -> Outcome<usize> {
    usize::try_from(value)
        .ok()
        .filter(|rank| *rank < ranks)
        .ok_or_else(|| Failure::argument(format!("{name} must be below {ranks} (got {value})")))
}
