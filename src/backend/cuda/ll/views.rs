//! Views: rank-major rows that stay where they arrive (`cuda/ll/view.cuh`), and where others are copied for a caller.

use crate::backend::cuda::driver::memory::{Buffer, CudaMemory};
use crate::backend::cuda::ll::launch::FewRows;
use crate::backend::cuda::params::common::{MAX_PEERS, PeerTable};
use crate::backend::cuda::params::ll_view::LL_VIEW_BANKS;
use crate::error::Result;
use crate::model::ids::LocalRank;
use crate::model::ops::{LlDispatch, ViewBank};
use crate::model::scales::WireRow;
use crate::model::tensor::DevPtr;
use once_cell::sync::OnceCell;
use std::ptr::null_mut;
use std::sync::Arc;

const _: () = assert!(LL_VIEW_BANKS as usize == ViewBank::COUNT);

/// Where rows of views come, on one node. Ranks make their banks together when the first view is asked for.
pub struct ViewBanks {
    /// This rank's `LlViewState`.
    pub state: DevPtr,
    bank_bytes: usize,
    /// Of the longest rows.
    row_bytes: usize,
    /// Of which rows no rank has many: these are copied, which is faster.
    few: Option<FewRows>,
    rank: LocalRank,
    /// The first bank of each rank.
    first: OnceCell<Box<[usize]>>,
}

impl ViewBanks {
    /// None yet; each will have `bank_bytes`, for rows of `row_bytes` at most.
    pub fn new(state: DevPtr, [bank_bytes, row_bytes]: [usize; 2], few: Option<FewRows>, rank: LocalRank) -> Self {
        Self { state, bank_bytes, row_bytes, few, rank, first: OnceCell::new() }
    }

    /// Whether the rows of `op` stay: they fit with the packets of their scales, and scales are no longer than the
    /// payload, as a lane that sends 16 bytes of that sends as many of these.
    pub fn hold(&self, op: &LlDispatch) -> bool {
        let row = op.wire();
        let (payload, packets) = (row.payload.bytes(), scale_bytes(row));
        let is_few = |few: FewRows| if row.scales.is_some() { few.by_rank } else { few.plain_of_view };
        let is_copied = self.few.is_some_and(is_few);
        !is_copied && payload + packets <= self.row_bytes && packets <= 2 * payload
    }

    /// Those that `make` makes of so many bytes, unless they are there.
    pub fn make(&self, make: impl FnOnce(usize) -> Result<Box<[usize]>>) -> Result<()> {
        self.first.get_or_try_init(|| make(ViewBank::COUNT * self.bank_bytes)).map(drop)
    }

    /// `bank` of each rank, once they are made.
    pub fn of_ranks(&self, bank: ViewBank) -> Option<PeerTable> {
        let first = self.first.get()?;
        let mut table =
            PeerTable { window: [null_mut(); MAX_PEERS], ranks: first.len() as u32, rank: self.rank.word() };
        for (to, first) in table.window.iter_mut().zip(first) {
            *to = (first + bank.index() * self.bank_bytes) as *mut u8;
        }
        Some(table)
    }

    /// How rows at `at` lie, of which there are `zone_bytes` for each rank.
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

    /// This rank's `bank`, once it is made.
    pub fn own(&self, bank: ViewBank) -> Option<DevPtr> {
        let first = self.first.get()?.get(self.rank.index())?;
        Some(DevPtr(first + bank.index() * self.bank_bytes))
    }
}

/// How rows of a caller's lie to a bank: apart from it, as its own, or over some of these.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Lies {
    Apart,
    There,
    Across,
}

/// Bytes of the packets of a row's scales: one for each four bytes, whole pieces of four.
pub fn scale_bytes(row: WireRow) -> usize {
    2 * (row.slot_bytes() - row.payload.bytes())
}

/// Memory of the library's that rows of views are copied to where they do not stay: of staged operations, over several
/// nodes, and of rows that banks do not hold. Made when the first one asks.
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
