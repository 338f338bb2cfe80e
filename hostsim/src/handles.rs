//! Opaque handles for C callers.
//!
//! A handle is a number that was never a pointer: a stale or invented one is not found, and refused, where following a
//! pointer would crash or reach an object that reused the address.

use std::collections::BTreeMap;
use std::sync::Arc;

use parking_lot::Mutex;

/// The live objects of one type, by handle.
pub(crate) struct Handles<T> {
    live: Mutex<Table<T>>,
}

struct Table<T> {
    next: usize,
    objects: BTreeMap<usize, Arc<T>>,
}

/// Distance between two handles: keeps them apart from CUDA's small reserved stream values.
const STRIDE: usize = 16;

impl<T> Handles<T> {
    /// An empty table whose handles count up from `base`; tables with different bases never
    /// confuse a handle of one type with a handle of another.
    pub(crate) const fn new(base: usize) -> Self {
        Self { live: Mutex::new(Table { next: base, objects: BTreeMap::new() }) }
    }

    pub(crate) fn insert(&self, object: Arc<T>) -> usize {
        let mut table = self.live.lock();
        table.next += STRIDE;
        let handle = table.next;
        table.objects.insert(handle, object);
        handle
    }

    pub(crate) fn get(&self, handle: usize) -> Option<Arc<T>> {
        self.live.lock().objects.get(&handle).cloned()
    }

    /// Removes a handle and returns its object.
    pub(crate) fn remove(&self, handle: usize) -> Option<Arc<T>> {
        self.live.lock().objects.remove(&handle)
    }

    /// Removes every handle whose object meets the condition.
    pub(crate) fn remove_if(&self, condition: impl Fn(&T) -> bool) {
        self.live.lock().objects.retain(|_, object| !condition(object));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn handles_are_never_reused() {
        let table = Handles::new(0x1000);
        let first = table.insert(Arc::new(1));
        assert_eq!(table.remove(first).as_deref(), Some(&1));
        let second = table.insert(Arc::new(2));
        assert_ne!(first, second);
        assert!(table.get(first).is_none());
        assert!(table.remove(first).is_none());
        assert_eq!(table.get(second).as_deref(), Some(&2));
    }
}
