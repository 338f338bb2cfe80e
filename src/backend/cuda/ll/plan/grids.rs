//! Grids of LL kernels: how many blocks of how many threads, of which some send.

use crate::backend::cuda::ll::chunks::{Cut, chunks};
use crate::backend::cuda::ll::launch::{
    COMBINE_LEAST_THREADS, CombineKernel, DISPATCH_LEAST_THREADS, DispatchGrid, FewGrids, FewRows, Grid, at_most,
};
use crate::backend::cuda::ll::plan::LlPlan;
use crate::backend::cuda::params::ll::{
    LL_COMBINE_MANY_THREADS, LL_COMBINE_QUEUE_THREADS, LL_COMBINE_THREADS, LL_DISPATCH_THREADS, LL_FEW_COMBINE_THREADS,
    LL_FEW_DISPATCH_THREADS, LL_FEW_TOP_K,
};
use crate::model::group::LlCombineMode;
use crate::model::ops::Routing;
use crate::tuning::{Choice, Operation};

/// Blocks that a caller's channel stands for, as in HT.
const BLOCKS_PER_CHANNEL: usize = 2;
/// Fewest blocks of a combine.
const LEAST_COMBINE_BLOCKS: usize = 8;
/// From this many tokens on, a combine needs more on its way at a time than its small kernel has
/// (docs/development/README.md).
const MANY_TOKENS_OF_COMBINE: usize = 64;
/// From this many tokens on, combines of two ranks, and of more, are faster with blocks that only receive.
const MANY_TOKENS: [usize; 2] = [1024, 256];
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
        (own.with_receivers(most.blocks).with_threads(most.threads), own.receive_blocks)
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
        own.with_senders(most.blocks).with_threads(most.threads)
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
            return Grid::chosen(choice, COMBINE_LEAST_THREADS..=most_threads);
        }
        if self.forwarders.nodes > 1 {
            let blocks = at_most(4 * tokens, multiprocessors);
            return Grid::shared(blocks.max(1), most_threads);
        }
        if tokens >= self.of_ranks(MANY_TOKENS) {
            let senders = if self.facts.ranks <= 2 { multiprocessors * 2 / 3 } else { multiprocessors * 3 / 4 };
            return Grid::split(senders, multiprocessors - senders, most_threads);
        }
        let blocks = at_most((4 * self.pairs_of_two(tokens)).max(LEAST_COMBINE_BLOCKS), multiprocessors);
        Grid::shared(blocks, most_threads)
    }
}

// Kernels for few tokens, each of whose blocks does one kind of work.

/// Up to this many pairs of a token and a rank. With twice as many the other kernels are as fast or faster
/// (docs/development/low-latency.md).
const PAIRS_BY_RANK: usize = 128;
/// The same of rows by expert, of two ranks and of more, as these need the counts of all sources before theirs; without
/// scales they have twice the chunks.
const PAIRS_SCALED: [usize; 2] = [128, 32];
const PAIRS_PLAIN: [usize; 2] = [64, 16];
/// And no more where others may have more tokens, as blocks are set aside for these.
const PAIRS_OF_SOME: [usize; 2] = [32, 64];
/// Up to as many, rows of a view are copied: without scales, of two ranks and of more.
const PAIRS_PLAIN_VIEW: [usize; 2] = [64, 128];
/// The same of combines, whose blocks have no more than half of the threads; and where others may have more tokens.
const PAIRS_OF_COMBINE: usize = 32;
const PAIRS_OF_COMBINE_OF_SOME: usize = 16;
/// Up to this many ranks, as a block asks one after the other for its counts.
const FEW_RANKS: usize = 8;
/// Up to this many tokens of this rank fewer threads suffice, and start sooner.
const LEAST_THREADS_TOKENS: usize = 8;
const LEAST_THREADS: u32 = 256;
/// And up to this many of any rank those that a combine may have.
const MORE_THREADS_TOKENS: usize = 16;
/// The least blocks of a dispatch: one sends, one tells, one hears, one receives, one serves others.
const LEAST_BLOCKS: u32 = 5;
const WARP: usize = 32;

impl LlPlan {
    /// The grids of these for a handle with such a routing on a device with so many `multiprocessors`, if they suit it; a
    /// block of its dispatches has `shared_bytes`.
    pub(super) fn few(&self, routing: &Routing, multiprocessors: u32, shared_bytes: u32) -> Option<FewGrids> {
        let is_tuned = |operation| self.measured(operation, routing.tokens, multiprocessors).is_some();
        let rows = self.few_rows(routing.tokens);
        let suits = rows.by_rank
            && routing.top_k <= LL_FEW_TOP_K as usize
            && multiprocessors >= LEAST_BLOCKS
            && !is_tuned(Operation::LlDispatch)
            && !is_tuned(Operation::LlCombine);
        let dispatch = |row_bytes| {
            let (grid, serve_blocks) = self.few_dispatch(routing, multiprocessors, chunks(row_bytes));
            let launch = grid.launch_shape(shared_bytes);
            DispatchGrid { grid, notify_blocks: 0, serve_blocks, cut: Cut::Small, launch }
        };
        let short_bytes = self.facts.row_bytes / 2;
        suits.then(|| FewGrids {
            rows,
            dispatch: dispatch(self.facts.row_bytes),
            short_dispatch: dispatch(short_bytes),
            short_bytes,
            combine: (rows.plain && self.pairs(routing.tokens) <= self.most_pairs_of_combine(routing.tokens))
                .then(|| self.few_combine(routing.tokens, multiprocessors)),
        })
    }

