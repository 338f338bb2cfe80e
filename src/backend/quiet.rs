//! When a device is quiet, and what waits for that.
//!
//! Freeing device memory, unmapping a peer's, loading kernels: each waits for all that runs on the device, and
//! on GPUs holds up every launch meanwhile. If another thread's exchange or operation is on the device then, it
//! waits for its peers. They may be in the same place the other way round, and no rank goes on. So such a
//! call is made only while nothing of this library is on the device that waits for other ranks, nor can
//! come there: the device is quiet. Whoever has something to free does not wait for that moment, which might
//! need the peers, but leaves it here. It goes at the next quiet moment, or to the next group that wants the
//! same, so that nothing piles up even if there is none.
#![forbid(unsafe_code)]

use parking_lot::Mutex;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// How long the caller's memory waits for operations to end.
const PATIENCE: Duration = Duration::from_millis(100);
const PAUSE: Duration = Duration::from_micros(50);

/// Operations that were enqueued and wait for other ranks.
pub trait Works: Send + Sync {
    /// Calls `then` while none of them is on the device and none can be enqueued; otherwise returns
    /// without it. Waits for nobody. Nobody tells us of the launches of graphs: where there are some with
    /// such operations, they may always be on the device, unless they do not count.
    fn while_idle(&self, graphs: Graphs, then: &mut dyn FnMut());
}

/// Whether launches of graphs count that the library does not know of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Graphs {
    /// They do.
    Count,
    /// They do not: for memory of the caller's, who must get it back some time, and who knows of them.
    DoNotCount,
}

/// Frees what lies at an address.
pub type Free = Box<dyn FnMut(usize) + Send>;

/// Whether an exchange that was given up is still on the device.
pub type IsStuck = Box<dyn FnMut() -> bool + Send>;

/// One device, as far as this process uses it. What can be used again is found by its key.
pub struct Quiet<K> {
    state: Mutex<State<K>>,
}

struct State<K> {
    /// Exchanges on the device.
    under_way: usize,
    works: Vec<Weak<dyn Works>>,
    stuck: Vec<IsStuck>,
    waiting: Vec<Waiting<K>>,
}

struct Waiting<K> {
    /// What it may be used for; `None` if it may be in use somewhere.
    key: Option<K>,
    address: usize,
    /// `None` if it must stay allocated as long as the process lives.
    free: Option<Free>,
}

impl<K> Default for Quiet<K> {
    fn default() -> Self {
        Self {
            state: Mutex::new(State {
                under_way: 0,
                works: Vec::new(),
                stuck: Vec::new(),
                waiting: Vec::new(),
            }),
        }
    }
}

impl<K> Quiet<K> {
    /// An exchange with other ranks begins; it ends when the result is dropped.
    pub fn begin(self: &Arc<Self>) -> UnderWay<K> {
        self.state.lock().under_way += 1;
        UnderWay(Arc::clone(self))
    }

    /// Operations that count from now on, as long as somebody holds them.
    pub fn watch(&self, works: Weak<dyn Works>) {
        let mut state = self.state.lock();
        state.works.retain(|known| known.strong_count() > 0);
        state.works.push(works);
    }

    /// An exchange was given up and may be on the device for ever.
    pub fn strand(&self, is_stuck: IsStuck) {
        self.state.lock().stuck.push(is_stuck);
    }

    /// Whether such an exchange is on the device at this moment.
    pub fn is_stranded(&self) -> bool {
        let (stranded, over) = {
            let mut state = self.state.lock();
            let over = state.take_over();
            (!state.stuck.is_empty(), over)
        };
        // Not under the lock: what a closure holds may come here to be freed.
        drop(over);
        stranded
    }

    /// Calls `then` if the device is quiet, and says whether it did.
    pub fn try_now(&self, then: impl FnOnce()) -> bool {
        self.while_quiet(Graphs::Count, |_| then())
    }

    /// Frees memory of the caller's by `free`, or when the device is quiet. Waits a little for operations
    /// to end, so that a program that always has some enqueued does not pile up memory; if they need this thread on
    /// another rank, nothing is lost but that time.
    pub fn free_soon(&self, address: usize, free: Free) {
        self.state.lock().waiting.push(Waiting {
            key: None,
            address,
            free: Some(free),
        });
        let start = Instant::now();
        while !self.settle_as(Graphs::DoNotCount, |waiting| waiting.key.is_none())
            && start.elapsed() < PATIENCE
            && self.state.lock().under_way == 0
            && !self.is_stranded()
        {
            std::thread::sleep(PAUSE);
        }
    }

