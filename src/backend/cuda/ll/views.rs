//! Views: rank-major rows that stay where they arrive (`cuda/ll/view.cuh`), and where others are copied for a caller.

use crate::backend::cuda::driver::memory::{Buffer, CudaMemory};
use crate::backend::cuda::ll::launch::FewRows;
use crate::backend::cuda::params::common::{MAX_PEERS, PeerTable};
use crate::backend::cuda::params::ll_view::{LL_VIEW_BANKS, LL_VIEW_THREADS};
use crate::error::Result;
use crate::model::ids::LocalRank;
use crate::model::ops::{LlDispatch, ViewBank};
use crate::model::scales::WireRow;
use crate::model::tensor::DevPtr;
use once_cell::sync::OnceCell;
use std::ptr::null_mut;
use std::sync::Arc;

/// Warps of a block that move rows; one does all else.
const ROW_WARPS: usize = LL_VIEW_THREADS as usize / 32 - 1;
/// Parts of a row, each in a block alone on its multiprocessor, that a token has at most.
const MOST_PARTS: usize = 7;
/// Blocks that a multiprocessor has room for, as the list of kernels says.
const BLOCKS_PER_MULTIPROCESSOR: usize = 4;

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

/// What decides about the launches of a handle's operations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ViewGrid {
    pub tokens: usize,
    pub most_tokens: usize,
    pub multiprocessors: u32,
    pub ranks: usize,
}

impl ViewGrid {
    /// In how many parts of how many chunks a row of so many is taken: of few tokens in more than there must be, while
    /// three quarters of the multiprocessors have no block.
    pub fn cut(self, chunks: usize) -> (usize, usize) {
        let apart = (self.multiprocessors as usize / (4 * self.tokens.max(1))).clamp(1, MOST_PARTS);
        let warps = chunks.div_ceil(chunks.div_ceil(ROW_WARPS).max(apart));
        (chunks.div_ceil(warps.max(1)).max(1), warps)
    }

    /// Whether more than one block of a multiprocessor polls: pauses between polls took pairs of 128 tokens on two
    /// H200s from 24 to 19 us.
    pub fn polls_gently(self, parts: usize) -> bool {
        self.blocks(parts) > self.multiprocessors
    }

    /// A block for each part of the rank's tokens, as many as run at the same time. Where others may have more tokens,
    /// one on every second multiprocessor.
    pub fn blocks(self, parts: usize) -> u32 {
        let all = self.multiprocessors as usize;
        let serving = all.div_ceil(2).min(self.most_tokens * parts);
        let wanted = (self.tokens * parts).max(serving).max(1);
        wanted.min(BLOCKS_PER_MULTIPROCESSOR * all) as u32
    }

    /// Groups of blocks of a combine: one that receives and up to one that sends to each other rank, while a quarter of
    /// the multiprocessors has no block for the rank's own tokens; else one that does both.
    pub fn groups(self, parts: usize) -> u32 {
        let all = self.multiprocessors as usize;
        let own = (self.tokens * parts).max(1);
        let most = BLOCKS_PER_MULTIPROCESSOR * all / self.blocks(parts) as usize;
        (all * 3 / 4 / own).min(self.ranks).min(most).max(1) as u32
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    fn grid(tokens: usize, most_tokens: usize, multiprocessors: u32) -> ViewGrid {
        ViewGrid { tokens, most_tokens, multiprocessors, ranks: 4 }
    }

    #[test]
    fn parts_have_all_chunks_of_a_row() {
        for (chunks, tokens) in (1..200).flat_map(|chunks| [0, 1, 5, 8, 300].map(|tokens| (chunks, tokens))) {
            let (parts, warps) = grid(tokens, 300, 132).cut(chunks);
            assert!(warps <= ROW_WARPS && parts * warps >= chunks);
            assert!((parts - 1) * warps < chunks);
        }
        let cut = |tokens, chunks| grid(tokens, 300, 132).cut(chunks);
        assert_eq!((cut(300, 28), cut(300, 29)), ((4, 7), (5, 6)));
        assert_eq!((cut(1, 28), cut(8, 28), cut(8, 14), cut(16, 14)), ((7, 4), (4, 7), (4, 4), (2, 7)));
        assert_eq!((cut(1, 3), cut(1, 0)), ((3, 1), (1, 0)));
    }

    #[test]
    fn blocks_run_at_the_same_time() {
        let blocks = |tokens, most_tokens, multiprocessors| grid(tokens, most_tokens, multiprocessors).blocks(4);
        assert_eq!(blocks(128, 128, 132), 512);
        assert_eq!(blocks(1024, 1024, 132), 528);
        assert_eq!((blocks(1, 128, 132), blocks(1, 1, 132)), (66, 4));
        assert_eq!((blocks(0, 1, 1), blocks(0, 0, 132)), (1, 1));
        let groups = |ranks, tokens| ViewGrid { ranks, ..grid(tokens, 528, 132) }.groups(1);
        assert_eq!([0, 1, 24, 33, 49, 50, 528].map(|tokens| groups(4, tokens)), [4, 4, 4, 3, 2, 1, 1]);
        assert_eq!((groups(8, 1), groups(72, 1)), (8, 8));
    }
}
