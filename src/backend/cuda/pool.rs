//! Reuses the device memory of handles for later ones, because allocating and freeing synchronize the device.

use crate::backend::cuda::driver::stream::{Capture, StreamScope};
use crate::error::Result;
use crate::model::handle_state::{HandleLife, WatchedLife};
use parking_lot::Mutex;
use std::ops::Deref;
use std::sync::Arc;

/// The memory of a group's present and past handles, one entry per routing.
pub(super) struct Pool<P> {
    entries: Mutex<Vec<Arc<Entry<P>>>>,
}

/// Memory for one routing at a time, and the graphs that use it. Graphs count as existing until their handle ends: the
/// CUDA user object that would report a graph's end makes each launch 2.6 us longer.
struct Entry<P> {
    memory: P,
    uses: Mutex<Vec<GraphUse>>,
}

/// A graph with operations of `handle` that use the memory. It ends before the handle does.
struct GraphUse {
    capture: Capture,
    handle: WatchedLife,
}

/// A request for memory.
pub(super) struct MemoryRequest<'a> {
    pub(super) handle: &'a HandleLife,
    /// The capture whose operations will use it.
    pub(super) capture: Option<Capture>,
    /// Whether several graphs of a handle may share the memory, as nothing in it has to outlast a graph's launch.
    pub(super) shares: bool,
}

/// Memory that a routing uses until all clones are dropped. Operations enqueued until then may still have to run;
/// stream order puts them before those of the next routing.
pub(super) struct Pooled<P> {
    entry: Arc<Entry<P>>,
    handle: HandleLife,
}

impl<P> Default for Pool<P> {
    fn default() -> Self {
        Self { entries: Mutex::default() }
    }
}

impl<P> Pool<P> {
    /// Takes the free entry with the least `waste`, or the result of `make`. `waste` is `None` for an entry that is not
    /// suitable.
    pub(super) fn take(
        &self,
        request: &MemoryRequest<'_>,
        waste: impl Fn(&P) -> Option<usize>,
        make: impl FnOnce() -> Result<P>,
    ) -> Result<Pooled<P>> {
        // Only `entries` refers to a free entry; the lock keeps others from taking it meanwhile.
        let free = |entries: &mut Vec<Arc<Entry<P>>>| {
            let idle = entries.iter_mut().filter_map(|it| {
                let entry = Arc::get_mut(it)?;
                let waste = entry.serves(request).then(|| waste(&entry.memory))??;
                Some((waste, Arc::clone(it)))
            });
            idle.min_by_key(|(waste, _)| *waste).map(|(_, entry)| entry)
        };
        if let Some(entry) = free(&mut self.entries.lock()) {
            return Ok(Pooled { entry, handle: request.handle.clone() });
        }
        // Not under the lock, as a caller's allocator may call the library.
        let taken = Pooled::apart(make()?, request.handle);
        self.entries.lock().push(Arc::clone(&taken.entry));
        Ok(taken)
    }
}

impl<P> Entry<P> {
    /// Launches of graphs are invisible to the library. So memory that a graph uses serves only this graph, whose
    /// operations are ordered, or, if shared, graphs of the same handle, whose launches are ordered, too.
    fn serves(&mut self, request: &MemoryRequest<'_>) -> bool {
        let uses = self.uses.get_mut();
        uses.retain(|it| !it.handle.has_ended());
        let shares = request.shares && request.capture.is_some();
        uses.iter().all(|it| Some(it.capture) == request.capture || shares && it.handle.is_of(request.handle))
    }
}

impl<P> Pooled<P> {
    /// `memory` that belongs to no pool.
    pub(super) fn apart(memory: P, handle: &HandleLife) -> Self {
        Self { entry: Arc::new(Entry { memory, uses: Mutex::default() }), handle: handle.clone() }
    }

    /// Records that operations on the stream `at` use the memory.
    pub(super) fn use_at(&self, at: &StreamScope) {
        if let Some(capture) = at.capture {
            self.use_in(capture);
        }
    }

    fn use_in(&self, capture: Capture) {
        let mut uses = self.entry.uses.lock();
        if !uses.iter().any(|it| it.capture == capture && it.handle.is_of(&self.handle)) {
            uses.push(GraphUse { capture, handle: self.handle.watch() });
        }
    }
}

impl<P> Clone for Pooled<P> {
    fn clone(&self) -> Self {
        Self { entry: Arc::clone(&self.entry), handle: self.handle.clone() }
    }
}

impl<P> Deref for Pooled<P> {
    type Target = P;

    fn deref(&self) -> &P {
        &self.entry.memory
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Takes an entry of at least `size` for `handle`.
    fn take(pool: &Pool<usize>, handle: &HandleLife, capture: Option<Capture>, size: usize) -> Option<Pooled<usize>> {
        take_as(pool, &MemoryRequest { handle, capture, shares: false }, size)
    }

    fn take_as(pool: &Pool<usize>, request: &MemoryRequest<'_>, size: usize) -> Option<Pooled<usize>> {
        let none_free = || Err(crate::error::Error::internal("none is free"));
        pool.take(request, |entry| entry.checked_sub(size), none_free).ok()
    }

    fn pool_of<const N: usize>(sizes: [usize; N]) -> Pool<usize> {
        let (pool, handle) = (Pool::default(), HandleLife::default());
        let request = MemoryRequest { handle: &handle, capture: None, shares: false };
        let entries = sizes.map(|size| pool.take(&request, |_| None, || Ok(size)).unwrap());
        assert!(take(&pool, &handle, None, 0).is_none());
        drop(entries);
        pool
    }

    #[test]
    fn the_smallest_free_entry_that_will_do_is_taken() {
        let (pool, handle) = (pool_of([30, 10, 20]), HandleLife::default());
        assert_eq!(take(&pool, &handle, None, 15).as_deref(), Some(&20));
        assert!(take(&pool, &handle, None, 31).is_none());
    }

    #[test]
    fn an_entry_is_free_when_its_last_reference_is_dropped() {
        let (pool, handle) = (pool_of([7]), HandleLife::default());
        let first = take(&pool, &handle, None, 0);
        let clone = first.clone();
        drop(first);
        assert!(take(&pool, &handle, None, 0).is_none());
        drop(clone);
        assert!(take(&pool, &handle, None, 0).is_some());
    }

    #[test]
    fn what_a_graph_uses_serves_it_alone_until_its_handles_end() {
        let pool = pool_of([7]);
        let [one, other, third] = [(); 3].map(|()| HandleLife::default());
        let [first, second] = [1, 2].map(|number| Some(Capture::numbered(number)));
        for handle in [&one, &other] {
            let taken = take(&pool, handle, first, 0).unwrap();
            taken.use_in(first.unwrap());
        }
        for capture in [None, second] {
            assert!(take(&pool, &third, capture, 0).is_none());
        }
        drop(one);
        assert!(take(&pool, &third, None, 0).is_none());
        drop(other);
        assert!(take(&pool, &third, None, 0).is_some());
    }

    #[test]
    fn graphs_of_a_handle_share_where_nothing_stays() {
        let pool = pool_of([7]);
        let [one, other] = [(); 2].map(|()| HandleLife::default());
        let [first, second] = [1, 2].map(Capture::numbered);
        take(&pool, &one, Some(first), 0).unwrap().use_in(first);
        let request = |handle, capture| MemoryRequest { handle, capture, shares: true };
        assert!(take_as(&pool, &request(&one, Some(second)), 0).is_some());
        assert!(take_as(&pool, &request(&one, None), 0).is_none());
        assert!(take_as(&pool, &request(&other, Some(second)), 0).is_none());
    }
}
