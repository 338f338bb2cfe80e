//! What tests of NVIDIA's for this interface call besides: a function of C++, in no header and no release.
#![allow(unsafe_code)]

use crate::objects::{GUARD, HANDLES, write_out};
use crate::types::{ncclEpHandle_t, ncclResult_t};
use std::ffi::c_uint;
use std::time::Duration;

/// Gets the rows, expert-major the slots, that the last update of an HT handle has left to come. Waits for it.
///
/// # Safety
/// `rows` is NULL or points to a writable number.
#[unsafe(export_name = "_Z34ncclEpHandle_test_getNumRecvTokensP12ncclEpHandlePj")]
pub unsafe extern "C" fn num_recv_tokens(handle: ncclEpHandle_t, rows: *mut c_uint) -> ncclResult_t {
    GUARD.look("ncclEpHandle_test_getNumRecvTokens", || {
        let handle = HANDLES.resolve(handle as usize)?;
        let kept = handle.group.kept;
        // The core's number includes dropped rows.
        let bound = kept.recv_rows.filter(|_| kept.drops).unwrap_or(usize::MAX);
        let found = handle.core.received_rows(Duration::MAX)?;
        let found = found.and_then(|found| u32::try_from(found.min(bound)).ok());
        // SAFETY: this function's contract.
        unsafe { write_out("rows", rows, found.unwrap_or(u32::MAX)) }
    })
}
