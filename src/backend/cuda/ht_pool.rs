//! The device memory of HT handles, kept from one handle to the next: allocating waits for the device.
#![forbid(unsafe_code)]

use crate::backend::cuda::context::Context;
use crate::backend::cuda::host_page::HostPage;
use crate::backend::cuda::ht_plan::HandleLayout;
use crate::backend::cuda::memory::{Buffer, CudaMemory};
use crate::backend::cuda::params_ht::{HtEntry, HtHandleMemory, HtReceived};
use crate::error::Result;
use crate::model::tensor::DevPtr;
use parking_lot::Mutex;
use std::sync::Arc;

/// What one handle has: device memory, and the page by which the host learns its number of rows.
pub(super) struct Piece {
    buffer: Buffer,
    bytes: usize,
    pub(super) received: HostPage<HtReceived>,
}

impl Piece {
    /// The memory as the kernels see it.
    pub(super) fn memory(&self, layout: HandleLayout, tokens: u32, top_k: u32) -> HtHandleMemory {
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

/// The pieces of a group that no handle has.
pub(super) struct Pool {
    context: Arc<Context>,
    memory: Arc<CudaMemory>,
    free: Mutex<Vec<Piece>>,
}

impl Pool {
    /// An empty pool.
    pub(super) fn new(context: &Arc<Context>, memory: &Arc<CudaMemory>) -> Self {
        Self {
            context: Arc::clone(context),
            memory: Arc::clone(memory),
            free: Mutex::default(),
        }
    }

    /// A piece of at least `bytes`: the smallest free one that will do, else a new one. Operations of
    /// the handle that had it may still be enqueued: the group's operations run one after the other.
    pub(super) fn take(&self, bytes: usize) -> Result<Piece> {
        let mut free = self.free.lock();
        let fitting = free.iter().enumerate().filter(|(_, it)| it.bytes >= bytes);
        if let Some((index, _)) = fitting.min_by_key(|(_, piece)| piece.bytes) {
            return Ok(free.swap_remove(index));
        }
        Ok(Piece {
            buffer: Buffer::new(&self.memory, bytes)?,
            bytes,
            received: HostPage::new(&self.context, 1)?,
        })
    }

    /// Takes a piece back.
    pub(super) fn put(&self, piece: Piece) {
        self.free.lock().push(piece);
    }
}
