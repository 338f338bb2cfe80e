//! Views of the caller's "device" memory, which on this backend is memory of this process.
//!
//! `rule` has checked the tensors that the addresses come from; their extents are the caller's
//! word, as on a GPU.
#![allow(unsafe_code)]

use crate::model::tensor::DevPtr;

/// `bytes` readable bytes at `data`.
///
/// # Safety
/// The memory is valid and nobody writes to it while the view lives.
pub unsafe fn bytes<'a>(data: DevPtr, bytes: usize) -> &'a [u8] {
    if bytes == 0 {
        return &[];
    }
    // SAFETY: this function's contract; `rule` has refused NULL for tensors that are not empty.
    unsafe { std::slice::from_raw_parts(data.0 as *const u8, bytes) }
}

/// `bytes` writable bytes at `data`.
///
/// # Safety
/// The memory is valid and nobody else touches it while the view lives.
pub unsafe fn bytes_mut<'a>(data: DevPtr, bytes: usize) -> &'a mut [u8] {
    if bytes == 0 {
        return &mut [];
    }
    // SAFETY: this function's contract; `rule` has refused NULL for tensors that are not empty.
    unsafe { std::slice::from_raw_parts_mut(data.0 as *mut u8, bytes) }
}
