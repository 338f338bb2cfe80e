//! Device memory of handles, kept for later handles, because allocating and freeing wait for the device.

use crate::error::Result;
use parking_lot::Mutex;
use std::sync::Arc;

/// The memory of a group's present and past handles, one entry per handle.
pub(super) struct Pool<P> {
    entries: Mutex<Vec<Arc<P>>>,
}

impl<P> Default for Pool<P> {
    fn default() -> Self {
        Self { entries: Mutex::default() }
    }
}

impl<P> Pool<P> {
    /// Takes the free entry with the least `waste`, or the result of `make`. `waste` is `None` for an entry that is not
    /// suitable. An entry becomes free when the result and its clones are dropped. Operations of its handle may still
    /// be enqueued then, but those of the next handle run after them.
    pub(super) fn take(&self, waste: impl Fn(&P) -> Option<usize>, make: impl FnOnce() -> Result<P>) -> Result<Arc<P>> {
        // Under the lock, an entry with one reference is free.
        let free = |entries: &mut Vec<Arc<P>>| {
            let fitting = entries.iter_mut().filter_map(|it| Some((waste(Arc::get_mut(it)?)?, Arc::clone(it))));
            fitting.min_by_key(|(waste, _)| *waste).map(|(_, entry)| entry)
        };
        if let Some(entry) = free(&mut self.entries.lock()) {
            return Ok(entry);
        }
        // A caller's allocator may do anything.
        let entry = Arc::new(make()?);
        self.entries.lock().push(Arc::clone(&entry));
        Ok(entry)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at_least(size: usize) -> impl Fn(&usize) -> Option<usize> {
        move |entry| entry.checked_sub(size)
    }

    fn none_free() -> Result<usize> {
        Err(crate::error::Error::internal("none is free"))
    }

    #[test]
    fn the_smallest_free_entry_that_will_do_is_taken() {
        let pool = Pool::default();
        let entries = [30, 10, 20].map(|size| pool.take(|_| None, || Ok(size)).unwrap());
        assert!(pool.take(at_least(5), none_free).is_err());
        drop(entries);
        assert_eq!(*pool.take(at_least(15), none_free).unwrap(), 20);
        assert!(pool.take(at_least(31), none_free).is_err());
    }

    #[test]
    fn an_entry_is_free_when_its_last_reference_is_dropped() {
        let pool = Pool::default();
        let first = pool.take(at_least(0), || Ok(7)).unwrap();
        let clone = Arc::clone(&first);
        drop(first);
        assert!(pool.take(at_least(0), none_free).is_err());
        drop(clone);
        assert_eq!(*pool.take(at_least(0), none_free).unwrap(), 7);
    }
}
