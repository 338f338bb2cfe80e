//! The device memory of an HT handle on one node: its block, and the page through which the host learns the number of
//! rows.

use crate::backend::cuda::driver::context::Context;
use crate::backend::cuda::driver::memory::{Buffer, CudaMemory, HostPage};
use crate::backend::cuda::params::ht::{HtCount, HtEntry, HtHandleMemory};
use crate::error::Result;
use crate::model::handle_state::HtSections;
use crate::model::tensor::DevPtr;
use std::sync::Arc;

/// What the library has of a handle's memory: the block, unless that is in a caller's, and the page.
pub struct HandleMemory {
    buffer: Option<Buffer>,
    bytes: usize,
    pub received: HostPage<HtCount>,
}

/// Of rows; and of slots, where rows lie by expert.
const COUNTS: usize = 2;
pub const SLOTS_OF_PAGE: usize = 1;

impl HandleMemory {
    /// Allocates `bytes` for a block, none for one elsewhere, and the page.
    pub fn new(context: &Arc<Context>, memory: &Arc<CudaMemory>, bytes: usize) -> Result<Self> {
        let buffer = (bytes > 0).then(|| Buffer::new(memory, bytes)).transpose()?;
        Ok(Self { buffer, bytes, received: HostPage::new(context, COUNTS)? })
    }

    /// The excess of this memory over `bytes`; `None` if it is too small, or has a block that nobody would use.
    pub fn waste(&self, bytes: usize) -> Option<usize> {
        let fits = (bytes > 0) == self.buffer.is_some();
        self.bytes.checked_sub(bytes).filter(|_| fits)
    }

    /// The library's block, if there is one.
    pub fn block(&self) -> Option<DevPtr> {
        self.buffer.as_ref().map(Buffer::data)
    }
}

/// The block at `block` as a kernel parameter.
pub fn block_at(block: DevPtr, sections: &HtSections, tokens: u32, top_k: u32) -> HtHandleMemory {
    let at = |offset: usize| block.0 + offset;
    HtHandleMemory {
        entries: at(sections.entries) as *mut HtEntry,
        begins: at(sections.begins) as *mut u32,
        departures: at(sections.departures) as *mut u32,
        counts: at(sections.counts) as *mut i32,
        tokens,
        top_k,
    }
}
