//! What a group of the CPU backend has enqueued.

use crate::backend::quiescence::{Graphs, Works};
use crate::error::Result;
use parking_lot::Mutex;

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
