//! Grids of LL kernels: how many blocks of how many threads, of which some send.

use crate::backend::cuda::ll::launch::{CombineKernel, DISPATCH_LEAST_THREADS, Grid, at_most};
use crate::backend::cuda::ll::plan::LlPlan;
use crate::backend::cuda::params::ll::{
    LL_COMBINE_MANY_THREADS, LL_COMBINE_QUEUE_THREADS, LL_COMBINE_THREADS, LL_DISPATCH_THREADS,
};
use crate::model::group::LlCombineMode;
use crate::tuning::{Choice, Operation};

/// Lower bound of the grid, as a share of the full one: an idle rank still serves the tokens of others.
/// The full grid would make small even batches slower. Half of it makes uneven ones slower, but they
/// still take less time than even batches with the most tokens (docs/performance.md).
pub(super) const SERVING_SHARE: u32 = 2;
/// Blocks that a caller's channel stands for, as in HT.
const BLOCKS_PER_CHANNEL: usize = 2;
/// Fewest blocks of a combine.
const LEAST_COMBINE_BLOCKS: usize = 8;
/// From this many tokens on, a combine needs more on its way at a time than its small kernel has
/// (docs/development/README.md).
const MANY_TOKENS_OF_COMBINE: usize = 64;
/// From this many tokens on, combine is faster with blocks that only receive.
const MANY_TOKENS: usize = 256;
/// Up to this many tokens more threads find nothing to do.
const FEW_TOKENS: usize = 8;

impl LlPlan {
    /// The most blocks of a kernel where `multiprocessors` could run it.
    pub(super) fn most_blocks(&self, multiprocessors: u32) -> u32 {
        let channels = self.facts.channels.unwrap_or(usize::MAX);
        at_most(channels.saturating_mul(BLOCKS_PER_CHANNEL), multiprocessors)
    }

    /// The most tokens of a rank's sources. How many there are is not known when a handle is made.
    fn served_tokens(&self) -> usize {
        self.max_tokens * self.forwarders.sources
    }

    /// The grid of a dispatch of `tokens` on a device with `multiprocessors`, of which one in `per_sender` sends,
    /// and how many of its receiving blocks notify.
    ///
    /// A rank sends its own tokens and receives those of all ranks. The number of the others'
    /// tokens is unknown here, and in a graph it may change from launch to launch.
    pub(super) fn dispatch_grid(
        &self,
        tokens: usize,
        multiprocessors: u32,
        per_sender: u32,
        most_threads: u32,
    ) -> (Grid, u32) {
        let even = |tokens| self.even_dispatch_grid(tokens, multiprocessors, per_sender, most_threads);
        if self.forwarders.nodes > 1 {
            let grid = even(self.served_tokens());
            return (grid, grid.receive_blocks);
        }
        let (own, most) = (even(tokens), even(self.max_tokens));
        let serving = own.send_blocks + most.receive_blocks / SERVING_SHARE;
        let grid = own.with_receivers(serving.max(most.blocks / SERVING_SHARE).min(most.blocks));
        (grid.with_threads(most.threads), own.receive_blocks)
    }

    /// The grid of a dispatch where all ranks have `tokens`.
    ///
    /// Measured on H200 (docs/development/low-latency.md): a quarter of the multiprocessors saturates NVLink with rows;
    /// the others copy the arriving rows out.
    pub(super) fn even_dispatch_grid(
        &self,
        tokens: usize,
        multiprocessors: u32,
        per_sender: u32,
        most_threads: u32,
    ) -> Grid {
        if let Some(choice) = self.measured(Operation::LlDispatch, tokens, multiprocessors) {
            return Grid::chosen(choice, DISPATCH_LEAST_THREADS..=most_threads);
        }
        let pairs = self.pairs_of_two(tokens);
        let senders = at_most(8 + pairs, multiprocessors / per_sender);
        let receivers = at_most(8 + 4 * pairs, multiprocessors - senders);
        let threads = match tokens {
            ..=FEW_TOKENS => LL_DISPATCH_THREADS,
            _ => most_threads,
        };
        Grid::split(senders, receivers, threads)
    }

    /// What was measured for an operation of `tokens`. Measurements are made with the tokens of one rank, also where
    /// it serves those of several sources, and a group over several nodes may have fewer blocks than they.
    pub(super) fn measured(&self, operation: Operation, tokens: usize, multiprocessors: u32) -> Option<Choice> {
        let choice = self.tuning.choice(operation, tokens.min(self.max_tokens))?;
        Some(choice.at_most(multiprocessors))
    }

    /// With how many tokens each of two ranks has as many pairs of a token and a rank. The blocks that suit these are too
    /// few for as many tokens of four ranks (docs/development/README.md).
    fn pairs_of_two(&self, tokens: usize) -> usize {
        tokens * self.forwarders.peers.div_ceil(2)
    }

    /// The kernel of a combine of `tokens` that is not exact. Ranks need not have the same.
    pub(super) fn combine_kernel(&self, tokens: usize) -> CombineKernel {
        if self.forwarders.nodes > 1 {
            CombineKernel::OverNodes
        } else if tokens >= MANY_TOKENS_OF_COMBINE {
            CombineKernel::ManyTokens
        } else {
            CombineKernel::FewTokens
        }
    }

    /// The grid of a combine of `tokens` on a device with `multiprocessors`: a rank receives its
    /// own tokens and sends rows for the tokens of all ranks.
    pub(super) fn combine_grid(&self, tokens: usize, multiprocessors: u32) -> Grid {
        if self.forwarders.nodes > 1 {
            return self.even_combine_grid(self.served_tokens(), multiprocessors);
        }
        let own = self.even_combine_grid(tokens, multiprocessors);
        let most = self.even_combine_grid(self.max_tokens, multiprocessors);
        let grid = own.with_senders(most.blocks / SERVING_SHARE);
        grid.with_threads(most.threads)
    }

    /// The grid of a combine where all ranks have `tokens`.
    pub(super) fn even_combine_grid(&self, tokens: usize, multiprocessors: u32) -> Grid {
        let reduces = self.facts.ll_combine == LlCombineMode::Reduce;
        let most_threads = match self.combine_kernel(tokens) {
            CombineKernel::FewTokens if reduces => LL_COMBINE_THREADS,
            CombineKernel::ManyTokens if reduces => LL_COMBINE_QUEUE_THREADS,
            _ => LL_COMBINE_MANY_THREADS,
        };
        if let Some(choice) = self.measured(Operation::LlCombine, tokens, multiprocessors) {
            return Grid::chosen(choice, 1..=most_threads);
        }
        if self.forwarders.nodes > 1 {
            let blocks = at_most(4 * tokens, multiprocessors);
            return Grid::shared(blocks.max(1), most_threads);
        }
        if tokens >= MANY_TOKENS {
            let senders = multiprocessors * 3 / 4;
            return Grid::split(senders, multiprocessors - senders, most_threads);
        }
        let blocks = at_most((4 * self.pairs_of_two(tokens)).max(LEAST_COMBINE_BLOCKS), multiprocessors);
        Grid::shared(blocks, most_threads)
    }
}
