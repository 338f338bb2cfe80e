//! Views of the caller's "device" memory, which on this backend is memory of this process.
//!
//! `rule` has checked the tensors that the addresses belong to; their extents are the caller's word, as on a GPU.
#![allow(unsafe_code)]

use crate::backend::host::mailboxes::Received;
use crate::backend::host::numeric::copy_row;
use crate::error::Result;
use crate::model::ops::{IntWidth, Numbers};
use crate::model::tensor::DevPtr;
use std::sync::atomic::{AtomicI64, Ordering};

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

/// Adds `numbers`, one per local expert or source rank, to the int64 at `totals`, which the caller leaves to the
/// group's dispatches.
pub fn add_numbers<N: Into<i64>>(numbers: impl IntoIterator<Item = N>, totals: DevPtr) {
    for (place, number) in numbers.into_iter().enumerate() {
        // Dispatches on several streams may add concurrently.
        // SAFETY: as said above; the session has checked the alignment, and whoever else writes is this function.
        let total = unsafe { AtomicI64::from_ptr((totals.0 as *mut i64).wrapping_add(place)) };
        total.fetch_add(number.into(), Ordering::Relaxed);
    }
}

/// Adds how long each message took to the int64 at `waits`, if asked for.
pub fn add_waits(messages: &[Received<'_>], waits: Option<DevPtr>) {
    if let Some(waits) = waits {
        add_numbers(messages.iter().map(Received::waited_ns), waits);
    }
}

/// Writes `from` to a caller's array, if there is one. Whoever read the arguments has checked its size; the caller
/// leaves it to the library until the handle is created, or to the operation.
pub fn write_numbers(to: Option<Numbers>, from: impl IntoIterator<Item = u32>) -> Result<()> {
    let Some(Numbers { data, width }) = to else { return Ok(()) };
    let from: Vec<u32> = from.into_iter().collect();
    // SAFETY: as said above.
    let out = unsafe { bytes_mut(data, from.len() * width.bytes()) };
    from.iter().enumerate().try_for_each(|(index, number)| match width {
        IntWidth::Bits32 => copy_row(out, index, &number.to_ne_bytes()),
        IntWidth::Bits64 => copy_row(out, index, &u64::from(*number).to_ne_bytes()),
    })
}

/// The same for int32 at `to`.
pub fn write_counts(to: Option<DevPtr>, from: &[u32]) -> Result<()> {
    write_numbers(to.map(|data| Numbers { data, width: IntWidth::Bits32 }), from.iter().copied())
}

/// Copies the `width` bytes of element `index` at `data` to `to`.
///
/// # Safety
/// The element is valid and nobody writes to it meanwhile.
pub unsafe fn read_element(data: DevPtr, index: usize, to: &mut [u8]) {
    let from = (data.0 as *const u8).wrapping_add(index * to.len());
    // SAFETY: this function's contract; a slice of this process does not overlap it.
    unsafe { std::ptr::copy_nonoverlapping(from, to.as_mut_ptr(), to.len()) }
}

/// Copies `from` to element `index` at `data`, which is as long.
///
/// # Safety
/// The element is valid and nobody else touches it meanwhile.
pub unsafe fn write_element(data: DevPtr, index: usize, from: &[u8]) {
    let to = (data.0 as *mut u8).wrapping_add(index * from.len());
    // SAFETY: this function's contract; a slice of this process does not overlap it.
    unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), to, from.len()) }
}
