//! Version, last refusal, asynchronous failure: this library's own additions to the interface.
#![allow(unsafe_code)]

use crate::objects::{GUARD, Group, check_out, last_error, set_last_error, write_out};
use crate::texts;
use crate::types::{ncclEpGroup_t, ncclResult_t};
use crate::version;
use nccl_ep_core::{fork, log};
use std::ffi::{c_char, c_int};

/// Gets the library's version: MAJOR * 10000 + MINOR * 100 + PATCH.
///
/// Returns `ncclInvalidArgument` if `version` is NULL.
///
/// # Safety
/// `version` is NULL or points to a writable int.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclEpGetVersion(version: *mut c_int) -> ncclResult_t {
    GUARD.look("ncclEpGetVersion", || {
        // SAFETY: this function's contract.
        unsafe { write_out("version", version, version::number()) }
    })
}

/// Returns one line that explains the last refusal of this library in the calling thread:
/// function, argument, rule, got and expected. Empty if nothing was refused yet; never NULL. Valid
/// until the next refusal in the same thread.
#[unsafe(no_mangle)]
pub extern "C" fn ncclEpGetLastError() -> *const c_char {
    last_error()
}

/// Reports whether an operation of `ep_group` failed while it ran, as `ncclCommGetAsyncError` does
/// for NCCL.
///
/// Writes `ncclSuccess`, or the code of the first failure, to `*result`; `ncclEpGetLastError` then
/// returns the text of the failure. A failed group refuses further operations; destroy it.
///
/// Returns `ncclInvalidArgument` for a NULL or dead `ep_group` or a NULL `result`.
///
/// # Safety
/// `result` is NULL or points to a writable `ncclResult_t`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclEpGetAsyncError(ep_group: ncclEpGroup_t, result: *mut ncclResult_t) -> ncclResult_t {
    let name = "ncclEpGetAsyncError";
    GUARD.look(name, || {
        fork::check()?;
        check_out("result", result)?;
        let group = Group::resolve(ep_group as usize)?;
        let code = group.session.failure().map_or(0, |error| {
            let code = error.code();
            let text = texts::text(&error.within(name));
            // Callers poll this function.
            if group.is_news() {
                log::warn(&text);
            }
            set_last_error(&text);
            code as ncclResult_t
        });
        // SAFETY: this function's contract.
        unsafe { write_out("result", result, code) }
    })
}
