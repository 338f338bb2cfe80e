//! Grids of the kernels for few tokens, each of whose blocks does one kind of work.

use crate::backend::cuda::ll::launch::{DispatchGrid, FewGrids, Grid, at_most, chunks};
use crate::backend::cuda::ll::plan::LlPlan;
use crate::backend::cuda::params::ll::{LL_FEW_COMBINE_THREADS, LL_FEW_DISPATCH_THREADS, LL_FEW_TOP_K};
use crate::model::ops::Routing;
use crate::tuning::Operation;

/// Up to this many pairs of a token and a rank, as many tokens as ranks may have. With twice as many the other kernels
/// are as fast or faster (docs/development/low-latency.md). All ranks know that number, though each might take either
/// kernel.
const PAIRS_OF_TWO: usize = 64;
const PAIRS_OF_MORE: usize = 16;
/// The same of combines, whose blocks have no more than half of the threads.
const PAIRS_OF_COMBINE: usize = 32;
/// Up to this many ranks, as a block asks one after the other for its counts.
const RANKS: usize = 8;
/// Up to this many tokens of this rank fewer threads suffice, and start sooner.
const FEW_THREADS_TOKENS: usize = 8;
const FEW_THREADS: u32 = 256;
/// And up to this many of any rank those that a combine may have.
const MORE_THREADS_TOKENS: usize = 16;
/// The least blocks of a dispatch: one sends, one tells, one hears, one receives.
const LEAST_BLOCKS: u32 = 4;
const WARP: usize = 32;

impl LlPlan {
    /// Those of a handle with such a routing on a device with so many `multiprocessors`, if its operations are such; a
    /// block of its dispatches has `shared_bytes`.
    pub(super) fn few(&self, routing: &Routing, multiprocessors: u32, shared_bytes: u32) -> Option<FewGrids> {
        let is_tuned = |operation| self.measured(operation, routing.tokens, multiprocessors).is_some();
        let pairs = if self.facts.ranks <= 2 { PAIRS_OF_TWO } else { PAIRS_OF_MORE };
        let most = self.max_tokens * self.facts.ranks;
        let suits = self.forwarders.nodes == 1
            && self.facts.ranks <= RANKS
            && most <= pairs
            && routing.top_k <= LL_FEW_TOP_K as usize
            && multiprocessors >= LEAST_BLOCKS
            && !is_tuned(Operation::LlDispatch)
            && !is_tuned(Operation::LlCombine);
        suits.then(|| {
            let grid = self.few_dispatch(routing, multiprocessors);
            FewGrids {
                dispatch: DispatchGrid { grid, notify_blocks: 0, launch: grid.launch_shape(shared_bytes) },
                combine: (most <= PAIRS_OF_COMBINE).then(|| self.few_combine(routing.tokens, multiprocessors)),
            }
        })
    }

    /// Chunks of `tokens` rows, and those that come to a rank or that it sends for others, at most.
    fn units(&self, tokens: usize) -> (usize, usize) {
        let of_row = chunks(self.facts.row_bytes);
        (tokens * of_row, self.max_tokens * self.facts.ranks * of_row)
    }

    fn few_threads(&self, tokens: usize) -> u32 {
        match tokens {
            _ if self.max_tokens > MORE_THREADS_TOKENS => LL_FEW_DISPATCH_THREADS,
            ..=FEW_THREADS_TOKENS => FEW_THREADS,
            _ => LL_FEW_COMBINE_THREADS,
        }
    }

    fn few_dispatch(&self, routing: &Routing, multiprocessors: u32) -> Grid {
        let threads = self.few_threads(routing.tokens);
        let (own, all) = self.units(routing.tokens);
        let entries = (routing.tokens * routing.top_k).div_ceil(WARP);
        let senders = at_most(blocks_of(own, threads), multiprocessors * 3 / 10);
        let tellers = at_most(entries.max(self.facts.ranks), (multiprocessors / 8).max(1));
        // And one that hears.
        let receivers = at_most(1 + blocks_of(all, threads), multiprocessors - senders - tellers);
        grid([senders, tellers, receivers], threads)
    }

    fn few_combine(&self, tokens: usize, multiprocessors: u32) -> Grid {
        let threads = self.few_threads(tokens).min(LL_FEW_COMBINE_THREADS);
        let (own, all) = self.units(tokens);
        let tellers = at_most(blocks_of(tokens, threads).max(1), (multiprocessors / 8).max(1));
        let receivers = at_most(blocks_of(own, threads), multiprocessors / 3);
        let senders = at_most(blocks_of(all, threads), multiprocessors - receivers - tellers);
        grid([senders, tellers, receivers], threads)
    }
}

/// How many blocks have a warp for each of `units`.
fn blocks_of(units: usize, threads: u32) -> usize {
    units.div_ceil(threads as usize / WARP)
}

fn grid([send_blocks, tellers, receive_blocks]: [u32; 3], threads: u32) -> Grid {
    Grid { blocks: send_blocks + tellers + receive_blocks, threads, send_blocks, receive_blocks }
}
