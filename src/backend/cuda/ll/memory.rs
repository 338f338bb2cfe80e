//! The device memory of an LL handle.
#![forbid(unsafe_code)]

use crate::backend::cuda::driver::memory::{Buffer, CudaMemory};
use crate::backend::cuda::ll::plan::{HandleSizes, LlPlan};
use crate::backend::cuda::params::LlHandleMemory;
use crate::error::Result;
use crate::model::ops::StagedSlot;
use crate::model::tensor::DevPtr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// What one handle has: what its dispatch leaves for its combine.
pub struct HandleMemory {
    buffer: Buffer,
    sizes: HandleSizes,
    top_k: usize,
    /// 1 + a slot, or 0.
    receiver: AtomicUsize,
}

impl HandleMemory {
    /// With any content, or what a handle before has left: writing something here would have to wait for
    /// kernels, hence for other ranks. A dispatch writes all that its combine reads. It may be in a graph that was
    /// never launched, which the host cannot see: then the kernels reach no wrong address, but what the group
    /// gives from there on means nothing.
    pub fn new(memory: &Arc<CudaMemory>, plan: &LlPlan, top_k: usize) -> Result<Self> {
        let sizes = plan.handle_memory(top_k);
        let bytes = sizes.expert_of + sizes.row_of + sizes.tokens_of;
        Ok(Self {
            buffer: Buffer::new(memory, bytes)?,
            sizes,
            top_k,
            receiver: AtomicUsize::new(0),
        })
    }

    /// Whether a handle with `top_k` ids per token can have this one.
    pub fn serves(&self, top_k: usize) -> bool {
        self.top_k == top_k
    }

    /// The memory as the kernels see it.
    pub fn memory(&self) -> LlHandleMemory {
        let at = |offset: usize| DevPtr(self.buffer.data().0 + offset);
        LlHandleMemory {
            expert_of: at(0).0 as *mut i32,
            row_of: at(self.sizes.expert_of).0 as *mut i32,
            tokens_of: at(self.sizes.expert_of + self.sizes.row_of).0 as *mut u32,
        }
    }

    /// The slot whose receive phase last used this memory, if no operation behind it did: whoever uses the memory
    /// next must wait for it, as receive phases are not in the group's order.
    pub fn receiver(&self) -> Option<StagedSlot> {
        let slot = self.receiver.load(Ordering::Relaxed).checked_sub(1)?;
        StagedSlot::ALL.get(slot).copied()
    }

    /// Records that slot, or that an operation behind it was enqueued.
    pub fn set_receiver(&self, slot: Option<StagedSlot>) {
        let number = slot.map_or(0, |slot| slot.index() + 1);
        self.receiver.store(number, Ordering::Relaxed);
    }
}
