//! Tensor memory that the library allocated, and its allocators.
//!
//! Programs destroy tensors after their group (the reference's own test does), so ownership is
//! recorded by data pointer, apart from the group.

use nccl_ep_core::error::Result;
use nccl_ep_core::model::tensor::DevPtr;
use once_cell::sync::Lazy;
use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::Arc;

/// Allocates and frees tensor data: the caller's functions, or the device's.
pub trait TensorAllocator: Send + Sync {
    fn alloc(&self, bytes: usize) -> Result<DevPtr>;
    fn free(&self, data: DevPtr) -> Result<()>;
    /// The address of the caller's free function; `None` if the device frees.
    fn free_fn(&self) -> Option<usize>;
}

/// Allocators for descriptors made by hand that are destroyed with a dead group. Has an entry per
/// change of the free function, not per group.
pub struct Freeing(Vec<(usize, Arc<dyn TensorAllocator>)>);

impl Freeing {
    /// Knows no group.
    pub const EMPTY: Self = Self(Vec::new());

    /// Records that group `number`, larger than all before, frees by `allocator`.
    pub fn note(&mut self, number: usize, allocator: &Arc<dyn TensorAllocator>) {
        let is_same = |(_, last): &(usize, Arc<dyn TensorAllocator>)| last.free_fn() == allocator.free_fn();
        if !self.0.last().is_some_and(is_same) {
            self.0.push((number, Arc::clone(allocator)));
        }
    }

    /// The allocator of group `number`, which must have been recorded.
    pub fn find(&self, number: usize) -> Option<Arc<dyn TensorAllocator>> {
        let later = self.0.partition_point(|(first, _)| *first <= number);
        let (_, allocator) = self.0.get(later.checked_sub(1)?)?;
        Some(Arc::clone(allocator))
    }
}

static OWNERS: Lazy<Mutex<HashMap<DevPtr, Arc<dyn TensorAllocator>>>> = Lazy::new(Mutex::default);

/// Allocates tensor data that [`free`] will return to `owner`.
pub fn alloc(owner: &Arc<dyn TensorAllocator>, bytes: usize) -> Result<DevPtr> {
    let data = owner.alloc(bytes)?;
    if !data.is_null() {
        OWNERS.lock().insert(data, Arc::clone(owner));
    }
    Ok(data)
}

/// Frees `data` by its allocator or, if unknown, by `fallback`; without either keeps it.
pub fn free(data: DevPtr, fallback: Option<&Arc<dyn TensorAllocator>>) -> Result<()> {
    let owner = OWNERS.lock().remove(&data);
    match owner.as_ref().or(fallback) {
        Some(allocator) if !data.is_null() => allocator.free(data),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Fake(Option<usize>);

    impl TensorAllocator for Fake {
        fn alloc(&self, _bytes: usize) -> Result<DevPtr> {
            Ok(DevPtr::default())
        }

        fn free(&self, _data: DevPtr) -> Result<()> {
            Ok(())
        }

        fn free_fn(&self) -> Option<usize> {
            self.0
        }
    }

    #[test]
    fn groups_that_free_alike_cost_nothing() {
        let mut freeing = Freeing::EMPTY;
        let mut note = |numbers: std::ops::Range<usize>, free_fn| {
            for number in numbers {
                let allocator: Arc<dyn TensorAllocator> = Arc::new(Fake(free_fn));
                freeing.note(number, &allocator);
            }
        };
        note(10..1000, None);
        note(1000..2000, Some(7));
        note(2000..2001, Some(8));
        note(2001..3000, None);
        let found = |number| freeing.find(number).map(|allocator| allocator.free_fn());
        assert_eq!(freeing.0.len(), 4);
        assert_eq!(found(9), None);
        assert_eq!((found(10), found(999)), (Some(None), Some(None)));
        assert_eq!((found(1000), found(1999)), (Some(Some(7)), Some(Some(7))));
        assert_eq!((found(2000), found(2500)), (Some(Some(8)), Some(None)));
    }
}
