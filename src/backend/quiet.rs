//! When a device is quiet, and what waits for that.
//!
//! Freeing device memory, unmapping a peer's, loading kernels: each waits for all that runs on the device, and
//! on GPUs holds up every launch meanwhile. If another thread's exchange or operation is on the device then, it
//! waits for its peers. They may be in the same place the other way round, and no rank goes on. So such a
//! call is made only while nothing of this library is on the device that waits for other ranks, nor can
//! come there: the device is quiet. Whoever has something to free does not wait for that moment, which might
//! need the peers, but leaves it here. It goes at the next quiet moment, or to the next group that wants the
//! same, so that little piles up even if there is none.
#![forbid(unsafe_code)]

use parking_lot::Mutex;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// How long the caller's memory waits for operations to end.
const PATIENCE: Duration = Duration::from_millis(100);
/// So many pieces of the caller's may wait to be freed.
const MOST_PIECES: usize = 256;
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
    /// Somebody has waited in vain since the device was quiet for the last time; nobody else need try.
    out_of_patience: bool,
}

/// What is left of another group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Taken {
    /// Where it lies.
    pub address: usize,
    /// It must stay allocated as long as the process lives: somebody may still map it.
    pub must_stay: bool,
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
                out_of_patience: false,
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
    /// to end, as a program that has some enqueued most of the time would pile up memory; if they need this
    /// thread on another rank, nothing is lost but that time, and that once. Of a program that always has some
    /// enqueued the oldest piece is freed all the same when there are too many: it would run out of memory.
    pub fn free_soon(&self, address: usize, free: Free) {
        self.state.lock().waiting.push(Waiting {
            key: None,
            address,
            free: Some(free),
        });
        let start = Instant::now();
        while !self.settle_as(Graphs::DoNotCount, |waiting| waiting.key.is_none()) {
            let mut state = self.state.lock();
            if !state.has(address) {
                return;
            }
            if state.out_of_patience || state.under_way > 0 || !state.stuck.is_empty() {
                break;
            }
            state.out_of_patience = start.elapsed() >= PATIENCE;
            drop(state);
            std::thread::sleep(PAUSE);
        }
        self.free_one_of_too_many();
    }

    /// Not behind an exchange, which may need this thread.
    fn free_one_of_too_many(&self) {
        let oldest = {
            let mut state = self.state.lock();
            let pieces = state.waiting.iter().filter(|it| it.key.is_none()).count();
            if pieces <= MOST_PIECES || state.under_way > 0 || !state.stuck.is_empty() {
                return;
            }
            let is_piece = |it: &Waiting<K>| it.key.is_none() && it.free.is_some();
            let oldest = state.waiting.iter().position(is_piece);
            oldest.map(|index| state.waiting.remove(index))
        };
        if let Some(Waiting {
            address,
            free: Some(mut free),
            ..
        }) = oldest
        {
            free(address);
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
    pub fn take(&self, key: &K) -> Option<Taken>
    where
        K: PartialEq,
    {
        let found = {
            let mut state = self.state.lock();
            let serves = |waiting: &Waiting<K>| waiting.key.as_ref() == Some(key);
            let index = state.waiting.iter().position(serves)?;
            state.waiting.swap_remove(index)
        };
        Some(Taken {
            address: found.address,
            must_stay: found.free.is_none(),
        })
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
                    state.out_of_patience = false;
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
    /// Whether a piece of the caller's at `address` waits.
    fn has(&self, address: usize) -> bool {
        let is_it = |it: &Waiting<K>| it.key.is_none() && it.address == address;
        self.waiting.iter().any(is_it)
    }

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
#[path = "quiet_tests.rs"]
mod tests;
