//! The device memory of an LL handle.
#![forbid(unsafe_code)]

use crate::backend::cuda::driver::memory::{Buffer, CudaMemory};
use crate::backend::cuda::ll::hello::HelloMemory;
use crate::backend::cuda::ll::plan::{HandleSizes, LlPlan};
use crate::backend::cuda::params::ll::LlHandleMemory;
use crate::error::{Error, Result};
use crate::model::ops::StagedSlot;
use crate::model::tensor::DevPtr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// One handle's memory: the data that its dispatch stores for its combine.
pub struct HandleMemory {
    buffer: Buffer,
    sizes: HandleSizes,
    top_k: usize,
    /// `None` on one node.
    hello: Option<HelloMemory>,
    /// 1 + the slot, or 0 for none.
    receiver: AtomicUsize,
}

impl HandleMemory {
    /// The content is arbitrary, or left by an earlier handle. Initialising it would have to wait
    /// for kernels, hence for other ranks, and a dispatch writes everything that its combine reads.
    /// But that dispatch may be in a graph that was never launched, which the host cannot see.
    /// Kernels then access no wrong address, but the group's results are meaningless from there on.
    ///
    /// Over several nodes the rank has `sources`.
    pub fn new(
        memory: &Arc<CudaMemory>,
        plan: &LlPlan,
        (top_k, sources): (usize, Option<usize>),
    ) -> Result<Self> {
        let sizes = plan.handle_memory(top_k);
        let bytes = sizes.expert_of + sizes.row_of + sizes.tokens_of;
        Ok(Self {
            buffer: Buffer::new(memory, bytes)?,
            sizes,
            top_k,
            hello: sources
                .map(|sources| HelloMemory::new(memory, sources))
                .transpose()?,
            receiver: AtomicUsize::new(0),
        })
    }

    /// Whether the memory fits a handle with `top_k` ids per token.
    pub fn serves(&self, top_k: usize) -> bool {
        self.top_k == top_k && self.hello.as_ref().is_none_or(HelloMemory::is_free)
    }

    /// What ranks tell each other over the network.
    pub fn hello(&self) -> Result<&HelloMemory> {
        let hello = self.hello.as_ref();
        hello.ok_or_else(|| Error::internal("a hello on one node"))
    }

    /// The memory as a kernel parameter.
    pub fn memory(&self) -> LlHandleMemory {
        let at = |offset: usize| DevPtr(self.buffer.data().0 + offset);
        LlHandleMemory {
            expert_of: at(0).0 as *mut i32,
            row_of: at(self.sizes.expert_of).0 as *mut i32,
            tokens_of: at(self.sizes.expert_of + self.sizes.row_of).0 as *mut u32,
        }
    }

    /// The slot whose receive phase last used this memory, if no later operation used it. The next
    /// user must wait for that phase, as receive phases are not in the group's order.
    pub fn receiver(&self) -> Option<StagedSlot> {
        let slot = self.receiver.load(Ordering::Relaxed).checked_sub(1)?;
        StagedSlot::ALL.get(slot).copied()
    }

    /// Records that slot, or `None` after a later operation was enqueued.
    pub fn set_receiver(&self, slot: Option<StagedSlot>) {
        let number = slot.map_or(0, |slot| slot.index() + 1);
        self.receiver.store(number, Ordering::Relaxed);
    }
}
