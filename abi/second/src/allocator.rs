//! A caller's allocator, used for handles without memory of the caller's.
#![allow(unsafe_code)]

use crate::types::{cudaError_t, ncclEpAllocConfig_t};
use nccl_ep_core::backend::device::{Blocks, Device};
use nccl_ep_core::error::{Code, Error, Result};
use nccl_ep_core::model::handle_state::BLOCK_ALIGN;
use nccl_ep_core::model::tensor::DevPtr;
use parking_lot::Mutex;
use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::Arc;

type Alloc = unsafe extern "C" fn(*mut *mut c_void, usize, *mut c_void) -> cudaError_t;
type Free = unsafe extern "C" fn(*mut c_void, *mut c_void) -> cudaError_t;

/// A group's allocator functions, and the memory that they gave.
pub struct Allocator {
    alloc: Alloc,
    free: Free,
    context: *mut c_void,
    device: Arc<dyn Device>,
    /// `None` once everything was freed.
    given: Mutex<Option<Vec<DevPtr>>>,
}

// SAFETY: the context is the caller's, who must expect calls from each thread that calls the library.
unsafe impl Send for Allocator {}
// SAFETY: as for Send.
unsafe impl Sync for Allocator {}

impl Allocator {
    /// The allocator of a group on `device`, if its configuration has one.
    pub fn of(config: &ncclEpAllocConfig_t, device: Arc<dyn Device>) -> Option<Arc<Self>> {
        let (alloc, free) = (config.alloc_fn?, config.free_fn?);
        let given = Mutex::new(Some(Vec::new()));
        Some(Arc::new(Self { alloc, free, context: config.context, device, given }))
    }

    /// Frees all memory, which no operation uses any more; returns the first failure.
    pub fn free_all(&self) -> Result<()> {
        let all = self.given.lock().take().unwrap_or_default();
        let freed = all.into_iter().map(|data| self.free(data));
        // Collected first, so that each is freed.
        freed.collect::<Vec<_>>().into_iter().collect()
    }

    fn free(&self, DevPtr(data): DevPtr) -> Result<()> {
        // SAFETY: the caller's function has the documented signature, and `data` is of its counterpart.
        self.call("free_fn", &mut || unsafe { (self.free)(data as *mut c_void, self.context) })
    }

    /// Calls one of the functions as the library calls the driver: on the group's device, without disturbing captures.
    fn call(&self, name: &str, function: &mut dyn FnMut() -> cudaError_t) -> Result<()> {
        let _entered = self.device.enter()?;
        let mut code = 0;
        self.device.apart_from_captures(&mut || code = function())?;
        match code {
            0 => Ok(()),
            _ => Err(Error::new(Code::SystemError, format!("config.alloc.{name}: failed with CUDA error {code}"))),
        }
    }
}

impl Blocks for Allocator {
    fn take(&self, bytes: usize) -> Result<DevPtr> {
        let mut data = null_mut();
        // SAFETY: the caller's function has the documented signature; `data` outlives the call.
        self.call("alloc_fn", &mut || unsafe { (self.alloc)(&raw mut data, bytes, self.context) })?;
        let data = DevPtr(data as usize);
        if data.is_null() {
            return Err(Error::new(Code::SystemError, "config.alloc.alloc_fn: gave NULL and reported success"));
        }
        let aligned = data.0.is_multiple_of(BLOCK_ALIGN);
        let kept = self.given.lock().as_mut().filter(|_| aligned).map(|given| given.push(data));
        kept.map(|()| data).ok_or_else(|| {
            // It will not be used.
            let _ = self.free(data);
            let text = "config.alloc.alloc_fn: gave memory at no multiple of 16 bytes, or to a group that has ended";
            Error::new(Code::SystemError, text)
        })
    }
}
