//! Memory of HT operations over several nodes: that of a handle, and the banks that rows pass through.

use crate::backend::cuda::driver::context::Context;
use crate::backend::cuda::driver::memory::{Buffer, CudaMemory, HostPage};
use crate::backend::cuda::ht::nodes::messages::{Bank, TokenBytes};
use crate::backend::cuda::ht::nodes::plan::{HandleParts, HandleSize, NodesPlan, message_sizes};
use crate::backend::cuda::params::ht::HtCount;
use crate::backend::cuda::params::ht_nodes::HtForwarded;
use crate::error::Result;
use std::sync::Arc;

/// One handle's memory: device memory, and pages that host and device share.
///
/// The device memory is one block of sections by a pure function, too, but the handle also has what each message carries
/// (`Counts`) and its stages on the host, which no copy of the block brings along: it cannot lie in a caller's memory.
pub struct NodesMemory {
    buffer: Buffer,
    bytes: usize,
    /// Tokens that travel, the most that a rank has, and the rows that this one receives; where they lie by expert also
    /// the slots.
    pub announced: HostPage<HtCount>,
    /// The forwarded ranks, for `ht_route_nodes` alone.
    pub forwarded: HostPage<HtForwarded>,
}

impl NodesMemory {
    /// Allocates memory for a handle of this `size`.
    pub fn new(context: &Arc<Context>, memory: &Arc<CudaMemory>, plan: &NodesPlan, size: HandleSize) -> Result<Self> {
        let bytes = plan.memory(0, size)?.bytes;
        Ok(Self {
            buffer: Buffer::new(memory, bytes)?,
            bytes,
            announced: HostPage::new(context, plan.announced() + 1)?,
            forwarded: HostPage::new(context, plan.forwarded)?,
        })
    }

    /// The excess of this memory over `bytes`; `None` if it is too small.
    pub fn waste(&self, bytes: usize) -> Option<usize> {
        self.bytes.checked_sub(bytes)
    }

    /// Its parts.
    pub fn parts(&self, plan: &NodesPlan, size: HandleSize) -> Result<HandleParts> {
        plan.memory(self.buffer.data().0, size)
    }
}

/// The messages of a stage on their way between nodes: those of the remote ranks, and its own. Two of each,
/// used by turns.
pub struct Banks {
    buffer: Buffer,
    /// Most tokens of a rank in a stage.
    pub room: usize,
    /// The first row of a message.
    first_row: usize,
    /// Bytes of a message.
    stride: usize,
    /// Messages of a bank for the remote ranks, and of one of this rank.
    remote: usize,
    others: usize,
}

impl Banks {
    /// Banks for stages of up to `room` tokens of a rank, with rows of up to `row_bytes`.
    pub fn new(memory: &Arc<CudaMemory>, plan: &NodesPlan, room: usize, row_bytes: usize) -> Result<Self> {
        let (first_row, stride) = message_sizes(room, row_bytes);
        let (remote, others) = (plan.forwarded - 1, plan.others);
        Ok(Self {
            buffer: Buffer::new(memory, 2 * (remote + others) * stride)?,
            room,
            first_row,
            stride,
            remote,
            others,
        })
    }

    /// The bank of stage number `stage` for messages with the remote ranks.
    pub fn of_remote(&self, stage: usize, bytes: TokenBytes) -> Bank {
        self.bank(stage % 2 * self.remote, bytes)
    }

    /// The bank of stage number `stage` for messages with the rail peers.
    pub fn own(&self, stage: usize, bytes: TokenBytes) -> Bank {
        self.bank(2 * self.remote + stage % 2 * self.others, bytes)
    }

    /// The bank that begins with message number `first` of all.
    fn bank(&self, first: usize, bytes: TokenBytes) -> Bank {
        Bank { rows: self.buffer.data().0 + first * self.stride + self.first_row, stride: self.stride, bytes }
    }
}
