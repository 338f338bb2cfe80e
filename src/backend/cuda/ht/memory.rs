//! The device memory of an HT handle.

use crate::backend::cuda::driver::context::Context;
use crate::backend::cuda::driver::memory::{Buffer, CudaMemory, HostPage};
use crate::backend::cuda::ht::plan::HandleLayout;
use crate::backend::cuda::params::ht::{HtCount, HtEntry, HtHandleMemory};
use crate::error::Result;
use crate::model::tensor::DevPtr;
use std::sync::Arc;

/// One handle's memory: device memory, and the page through which the host learns the number of
/// rows.
pub struct HandleMemory {
    buffer: Buffer,
    bytes: usize,
    pub received: HostPage<HtCount>,
}

impl HandleMemory {
    /// Allocates `bytes` of device memory, and the page.
    pub fn new(context: &Arc<Context>, memory: &Arc<CudaMemory>, bytes: usize) -> Result<Self> {
        Ok(Self {
            buffer: Buffer::new(memory, bytes)?,
            bytes,
            received: HostPage::new(context, 1)?,
        })
    }

    /// The excess of this memory over `bytes`; `None` if it is too small.
    pub fn waste(&self, bytes: usize) -> Option<usize> {
        self.bytes.checked_sub(bytes)
    }

    /// The memory as a kernel parameter.
    pub fn memory(&self, layout: HandleLayout, tokens: u32, top_k: u32) -> HtHandleMemory {
        let at = |offset: usize| DevPtr(self.buffer.data().0 + offset);
        HtHandleMemory {
            entries: at(layout.entries).0 as *mut HtEntry,
            begins: at(layout.begins).0 as *mut u32,
            departures: at(layout.departures).0 as *mut u32,
            counts: at(layout.counts).0 as *mut i32,
            tokens,
            top_k,
        }
    }
}
