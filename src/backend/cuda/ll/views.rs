//! Views: rank-major rows that stay where they arrive (`cuda/ll/view.cuh`), or that are copied for the caller.

use crate::backend::cuda::driver::memory::{Buffer, CudaMemory};
use crate::backend::cuda::group_context::peer_table;
use crate::backend::cuda::ll::launch::FewRows;
use crate::backend::cuda::params::common::PeerTable;
use crate::backend::cuda::params::ll_view::LL_VIEW_BANKS;
use crate::error::Result;
use crate::model::ids::LocalRank;
use crate::model::ops::{LlDispatch, ViewBank};
use crate::model::scales::WireRow;
use crate::model::tensor::DevPtr;
use once_cell::sync::OnceCell;
use std::sync::Arc;

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
