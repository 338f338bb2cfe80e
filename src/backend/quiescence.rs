//! Quiescent moments of a device, and the calls that are only made then.
//!
//! A device is quiescent while no work of this library on it waits for other ranks and no such work can be enqueued.
//! Freeing device memory, unmapping a peer's memory, loading kernels and destroying communicators happen only then.
//! Each of these calls waits for everything on the device and, on GPUs, blocks every launch meanwhile. If another
//! thread's exchange or operation were on the device, the call would wait for that operation's peers, which may be
//! blocked in the same kind of call, waiting for this rank: a deadlock.
//!
//! Nobody waits long for a quiescent moment, as that might need the peers. Memory to be freed is left here until the
//! next one, or reused by the next group with the same needs, so little accumulates even if the device is never
//! quiescent.
//!
//! While a graph has operations no moment is quiescent: two ranks would deadlock if each had a free that waits for one
//! replay and blocks the launch of the other. On one node graphs count until their group ends. If too much of the
//! caller's memory accumulates, it is freed all the same, by a call that waits for nothing.

use parking_lot::Mutex;
use std::collections::VecDeque;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// How long freeing a caller's memory waits for operations to end.
const PATIENCE: Duration = Duration::from_millis(100);
/// Most allocations of callers that may wait to be freed.
const MOST_ALLOCATIONS: usize = 256;
/// Most bytes of them that may wait only because of graphs.
const MOST_BYTES: usize = 256 << 20;
const PAUSE: Duration = Duration::from_micros(50);

/// Enqueued operations that wait for other ranks.
pub trait Works: Send + Sync {
    /// Calls `then` while no operation is on the device and none can be enqueued; otherwise returns without calling it.
    /// Never waits. The library does not see graph launches: captured operations count as always running, unless
    /// `graphs` says otherwise.
    fn while_idle(&self, graphs: Graphs, then: &mut dyn FnMut());
}

/// Whether graph launches, which the library does not see, count as running.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Graphs {
    Count,
    /// They do not: for frees that wait for nothing. The caller knows of its launches.
    DoNotCount,
}

/// The outcome of work for a quiescent moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Attempt {
    Done,
    /// The device is not quiescent.
    Busy,
    /// The device was reset, and nothing on it is left.
    Gone,
}

/// Frees the allocation at an address.
pub type Free = Box<dyn FnMut(usize) + Send>;

/// Memory of the caller's, to be freed.
pub struct Allocation {
    pub address: usize,
    pub bytes: usize,
    /// Frees it after everything on the device.
    pub free: Free,
    /// Frees it without waiting; false if the device cannot.
    pub free_unawaited: Box<dyn FnMut(usize) -> bool + Send>,
}

/// Whether an exchange that was given up is still on the device.
pub type IsStuck = Box<dyn FnMut() -> bool + Send>;

/// Bytes of a handle that lets another process map an allocation.
pub const IPC_HANDLE_BYTES: usize = 64;

/// What can be reused instead of being allocated or mapped anew.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Key {
    /// Device memory of this many bytes that no other process maps.
    Memory(usize),
    /// A window of this many bytes.
    Window(usize),
    /// Pinned host memory of this many bytes.
    Pinned(usize),
    /// The mapping of another process's export.
    Import([u8; IPC_HANDLE_BYTES]),
}

/// One device, as used by this process.
#[derive(Default)]
pub struct Quiescence {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Number of exchanges on the device.
    under_way: usize,
    works: Vec<Weak<dyn Works>>,
    stuck: Vec<IsStuck>,
    waiting: Vec<Waiting>,
    /// Callers' memory to be freed, oldest first.
    allocations: VecDeque<Allocation>,
    /// A wait has failed since the last quiescent moment, so no thread waits again before the next.
    out_of_patience: bool,
}

/// Memory or a mapping that another group left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Taken {
    pub address: usize,
    /// It must stay allocated until the process ends: a peer may still map it.
    pub must_stay: bool,
}

struct Waiting {
    /// What it may be reused for; `None`: nothing.
    key: Option<Key>,
    address: usize,
    /// `None` if it must stay allocated until the process ends.
    free: Option<Free>,
}

impl Quiescence {
    /// Begins an exchange with other ranks; it ends when the result is dropped.
    pub fn begin(self: &Arc<Self>) -> UnderWay {
        self.state.lock().under_way += 1;
        UnderWay(Arc::clone(self))
    }

    /// Registers operations, which count as long as their owner keeps them.
    pub fn watch(&self, works: Weak<dyn Works>) {
        let mut state = self.state.lock();
        state.works.retain(|known| known.strong_count() > 0);
        state.works.push(works);
    }

    /// Registers an exchange that was given up and may never end.
    pub fn mark_hung(&self, is_stuck: IsStuck) {
        self.state.lock().stuck.push(is_stuck);
    }

