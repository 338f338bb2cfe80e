//! The memory of LL handles, and of views: rank-major rows that the caller reads where they arrive
//! (`cuda/ll/view.cuh`), or from a copy.

use crate::backend::cuda::driver::event::MOST_CAPTURES;
use crate::backend::cuda::driver::memory::{Buffer, CudaMemory};
use crate::backend::cuda::driver::stream::Capture;
use crate::backend::cuda::group_context::{GroupContext, peer_table};
use crate::backend::cuda::ll::launch::FewRows;
use crate::backend::cuda::ll::plan::LlPlan;
use crate::backend::cuda::network::two_sided::handshake::Handshake;
use crate::backend::cuda::params::common::PeerTable;
use crate::backend::cuda::params::ll::LlHandleMemory;
use crate::backend::cuda::params::ll_view::LL_VIEW_BANKS;
use crate::error::{Error, Result};
use crate::model::handle_state::{CallerBlock, LlSections};
use crate::model::ids::LocalRank;
use crate::model::ops::{HandleForm, LlDispatch, Routing, StagedSlot, ViewBank};
use crate::model::scales::WireRow;
use crate::model::tensor::DevPtr;
use once_cell::sync::OnceCell;
use parking_lot::Mutex;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// A handle's memory: what its dispatch stores for its combine.
pub struct HandleMemory {
    /// `None` if the block is in a caller's memory.
    _buffer: Option<Buffer>,
    block: DevPtr,
    sections: LlSections,
    top_k: usize,
    form: HandleForm,
    /// `None` on one node.
    handshake: Option<Handshake>,
    pub receivers: Receivers,
}

impl HandleMemory {
    /// Its content is arbitrary: initialising it would mean waiting for kernels, hence for other ranks, and is not
    /// needed, as a dispatch writes everything that its combine reads. But the host cannot see whether a captured
    /// dispatch was ever launched; after a combine without it, the group's results are meaningless, though kernels
    /// access no wrong address.
    ///
    /// Over several nodes this rank forwards for `forwarded` ranks, including itself.
    pub fn new(
        (group, memory): (&GroupContext, &Arc<CudaMemory>),
        plan: &LlPlan,
        routing: &Routing,
        forwarded: Option<usize>,
    ) -> Result<Self> {
        let handshake = forwarded.map(|forwarded| Handshake::new(memory, forwarded)).transpose()?;
        let buffer = group.block(memory, plan.handle_memory(routing.top_k, routing.form).bytes)?;
        let in_caller_memory = Self::in_caller_memory(plan, routing, CallerBlock(buffer.data()));
        Ok(Self { _buffer: Some(buffer), handshake, ..in_caller_memory })
    }

    /// The memory of a handle on one node whose block is in a caller's memory.
    pub fn in_caller_memory(plan: &LlPlan, routing: &Routing, CallerBlock(block): CallerBlock) -> Self {
        let Routing { top_k, form, .. } = *routing;
        Self {
            _buffer: None,
            block,
            sections: plan.handle_memory(top_k, form),
            top_k,
            form,
            handshake: None,
            receivers: Receivers::default(),
        }
    }

    /// Whether the memory suits a handle with this routing.
    pub fn serves(&self, routing: &Routing) -> bool {
        let is_same = (self.top_k, self.form) == (routing.top_k, routing.form);
        is_same && self.handshake.as_ref().is_none_or(Handshake::is_free)
    }

    pub fn handshake(&self) -> Result<&Handshake> {
        let handshake = self.handshake.as_ref();
        handshake.ok_or_else(|| Error::internal("a handshake on one node"))
    }

    /// Memory for widened 32-bit ids.
    pub fn ids(&self) -> DevPtr {
        DevPtr(self.block.0 + self.sections.ids)
    }

    /// The kernels' parameter for this memory.
    pub fn memory(&self) -> LlHandleMemory {
        let at = |offset: usize| self.block.0 + offset;
        LlHandleMemory {
            expert_of: at(self.sections.expert_of) as *mut i32,
            row_of: at(self.sections.row_of) as *mut i32,
            tokens_of: at(self.sections.tokens_of) as *mut u32,
        }
    }
}

/// The slots of receive phases that used a handle's memory since its last operation, outside graphs and within
/// captures: those of one cannot wait for those of another. The next operation must wait for them, as receive phases
/// are not in the group's order.
#[derive(Default)]
pub struct Receivers {
    /// A bit for each slot.
    outside: AtomicUsize,
    captured: Mutex<Vec<(Capture, usize)>>,
}

impl Receivers {
    /// The slots, as `capture` sees them.
    pub fn of(&self, capture: Option<Capture>) -> impl Iterator<Item = StagedSlot> {
        let slots = match capture {
            None => self.outside.load(Ordering::Acquire),
            Some(capture) => {
                let captured = self.captured.lock();
                captured.iter().find(|(of, _)| *of == capture).map_or(0, |(_, slots)| *slots)
            }
        };
        StagedSlot::ALL.into_iter().filter(move |slot| slots & bit(*slot) != 0)
    }

    /// Records a receive phase.
    pub fn add(&self, capture: Option<Capture>, slot: StagedSlot) {
        let Some(capture) = capture else {
            self.outside.fetch_or(bit(slot), Ordering::AcqRel);
            return;
        };
        let mut captured = self.captured.lock();
        if let Some((_, slots)) = captured.iter_mut().find(|(of, _)| *of == capture) {
            *slots |= bit(slot);
            return;
        }
        // Of more captures the group's order refuses the older ones.
        if captured.len() == MOST_CAPTURES {
            captured.remove(0);
        }
        captured.push((capture, bit(slot)));
    }