    /// Frees what lies at `address` when the device is quiet; `key` is what it may be used for until then. Without
    /// `free` it stays allocated.
    pub fn later(&self, key: Option<K>, address: usize, free: Option<Free>) {
        self.state
            .lock()
            .waiting
            .push(Waiting { key, address, free });
        self.settle();
    }

    /// Something that waits here for the same use.
    pub fn take(&self, key: &K) -> Option<usize>
    where
        K: PartialEq,
    {
        let found = {
            let mut state = self.state.lock();
            let serves = |waiting: &Waiting<K>| waiting.key.as_ref() == Some(key);
            let index = state.waiting.iter().position(serves)?;
            state.waiting.swap_remove(index)
        };
        Some(found.address)
    }

    /// Frees what waits, if the device is quiet.
    fn settle(&self) {
        self.settle_as(Graphs::Count, |_| true);
    }

    /// Frees those that are `wanted` of what waits, if the device is quiet, and says whether it is.
    fn settle_as(&self, graphs: Graphs, wanted: impl Fn(&Waiting<K>) -> bool) -> bool {
        let mut gone = Vec::new();
        self.while_quiet(graphs, |state| {
            let (freeable, kept) = state
                .waiting
                .drain(..)
                .partition(|waiting| waiting.free.is_some() && wanted(waiting));
            gone = freeable;
            state.waiting = kept;
            for Waiting { address, free, .. } in &mut gone {
                if let Some(free) = free {
                    free(*address);
                }
            }
        })
    }

    fn while_quiet(&self, graphs: Graphs, then: impl FnOnce(&mut State<K>)) -> bool {
        // These two are dropped after the lock is released: with them may go what comes here to be freed.
        let works: Vec<Arc<dyn Works>>;
        let over;
        let mut then = Some(then);
        {
            let mut state = self.state.lock();
            over = state.take_over();
            works = state.works.iter().filter_map(Weak::upgrade).collect();
            if state.under_way == 0 && state.stuck.is_empty() {
                while_all_idle(&works, graphs, &mut || {
                    if let Some(then) = then.take() {
                        then(&mut state);
                    }
                });
            }
        }
        drop((works, over));
        then.is_none()
    }
}

impl<K> State<K> {
    /// Takes out the exchanges that are not on the device any more.
    fn take_over(&mut self) -> Vec<IsStuck> {
        let (stuck, over) = self
            .stuck
            .drain(..)
            .map(|mut is_stuck| (is_stuck(), is_stuck))
            .partition::<Vec<_>, _>(|(stuck, _)| *stuck);
        self.stuck = stuck.into_iter().map(|(_, is_stuck)| is_stuck).collect();
        over.into_iter().map(|(_, is_stuck)| is_stuck).collect()
    }
}

fn while_all_idle(works: &[Arc<dyn Works>], graphs: Graphs, then: &mut dyn FnMut()) {
    match works.split_first() {
        None => then(),
        Some((first, others)) => {
            first.while_idle(graphs, &mut || while_all_idle(others, graphs, then));
        }
    }
}

/// An exchange on the device, which counts as over when this is dropped.
#[must_use]
pub struct UnderWay<K>(Arc<Quiet<K>>);

