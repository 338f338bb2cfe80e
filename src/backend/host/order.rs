//! The order of a group's operations on this rank, across streams: each begins after the one before
//! it. Receive phases of staged operations have an order of their own, per handle (`ll`).

use parking_lot::{Condvar, Mutex};

/// The last operation that has ended.
#[derive(Default)]
pub struct Order {
    last: Mutex<u64>,
    moved: Condvar,
}

impl Order {
    /// Waits until the operation with epoch `before` has ended. It was enqueued earlier, so the
    /// wait terminates.
    pub fn follow(&self, before: u64) {
        let mut last = self.last.lock();
        while *last < before {
            self.moved.wait(&mut last);
        }
    }

    /// Marks the operation with epoch `epoch` as ended.
    pub fn end(&self, epoch: u64) {
        *self.last.lock() = epoch;
        self.moved.notify_all();
    }
}
