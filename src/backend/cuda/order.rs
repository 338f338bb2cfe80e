//! The order of a group's operations on the device, across streams.
//!
//! Each operation of a group begins after the previous one: they use the same memory, and the blocks of two might not
//! fit on the device together. Only receive phases of staged operations are exempt. An event is recorded after every
//! operation, as its stream may be destroyed before another one waits on it. That costs the host 0.1 to 0.4 us; a
//! counter of finished blocks would take longer on the device (`docs/development/host-time.md`).

use crate::backend::cuda::driver::context::{Context, Enqueued};
use crate::backend::cuda::driver::event::Event;
use crate::backend::cuda::driver::stream::StreamScope;
use crate::backend::quiescence::{Graphs, Works};
use crate::error::refusal::{InSequence, Subject};
use crate::error::{Error, Result};
use parking_lot::{Mutex, MutexGuard};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// The operations that the group has enqueued, outside of graphs and in captures.
pub(super) struct Order(Arc<Operations<Event>>);

/// The events that follow operations.
pub(super) trait Events: Send {
    fn all(&self) -> impl Iterator<Item = &Event>;
}

impl Events for Event {
    fn all(&self) -> impl Iterator<Item = &Event> {
        std::iter::once(self)
    }
}

/// Operations in one order or several, and the ends of the last ones.
pub(super) struct Operations<T> {
    done: Mutex<T>,
    /// Set under the lock of `done`: no operation may follow.
    ended: AtomicBool,
}

impl<T: Events + 'static> Operations<T> {
    /// Those of the group in `context`; none yet.
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

    /// Makes `at` wait for the previous operation. Work launched until [`Turn::end`] is the next operation; without
    /// that call none was launched. Operations captured into the same graph are ordered, too; the caller orders the
    /// launches of graphs.
    pub(super) fn begin<'a>(&'a self, at: &'a StreamScope) -> Result<Turn<'a>> {
        let done = self.0.lock();
        self.0.check_open()?;
        done.hold(at)?;
        Ok(Turn { done, at })
    }
}

/// One operation's place in the order; no other operation begins until it is dropped.
#[must_use]
pub(super) struct Turn<'a> {
    done: MutexGuard<'a, Event>,
    at: &'a StreamScope,
}

impl Turn<'_> {
    /// Records that the operation was launched: the next one will wait for it.
    pub(super) fn end(mut self) -> Result<()> {
        self.done.record(self.at)
    }

    /// The same for an operation of several launches. If enqueuing failed halfway, what was launched is recorded.
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
