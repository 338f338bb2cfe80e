//! Tensor memory that the library allocated, and its allocators.
//!
//! Programs destroy tensors after their group (the reference's own test does), so ownership is
//! recorded by data pointer, apart from the group.
#![allow(unsafe_code)]

use crate::types::{cudaError_t, ncclEpAllocFn_t, ncclEpFreeFn_t};
use nccl_ep_core::backend::device::Device;
use nccl_ep_core::error::{Code, Error, Result};
use nccl_ep_core::model::tensor::DevPtr;
use once_cell::sync::Lazy;
use parking_lot::Mutex;
use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::Arc;

/// Allocates and frees tensor data through the caller's functions; a NULL one is replaced by the device's.
pub struct Allocator {
    pub alloc: ncclEpAllocFn_t,
    pub free: ncclEpFreeFn_t,
    pub device: Arc<dyn Device>,
}

impl Allocator {
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

    /// How it frees.
    pub fn frees_by(&self) -> FreesBy {
        (self.free.map(|free| free as usize), self.device.context_number())
    }
}

fn check(name: &str, code: cudaError_t) -> Result<()> {
    match code {
        0 => Ok(()),
        _ => Err(Error::new(Code::SystemError, format!("{name}: failed with CUDA error {code}"))),
    }
}

/// How a group frees: the address of the caller's function, if there is one, and the number of its device's context.
pub type FreesBy = (Option<usize>, u64);

/// Allocators for descriptors made by hand that are destroyed with a dead group: from which group on, how it frees, and
/// by what. It has an entry for each change of the way to free, not for each group, and one allocator for each way.
pub struct Freeing<A>(Vec<(usize, FreesBy, Arc<A>)>);

impl<A> Freeing<A> {
    /// Knows no group.
    pub const EMPTY: Self = Self(Vec::new());

    /// Records that group `number`, larger than all before, frees in this way, by `allocator`.
    pub fn note(&mut self, number: usize, way: FreesBy, allocator: &Arc<A>) {
        if self.0.last().is_none_or(|(_, last, _)| *last != way) {
            let known = self.0.iter().find(|(_, it, _)| *it == way);
            let allocator = Arc::clone(known.map_or(allocator, |(.., known)| known));
            self.0.push((number, way, allocator));
        }
    }

    /// The allocator of group `number`, which must have been recorded.
    pub fn find(&self, number: usize) -> Option<Arc<A>> {
        let later = self.0.partition_point(|(first, ..)| *first <= number);
        let (.., allocator) = self.0.get(later.checked_sub(1)?)?;
        Some(Arc::clone(allocator))
    }
}

static OWNERS: Lazy<Mutex<HashMap<DevPtr, Arc<Allocator>>>> = Lazy::new(Mutex::default);

/// Allocates tensor data that [`free`] will return to `owner`.
pub fn alloc(owner: &Arc<Allocator>, bytes: usize) -> Result<DevPtr> {
    let data = owner.alloc(bytes)?;
    if !data.is_null() {
        OWNERS.lock().insert(data, Arc::clone(owner));
    }
    Ok(data)
}

/// Frees `data` by its allocator or, if unknown, by `fallback`; without either keeps it.
pub fn free(data: DevPtr, fallback: Option<&Arc<Allocator>>) -> Result<()> {
    let owner = OWNERS.lock().remove(&data);
    match owner.as_ref().or(fallback) {
        Some(allocator) if !data.is_null() => allocator.free(data),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_that_free_alike_cost_nothing() {
        let mut freeing = Freeing::EMPTY;
        let mut note = |numbers: std::ops::Range<usize>, way: FreesBy| {
            for number in numbers {
                freeing.note(number, way, &Arc::new(way));
            }
        };
        note(10..1000, (None, 0));
        note(1000..2000, (Some(7), 0));
        note(2000..2001, (None, 1));
        note(2001..3000, (None, 0));
        let found = |number| freeing.find(number).map(|way| *way);
        assert_eq!(freeing.0.len(), 4);
        assert!(Arc::ptr_eq(&freeing.find(10).unwrap(), &freeing.find(2500).unwrap()));
        assert_eq!(found(9), None);
        assert_eq!((found(10), found(999)), (Some((None, 0)), Some((None, 0))));
        assert_eq!((found(1000), found(1999)), (Some((Some(7), 0)), Some((Some(7), 0))));
        assert_eq!((found(2000), found(2500)), (Some((None, 1)), Some((None, 0))));
    }
}