    fn most_pairs_of_combine(&self, tokens: usize) -> usize {
        if tokens < self.max_tokens { PAIRS_OF_COMBINE_OF_SOME } else { PAIRS_OF_COMBINE }
    }

    /// What holds for two ranks, or for more.
    fn of_ranks(&self, [two, more]: [usize; 2]) -> usize {
        if self.facts.ranks <= 2 { two } else { more }
    }

    /// Pairs of a token and a rank, if each of these has so many.
    fn pairs(&self, tokens: usize) -> usize {
        tokens * self.facts.ranks
    }

    /// Of which rows there are few where ranks have so many `tokens`.
    pub fn few_rows(&self, tokens: usize) -> FewRows {
        let suits = self.forwarders.nodes == 1 && self.facts.ranks <= FEW_RANKS;
        let bound = if tokens < self.max_tokens { self.of_ranks(PAIRS_OF_SOME) } else { usize::MAX };
        let is_few = |most| suits && self.pairs(tokens) <= self.of_ranks(most).min(bound);
        FewRows {
            by_rank: is_few([PAIRS_BY_RANK; 2]),
            scaled: is_few(PAIRS_SCALED),
            plain: is_few(PAIRS_PLAIN),
            plain_of_view: is_few(PAIRS_PLAIN_VIEW),
        }
    }

    /// Of which rows no rank has many, where a device with so many `multiprocessors` runs these kernels: that of each
    /// rank, or none.
    pub fn few_rows_of_view(&self, multiprocessors: u32) -> Option<FewRows> {
        (self.most_blocks(multiprocessors) >= LEAST_BLOCKS).then(|| self.few_rows(self.max_tokens))
    }

    /// Of how many blocks of so many `threads` each warp moves a chunk of one of `rows`.
    fn few_blocks(&self, rows: usize, threads: u32) -> usize {
        blocks_of_chunks(rows * chunks(self.facts.row_bytes), threads)
    }

    /// And how many blocks of a dispatch, of rows of so many `chunks`, serve ranks with more tokens.
    fn few_dispatch(&self, routing: &Routing, multiprocessors: u32, chunks: usize) -> (Grid, u32) {
        let tokens = routing.tokens;
        // A warp with a second chunk takes longer than more threads, which start later.
        let fits = |threads| 3 * blocks_of_chunks(self.pairs(tokens) * chunks, threads) <= 2 * multiprocessors as usize;
        let least = self.few_threads(tokens);
        let threads = [LEAST_THREADS, LL_FEW_COMBINE_THREADS]
            .into_iter()
            .find(|threads| *threads >= least && fits(*threads))
            .unwrap_or(LL_FEW_DISPATCH_THREADS);
        let entries = (tokens * routing.top_k).div_ceil(WARP);
        // Of short rows more than there must be, so that each has less to do at a time.
        let few_blocks = |rows| self.few_blocks(rows, threads);
        let senders = at_most(few_blocks(tokens), multiprocessors * 3 / 10);
        let tellers = at_most(entries.max(self.facts.ranks), (multiprocessors / 8).max(1));
        // One hears.
        let room = multiprocessors - senders - tellers - 1;
        let of_few = at_most(few_blocks(self.pairs(tokens)), room);
        let more = few_blocks(self.pairs(self.max_tokens - tokens));
        let serving = at_most(more, (room - of_few).max(multiprocessors / 4).max(1));
        let of_few = of_few.min(room - serving);
        (grid([senders, tellers, 1 + of_few + serving], threads), serving)
    }

    fn few_combine(&self, tokens: usize, multiprocessors: u32) -> Grid {
        let threads = self.few_threads(tokens).min(LL_FEW_COMBINE_THREADS);
        let few_blocks = |rows| self.few_blocks(rows, threads);
        let tellers = at_most(tokens.div_ceil(threads as usize / WARP).max(1), (multiprocessors / 8).max(1));
        let receivers = at_most(few_blocks(tokens), multiprocessors / 3);
        let more = few_blocks(self.pairs(self.max_tokens - tokens));
        let senders = at_most(few_blocks(self.pairs(tokens)).max(more), multiprocessors - receivers - tellers);
        grid([senders, tellers, receivers], threads)
    }

    /// The fewest threads of their blocks.
    fn few_threads(&self, tokens: usize) -> u32 {
        match tokens {
            _ if self.max_tokens > MORE_THREADS_TOKENS => LL_FEW_DISPATCH_THREADS,
            ..=LEAST_THREADS_TOKENS => LEAST_THREADS,
            _ => LL_FEW_COMBINE_THREADS,
        }
    }
}

/// Of how many blocks of so many `threads` each warp moves one of these chunks.
fn blocks_of_chunks(chunks: usize, threads: u32) -> usize {
    chunks.div_ceil(threads as usize / WARP)
}

fn grid([send_blocks, tellers, receive_blocks]: [u32; 3], threads: u32) -> Grid {
    Grid { blocks: send_blocks + tellers + receive_blocks, threads, send_blocks, receive_blocks }
}
