//! The version, and masks of lost ranks, which no group has yet.
#![allow(unsafe_code)]

use crate::objects::{GROUPS, GUARD, write_out};
use crate::texts::not_served;
use crate::types::{NCCL_EP_VERSION_CODE, cudaStream_t, ncclEpGroup_t, ncclResult_t};
use nccl_ep_core::error::{Code, Error};
use nccl_ep_core::fork;
use std::ffi::c_int;

/// A client finds this line in the file and compares the CUDA version; the zeros separate it from its neighbours there.
#[used]
static BANNER: &str = concat!("\0NCCL EP version 0.2.0+cuda", env!("NCCL_EP_CUDA_VERSION"), "\0");

/// The version as log lines have it.
pub(crate) fn version() -> &'static str {
    BANNER.trim_matches('\0')
}

/// Gets the version of the interface: MAJOR * 10000 + MINOR * 100 + PATCH.
///
/// Returns `ncclInvalidArgument` if `version` is NULL.
///
/// # Safety
/// `version` is NULL or points to a writable int.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclEpGetVersion(version: *mut c_int) -> ncclResult_t {
    GUARD.look("ncclEpGetVersion", || {
        // SAFETY: this function's contract.
        unsafe { write_out("version", version, NCCL_EP_VERSION_CODE) }
    })
}

/// Refuses a call that needs a group with a mask; there is none yet.
fn without_mask(name: &'static str, ep_group: ncclEpGroup_t) -> ncclResult_t {
    GUARD.look(name, || {
        fork::check()?;
        if GROUPS.resolve(ep_group as usize)?.kept.enable_mask {
            return Err(not_served("ep_group", "a mask of lost ranks"));
        }
        let text = "ep_group: was made without config.enable_mask";
        Err(Error::new(Code::InvalidUsage, text))
    })
}

/// Gets which ranks are active. Not served yet.
///
/// @param ep_group  the group
/// @param mask      device memory: R numbers
/// @param stream    stream to run on
///
/// Returns `ncclInvalidUsage`, or `ncclInvalidArgument` for a NULL or dead group.
///
/// # Safety
/// None.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclEpMaskQuery(
    ep_group: ncclEpGroup_t,
    mask: *mut c_int,
    stream: cudaStream_t,
) -> ncclResult_t {
    let _ = (mask, stream);
    without_mask("ncclEpMaskQuery", ep_group)
}

/// Sets which ranks are active. Not served yet.
///
/// @param ep_group  the group
/// @param mask      host memory: R numbers
/// @param stream    stream to run on
///
/// Returns as `ncclEpMaskQuery`.
///
/// # Safety
/// None.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclEpMaskUpdate(
    ep_group: ncclEpGroup_t,
    mask: *const c_int,
    stream: cudaStream_t,
) -> ncclResult_t {
    let _ = (mask, stream);
    without_mask("ncclEpMaskUpdate", ep_group)
}

/// Makes all ranks active again. Not served yet.
///
/// @param ep_group  the group
/// @param stream    stream to run on
///
/// Returns as `ncclEpMaskQuery`.
///
/// # Safety
/// None.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclEpMaskClean(ep_group: ncclEpGroup_t, stream: cudaStream_t) -> ncclResult_t {
    let _ = stream;
    without_mask("ncclEpMaskClean", ep_group)
}

/// Gets whether a rank was masked. Not served yet.
///
/// @param ep_group  the group
/// @param error     gets 0 or 1
///
/// Returns as `ncclEpMaskQuery`.
///
/// # Safety
/// None.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclEpGetAsyncError(ep_group: ncclEpGroup_t, error: *mut c_int) -> ncclResult_t {
    let _ = error;
    without_mask("ncclEpGetAsyncError", ep_group)
}

/// Forgets that a rank was masked. Not served yet.
///
/// @param ep_group  the group
///
/// Returns as `ncclEpMaskQuery`.
///
/// # Safety
/// None.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclEpErrorClear(ep_group: ncclEpGroup_t) -> ncclResult_t {
    without_mask("ncclEpErrorClear", ep_group)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::{NCCL_EP_MAJOR, NCCL_EP_MINOR, NCCL_EP_PATCH};

    #[test]
    fn number_and_text_are_those_of_the_header() {
        let (major, minor, patch) = (NCCL_EP_MAJOR, NCCL_EP_MINOR, NCCL_EP_PATCH);
        assert_eq!(NCCL_EP_VERSION_CODE, major * 10_000 + minor * 100 + patch);
        assert!(version().starts_with(&format!("NCCL EP version {major}.{minor}.{patch}+")));
    }
}
