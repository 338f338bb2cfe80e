//! High-throughput operations of a group over several nodes.
//!
//! Rows travel along rails: a token crosses the network once for each other node that has one of its experts, to
//! the rail peer there, which forwards it to the node's ranks as it sends its own. Combine goes the other way: the
//! rail peer sums what the node's ranks return for a token, and one row travels home, which adds its own node and
//! then the others. Operations run in stages: while one is on the network, that before it is on NVLink.

mod combine;
mod create;
mod dispatch;
mod handle;
mod memory;
mod messages;
pub mod plan;
mod rails;
mod stage;
mod zones;

pub use create::open_handle;
pub use rails::Rails;

use crate::backend::HtBackend;
use crate::backend::cuda::ht::nodes::handle::NodesHt;
use crate::error::Result;
use crate::model::ops::{HtCombine, HtDispatch, Stream};
use crate::model::tensor::DevPtr;

impl HtBackend for NodesHt {
    fn dispatch(&self, op: &HtDispatch, stream: Stream) -> Result<()> {
        zones::dispatch(self, op, stream)
    }

    fn combine(&self, op: &HtCombine, stream: Stream) -> Result<()> {
        zones::combine(self, op, stream)
    }

    fn add_counts(&self, totals: DevPtr, stream: Stream) -> Result<()> {
        let counts = self.device()?.counts;
        (self.group).add_counts(counts, totals, &self.group.enter(stream)?)
    }

    fn num_recv_tokens(&self) -> Result<usize> {
        Ok(self.slots.unwrap_or(self.rows))
    }
}