    /// Forgets them, once an operation that waits for them is enqueued.
    pub fn clear(&self, capture: Option<Capture>) {
        match capture {
            None => self.outside.store(0, Ordering::Release),
            Some(capture) => self.captured.lock().retain(|(of, _)| *of != capture),
        }
    }
}

fn bit(slot: StagedSlot) -> usize {
    1 << slot.index()
}

const _: () = assert!(LL_VIEW_BANKS as usize == ViewBank::COUNT);

/// The banks of views, on one node. All ranks allocate theirs when a caller asks for the first view.
pub struct ViewBanks {
    /// This rank's `LlViewState`.
    pub state: DevPtr,
    bank_bytes: usize,
    /// Bytes of the longest rows.
    row_bytes: usize,
    /// The kinds of rows of which no rank has many, so that copying them is faster than reading them in place.
    few: Option<FewRows>,
    rank: LocalRank,
    /// The address of each rank's first bank.
    first: OnceCell<Box<[usize]>>,
}

impl ViewBanks {
    /// No banks yet. Each will have `bank_bytes`, for rows of at most `row_bytes`.
    pub fn new(state: DevPtr, [bank_bytes, row_bytes]: [usize; 2], few: Option<FewRows>, rank: LocalRank) -> Self {
        Self { state, bank_bytes, row_bytes, few, rank, first: OnceCell::new() }
    }

    /// Whether the rows of `op` stay where they arrive. For that, they must fit with the packets of their scales, and
    /// the scales must not be longer than the payload, as a lane sends at most as many bytes of scales as of payload.
    pub fn keep_in_place(&self, op: &LlDispatch) -> bool {
        let row = op.wire();
        let (payload, packets) = (row.payload.bytes(), scale_bytes(row));
        let is_few = |few: FewRows| if row.scales.is_some() { few.by_rank } else { few.plain_of_view };
        let is_copied = self.few.is_some_and(is_few);
        !is_copied && payload + packets <= self.row_bytes && packets <= 2 * payload
    }

    /// Creates the banks, unless they exist. `make` gets a bank's size and returns the address of each rank's first.
    pub fn make(&self, make: impl FnOnce(usize) -> Result<Box<[usize]>>) -> Result<()> {
        self.first.get_or_try_init(|| make(ViewBank::COUNT * self.bank_bytes)).map(drop)
    }

    /// The addresses of `bank` on all ranks; `None` before the banks exist.
    pub fn of_ranks(&self, bank: ViewBank) -> Option<PeerTable> {
        let first = self.first.get()?.iter();
        Some(peer_table(first.map(|first| first + bank.index() * self.bank_bytes), self.rank))
    }

    /// How a caller's rows at `at`, with `zone_bytes` for each rank, overlap `bank`.
    pub fn overlap(&self, bank: ViewBank, at: DevPtr, zone_bytes: usize) -> Overlap {
        match (self.own(bank), self.first.get()) {
            (Some(own), _) if own == at => Overlap::Exact,
            (Some(own), Some(ranks)) => {
                let apart = at.0 + ranks.len() * zone_bytes <= own.0 || own.0 + self.bank_bytes <= at.0;
                if apart { Overlap::None } else { Overlap::Partial }
            }
            _ => Overlap::None,
        }
    }

    /// The address of this rank's `bank`; `None` before the banks exist.
    pub fn own(&self, bank: ViewBank) -> Option<DevPtr> {
        let first = self.first.get()?.get(self.rank.index())?;
        Some(DevPtr(first + bank.index() * self.bank_bytes))
    }
}

/// How a caller's rows overlap a bank: `Exact` means that they are the bank's rows, each in its place.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Overlap {
    None,
    Exact,
    Partial,
}

/// Bytes of the packets of a row's scales: one packet per four bytes of scales, in multiples of four packets.
pub fn scale_bytes(row: WireRow) -> usize {
    2 * (row.slot_bytes() - row.payload.bytes())
}

/// The library's memory for copies of views' rows, allocated on first use. Rows are copied in staged operations, over
/// several nodes, and if the banks cannot hold them.
#[derive(Default)]
pub struct CopiedViews(OnceCell<Buffer>);

impl CopiedViews {
    /// The address of the copies for `bank`, of `bank_bytes`.
    pub fn at(&self, memory: &Arc<CudaMemory>, bank: ViewBank, bank_bytes: usize) -> Result<DevPtr> {
        let make = || Buffer::new(memory, ViewBank::COUNT * bank_bytes);
        let buffer = self.0.get_or_try_init(make)?;
        Ok(DevPtr(buffer.data().0 + bank.index() * bank_bytes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn receivers_are_remembered_by_capture() {
        let [first, second] = StagedSlot::ALL;
        let [outside, one, other] = [None, Some(Capture::numbered(1)), Some(Capture::numbered(2))];
        let receivers = Receivers::default();
        let seen = |capture| receivers.of(capture).collect::<Vec<_>>();
        receivers.add(outside, second);
        receivers.add(one, first);
        assert_eq!([seen(outside), seen(one), seen(other)], [vec![second], vec![first], vec![]]);
        // Of an abandoned operation beside one that is late.
        receivers.add(outside, first);
        receivers.add(one, second);
        assert_eq!([seen(outside), seen(one)], [[first, second], [first, second]]);
        receivers.clear(one);
        assert_eq!([seen(outside), seen(one)], [vec![first, second], vec![]]);
        receivers.clear(outside);
        assert_eq!(seen(outside), []);
    }
}
