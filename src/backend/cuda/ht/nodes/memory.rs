//! Memory of HT operations over several nodes: that of a handle, and the banks that rows pass through.
#![forbid(unsafe_code)]

use crate::backend::cuda::driver::context::Context;
use crate::backend::cuda::driver::memory::{Buffer, CudaMemory, HostPage};
use crate::backend::cuda::ht::nodes::plan::NodesPlan;
use crate::backend::cuda::params::ht::{HT_MAX_TOP_K, HtReceived};
use crate::backend::cuda::params::ht_nodes::{HtNodesMemory, HtSource, HtTold};
use crate::error::Result;
use crate::model::tensor::DevPtr;
use std::sync::Arc;

const ALIGN: usize = 256;
/// Most bytes that travel with a row: an id and a weight for each expert.
const MOST_TAIL_BYTES: usize = HT_MAX_TOP_K as usize * (size_of::<i64>() + size_of::<f32>());

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
    /// Allocates memory for a handle with `tokens`, own and remote ones.
    pub fn new(
        context: &Arc<Context>,
        memory: &Arc<CudaMemory>,
        plan: &NodesPlan,
        (tokens, top_k): ((usize, usize), usize),
    ) -> Result<Self> {
        let (_, bytes) = plan.memory(0, tokens, top_k)?;
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
    pub fn memory(
        &self,
        plan: &NodesPlan,
        (tokens, top_k): ((usize, usize), usize),
    ) -> Result<HtNodesMemory> {
        Ok(plan.memory(self.buffer.data().0, tokens, top_k)?.0)
    }
}

/// Rows of a pass, with what travels along, on their way between nodes: those of the sources of this rank, and its
/// own. Two of each, used by turns.
pub struct Banks {
    buffer: Buffer,
    /// Most tokens of a source in a pass.
    pub room: usize,
    sources_bytes: usize,
    own_bytes: usize,
}

/// Where a pass finds its rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bank {
    /// Rows.
    pub rows: DevPtr,
    /// Ids in dispatch, gradients in combine.
    pub first_tail: DevPtr,
    /// Weights.
    pub second_tail: DevPtr,
}

impl Banks {
    /// Banks for passes of up to `room` tokens of a source, with rows of up to `row_bytes`.
    pub fn new(
        memory: &Arc<CudaMemory>,
        plan: &NodesPlan,
        room: usize,
        row_bytes: usize,
    ) -> Result<Self> {
        let bytes = |rows: usize| rows * (row_bytes + MOST_TAIL_BYTES) + 3 * ALIGN;
        let sources_bytes = bytes(room * (plan.sources - 1)).next_multiple_of(ALIGN);
        let own_bytes = bytes(room * plan.others).next_multiple_of(ALIGN);
        Ok(Self {
            buffer: Buffer::new(memory, 2 * (sources_bytes + own_bytes))?,
            room,
            sources_bytes,
            own_bytes,
        })
    }

    /// The bank of pass number `pass` for rows of remote sources, at most `rows`.
    pub fn of_sources(&self, pass: usize, rows: usize, sizes: (usize, usize)) -> Bank {
        bank(
            self.buffer.data().0 + pass % 2 * self.sources_bytes,
            rows,
            sizes,
        )
    }

    /// The bank of pass number `pass` for this rank's own rows.
    pub fn own(&self, pass: usize, rows: usize, sizes: (usize, usize)) -> Bank {
        let start = self.buffer.data().0 + 2 * self.sources_bytes;
        bank(start + pass % 2 * self.own_bytes, rows, sizes)
    }
}

/// A bank that begins at `base`, for `rows` with so many bytes, and so many of the first tail.
fn bank(base: usize, rows: usize, (row_bytes, tail_bytes): (usize, usize)) -> Bank {
    let first_tail = (base + rows * row_bytes).next_multiple_of(ALIGN);
    Bank {
        rows: DevPtr(base),
        first_tail: DevPtr(first_tail),
        second_tail: DevPtr((first_tail + rows * tail_bytes).next_multiple_of(ALIGN)),
    }
}
