//! Memory of HT operations over several nodes: that of a handle, and the banks that rows pass through.

use crate::backend::cuda::driver::context::Context;
use crate::backend::cuda::driver::memory::{Buffer, CudaMemory, HostPage};
use crate::backend::cuda::ht::nodes::messages::{Bank, TokenBytes};
use crate::backend::cuda::ht::nodes::plan::{HandleSize, NodesPlan, message_sizes};
use crate::backend::cuda::params::ht::HtReceived;
use crate::backend::cuda::params::ht_nodes::{HtNodesMemory, HtSource, HtTold};
use crate::error::Result;
use std::sync::Arc;

/// One handle's memory: device memory, and pages that host and device share.
pub struct NodesMemory {
    buffer: Buffer,
    bytes: usize,
    /// Rows that this rank receives.
    pub received: HostPage<HtReceived>,
    /// Tokens that travel, and the most that a rank has.
    pub told: HostPage<HtTold>,
    /// The sources, for `ht_route_nodes` alone.
    pub sources: HostPage<HtSource>,
}

impl NodesMemory {
    /// Allocates memory for a handle of this `size`.
    pub fn new(
        context: &Arc<Context>,
        memory: &Arc<CudaMemory>,
        plan: &NodesPlan,
        size: HandleSize,
    ) -> Result<Self> {
        let (_, bytes) = plan.memory(0, size)?;
        Ok(Self {
            buffer: Buffer::new(memory, bytes)?,
            bytes,
            received: HostPage::new(context, 1)?,
            told: HostPage::new(context, plan.told())?,
            sources: HostPage::new(context, plan.sources)?,
        })
    }

    /// The excess of this memory over `bytes`; `None` if it is too small.
    pub fn waste(&self, bytes: usize) -> Option<usize> {
        self.bytes.checked_sub(bytes)
    }

    /// The memory as a kernel parameter.
    pub fn memory(&self, plan: &NodesPlan, size: HandleSize) -> Result<HtNodesMemory> {
        Ok(plan.memory(self.buffer.data().0, size)?.0)
    }
}

/// The messages of a pass on their way between nodes: those of the sources of this rank, and its own. Two of each,
/// used by turns.
pub struct Banks {
    buffer: Buffer,
    /// Most tokens of a source in a pass.
    pub room: usize,
    /// The first row of a message.
    first_row: usize,
    /// Bytes of a message.
    stride: usize,
    /// Messages of a bank for the sources, and of one of this rank.
    sources: usize,
    others: usize,
}

impl Banks {
    /// Banks for passes of up to `room` tokens of a source, with rows of up to `row_bytes`.
    pub fn new(
        memory: &Arc<CudaMemory>,
        plan: &NodesPlan,
        room: usize,
        row_bytes: usize,
    ) -> Result<Self> {
        let (first_row, stride) = message_sizes(room, row_bytes);
        let (sources, others) = (plan.sources - 1, plan.others);
        Ok(Self {
            buffer: Buffer::new(memory, 2 * (sources + others) * stride)?,
            room,
            first_row,
            stride,
            sources,
            others,
        })
    }

    /// The bank of pass number `pass` for messages with the remote sources.
    pub fn of_sources(&self, pass: usize, bytes: TokenBytes) -> Bank {
        self.bank(pass % 2 * self.sources, bytes)
    }

    /// The bank of pass number `pass` for messages with the gateways.
    pub fn own(&self, pass: usize, bytes: TokenBytes) -> Bank {
        self.bank(2 * self.sources + pass % 2 * self.others, bytes)
    }

    /// The bank that begins with message number `first` of all.
    fn bank(&self, first: usize, bytes: TokenBytes) -> Bank {
        Bank {
            rows: self.buffer.data().0 + first * self.stride + self.first_row,
            stride: self.stride,
            bytes,
        }
    }
}
