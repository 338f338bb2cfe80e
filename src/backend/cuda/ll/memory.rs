//! The memory of an LL handle, and that of views: rank-major rows that stay where they arrive (`cuda/ll/view.cuh`), or
//! that are copied for the caller.

use crate::backend::cuda::driver::memory::{Buffer, CudaMemory};
use crate::backend::cuda::group_context::{GroupContext, peer_table};
use crate::backend::cuda::ll::launch::FewRows;
use crate::backend::cuda::ll::plan::LlPlan;
use crate::backend::cuda::network::two_sided::handshake::Handshake;
use crate::backend::cuda::params::common::PeerTable;
use crate::backend::cuda::params::ll::LlHandleMemory;
use crate::backend::cuda::params::ll_view::LL_VIEW_BANKS;
use crate::error::{Error, Result};
use crate::model::handle_state::{GivenBlock, LlSections};
use crate::model::ids::LocalRank;
use crate::model::ops::{HandleForm, LlDispatch, Routing, StagedSlot, ViewBank};
use crate::model::scales::WireRow;
use crate::model::tensor::DevPtr;
use once_cell::sync::OnceCell;
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

const _: () = assert!(LL_VIEW_BANKS as usize == ViewBank::COUNT);

/// The memory of views, on one node. Ranks allocate their banks together when the first view is asked for.
pub struct ViewBanks {
    /// This rank's `LlViewState`.
    pub state: DevPtr,
    bank_bytes: usize,
    /// Of the longest rows.
    row_bytes: usize,
    /// The kinds of rows of which no rank has many: copying these is faster.
    few: Option<FewRows>,
    rank: LocalRank,
    /// The address of each rank's first bank.
    first: OnceCell<Box<[usize]>>,
}

impl ViewBanks {
    /// No banks yet; each will have `bank_bytes`, for rows of at most `row_bytes`.
    pub fn new(state: DevPtr, [bank_bytes, row_bytes]: [usize; 2], few: Option<FewRows>, rank: LocalRank) -> Self {
        Self { state, bank_bytes, row_bytes, few, rank, first: OnceCell::new() }
    }

    /// Whether the rows of `op` stay where they arrive: they fit with the packets of their scales, and the scales are
    /// no longer than the payload, as a lane that sends 16 bytes of payload sends as many of scales.
    pub fn hold(&self, op: &LlDispatch) -> bool {
        let row = op.wire();
        let (payload, packets) = (row.payload.bytes(), scale_bytes(row));
        let is_few = |few: FewRows| if row.scales.is_some() { few.by_rank } else { few.plain_of_view };
        let is_copied = self.few.is_some_and(is_few);
        !is_copied && payload + packets <= self.row_bytes && packets <= 2 * payload
    }

    /// Creates the banks, unless they exist; `make` gets their size.
    pub fn make(&self, make: impl FnOnce(usize) -> Result<Box<[usize]>>) -> Result<()> {
        self.first.get_or_try_init(|| make(ViewBank::COUNT * self.bank_bytes)).map(drop)
    }

    /// `bank` of each rank, once the banks exist.
    pub fn of_ranks(&self, bank: ViewBank) -> Option<PeerTable> {
        let first = self.first.get()?.iter();
        Some(peer_table(first.map(|first| first + bank.index() * self.bank_bytes), self.rank))
    }

    /// How rows at `at`, with `zone_bytes` for each rank, lie relative to `bank`.
    pub fn lies(&self, bank: ViewBank, at: DevPtr, zone_bytes: usize) -> Lies {
        match (self.own(bank), self.first.get()) {
            (Some(own), _) if own == at => Lies::There,
            (Some(own), Some(ranks)) => {
                let apart = at.0 + ranks.len() * zone_bytes <= own.0 || own.0 + self.bank_bytes <= at.0;
                if apart { Lies::Apart } else { Lies::Across }
            }
            _ => Lies::Apart,
        }
    }

    /// This rank's `bank`, once the banks exist.
    pub fn own(&self, bank: ViewBank) -> Option<DevPtr> {
        let first = self.first.get()?.get(self.rank.index())?;
        Some(DevPtr(first + bank.index() * self.bank_bytes))
    }
}

/// How a caller's rows lie relative to a bank: outside, exactly there, or overlapping.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Lies {
    Apart,
    There,
    Across,
}

/// Bytes of the packets of a row's scales: one per four bytes, in multiples of four packets.
pub fn scale_bytes(row: WireRow) -> usize {
    2 * (row.slot_bytes() - row.payload.bytes())
}

/// Memory of the library's to which views' rows are copied if they do not stay where they arrive: in staged operations,
/// over several nodes, and if banks cannot hold them. Allocated on first use.
#[derive(Default)]
pub struct CopiedViews(OnceCell<Buffer>);

impl CopiedViews {
    /// The address of `bank`, of `bank_bytes`.
    pub fn at(&self, memory: &Arc<CudaMemory>, bank: ViewBank, bank_bytes: usize) -> Result<DevPtr> {
        let make = || Buffer::new(memory, ViewBank::COUNT * bank_bytes);
        let buffer = self.0.get_or_try_init(make)?;
        Ok(DevPtr(buffer.data().0 + bank.index() * bank_bytes))
    }
}
