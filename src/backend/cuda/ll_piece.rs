//! The device memory of an LL handle.
#![forbid(unsafe_code)]

use crate::backend::cuda::ll_plan::{HandleMemory, LlPlan};
use crate::backend::cuda::memory::{Buffer, CudaMemory};
use crate::backend::cuda::params::{LL_WHOLE_CHANNEL, LlHandleMemory};
use crate::error::Result;
use crate::model::tensor::DevPtr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

/// What one handle has: what its dispatch leaves for its combine.
pub(super) struct Piece {
    buffer: Buffer,
    sizes: HandleMemory,
    top_k: usize,
    received_on: AtomicU32,
}

impl Piece {
    /// With any content, or what a handle before has left: writing something here would have to wait for
    /// kernels, hence for other ranks. A dispatch writes all that its combine reads. It may be in a graph that was
    /// never launched, which the host cannot see: then the kernels reach no wrong address, but what the group
    /// gives from there on means nothing.
    pub(super) fn new(memory: &Arc<CudaMemory>, plan: &LlPlan, top_k: usize) -> Result<Self> {
        let sizes = plan.handle_memory(top_k);
        let bytes = sizes.expert_of + sizes.row_of + sizes.tokens_of;
        Ok(Self {
            buffer: Buffer::new(memory, bytes)?,
            sizes,
            top_k,
            received_on: AtomicU32::new(LL_WHOLE_CHANNEL),
        })
    }

    /// Whether a handle with `top_k` ids per token can have this one.
    pub(super) fn serves(&self, top_k: usize) -> bool {
        self.top_k == top_k
    }

    /// The memory as the kernels see it.
    pub(super) fn memory(&self) -> LlHandleMemory {
        let at = |offset: usize| DevPtr(self.buffer.data().0 + offset);
        LlHandleMemory {
            expert_of: at(0).0 as *mut i32,
            row_of: at(self.sizes.expert_of).0 as *mut i32,
            tokens_of: at(self.sizes.expert_of + self.sizes.row_of).0 as *mut u32,
        }
    }

    /// The track of a receive phase that the next operation has to follow, whichever handle has the
    /// memory then, or [`LL_WHOLE_CHANNEL`] if there is none: whole operations follow each other.
    pub(super) fn received_on(&self) -> u32 {
        self.received_on.load(Ordering::Relaxed)
    }

    /// A receive phase that uses the memory was enqueued on track `track`; or, [`LL_WHOLE_CHANNEL`], an
    /// operation behind it.
    pub(super) fn set_received_on(&self, track: u32) {
        self.received_on.store(track, Ordering::Relaxed);
    }
}
