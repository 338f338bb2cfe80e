//! Views: rank-major rows that stay where they arrive (`cuda/ll/view.cuh`), and where others are copied for a caller.

use crate::backend::cuda::driver::memory::{Buffer, CudaMemory};
use crate::backend::cuda::params::ll_view::{LL_VIEW_BANKS, LL_VIEW_THREADS};
use crate::error::Result;
use crate::model::ops::ViewBank;
use crate::model::tensor::DevPtr;
use once_cell::sync::OnceCell;
use std::sync::Arc;

/// Warps of a block that move rows; one does all else.
const ROW_WARPS: usize = LL_VIEW_THREADS as usize / 32 - 1;
/// Blocks that a multiprocessor has room for, as the list of kernels says.
const BLOCKS_PER_MULTIPROCESSOR: usize = 4;

const _: () = assert!(LL_VIEW_BANKS as usize == ViewBank::COUNT);

/// Where rows of views come, in every window, and this rank's state of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ViewBanks {
    /// Offset of this rank's `LlViewState`.
    pub state: usize,
    /// Offset of the first bank.
    pub banks: usize,
    /// Bytes of each.
    pub bank_bytes: usize,
}

impl ViewBanks {
    /// Offset and length of all rows.
    pub fn rows(self) -> (usize, usize) {
        (self.banks, ViewBank::COUNT * self.bank_bytes)
    }

    /// These, `start` further on.
    pub fn moved(self, start: usize) -> Self {
        Self { state: start + self.state, banks: start + self.banks, ..self }
    }

    /// Offset of the rows of `bank`.
    pub fn bank(self, bank: ViewBank) -> usize {
        self.banks + bank.index() * self.bank_bytes
    }
}

/// What decides about the launches of a handle's operations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ViewGrid {
    pub tokens: usize,
    pub most_tokens: usize,
    pub multiprocessors: u32,
}

impl ViewGrid {
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
}

/// In how many parts of how many chunks a row of so many is taken.
pub fn cut(chunks: usize) -> (usize, usize) {
    let parts = chunks.div_ceil(ROW_WARPS).max(1);
    (parts, chunks.div_ceil(parts))
}

/// Memory of the library's that rows of views are copied to where they do not stay: of rows with scales, of staged
/// operations, over several nodes. Made when the first one asks.
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

    #[test]
    fn parts_have_all_chunks_of_a_row() {
        for chunks in 1..200 {
            let (parts, warps) = cut(chunks);
            assert!(warps <= ROW_WARPS && parts * warps >= chunks);
            assert!((parts - 1) * warps < chunks);
        }
        assert_eq!((cut(28), cut(29)), ((4, 7), (5, 6)));
    }

    #[test]
    fn blocks_run_at_the_same_time() {
        let blocks = |tokens, most_tokens, multiprocessors| ViewGrid { tokens, most_tokens, multiprocessors }.blocks(4);
        assert_eq!(blocks(128, 128, 132), 512);
        assert_eq!(blocks(1024, 1024, 132), 528);
        assert_eq!((blocks(1, 128, 132), blocks(1, 1, 132)), (66, 4));
        assert_eq!((blocks(0, 1, 1), blocks(0, 0, 132)), (1, 1));
    }
}
