//! `ncclMemAlloc` and `ncclMemFree`: device memory by another name.
#![allow(unsafe_code)]

use std::ffi::c_void;

use super::error::{Failure, Outcome, ncclResult_t};
use super::{boundary, store};
use crate::cuda::device;
use crate::cuda::error::CudaError;
use crate::cuda::heap::{self, Memory};

/// Allocates device memory on the current device.
///
/// # Safety
/// `out` is null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclMemAlloc(out: *mut *mut c_void, size: usize) -> ncclResult_t {
    boundary(|| {
        if out.is_null() || size == 0 {
            return Err(Failure::argument("ptr is NULL or size is 0"));
        }
        let address = heap::allocate(size, Memory::Device(device::current_index()))?;
        // SAFETY: passed on under this function's contract.
        unsafe { store(out, address as *mut c_void) }
    })
}

/// Waits for the device, then frees memory from `ncclMemAlloc`. NULL is accepted.
#[unsafe(no_mangle)]
pub extern "C" fn ncclMemFree(pointer: *mut c_void) -> ncclResult_t {
    boundary(|| match pointer as usize {
        0 => Ok(()),
        address => free(address),
    })
}

fn free(address: usize) -> Outcome<()> {
    let Some(Memory::Device(owner)) = heap::starts_at(address) else {
        return Err(CudaError::InvalidValue.into());
    };
    let finished = device::device(owner)?.synchronize();
    Ok(heap::release(address).and(finished)?)
}