impl<K> Drop for UnderWay<K> {
    fn drop(&mut self) {
        self.0.state.lock().under_way -= 1;
        self.0.settle();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

    struct Switch(AtomicBool);

    impl Works for Switch {
        fn while_idle(&self, _graphs: Graphs, then: &mut dyn FnMut()) {
            if self.0.load(Ordering::Relaxed) {
                then();
            }
        }
    }

    /// Has operations in graphs.
    struct Captured;

    impl Works for Captured {
        fn while_idle(&self, graphs: Graphs, then: &mut dyn FnMut()) {
            if graphs == Graphs::DoNotCount {
                then();
            }
        }
    }

    /// A device, and what was freed on it.
    fn device() -> (Arc<Quiet<usize>>, Arc<AtomicUsize>) {
        (Arc::default(), Arc::default())
    }

    fn free(freed: &Arc<AtomicUsize>) -> Option<Free> {
        let freed = Arc::clone(freed);
        Some(Box::new(move |address| {
            freed.fetch_add(address, Ordering::Relaxed);
        }))
    }

    #[test]
    fn on_a_quiet_device_nothing_waits() {
        let (quiet, freed) = device();
        quiet.later(Some(1), 7, free(&freed));
        assert_eq!(freed.load(Ordering::Relaxed), 7);
        assert_eq!(quiet.take(&1), None);
    }

    #[test]
    fn what_waits_is_freed_when_the_last_exchange_ends() {
        let (quiet, freed) = device();
        let exchanges = [quiet.begin(), quiet.begin()];
        quiet.later(Some(1), 7, free(&freed));
        let [first, second] = exchanges;
        drop(first);
        assert_eq!(freed.load(Ordering::Relaxed), 0);
        drop(second);
        assert_eq!(freed.load(Ordering::Relaxed), 7);
    }

    #[test]
    fn operations_on_the_device_make_it_wait() {
        let (quiet, freed) = device();
        let busy = Arc::new(Switch(AtomicBool::new(false)));
        let works: Weak<dyn Works> = Arc::downgrade(&busy) as Weak<dyn Works>;
        quiet.watch(works);
        quiet.later(None, 7, free(&freed));
        assert!(!quiet.try_now(|| panic!("the device is not quiet")));
        busy.0.store(true, Ordering::Relaxed);
        drop(quiet.begin());
        assert_eq!(freed.load(Ordering::Relaxed), 7);
        busy.0.store(false, Ordering::Relaxed);
        drop(busy);
        assert!(quiet.try_now(|| ()));
    }

    #[test]
    fn memory_of_the_callers_does_not_wait_for_graphs() {
        let (quiet, freed) = device();
        let captured = Arc::new(Captured);
        quiet.watch(Arc::downgrade(&captured) as Weak<dyn Works>);
        quiet.later(Some(1), 7, free(&freed));
        quiet.free_soon(8, free(&freed).unwrap());
        assert_eq!(freed.load(Ordering::Relaxed), 8);
        drop(captured);
        drop(quiet.begin());
        assert_eq!(freed.load(Ordering::Relaxed), 15);
    }

    #[test]
    fn memory_of_the_callers_waits_for_operations_but_not_for_ever() {
        let (quiet, freed) = device();
        let busy = Arc::new(Switch(AtomicBool::new(false)));
        quiet.watch(Arc::downgrade(&busy) as Weak<dyn Works>);
        quiet.free_soon(7, free(&freed).unwrap());
        assert_eq!(freed.load(Ordering::Relaxed), 0);
        busy.0.store(true, Ordering::Relaxed);
        quiet.free_soon(8, free(&freed).unwrap());
        assert_eq!(freed.load(Ordering::Relaxed), 15);
        let exchange = quiet.begin();
        quiet.free_soon(1, free(&freed).unwrap());
        assert_eq!(freed.load(Ordering::Relaxed), 15);
        drop(exchange);
        assert_eq!(freed.load(Ordering::Relaxed), 16);
    }

    #[test]
    fn what_waits_serves_the_same_use_again() {
        let (quiet, freed) = device();
        let exchange = quiet.begin();
        quiet.later(Some(1), 7, free(&freed));
        quiet.later(None, 8, free(&freed));
        assert_eq!(quiet.take(&2), None);
        assert_eq!(quiet.take(&1), Some(7));
        assert_eq!(quiet.take(&1), None);
        drop(exchange);
        assert_eq!(freed.load(Ordering::Relaxed), 8);
    }

    #[test]
    fn what_a_peer_may_map_stays_and_serves_again() {
        let (quiet, _) = device();
        quiet.later(Some(1), 7, None);
        drop(quiet.begin());
        assert_eq!(quiet.take(&1), Some(7));
    }

    #[test]
    fn a_stuck_exchange_keeps_everything_until_it_is_over() {
        let (quiet, freed) = device();
        let stuck = Arc::new(AtomicBool::new(true));
        let asked = Arc::clone(&stuck);
        quiet.strand(Box::new(move || asked.load(Ordering::Relaxed)));
        quiet.later(None, 7, free(&freed));
        assert!(quiet.is_stranded());
        assert_eq!(freed.load(Ordering::Relaxed), 0);
        stuck.store(false, Ordering::Relaxed);
        assert!(!quiet.is_stranded());
        drop(quiet.begin());
        assert_eq!(freed.load(Ordering::Relaxed), 7);
    }

    #[test]
    fn freeing_may_drop_what_frees_in_turn() {
        struct Frees(Arc<Quiet<usize>>);
        impl Drop for Frees {
            fn drop(&mut self) {
                self.0.later(None, 0, Some(Box::new(drop)));
            }
        }
        let (quiet, _) = device();
        let inner = Frees(Arc::clone(&quiet));
        let exchange = quiet.begin();
        quiet.later(
            Some(1),
            1,
            Some(Box::new(move |_| {
                let _held = &inner;
            })),
        );
        drop(exchange);
        let inner = Frees(Arc::clone(&quiet));
        quiet.strand(Box::new(move || {
            let _held = &inner;
            false
        }));
        assert!(!quiet.is_stranded());
    }
}
