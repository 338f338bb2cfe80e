//! High-throughput operations of a group over several nodes.
//!
//! Rows travel along rails: a token crosses the network once per other node that hosts one of its experts, to the rail
//! peer there, which forwards it to the node's ranks as it does its own tokens. In a combine, the rail peer sums the
//! rows that the node's ranks return for a token and sends one row home, where it is added after the home node's.
//! Operations run in stages: while one stage is on the network, the previous one is on NVLink.

mod caller_block;
mod combine;
mod create;
mod cut;
mod dispatch;
mod handle;
mod messages;
mod part;
pub mod plan;
mod rails;
mod stage;

pub use caller_block::{CallerHt, block_bytes};
pub use create::open_handle;
pub use rails::Rails;

use crate::backend::HtBackend;
use crate::backend::cuda::ht::nodes::handle::NodesHt;
use crate::error::Result;
use crate::model::ops::{HtCombine, HtDispatch, Stream};
use crate::model::tensor::DevPtr;
use std::time::Duration;

impl HtBackend for NodesHt {
    fn dispatch(&self, op: &HtDispatch, stream: Stream) -> Result<()> {
        dispatch::run(self, op, stream)
    }

    fn combine(&self, op: &HtCombine, stream: Stream) -> Result<()> {
        combine::run(self, op, stream)
    }

    fn add_counts(&self, totals: DevPtr, stream: Stream) -> Result<()> {
        let counts = self.device()?.counts;
        (self.group).add_counts(counts, totals, &self.group.enter(stream)?)
    }

    fn num_recv_tokens(&self, _within: Duration) -> Result<Option<usize>> {
        Ok(Some(self.slots.unwrap_or(self.rows)))
    }
}
