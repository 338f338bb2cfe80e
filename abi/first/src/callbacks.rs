//! The caller's allocation functions as an allocator of the library.
#![allow(unsafe_code)]

use crate::owners::TensorAllocator;
use crate::types::{cudaError_t, ncclEpAllocFn_t, ncclEpFreeFn_t};
use nccl_ep_core::backend::device::Device;
use nccl_ep_core::error::{Code, Error, Result};
use nccl_ep_core::model::tensor::DevPtr;
use std::ffi::c_void;
use std::sync::Arc;

/// Allocates through the caller's functions; a NULL one is replaced by the device's.
pub struct Callbacks {
    pub alloc: ncclEpAllocFn_t,
    pub free: ncclEpFreeFn_t,
    pub device: Arc<dyn Device>,
}

impl TensorAllocator for Callbacks {
    fn alloc(&self, bytes: usize) -> Result<DevPtr> {
        let Some(alloc) = self.alloc else { return self.device.alloc(bytes) };
        let mut data = std::ptr::null_mut::<c_void>();
        let mut code = 0;
        // It may allocate as this library does itself, which spoils no capture.
        self.device.apart_from_captures(&mut || {
            // SAFETY: the caller's function has the documented signature; `data` outlives the call.
            code = unsafe { alloc(&mut data, bytes) };
        })?;
        check("alloc_fn", code)?;
        if data.is_null() && bytes > 0 {
            return Err(Error::new(Code::SystemError, "alloc_fn: gave NULL and reported success"));
        }
        Ok(DevPtr(data as usize))
    }

    fn free(&self, data: DevPtr) -> Result<()> {
        let Some(free) = self.free else { return self.device.free(data) };
        let mut code = 0;
        self.device.apart_from_captures(&mut || {
            // SAFETY: the caller's function has the documented signature; it gets memory of the
            // matching allocator, or a pointer that the caller put into a descriptor to be freed.
            code = unsafe { free(data.0 as *mut c_void) };
        })?;
        check("free_fn", code)
    }

    fn free_fn(&self) -> Option<usize> {
        self.free.map(|free| free as usize)
    }
}

fn check(name: &str, code: cudaError_t) -> Result<()> {
    match code {
        0 => Ok(()),
        _ => Err(Error::new(Code::SystemError, format!("{name}: failed with CUDA error {code}"))),
    }
}
