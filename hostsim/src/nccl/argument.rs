//! Checks of the arguments that several entry points take.

use std::ffi::c_int;

use super::error::{Failure, Outcome};
use crate::cuda::heap::{self, Range};

/// Refuses memory that a GPU could not reach: only device and pinned memory will do.
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
