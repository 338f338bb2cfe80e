//! Checks of the arguments that several entry points take.
#![allow(unsafe_code)]
#![allow(non_camel_case_types)]

use std::ffi::{c_int, c_uint};

use super::error::{Failure, Outcome};
use crate::cuda::heap::{self, Range};

const CONFIG_MAGIC: c_uint = 0xcafe_beef;

/// The fields of C's `ncclConfig_t` that every version has and callers must not touch.
#[repr(C)]
pub struct ncclConfig_t {
    size: usize,
    magic: c_uint,
    version: c_uint,
}

/// Refuses what is not a configuration. Its settings concern transports that do not exist here.
///
/// # Safety
/// `config` is null or points to an `ncclConfig_t`.
pub(crate) unsafe fn check_config(config: *const ncclConfig_t) -> Outcome<()> {
    // SAFETY: by this function's contract.
    match unsafe { config.as_ref() } {
        Some(config) if config.magic != CONFIG_MAGIC => Err(Failure::argument(
            "config was not set with NCCL_CONFIG_INITIALIZER",
        )),
        Some(config) if config.size < size_of::<ncclConfig_t>() || config.version == 0 => Err(
            Failure::argument("config has an impossible size or version"),
        ),
        _ => Ok(()),
    }
}

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
    Err(Failure::argument(format!(
        "{call}: {name} {address:#x} ({bytes} bytes) {problem}"
    )))
}

/// Reads an argument that names one of `ranks` ranks.
pub(crate) fn read_rank(name: &str, value: c_int, ranks: usize) -> Outcome<usize> {
    usize::try_from(value)
        .ok()
        .filter(|rank| *rank < ranks)
        .ok_or_else(|| Failure::argument(format!("{name} must be below {ranks} (got {value})")))
}
