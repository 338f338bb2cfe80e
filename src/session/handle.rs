//! A handle: a routing that may be replaced, its backend side, and the staged operation that waits for completion.
#![forbid(unsafe_code)]

use crate::backend::{HtBackend, LlBackend, OpenGroup};
use crate::error::refusal::{InSequence, Subject};
use crate::error::{Error, Result};
use crate::model::group::Algorithm;
use crate::model::ops::{LlOp, StagedSlot, Stream};
use crate::rule::handle::HandleTensors;
use crate::rule::{CombineTensors, DispatchTensors, ht, ll};
use crate::session::group::Group;
use crate::session::route::{self, Routed};
use parking_lot::{Mutex, RwLock};
use std::sync::Arc;

/// A routing of tokens to experts, and what runs on it.
pub struct Handle {
    group: Arc<Group>,
    mode: Mode,
}

enum Mode {
    Ll(Mutex<LlHandle>),
    Ht(RwLock<Option<Routed<dyn HtBackend>>>),
}

/// An LL handle, and what happened on its routing so far.
#[derive(Default)]
struct LlHandle {
    routed: Option<Routed<dyn LlBackend>>,
    dispatched: bool,
    staged: Option<Sent>,
}

/// A staged operation that waits for its receive phase.
struct Sent {
    op: LlOp,
    slot: StagedSlot,
}

/// The routing, which a handle has once it was updated.
fn routed<B: ?Sized>(routed: &Option<Routed<B>>) -> Result<&Routed<B>> {
    let missing = || Error::usage(Subject::Handle, InSequence::RouteFirst);
    routed.as_ref().ok_or_else(missing)
}

impl Handle {
    /// A handle without a routing: nothing runs on it before its first [`Handle::update`].
    pub fn new(group: Arc<Group>) -> Self {
        let mode = match group.backend() {
            OpenGroup::Ll(_) => Mode::Ll(Mutex::default()),
            OpenGroup::Ht(_) => Mode::Ht(RwLock::default()),
        };
        Self { group, mode }
    }

    /// Routes by `tensors` from now on; they are an error if they could not even be read. Collective in HT. A
    /// refusal leaves the routing as it was.
    pub fn update(&self, tensors: Result<HandleTensors>, stream: Stream) -> Result<()> {
        self.group.check_usable()?;
        match (&self.mode, self.group.backend()) {
            (Mode::Ll(handle), OpenGroup::Ll(backend)) => {
                let mut handle = handle.lock();
                if handle.staged.is_some() {
                    return Err(Error::usage(Subject::Handle, InSequence::CompleteFirst));
                }
                let routed = route::ll(&self.group, backend.as_ref(), tensors)?;
                handle.routed = Some(routed);
                handle.dispatched = false;
                Ok(())
            }
            (Mode::Ht(handle), OpenGroup::Ht(backend)) => {
                let routed = route::ht(&self.group, backend.as_ref(), tensors, stream)?;
                let before = handle.write().replace(routed);
                drop(before);
                Ok(())
            }
            _ => Err(Error::internal("a handle of another mode than its group")),
        }
    }

    /// Takes the handle out of use. A staged operation of it is given up.
    pub fn close(&self) {
        if let Mode::Ll(handle) = &self.mode {
            let mut handle = handle.lock();
            let sent = handle.staged.take();
            if let (Some(sent), Some(routed)) = (sent, &handle.routed) {
                routed.backend.abandon(&sent.op, sent.slot);
                self.group.end_staged(sent.slot);
            }
        }
    }

    /// The group that the handle belongs to.
    pub fn group(&self) -> &Group {
        &self.group
    }

    /// Enqueues a dispatch. `staged`, which counts in LL alone, leaves the receive phase to [`Handle::complete`].
    pub fn dispatch(
        &self,
        tensors: &DispatchTensors<'_>,
        staged: bool,
        stream: Stream,
    ) -> Result<()> {
        self.group.check_usable()?;
        let facts = self.group.facts();
        match &self.mode {
            Mode::Ll(handle) => {
                let mut handle = handle.lock();
                let op = ll::dispatch(facts, &routed(&handle.routed)?.routing, tensors)?;
                self.start(&mut handle, LlOp::Dispatch(op), staged, stream)?;
                handle.dispatched = true;
                Ok(())
            }
            Mode::Ht(handle) => {
                let handle = handle.read();
                let routed = routed(&handle)?;
                let op = ht::dispatch(facts, &routed.routing, tensors)?;
                routed.backend.dispatch(&op, stream)
            }
        }
    }

    /// Enqueues a combine. `staged`, which counts in LL alone, leaves the receive phase to [`Handle::complete`].
    pub fn combine(
        &self,
        tensors: &CombineTensors<'_>,
        staged: bool,
        stream: Stream,
    ) -> Result<()> {
        self.group.check_usable()?;
        let facts = self.group.facts();
        match &self.mode {
            Mode::Ll(handle) => {
                let mut handle = handle.lock();
                let op = ll::combine(facts, &routed(&handle.routed)?.routing, tensors)?;
                if !handle.dispatched {
                    return Err(Error::usage(Subject::Handle, InSequence::DispatchFirst));
                }
                self.start(&mut handle, LlOp::Combine(op), staged, stream)
            }
            Mode::Ht(handle) => {
                let handle = handle.read();
                let routed = routed(&handle)?;
                let op = ht::combine(facts, &routed.routing, tensors)?;
                routed.backend.combine(&op, stream)
            }
        }
    }

    fn start(&self, handle: &mut LlHandle, op: LlOp, staged: bool, stream: Stream) -> Result<()> {
        if handle.staged.is_some() {
            return Err(Error::usage(Subject::Handle, InSequence::CompleteFirst));
        }
        let backend = &routed(&handle.routed)?.backend;
        if !staged {
            return backend.run(&op, stream);
        }
        let send = |slot| backend.send(&op, slot, stream);
        let slot = self.group.send_staged(send)?;
        handle.staged = Some(Sent { op, slot });
        Ok(())
    }

    /// Enqueues the receive phase of the staged operation; nothing to do is a success.
    pub fn complete(&self, stream: Stream) -> Result<()> {
        self.group.check_usable()?;
        let Mode::Ll(handle) = &self.mode else {
            return Ok(());
        };
        let mut handle = handle.lock();
        let Some(sent) = &handle.staged else {
            return Ok(());
        };
        // If this is refused, the operation still waits: the caller may try again.
        let backend = &routed(&handle.routed)?.backend;
        backend.receive(&sent.op, sent.slot, stream)?;
        self.group.end_staged(sent.slot);
        handle.staged = None;
        Ok(())
    }

    /// Rows that an HT dispatch can deliver: the group's bound, or the real count in a group without one.
    pub fn num_recv_tokens(&self) -> Result<usize> {
        let facts = self.group.facts();
        match &self.mode {
            Mode::Ll(_) => Err(
                Error::usage(Subject::Handle, InSequence::HighThroughputOnly).got(
                    Algorithm::LowLatency.name(),
                    Algorithm::HighThroughput.name(),
                ),
            ),
            Mode::Ht(handle) => match facts.max_recv_rows {
                Some(rows) => Ok(rows),
                None => routed(&handle.read())?.backend.num_recv_tokens(),
            },
        }
    }
}
