//! The order of a group's operations on this rank, across streams: each begins after the previous one. Receive phases
//! of staged operations have an order of their own.

use crate::backend::quiescence::{Graphs, Works};
use crate::error::refusal::{InSequence, Subject};
use crate::error::{Error, Result};
use crate::model::ops::{STAGED_SLOTS, StagedSlot};
use parking_lot::{Condvar, Mutex};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// The last operation that has ended.
#[derive(Default)]
pub struct Order {
    last: Mutex<u64>,
    moved: Condvar,
}

impl Order {
    /// Waits until the operation with epoch `before` has ended, which was enqueued earlier: so the wait terminates.
    pub fn follow(&self, before: u64) {
        let mut last = self.last.lock();
        while *last < before {
            self.moved.wait(&mut last);
        }
    }

    pub fn end(&self, epoch: u64) {
        *self.last.lock() = epoch;
        self.moved.notify_all();
    }
}

/// The receive phases of staged operations, by slot. They use the handle's memory, so each later operation on it waits
/// for those enqueued before, on any stream. Handles in callers' memory may share it, and so share one instance.
#[derive(Default)]
pub struct Received([ReceivedInSlot; STAGED_SLOTS]);

#[derive(Default)]
struct ReceivedInSlot {
    ended: Order,
    /// Epoch of the last one enqueued.
    last: AtomicU64,
}

impl Received {
    /// Records that the receive phase of operation `epoch` is enqueued.
    pub fn enqueued(&self, slot: StagedSlot, epoch: u64) {
        slot.of(&self.0).last.store(epoch, Ordering::Release);
    }

    /// Records that it has ended.
    pub fn end(&self, slot: StagedSlot, epoch: u64) {
        slot.of(&self.0).ended.end(epoch);
    }

    /// The wait that an operation enqueued now must perform when it runs: for earlier ones, so it terminates.
    pub fn follow(self: &Arc<Self>) -> impl FnOnce() + Send + use<> {
        let received = Arc::clone(self);
        let last = self.0.each_ref().map(|it| it.last.load(Ordering::Acquire));
        move || {
            for (slot, last) in received.0.iter().zip(last) {
                slot.ended.follow(last);
            }
        }
    }
}

/// Host functions enqueued on any stream that have not run yet.
#[derive(Default)]
pub struct Pending(Mutex<Enqueued>);

#[derive(Default)]
struct Enqueued {
    functions: usize,
    /// Whether the group has ended, so that none may follow.
    ended: bool,
}

impl Pending {
    /// Counts one and enqueues it with `launch`, without holding the lock: a launch may wait for a thread that frees
    /// memory, which waits for functions that have to take the lock to end. Refused if another thread has destroyed the
    /// group meanwhile.
    pub fn enqueue<T>(&self, launch: impl FnOnce() -> Result<T>) -> Result<T> {
        let mut enqueued = self.0.lock();
        if enqueued.ended {
            return Err(Error::usage(Subject::Group, InSequence::DestroyedMeanwhile));
        }
        enqueued.functions += 1;
        drop(enqueued);
        launch().inspect_err(|_| self.end())
    }

    pub fn end(&self) {
        self.0.lock().functions -= 1;
    }

    /// Refuses further functions.
    pub fn close(&self) {
        self.0.lock().ended = true;
    }

    pub fn is_empty(&self) -> bool {
        self.0.lock().functions == 0
    }
}

impl Works for Pending {
    fn while_idle(&self, _graphs: Graphs, then: &mut dyn FnMut()) {
        if let Some(pending) = self.0.try_lock()
            && pending.functions == 0
        {
            then();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_closed_group_enqueues_nothing() {
        let pending = Pending::default();
        pending.enqueue(|| Ok(())).unwrap();
        pending.close();
        assert!(!pending.is_empty());
        let refused = pending.enqueue(|| -> Result<()> { unreachable!("launched") });
        assert_eq!(refused, Err(Error::usage(Subject::Group, InSequence::DestroyedMeanwhile)));
        pending.end();
        assert!(pending.is_empty());
    }
}
