//! The order of staged operations: the two phases of one, and the operations that use a slot one after the other.
//!
//! A slot carries one staged operation at a time (`cuda/ll/protocol.cuh` says why banks are then safe); the session
//! chooses it, so that all ranks use the same. A send phase runs after the slot's last receive phase, and the
//! receive phase after its send phase, whatever their streams.
#![forbid(unsafe_code)]

use crate::backend::cuda::driver::context::{Context, Enqueued};
use crate::backend::cuda::driver::event::Event;
use crate::backend::cuda::driver::stream::StreamScope;
use crate::backend::cuda::order::group_has_ended;
use crate::backend::quiet::{Graphs, Works};
use crate::error::refusal::{InSequence, Subject};
use crate::error::{Error, Result};
use crate::model::ops::{STAGED_SLOTS, StagedSlot};
use parking_lot::{MappedMutexGuard, Mutex, MutexGuard};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Enqueues a receive phase that throws away what it receives.
pub type Discard = Box<dyn Fn(&StreamScope) -> Result<()> + Send>;

/// The staged operations of a group.
pub struct Staged(Arc<Slots>);

struct Slots {
    slots: Mutex<[Slot; STAGED_SLOTS]>,
    closed: AtomicBool,
    /// Set under the lock of `slots`: no receive phase follows.
    ended: AtomicBool,
}

struct Slot {
    /// A send phase was enqueued, its receive phase was not.
    busy: bool,
    /// The receive phase of an operation that was given up, due before the slot's next operation.
    abandoned: Option<Discard>,
    sent: Event,
    received: Event,
}

impl Slot {
    fn new(context: &Arc<Context>) -> Result<Self> {
        Ok(Self {
            busy: false,
            abandoned: None,
            sent: Event::new(context)?,
            received: Event::new(context)?,
        })
    }

    /// Makes `at` wait for the receive phase of the slot's last operation, which is enqueued first if that
    /// operation was given up.
    fn follow_last(&mut self, at: &StreamScope) -> Result<()> {
        let Some(discard) = &self.abandoned else {
            return self.received.hold(at).map(drop);
        };
        if at.is_captured() {
            // The graph would discard at each launch, and in memory that has another handle by then.
            return Err(Error::usage(
                Subject::Stream,
                InSequence::NoCaptureWhileGivenUp,
            ));
        }
        self.sent.hold(at)?;
        discard(at)?;
        self.received.record(at)?;
        self.abandoned = None;
        Ok(())
    }
}

impl Staged {
    /// Nothing is staged.
    pub fn new(context: &Arc<Context>) -> Result<Self> {
        let slots = Arc::new(Slots {
            slots: Mutex::new([Slot::new(context)?, Slot::new(context)?]),
            closed: AtomicBool::new(false),
            ended: AtomicBool::new(false),
        });
        context.watch(&slots);
        Ok(Self(slots))
    }

    fn slot(&self, slot: StagedSlot) -> Result<MappedMutexGuard<'_, Slot>> {
        MutexGuard::try_map(self.0.slots.lock(), |slots| slots.get_mut(slot.index()))
            .map_err(|_| Error::internal(format!("no {slot:?}")))
    }

    /// Makes `at` wait for the slot's last operation; the send phase is what is launched until [`SendPhase::end`].
    pub fn begin_send<'a>(
        &'a self,
        slot: StagedSlot,
        at: &'a StreamScope,
    ) -> Result<SendPhase<'a>> {
        let mut found = self.slot(slot)?;
        if found.busy {
            return Err(Error::internal(format!("{slot:?} is in use")));
        }
        found.follow_last(at)?;
        Ok(SendPhase { slot: found, at })
    }

    /// Makes `at` wait for the send phase in `slot`; the receive phase is what is launched until
    /// [`ReceivePhase::end`].
    pub fn begin_receive<'a>(
        &'a self,
        slot: StagedSlot,
        at: &'a StreamScope,
    ) -> Result<ReceivePhase<'a>> {
        let found = self.slot(slot)?;
        if self.0.ended.load(Ordering::Relaxed) {
            return Err(group_has_ended());
        }
        found.sent.hold_or_refuse(at)?;
        Ok(ReceivePhase { slot: found, at })
    }

    /// Makes `at` wait for the last receive phase in `slot`, and says whether it does: a graph does not wait for
    /// what is outside.
    pub fn follow(&self, slot: StagedSlot, at: &StreamScope) -> Result<bool> {
        self.slot(slot)?.received.hold(at)
    }

    /// Frees `slot` without a receive phase; its next operation runs `discard` first.
    pub fn abandon(&self, slot: StagedSlot, discard: Discard) {
        if let Ok(mut found) = self.slot(slot) {
            found.busy = false;
            if !self.0.closed.load(Ordering::Relaxed) {
                found.abandoned = Some(discard);
            }
        }
    }

    /// No operation will follow: forgets what was given up, and with it the handles that it keeps.
    pub fn close(&self) {
        self.0.closed.store(true, Ordering::Relaxed);
        let given_up: Vec<_> = {
            let mut slots = self.0.slots.lock();
            slots.iter_mut().map(|it| it.abandoned.take()).collect()
        };
        drop(given_up);
    }
}

/// A send phase that is being launched.
#[must_use]
pub struct SendPhase<'a> {
    slot: MappedMutexGuard<'a, Slot>,
    at: &'a StreamScope,
}

impl SendPhase<'_> {
    /// It was launched: the slot waits for its receive phase.
    pub fn end(mut self) -> Result<()> {
        self.slot.sent.record(self.at)?;
        self.slot.busy = true;
        Ok(())
    }
}

/// A receive phase that is being launched.
#[must_use]
pub struct ReceivePhase<'a> {
    slot: MappedMutexGuard<'a, Slot>,
    at: &'a StreamScope,
}

impl ReceivePhase<'_> {
    /// It was launched: the slot is free.
    pub fn end(mut self) -> Result<()> {
        self.slot.received.record(self.at)?;
        self.slot.busy = false;
        Ok(())
    }
}

/// Send phases are in the group's order, too; receive phases here alone.
impl Works for Slots {
    fn while_idle(&self, graphs: Graphs, then: &mut dyn FnMut()) {
        let graphs_count = graphs == Graphs::Count && !self.ended.load(Ordering::Relaxed);
        if let Some(slots) = self.slots.try_lock()
            && !(graphs_count && slots.iter().any(|it| it.received.is_in_graphs()))
            && slots.iter().all(|it| it.received.is_over() != Ok(false))
        {
            then();
        }
    }
}

impl Enqueued for Slots {
    fn are_over(&self) -> Result<bool> {
        let slots = self.slots.lock();
        let over: Result<Vec<bool>> = slots.iter().map(|it| it.received.is_over()).collect();
        Ok(!over?.contains(&false))
    }

    fn are_captured(&self) -> bool {
        let slots = self.slots.lock();
        slots.iter().any(|it| it.received.is_in_graphs())
    }

    fn end(&self) {
        let _no_launch = self.slots.lock();
        self.ended.store(true, Ordering::Relaxed);
    }
}
