//! A handle: one routing, its backend side, and the staged operation that waits for completion.
#![forbid(unsafe_code)]

use crate::backend::{HtBackend, LlBackend};
use crate::error::refusal::{InSequence, Subject};
use crate::error::{Error, Result};
use crate::model::group::Algorithm;
use crate::model::ops::{LlOp, Routing, StagedSlot, Stream};
use crate::rule::{CombineTensors, DispatchTensors, ht, ll};
use crate::session::group::Group;
use parking_lot::Mutex;
use std::sync::Arc;

/// A routing of tokens to experts, and what runs on it.
pub struct Handle {
    group: Arc<Group>,
    routing: Routing,
    mode: Mode,
}

enum Mode {
    Ll(LlHandle),
    Ht(Box<dyn HtBackend>),
}

struct LlHandle {
    backend: Box<dyn LlBackend>,
    progress: Mutex<Progress>,
}

/// What happened on an LL handle so far.
#[derive(Default)]
struct Progress {
    dispatched: bool,
    staged: Option<Sent>,
}

/// A staged operation that waits for its receive phase.
struct Sent {
    op: LlOp,
    slot: StagedSlot,
}

impl Handle {
    /// An LL handle.
    pub(super) fn low_latency(
        group: Arc<Group>,
        routing: Routing,
        backend: Box<dyn LlBackend>,
    ) -> Self {
        let mode = Mode::Ll(LlHandle {
            backend,
            progress: Mutex::default(),
        });
        Self {
            group,
            routing,
            mode,
        }
    }

    /// An HT handle.
    pub(super) fn high_throughput(
        group: Arc<Group>,
        routing: Routing,
        backend: Box<dyn HtBackend>,
    ) -> Self {
        Self {
            group,
            routing,
            mode: Mode::Ht(backend),
        }
    }

    /// Takes the handle out of use. A staged operation of it is given up.
    pub fn close(&self) {
        if let Mode::Ll(ll) = &self.mode
            && let Some(sent) = ll.progress.lock().staged.take()
        {
            ll.backend.abandon(&sent.op, sent.slot);
            self.group.end_staged(sent.slot);
        }
    }

    /// The group that the handle belongs to.
    pub fn group(&self) -> &Group {
        &self.group
    }

    /// Enqueues a dispatch. `send_only` counts in LL alone.
    pub fn dispatch(
        &self,
        tensors: &DispatchTensors<'_>,
        send_only: bool,
        stream: Stream,
    ) -> Result<()> {
        self.group.check_usable()?;
        match &self.mode {
            Mode::Ll(handle) => {
                let op = ll::dispatch(self.group.facts(), &self.routing, tensors)?;
                let mut progress = handle.progress.lock();
                self.start(handle, &mut progress, LlOp::Dispatch(op), send_only, stream)?;
                progress.dispatched = true;
                Ok(())
            }
            Mode::Ht(backend) => {
                let op = ht::dispatch(self.group.facts(), &self.routing, tensors)?;
                backend.dispatch(&op, stream)
            }
        }
    }

    /// Enqueues a combine. `send_only` counts in LL alone.
    pub fn combine(
        &self,
        tensors: &CombineTensors<'_>,
        send_only: bool,
        stream: Stream,
    ) -> Result<()> {
        self.group.check_usable()?;
        match &self.mode {
            Mode::Ll(handle) => {
                let op = ll::combine(self.group.facts(), &self.routing, tensors)?;
                let mut progress = handle.progress.lock();
                if !progress.dispatched {
                    return Err(Error::usage(Subject::Handle, InSequence::DispatchFirst));
                }
                self.start(handle, &mut progress, LlOp::Combine(op), send_only, stream)
            }
            Mode::Ht(backend) => {
                let op = ht::combine(self.group.facts(), &self.routing, tensors)?;
                backend.combine(&op, stream)
            }
        }
    }

    fn start(
        &self,
        handle: &LlHandle,
        progress: &mut Progress,
        op: LlOp,
        send_only: bool,
        stream: Stream,
    ) -> Result<()> {
        if progress.staged.is_some() {
            return Err(Error::usage(Subject::Handle, InSequence::CompleteFirst));
        }
        if !send_only {
            return handle.backend.run(&op, stream);
        }
        let send = |slot| handle.backend.send(&op, slot, stream);
        let slot = self.group.send_staged(send)?;
        progress.staged = Some(Sent { op, slot });
        Ok(())
    }

    /// Enqueues the receive phase of the staged operation; nothing to do is a success.
    pub fn complete(&self, stream: Stream) -> Result<()> {
        self.group.check_usable()?;
        let Mode::Ll(handle) = &self.mode else {
            return Ok(());
        };
        let mut progress = handle.progress.lock();
        let Some(sent) = &progress.staged else {
            return Ok(());
        };
        // If this is refused, the operation still waits: the caller may try again.
        handle.backend.receive(&sent.op, sent.slot, stream)?;
        self.group.end_staged(sent.slot);
        progress.staged = None;
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
            Mode::Ht(backend) => match facts.max_recv_rows {
                Some(rows) => Ok(rows),
                None => backend.num_recv_tokens(),
            },
        }
    }
}
