//! The order of a group's operations on the device, across streams.
//!
//! Each operation of a group begins after the previous one has ended, as all use the same memory, and the blocks of two
//! might not fit on the device together. Only receive phases of staged operations are exempt.
//! An event is recorded after every operation, because its stream may be destroyed before another stream has to wait.
//! This costs the host 0.1 to 0.4 us; counting finished blocks on the device would take longer
//! (`docs/development/host-time.md`).

use crate::backend::cuda::driver::context::{Context, Enqueued};
use crate::backend::cuda::driver::event::Event;
use crate::backend::cuda::driver::stream::StreamScope;
use crate::backend::quiescence::{Graphs, Works};
use crate::error::refusal::{InSequence, Subject};
use crate::error::{Error, Result};
use parking_lot::{Mutex, MutexGuard};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// The order of a group's operations, outside of graphs and within captures.
pub(super) struct Order(Arc<Operations<Event>>);

/// Events recorded after operations.
pub(super) trait Events: Send {
    fn all(&self) -> impl Iterator<Item = &Event>;
}

impl Events for Event {
    fn all(&self) -> impl Iterator<Item = &Event> {
        std::iter::once(self)
    }
}

/// Operations in one or several orders, with the events after the last one of each.
pub(super) struct Operations<T> {
    done: Mutex<T>,
    /// Whether the group has ended, so that no operation may follow; changed under the lock of `done`.
    ended: AtomicBool,
}

impl<T: Events + 'static> Operations<T> {
    /// No operations yet, of a group in `context`.
    pub(super) fn new(context: &Context, done: T) -> Arc<Self> {
        let operations = Arc::new(Self { done: Mutex::new(done), ended: AtomicBool::new(false) });
        context.watch(&operations);
        operations
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, T> {
        self.done.lock()
    }

    /// Refuses, under the lock, an operation enqueued while another thread destroys the group.
    pub(super) fn check_open(&self) -> Result<()> {
        if self.ended.load(Ordering::Relaxed) {
            return Err(Error::usage(Subject::Group, InSequence::DestroyedMeanwhile));
        }
        Ok(())
    }
}

impl Order {
    pub(super) fn new(context: &Arc<Context>) -> Result<Self> {
        Ok(Self(Operations::new(context, Event::new(context)?)))
    }

    /// Makes `at` wait for the previous operation. What the caller launches until [`Turn::end`] is the next operation;
    /// a turn dropped without that call counts as nothing launched. Operations captured into one graph are ordered,
    /// too; the caller has to order the launches of graphs.
    pub(super) fn begin<'a>(&'a self, at: &'a StreamScope) -> Result<Turn<'a>> {
        let done = self.0.lock();
        self.0.check_open()?;
        done.make_wait(at)?;
        Ok(Turn { done, at })
    }
}

/// An operation's turn to be enqueued; it holds the lock of the order, so no other operation can begin.
#[must_use]
pub(super) struct Turn<'a> {
    done: MutexGuard<'a, Event>,
    at: &'a StreamScope,
}

impl Turn<'_> {
    /// Records that the operation was launched, so that the next one waits for it.
    pub(super) fn end(mut self) -> Result<()> {
        self.done.record(self.at)
    }

    /// As [`Self::end`], for an operation of several launches, also if `enqueued` failed after some of them.
    pub(super) fn end_after(self, enqueued: Result<()>) -> Result<()> {
        enqueued.and(self.end())
    }
}

impl<T: Events> Works for Operations<T> {
    fn while_idle(&self, graphs: Graphs, then: &mut dyn FnMut()) {
        let graphs_count = graphs == Graphs::Count && !self.ended.load(Ordering::Relaxed);
        if let Some(done) = self.done.try_lock()
            && !(graphs_count && done.all().any(Event::is_in_graphs))
            && done.all().all(|it| it.is_over() != Ok(false))
        {
            then();
        }
    }
}

impl<T: Events> Enqueued for Operations<T> {
    fn are_over(&self) -> Result<bool> {
        let over: Result<Vec<bool>> = self.done.lock().all().map(Event::is_over).collect();
        Ok(!over?.contains(&false))
    }

    fn are_captured(&self) -> bool {
        self.done.lock().all().any(Event::is_in_graphs)
    }

    fn end(&self) {
        let _no_launch = self.done.lock();
        self.ended.store(true, Ordering::Relaxed);
    }
}
