//! Host memory for the device: ordinary pages of this process, registered with the driver.
//!
//! Memory from `cuMemHostAlloc` would disappear when the caller resets the device, although threads of the library,
//! which do not learn of a reset in time, may read it at any moment. Ordinary pages stay; only the device loses access.
#![allow(unsafe_code)]

use crate::backend::cuda::driver::api::{call, functions};
use crate::error::{Error, Result};
use cudarc::driver::sys;
use std::ffi::{c_uint, c_void};
use std::io;
use std::ptr::{NonNull, null_mut};

/// Zeroed pages for `bytes`, which must not be zero, pinned and mapped in every context of the process.
pub fn allocate(bytes: usize) -> Result<NonNull<c_void>> {
    const FLAGS: c_uint = sys::CU_MEMHOSTREGISTER_PORTABLE | sys::CU_MEMHOSTREGISTER_DEVICEMAP;
    let pages = map(bytes)?;
    // SAFETY: the pages are this function's, and stay mapped while they are registered.
    unsafe { call!(cuMemHostRegister_v2(pages.as_ptr(), bytes, FLAGS)) }
        .inspect_err(|_| unmap(pages.as_ptr() as usize, bytes))?;
    Ok(pages)
}

/// Unpins the pages, after which no device can access them.
pub fn unpin(address: usize) {
    if let Ok(functions) = functions() {
        // SAFETY: the driver knows what is registered, and refuses other addresses.
        unsafe { (functions.cuMemHostUnregister)(address as *mut c_void) };
    }
}

/// Unmaps pages of `bytes` that no device accesses any more.
pub fn unmap(address: usize, bytes: usize) {
    // SAFETY: the pages are from `allocate`, whose caller gives them back once.
    unsafe { libc::munmap(address as *mut c_void, bytes) };
}

fn map(bytes: usize) -> Result<NonNull<c_void>> {
    const ACCESS: i32 = libc::PROT_READ | libc::PROT_WRITE;
    const KIND: i32 = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    let failed = || Error::system("pages of host memory", &io::Error::last_os_error());
    // SAFETY: a new mapping, which replaces none.
    let pages = unsafe { libc::mmap(null_mut(), bytes, ACCESS, KIND, -1, 0) };
    if pages == libc::MAP_FAILED {
        return Err(failed());
    }
    // A process that forks must keep the pages that the device maps. Where the kernel cannot promise that, forks behave
    // as usual. SAFETY: the mapping is whole and this function's.
    unsafe { libc::madvise(pages, bytes, libc::MADV_DONTFORK) };
    NonNull::new(pages).ok_or_else(failed)
}
