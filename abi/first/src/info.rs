//! Version, last refusal, asynchronous failure: this library's own additions to the interface.
#![allow(unsafe_code)]

use crate::objects::{GROUPS, GUARD, check_out, last_error, set_last_error, write_out};
use crate::texts;
use crate::types::{NCCL_EP_MAJOR, NCCL_EP_MINOR, NCCL_EP_PATCH, ncclEpGroup_t, ncclResult_t};
use nccl_ep_core::{fork, log};
use std::ffi::{c_char, c_int};

/// `strings libnccl_ep.so` shows this line; the zeros keep it apart from its neighbours in the file.
#[used]
static BANNER: &str =
    concat!("\0NCCL EP version ", env!("CARGO_PKG_VERSION"), "+cuda", env!("NCCL_EP_CUDA_VERSION"), "\0");

/// The version as log lines have it.
pub(crate) fn version() -> &'static str {
    BANNER.trim_matches('\0')
}

const VERSION_NUMBER: c_int = NCCL_EP_MAJOR * 10_000 + NCCL_EP_MINOR * 100 + NCCL_EP_PATCH;

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
        unsafe { write_out("version", version, VERSION_NUMBER) }
    })
}

/// Returns one line that explains this library's last refusal in the calling thread: function, argument, rule, got and
/// expected. Empty if nothing was refused yet; never NULL. Valid until the next refusal in the same thread.
#[unsafe(no_mangle)]
pub extern "C" fn ncclEpGetLastError() -> *const c_char {
    last_error()
}

/// Reports whether an operation of `ep_group` failed while it ran, as `ncclCommGetAsyncError` does for NCCL.
///
/// Writes `ncclSuccess`, or the code of the first failure, to `*result`; after a failure, `ncclEpGetLastError` returns
/// its text. A failed group refuses further operations; destroy it.
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
        let group = GROUPS.resolve(ep_group as usize)?;
        let code = group.session.failure().map_or(0, |error| {
            let code = error.code();
            let text = texts::text(&error.within(name));
            // Callers poll this function.
            if group.session.is_news() {
                log::warn(&text);
            }
            set_last_error(&text);
            code as ncclResult_t
        });
        // SAFETY: this function's contract.
        unsafe { write_out("result", result, code) }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_headers_version_is_cargos() {
        let cargos =
            [env!("CARGO_PKG_VERSION_MAJOR"), env!("CARGO_PKG_VERSION_MINOR"), env!("CARGO_PKG_VERSION_PATCH")];
        assert_eq!([NCCL_EP_MAJOR, NCCL_EP_MINOR, NCCL_EP_PATCH].map(|part| part.to_string()), cargos);
    }
}
