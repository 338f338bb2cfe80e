//! High-throughput operations: a handle, and the checks that both operations share.

mod agreement;
mod combine;
mod dispatch;
mod route;

use crate::backend::host::fingerprint::Fingerprint;
use crate::backend::host::group_state::GroupState;
use crate::backend::host::ht::route::HtMap;
use crate::backend::{HtBackend, HtRouting};
use crate::error::refusal::{OfTensor, Operation, Role, Subject};
use crate::error::{Error, Result};
use crate::model::ops::{HtCombine, HtDispatch, Routing, Stream};
use crate::model::scales::WireRow;
use std::sync::Arc;
use std::time::Duration;

/// An HT handle: the routing at the time when the handle was made.
#[derive(Clone)]
pub struct HostHt {
    shared: Arc<GroupState>,
    routing: Routing,
    map: Arc<HtMap>,
}

impl HostHt {
    /// Exchanges the ids of all ranks. Collective; `wanted` is an error on a rank that refused its
    /// arguments.
    pub fn open(
        shared: Arc<GroupState>,
        wanted: Result<HtRouting>,
        stream: Stream,
        timeout: Duration,
    ) -> Result<Self> {
        let routing = wanted.as_ref().map(|wanted| wanted.routing);
        let routing = routing.map_err(Error::clone);
        let map = agreement::exchange(&shared, wanted, stream, timeout)?;
        Ok(Self {
            shared,
            routing: routing?,
            map: Arc::new(map),
        })
    }

    /// The fingerprint of a call. Ranks may differ in `staged`, which has no effect in HT.
    fn fingerprint(&self, call: Operation, row: WireRow) -> Fingerprint {
        Fingerprint {
            call,
            staged: false,
            handle: Some(self.map.number),
            top_k: self.routing.top_k,
            by_rank: false,
            row,
        }
    }

    /// Refuses a tensor that cannot hold all received rows: silently losing tokens would be worse.
    fn check_capacity(&self, role: Role, rows: usize) -> Result<()> {
        let received = self.map.arrivals.len();
        if rows >= received {
            return Ok(());
        }
        Err(
            Error::usage(Subject::Size(role, 0), OfTensor::HoldsAllReceived)
                .got(rows, format_args!("{received} or more")),
        )
    }
}

impl HtBackend for HostHt {
    fn dispatch(&self, op: &HtDispatch, stream: Stream) -> Result<()> {
        let (handle, op) = (self.clone(), *op);
        self.shared
            .enqueue_operation(
                Operation::HtDispatch,
                stream,
                || (),
                move |epoch| {
                    handle.send_tokens(&op, epoch)?;
                    handle.receive_tokens(&op, epoch)
                },
            )
            .map(drop)
    }

    fn combine(&self, op: &HtCombine, stream: Stream) -> Result<()> {
        let (handle, op) = (self.clone(), *op);
        self.shared
            .enqueue_operation(
                Operation::HtCombine,
                stream,
                || (),
                move |epoch| {
                    handle.send_results(&op, epoch)?;
                    handle.receive_results(&op, epoch)
                },
            )
            .map(drop)
    }

    fn num_recv_tokens(&self) -> Result<usize> {
        Ok(self.map.arrivals.len())
    }
}

/// The message of `rank`.
fn source<T>(all: &[T], rank: usize) -> Result<&T> {
    all.get(rank)
        .ok_or_else(|| Error::internal("a rank without a message"))
}
