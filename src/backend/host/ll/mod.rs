//! Low-latency operations: the state of a handle, and the two phases of an operation.

mod combine;
mod dispatch;
mod last;

use crate::backend::LlBackend;
use crate::backend::host::fingerprint::Fingerprint;
use crate::backend::host::group_state::GroupState;
use crate::backend::host::ll::last::LastDispatch;
use crate::backend::host::order::Received;
use crate::error::refusal::Operation;
use crate::error::{Error, Result};
use crate::model::group::GroupFacts;
use crate::model::handle_state::{CallerBlock, HandleStorage};
use crate::model::layout::Layout;
use crate::model::ops::{LlDispatch, LlOp, Routing, STAGED_SLOTS, StagedSlot, Stream, ViewBank};
use crate::model::tensor::DevPtr;
use parking_lot::Mutex;
use std::iter;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

#[derive(Clone)]
pub struct HostLl {
    shared: Arc<GroupState>,
    routing: Routing,
    last: Arc<Mutex<Arc<LastDispatch>>>,
    /// The block in a caller's memory that holds the last dispatch instead, if there is one.
    caller_block: Option<CallerBlock>,
    received: Arc<Received>,
    /// Epoch of the last operation that was sent in each slot.
    staged: Arc<[AtomicU64; STAGED_SLOTS]>,
}

impl HostLl {
    /// A handle with the ids `routing`, which every operation reads again.
    pub fn new(shared: Arc<GroupState>, routing: Routing, storage: HandleStorage) -> Self {
        let caller_block = storage.caller_block;
        Self {
            received: match caller_block {
                Some(_) => Arc::clone(&shared.received_in_given),
                None => Arc::default(),
            },
            shared,
            routing,
            last: Arc::default(),
            caller_block,
            staged: Arc::default(),
        }
    }

    /// Keeps what a dispatch has stored for combines.
    fn keep(&self, last: LastDispatch, layout: Layout) -> Result<()> {
        match self.caller_block {
            Some(block) => last.store(self.facts(), &self.routing, (block, layout))?,
            None => *self.last.lock() = Arc::new(last),
        }
        Ok(())
    }

    /// What the last dispatch has stored.
    fn last(&self, layout: Layout) -> Result<Arc<LastDispatch>> {
        let load = |block| LastDispatch::load(self.facts(), &self.routing, (block, layout));
        match self.caller_block {
            Some(block) => load(block).map(Arc::new),
            None => Ok(Arc::clone(&self.last.lock())),
        }
    }

    /// Rows of the tensor of a dispatch's output.
    fn rows(&self, layout: Layout) -> Result<usize> {
        let rows = layout.rows();
        rows.ok_or_else(|| Error::internal("an LL layout that does not say how many rows"))
    }

    fn send_now(&self, op: &LlOp, fingerprint: &Fingerprint, epoch: u64) -> Result<()> {
        match op {
            LlOp::Dispatch(op) => self.send_tokens(op, fingerprint, epoch),
            LlOp::Combine(op) => self.send_results(op, fingerprint, epoch),
        }
    }

    fn receive_now(&self, op: &LlOp, fingerprint: &Fingerprint, epoch: u64) -> Result<()> {
        match op {
            LlOp::Dispatch(op) => self.receive_tokens(op, fingerprint, epoch),
            LlOp::Combine(op) => self.receive_results(op, fingerprint, epoch),
        }
    }

    fn fingerprint(&self, op: &LlOp, staged: bool) -> Fingerprint {
        let (call, row) = match op {
            LlOp::Dispatch(op) => (Operation::LlDispatch, op.wire()),
            LlOp::Combine(op) => (Operation::LlCombine, op.row.into()),
        };
        Fingerprint {
            call,
            staged,
            handle: None,
            top_k: self.routing.top_k,
            by_rank: op.layout().is_rank_major(),
            exact: matches!(op, LlOp::Combine(op) if op.is_exact()),
            in_view: is_in_view(op),
            row,
        }
    }

    /// What records the receive phases that use the memory of `op`.
    fn received_with(&self, op: &LlOp) -> Vec<Arc<Received>> {
        let in_views = is_in_view(op).then_some(&self.shared.received_in_views);
        iter::once(&self.received).chain(in_views).cloned().collect()
    }

    /// The wait of `op`, enqueued now, for these.
    fn follow(&self, op: &LlOp) -> impl FnOnce() + Send + use<> {
        let follow: Vec<_> = self.received_with(op).iter().map(Received::follow).collect();
        move || follow.into_iter().for_each(|follow| follow())
    }

    fn facts(&self) -> &GroupFacts {
        &self.shared.facts
    }
}

fn is_in_view(op: &LlOp) -> bool {
    matches!(op, LlOp::Dispatch(op) if op.view.is_some())
}

impl LlBackend for HostLl {
    fn view(&self, _op: &LlDispatch, _staged: bool, bank: ViewBank) -> Result<Option<DevPtr>> {
        self.shared.views.at(bank).map(Some)
    }

    fn run(&self, op: &LlOp, stream: Stream) -> Result<()> {
        let (handle, op, fingerprint) = (self.clone(), *op, self.fingerprint(op, false));
        let follow = self.follow(&op);
        let run = move |epoch| {
            handle.send_now(&op, &fingerprint, epoch)?;
            handle.receive_now(&op, &fingerprint, epoch)
        };
        self.shared.enqueue_operation(fingerprint.call, stream, follow, run).map(drop)
    }

    fn send(&self, op: &LlOp, slot: StagedSlot, stream: Stream) -> Result<()> {
        let (handle, op, fingerprint) = (self.clone(), *op, self.fingerprint(op, true));
        let follow = self.follow(&op);
        let send = move |epoch| handle.send_now(&op, &fingerprint, epoch);
        let epoch = self.shared.enqueue_operation(fingerprint.call, stream, follow, send)?;
        slot.of(&self.staged).store(epoch, Ordering::Relaxed);
        Ok(())
    }

    fn receive(&self, op: &LlOp, slot: StagedSlot, stream: Stream) -> Result<()> {
        // The phases are ordered on any streams, because the receive phase waits for this rank's own message.
        let (handle, op, fingerprint) = (self.clone(), *op, self.fingerprint(op, true));
        let received = self.received_with(&op);
        let ended = received.clone();
        let epoch = slot.of(&self.staged).load(Ordering::Relaxed);
        let receive = move || handle.receive_now(&op, &fingerprint, epoch);
        let end = move || ended.iter().for_each(|it| it.end(slot, epoch));
        self.shared.enqueue(fingerprint.call, stream, receive, end)?;
        received.iter().for_each(|it| it.enqueued(slot, epoch));
        Ok(())
    }

    fn abandon(&self, _op: &LlOp, slot: StagedSlot) {
        let epoch = slot.of(&self.staged).load(Ordering::Relaxed);
        self.shared.mailboxes.abandon(epoch);
    }
}