    /// Whether such an exchange is on the device now.
    pub fn is_hung(&self) -> bool {
        let (hung, over) = {
            let mut state = self.state.lock();
            let over = state.take_ended();
            (!state.stuck.is_empty(), over)
        };
        // Outside the lock: dropping a closure may bring something here to be freed.
        drop(over);
        hung
    }

    /// Does `work` if the device is quiescent. Meanwhile every caller of this object waits, and so does whoever begins
    /// an operation.
    pub fn attempt(&self, work: impl FnOnce()) -> Attempt {
        if self.while_quiescent(Graphs::Count, |_| work()) { Attempt::Done } else { Attempt::Busy }
    }

    /// Frees a caller's memory, now or at the next quiescent moment. Waits briefly for operations to end, but not for
    /// graphs: with some enqueued most of the time, memory would accumulate. If the operations need this thread on
    /// another rank, the wait only costs time, and only once. A surplus is freed at once.
    pub fn free_soon(&self, allocation: Allocation) {
        let address = allocation.address;
        self.state.lock().allocations.push_back(allocation);
        let start = Instant::now();
        while !self.settle_allocations() {
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
        // Outside of the lock: dropping it may bring something here to be freed.
        let gone = self.state.lock().free_surplus(usize::MAX);
        drop(gone);
    }

    /// Frees the allocation at `address` when the device is quiescent; until then it may be reused for `key`. Without
    /// `free` it stays allocated.
    pub fn later(&self, key: Option<Key>, address: usize, free: Option<Free>) {
        self.state.lock().waiting.push(Waiting { key, address, free });
        self.settle();
    }

    /// Takes out an entry for `key`.
    pub fn take(&self, key: &Key) -> Option<Taken> {
        let found = {
            let mut state = self.state.lock();
            let serves = |waiting: &Waiting| waiting.key.as_ref() == Some(key);
            let index = state.waiting.iter().position(serves)?;
            state.waiting.swap_remove(index)
        };
        Some(Taken { address: found.address, must_stay: found.free.is_none() })
    }

    /// Frees everything that waits, if the device is quiescent.
    fn settle(&self) {
        let (mut gone, mut allocations) = (Vec::new(), VecDeque::new());
        self.while_quiescent(Graphs::Count, |state| {
            let all = state.waiting.drain(..);
            (gone, state.waiting) = all.partition(|waiting| waiting.free.is_some());
            for Waiting { address, free, .. } in &mut gone {
                if let Some(free) = free {
                    free(*address);
                }
            }
            allocations = std::mem::take(&mut state.allocations);
            for Allocation { address, free, .. } in &mut allocations {
                free(*address);
            }
        });
    }

    /// The same; also frees surplus caller's memory if the device is quiescent but for graphs. Returns whether it is.
    fn settle_allocations(&self) -> bool {
        self.settle();
        let mut gone = Vec::new();
        self.while_quiescent(Graphs::DoNotCount, |state| {
            gone = state.free_surplus(MOST_BYTES);
        })
    }

    fn while_quiescent(&self, graphs: Graphs, then: impl FnOnce(&mut State)) -> bool {
        // Both are dropped after the lock is released: dropping them may bring something here to be freed.
        let works: Vec<Arc<dyn Works>>;
        let over;
        let mut then = Some(then);
        {
            let mut state = self.state.lock();
            over = state.take_ended();
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

impl State {
    /// Whether the caller's allocation at `address` is waiting.
    fn has(&self, address: usize) -> bool {
        self.allocations.iter().any(|it| it.address == address)
    }

    /// Frees callers' oldest allocations until at most [`MOST_ALLOCATIONS`] of `most_bytes` are left. Nothing while a
    /// stuck exchange may still use them. Returns what was freed, to be dropped outside the lock.
    fn free_surplus(&mut self, most_bytes: usize) -> Vec<Allocation> {
        let mut freed = Vec::new();
        let mut bytes: usize = self.allocations.iter().map(|it| it.bytes).sum();
        while self.stuck.is_empty()
            && (bytes > most_bytes || self.allocations.len() > MOST_ALLOCATIONS)
            && let Some(oldest) = self.allocations.front_mut()
            && (oldest.free_unawaited)(oldest.address)
        {
            bytes -= oldest.bytes;
            freed.extend(self.allocations.pop_front());
        }
        freed
    }

    /// Takes out the exchanges that have left the device.
    fn take_ended(&mut self) -> Vec<IsStuck> {
        self.stuck.extract_if(.., |is_stuck| !is_stuck()).collect()
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

/// An exchange on a device, which counts as over when this is dropped.
#[must_use]
pub struct UnderWay(Arc<Quiescence>);

impl Drop for UnderWay {
    fn drop(&mut self) {
        self.0.state.lock().under_way -= 1;
        self.0.settle();
    }
}

#[cfg(test)]
#[path = "quiescence_tests.rs"]
mod tests;
