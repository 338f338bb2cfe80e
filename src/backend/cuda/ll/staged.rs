//! The order of staged operations: of the two phases of an operation, and of operations in the same slot.
//!
//! On whatever streams, a receive phase runs after its send phase, and a send phase after the last receive phase in its
//! slot. So a slot carries one operation at a time, as its bank requires (`cuda/ll/protocol.cuh`). The session chooses
//! the slot, the same on all ranks.

use crate::backend::cuda::driver::context::Context;
use crate::backend::cuda::driver::event::Event;
use crate::backend::cuda::driver::stream::StreamScope;
use crate::backend::cuda::order::{Events, Operations};
use crate::error::refusal::{InSequence, Subject};
use crate::error::{Error, Result};
use crate::model::ops::{STAGED_SLOTS, StagedSlot};
use parking_lot::{MappedMutexGuard, MutexGuard};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Enqueues a receive phase that discards the received rows.
pub type Discard = Box<dyn Fn(&StreamScope) -> Result<()> + Send>;

/// The staged operations of a group.
pub struct Staged {
    slots: Arc<Operations<[Slot; STAGED_SLOTS]>>,
    closed: AtomicBool,
}

// Only events of receive phases count here; send phases are in the group's order.
impl Events for [Slot; STAGED_SLOTS] {
    fn all(&self) -> impl Iterator<Item = &Event> {
        self.iter().map(|it| &it.received)
    }
}

struct Slot {
    /// Whether a send phase was enqueued whose receive phase was not.
    busy: bool,
    /// The receive phase of an abandoned operation, to be enqueued before the slot's next operation.
    abandoned: Option<Discard>,
    sent: Event,
    received: Event,
}

impl Slot {
    fn new(context: &Arc<Context>) -> Result<Self> {
        Ok(Self { busy: false, abandoned: None, sent: Event::new(context)?, received: Event::new(context)? })
    }

    /// Makes `at` wait for the slot's last receive phase; if the operation was abandoned, enqueues that phase first.
    fn follow_last(&mut self, at: &StreamScope) -> Result<()> {
        if self.abandoned.is_some() && at.is_captured() {
            // Each launch of the graph would receive again, into memory that belongs to another handle by then.
            return Err(Error::usage(Subject::Stream, InSequence::NoCaptureWhileGivenUp));
        }
        self.received.make_wait(at)?;
        let Some(discard) = &self.abandoned else { return Ok(()) };
        self.sent.make_wait(at)?;
        discard(at)?;
        self.received.record(at)?;
        self.abandoned = None;
        Ok(())
    }
}

impl Staged {
    /// The slots of a group, all free.
    pub fn new(context: &Arc<Context>) -> Result<Self> {
        let slots = [Slot::new(context)?, Slot::new(context)?];
        Ok(Self { slots: Operations::new(context, slots), closed: AtomicBool::new(false) })
    }

    fn slot(&self, slot: StagedSlot) -> Result<MappedMutexGuard<'_, Slot>> {
        MutexGuard::try_map(self.slots.lock(), |slots| slots.get_mut(slot.index()))
            .map_err(|_| Error::internal(format!("no {slot:?}")))
    }

    /// Makes `at` wait for the slot's last operation. What is launched until [`SendPhase::end`] is the send phase.
    pub fn begin_send(&self, slot: StagedSlot, at: &StreamScope) -> Result<SendPhase<'_>> {
        let mut found = self.slot(slot)?;
        if found.busy {
            return Err(Error::internal(format!("{slot:?} is in use")));
        }
        found.follow_last(at)?;
        Ok(SendPhase { slot: found })
    }

    /// Makes `at` wait for the send phase in `slot`. What is launched until [`ReceivePhase::end`] is the receive phase.
    pub fn begin_receive<'a>(&'a self, slot: StagedSlot, at: &'a StreamScope) -> Result<ReceivePhase<'a>> {
        let found = self.slot(slot)?;
        self.slots.check_open()?;
        found.sent.hold_or_refuse(at)?;
        Ok(ReceivePhase { slot: found, at })
    }

    /// Makes `at` wait for the last receive phase in `slot`; a graph cannot wait for work outside it.
    pub fn follow(&self, slot: StagedSlot, at: &StreamScope) -> Result<()> {
        self.slot(slot)?.received.make_wait(at).map(drop)
    }

    /// Frees `slot` without a receive phase, which `discard` will enqueue before the slot's next operation.
    pub fn abandon(&self, slot: StagedSlot, discard: Discard) {
        if let Ok(mut found) = self.slot(slot) {
            found.busy = false;
            if !self.closed.load(Ordering::Relaxed) {
                found.abandoned = Some(discard);
            }
        }
    }

    /// Forgets abandoned operations, and thus releases their handles, as no operation will follow.
    pub fn close(&self) {
        self.closed.store(true, Ordering::Relaxed);
        let given_up: Vec<_> = {
            let mut slots = self.slots.lock();
            slots.iter_mut().map(|it| it.abandoned.take()).collect()
        };
        drop(given_up);
    }
}

/// A send phase being launched.
#[must_use]
pub struct SendPhase<'a> {
    slot: MappedMutexGuard<'a, Slot>,
}

impl SendPhase<'_> {
    /// Records that the phase was launched, and ends on the stream `after`. The slot is busy until the receive phase.
    pub fn end(mut self, after: &StreamScope) -> Result<()> {
        self.slot.sent.record(after)?;
        self.slot.busy = true;
        Ok(())
    }
}

/// A receive phase being launched.
#[must_use]
pub struct ReceivePhase<'a> {
    slot: MappedMutexGuard<'a, Slot>,
    at: &'a StreamScope,
}

impl ReceivePhase<'_> {
    /// Records that the phase was launched, which frees the slot.
    pub fn end(mut self) -> Result<()> {
        self.slot.received.record(self.at)?;
        self.slot.busy = false;
        Ok(())
    }
}
