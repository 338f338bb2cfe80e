//! The memory of an LL handle.

use crate::backend::cuda::driver::memory::{Buffer, CudaMemory};
use crate::backend::cuda::group_context::GroupContext;
use crate::backend::cuda::ll::plan::LlPlan;
use crate::backend::cuda::network::two_sided::handshake::Handshake;
use crate::backend::cuda::params::ll::LlHandleMemory;
use crate::error::{Error, Result};
use crate::model::handle_state::{GivenBlock, LlSections};
use crate::model::ops::{HandleForm, Routing, StagedSlot};
use crate::model::tensor::DevPtr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// One handle's memory: the data that its dispatch stores for its combine.
pub struct HandleMemory {
    /// `None` if the block is in a caller's memory.
    _buffer: Option<Buffer>,
    block: DevPtr,
    sections: LlSections,
    top_k: usize,
    form: HandleForm,
    /// `None` on one node.
    handshake: Option<Handshake>,
    /// 1 + the index of a slot, or 0 for none.
    receiver: AtomicUsize,
}

impl HandleMemory {
    /// The content is arbitrary, or left by an earlier handle. Initialising it would mean waiting for kernels, hence
    /// for other ranks, and a dispatch writes everything that its combine reads. But that dispatch may be in a graph
    /// that was never launched, which the host cannot see: then kernels access no wrong address, but the group's
    /// results are meaningless from there on.
    ///
    /// Over several nodes the rank forwards for `forwarded` ranks, itself included.
    pub fn new(
        (group, memory): (&GroupContext, &Arc<CudaMemory>),
        plan: &LlPlan,
        routing: &Routing,
        forwarded: Option<usize>,
    ) -> Result<Self> {
        let handshake = forwarded.map(|forwarded| Handshake::new(memory, forwarded)).transpose()?;
        let buffer = group.block(memory, plan.handle_memory(routing.top_k, routing.form).bytes)?;
        let given = Self::given(plan, routing, GivenBlock(buffer.data()));
        Ok(Self { _buffer: Some(buffer), handshake, ..given })
    }

    /// A block for this routing in a caller's memory, in a group on one node.
    pub fn given(plan: &LlPlan, routing: &Routing, GivenBlock(block): GivenBlock) -> Self {
        let Routing { top_k, form, .. } = *routing;
        Self {
            _buffer: None,
            block,
            sections: plan.handle_memory(top_k, form),
            top_k,
            form,
            handshake: None,
            receiver: AtomicUsize::new(0),
        }
    }

    /// Whether the memory fits a handle with this routing.
    pub fn serves(&self, routing: &Routing) -> bool {
        let is_same = (self.top_k, self.form) == (routing.top_k, routing.form);
        is_same && self.handshake.as_ref().is_none_or(Handshake::is_free)
    }

    pub fn handshake(&self) -> Result<&Handshake> {
        let handshake = self.handshake.as_ref();
        handshake.ok_or_else(|| Error::internal("a handshake on one node"))
    }

    /// Where 32-bit ids are widened to.
    pub fn ids(&self) -> DevPtr {
        DevPtr(self.block.0 + self.sections.ids)
    }

    /// The memory as a kernel parameter.
    pub fn memory(&self) -> LlHandleMemory {
        let at = |offset: usize| self.block.0 + offset;
        LlHandleMemory {
            expert_of: at(self.sections.expert_of) as *mut i32,
            row_of: at(self.sections.row_of) as *mut i32,
            tokens_of: at(self.sections.tokens_of) as *mut u32,
        }
    }

    /// The slot whose receive phase was the last to use this memory, if no operation has used it since. The next one
    /// must wait for that phase, as receive phases are not in the group's order.
    pub fn receiver(&self) -> Option<StagedSlot> {
        let slot = self.receiver.load(Ordering::Acquire).checked_sub(1)?;
        StagedSlot::ALL.get(slot).copied()
    }

    /// Records that slot, or `None` once a later operation is enqueued.
    pub fn set_receiver(&self, slot: Option<StagedSlot>) {
        self.receiver.store(slot.map_or(0, |slot| 1 + slot.index()), Ordering::Release);
    }
}
