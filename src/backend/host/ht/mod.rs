//! High-throughput operations: a handle, and the checks that both operations share.

mod agreement;
mod combine;
mod dispatch;
mod route;

use crate::backend::host::device::add_numbers;
use crate::backend::host::fingerprint::Fingerprint;
use crate::backend::host::group_state::GroupState;
use crate::backend::host::ht::route::HtMap;
use crate::backend::{HtBackend, HtRouting, opened_again, too_few_rows};
use crate::error::refusal::{Operation, Role};
use crate::error::{Error, Result};
use crate::model::handle_state::CallerBlock;
use crate::model::ops::{HtCombine, HtDispatch, Routing, Stream, Zones};
use crate::model::scales::WireRow;
use crate::model::tensor::DevPtr;
use std::sync::{Arc, mpsc};
use std::time::Duration;

/// An HT handle: a snapshot of the routing.
#[derive(Clone)]
pub struct HostHt {
    shared: Arc<GroupState>,
    routing: Routing,
    /// In a caller's memory what this handle has stored there, if anything; each operation reads the block again.
    map: Option<Arc<HtMap>>,
    caller_block: Option<CallerBlock>,
}

impl HostHt {
    /// Exchanges the ids of all ranks. Collective; `wanted` is an error on a rank that refused its arguments.
    pub fn open(shared: Arc<GroupState>, wanted: Result<HtRouting>, stream: Stream) -> Result<Self> {
        let own = wanted.clone();
        let map = agreement::exchange(&shared, wanted, stream)?;
        let HtRouting { routing, storage, .. } = own?;
        Ok(Self { shared, routing, map: Some(Arc::new(map)), caller_block: storage.caller_block })
    }

    /// A handle over the content of `block`.
    pub fn reopen(shared: Arc<GroupState>, routing: Routing, block: CallerBlock) -> Self {
        Self { shared, routing, map: None, caller_block: Some(block) }
    }

    /// The handle, as the operation that is running sees it.
    fn routed(&self) -> Result<Routed> {
        let (facts, routing) = (&self.shared.facts, self.routing);
        let map = match (self.caller_block, &self.map) {
            (Some(block), _) => Arc::new(HtMap::load(facts, &routing, block)?),
            (None, Some(map)) => Arc::clone(map),
            (None, None) => return Err(Error::internal("a handle without a map")),
        };
        Ok(Routed { shared: Arc::clone(&self.shared), routing, map })
    }

    /// The received rows of `map`, or their slots.
    fn rows_of(&self, map: &HtMap) -> usize {
        match self.routing.form.zones {
            None => map.received(),
            Some(_) => map.zones.total(),
        }
    }

    fn enqueue(
        &self,
        call: Operation,
        stream: Stream,
        work: impl FnOnce(&Routed, u64) -> Result<()> + Send + 'static,
    ) -> Result<()> {
        let handle = self.clone();
        let work = move |epoch| work(&handle.routed()?, epoch);
        self.shared.enqueue_operation(call, stream, || (), work).map(drop)
    }
}

/// A handle and its map.
struct Routed {
    shared: Arc<GroupState>,
    routing: Routing,
    map: Arc<HtMap>,
}

impl Routed {
    /// The fingerprint of a call. Ranks may differ in `staged`, which has no effect in HT.
    fn fingerprint(&self, call: Operation, row: WireRow) -> Fingerprint {
        Fingerprint {
            call,
            staged: false,
            handle: Some(self.map.number),
            top_k: self.routing.top_k,
            by_rank: false,
            exact: false,
            in_view: false,
            row,
        }
    }

    /// Rows that the caller's tensors must have; with zones slots, unless the excess is dropped.
    fn rows_needed(&self) -> usize {
        match self.routing.form.zones {
            None => self.map.received(),
            Some(Zones { most_slots: None, .. }) => self.map.zones.total(),
            Some(_) => 0,
        }
    }

    /// Refuses a tensor without room for all received rows.
    fn check_capacity(&self, role: Role, rows: usize) -> Result<()> {
        let received = self.rows_needed();
        if rows >= received {
            return Ok(());
        }
        Err(too_few_rows(role, (rows, received), self.shared.facts.tensor_rows))
    }
}

impl HtBackend for HostHt {
    fn dispatch(&self, op: &HtDispatch, stream: Stream) -> Result<()> {
        let op = *op;
        if let Some(out) = op.out {
            self.shared.recognise(out, op.wire().payload.bytes());
        }
        self.enqueue(Operation::HtDispatch, stream, move |handle, epoch| {
            handle.send_tokens(&op, epoch)?;
            handle.receive_tokens(&op, epoch)
        })
    }

    fn combine(&self, op: &HtCombine, stream: Stream) -> Result<()> {
        let op = *op;
        self.shared.recognise(op.expert_rows, op.row.bytes());
        self.enqueue(Operation::HtCombine, stream, move |handle, epoch| {
            handle.send_results(&op, epoch)?;
            handle.receive_results(&op, epoch)
        })
    }

    fn add_counts(&self, totals: DevPtr, stream: Stream) -> Result<()> {
        let handle = self.clone();
        let add = move || {
            add_numbers(handle.routed()?.map.counts.iter().copied(), totals);
            Ok(())
        };
        self.shared.enqueue(Operation::HtDispatch, stream, add, || ())
    }

    fn num_recv_tokens(&self, _within: Duration) -> Result<Option<usize>> {
        let map = self.map.as_ref().ok_or_else(opened_again)?;
        Ok(Some(self.rows_of(map)))
    }

    fn num_recv_tokens_in_block(&self, stream: Stream) -> Result<Option<usize>> {
        if self.caller_block.is_none() {
            return self.num_recv_tokens(Duration::MAX);
        }
        let (sender, receiver) = mpsc::channel();
        let handle = self.clone();
        let look = move || {
            // If nobody listens any more, nobody needs it.
            let _ = sender.send(handle.routed().map(|it| handle.rows_of(&it.map)).ok());
            Ok(())
        };
        self.shared.enqueue(Operation::HtDispatch, stream, look, || ())?;
        // After a failure nothing runs, and behind other work of the program perhaps for ever.
        Ok(receiver.recv_timeout(2 * self.shared.mailboxes.timeout()).ok().flatten())
    }
}

/// The message of `rank`.
fn source<T>(all: &[T], rank: usize) -> Result<&T> {
    all.get(rank).ok_or_else(|| Error::internal("a rank without a message"))
}
