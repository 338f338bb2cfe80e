//! Memory of tensors that the library created, and who frees it.
//!
//! Programs destroy tensors after their group is gone (the reference's own test does), so ownership
//! is kept by data pointer, apart from the group.
#![forbid(unsafe_code)]

use crate::error::Result;
use crate::model::tensor::DevPtr;
use once_cell::sync::Lazy;
use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::Arc;

/// Allocates and frees tensor data: the caller's functions, or the device's.
pub trait TensorAllocator: Send + Sync {
    /// Allocates `bytes`.
    fn alloc(&self, bytes: usize) -> Result<DevPtr>;
    /// Frees `data`.
    fn free(&self, data: DevPtr) -> Result<()>;
}

static OWNERS: Lazy<Mutex<HashMap<DevPtr, Arc<dyn TensorAllocator>>>> = Lazy::new(Mutex::default);

/// Allocates tensor data that [`free`] will hand back to `owner`.
pub fn alloc(owner: &Arc<dyn TensorAllocator>, bytes: usize) -> Result<DevPtr> {
    let data = owner.alloc(bytes)?;
    if !data.is_null() {
        OWNERS.lock().insert(data, Arc::clone(owner));
    }
    Ok(data)
}

/// Frees `data`: by the allocator that made it, else by `fallback`, else not at all.
pub fn free(data: DevPtr, fallback: Option<&Arc<dyn TensorAllocator>>) -> Result<()> {
    let owner = OWNERS.lock().remove(&data);
    match owner.as_ref().or(fallback) {
        Some(allocator) if !data.is_null() => allocator.free(data),
        _ => Ok(()),
    }
}
