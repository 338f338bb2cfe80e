//! The order of a group's operations on this rank, across streams: each begins after the one before
//! it. Receive phases of staged operations have an order of their own.

use crate::backend::quiescence::{Graphs, Works};
use crate::error::Result;
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
    /// Waits until the operation with epoch `before` has ended. It was enqueued earlier, so the wait terminates.
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
/// for those enqueued before it, on any stream. Memory of a caller's may be several handles', which share these.
#[derive(Default)]
pub struct Received([ReceivedInSlot; STAGED_SLOTS]);

#[derive(Default)]
struct ReceivedInSlot {
    ended: Order,
    /// Epoch of the last one that was enqueued.
    last: AtomicU64,
}

impl Received {
    /// The receive phase of the operation `epoch` is enqueued.
    pub fn enqueued(&self, slot: StagedSlot, epoch: u64) {
        slot.of(&self.0).last.store(epoch, Ordering::Release);
    }

    /// It has ended.
    pub fn end(&self, slot: StagedSlot, epoch: u64) {
        slot.of(&self.0).ended.end(epoch);
    }

    /// The wait that an operation enqueued now must do when it runs. It waits for earlier ones, so it terminates.
    pub fn follow(self: &Arc<Self>) -> impl FnOnce() + Send + 'static {
        let received = Arc::clone(self);
        let last = self.0.each_ref().map(|it| it.last.load(Ordering::Acquire));
        move || {
            for (slot, last) in received.0.iter().zip(last) {
                slot.ended.follow(last);
            }
        }
    }
}

/// Host functions that were enqueued and have not run yet, on any stream.
#[derive(Default)]
pub struct Pending(Mutex<usize>);

impl Pending {
    /// Enqueues one by `launch` and counts it. Not locked meanwhile: a launch waits beside a thread that frees memory,
    /// which waits for those that are to end.
    pub fn enqueue<T>(&self, launch: impl FnOnce() -> Result<T>) -> Result<T> {
        *self.0.lock() += 1;
        launch().inspect_err(|_| self.end())
    }

    pub fn end(&self) {
        *self.0.lock() -= 1;
    }

    pub fn is_empty(&self) -> bool {
        *self.0.lock() == 0
    }
}

impl Works for Pending {
    fn while_idle(&self, _graphs: Graphs, then: &mut dyn FnMut()) {
        if let Some(pending) = self.0.try_lock()
            && *pending == 0
        {
            then();
        }
    }
}
