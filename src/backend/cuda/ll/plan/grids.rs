//! Grids of LL kernels: numbers of blocks, of threads, and of blocks that send, chosen by measurements on H200.

use crate::backend::cuda::ll::chunks::{ChunkSize, chunks};
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

/// Blocks per channel, for the caller's bound on channels; as in HT.
const BLOCKS_PER_CHANNEL: usize = 2;
/// Fewest blocks of a combine.
const LEAST_COMBINE_BLOCKS: usize = 8;
/// From this many tokens on, the combine kernel with more loads in flight is faster (docs/development/README.md).
const MANY_TOKENS_OF_COMBINE: usize = 64;
/// From this many tokens on, combines are faster with blocks that only receive: with two ranks, and with more.
const MANY_TOKENS: [usize; 2] = [1024, 256];
/// Up to this many tokens additional threads would be idle.
const FEW_TOKENS: usize = 8;

impl LlPlan {
    /// The largest grid on a device with `multiprocessors`.
    pub(super) fn most_blocks(&self, multiprocessors: u32) -> u32 {
        let channels = self.facts.channels.unwrap_or(usize::MAX);
        at_most(channels.saturating_mul(BLOCKS_PER_CHANNEL), multiprocessors)
    }

    /// The most tokens of all sources of a rank. Their actual number is unknown when a handle is created.
    fn served_tokens(&self) -> usize {
        self.max_tokens * self.forwarders.sources
    }

    /// The grid of a dispatch of `tokens` on a device with `multiprocessors`, with one sender per `per_sender` of them;
    /// and how many of its receiving blocks notify peers.
    ///
    /// A rank sends its own tokens, but receives those of all ranks, whose numbers are unknown here, and in a graph may
    /// change between launches.
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

    /// The grid of a dispatch if all ranks have `tokens`.
    ///
    /// A quarter of the multiprocessors saturates NVLink with rows (docs/development/low-latency.md); the others copy
    /// arriving rows to the output.
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

    /// The tuning file's choice for an operation of `tokens`. Files are measured on one node; over several nodes a rank
    /// serves several sources, and may have fewer blocks.
    pub(super) fn measured(&self, operation: Operation, tokens: usize, multiprocessors: u32) -> Option<Choice> {
        let choice = self.shapes.choice(operation, tokens.min(self.max_tokens))?;
        Some(choice.at_most(multiprocessors))
    }

    /// The number of tokens with which each of two ranks would have as many (token, rank) pairs: grids chosen by tokens
    /// for two ranks are too small for four (docs/development/README.md).
    fn pairs_of_two(&self, tokens: usize) -> usize {
        tokens * self.forwarders.peers.div_ceil(2)
    }

    /// The kernel for a combine of `tokens` that is not exact; ranks may use different kernels.
    pub(super) fn combine_kernel(&self, tokens: usize) -> CombineKernel {
        if self.forwarders.nodes > 1 {
            CombineKernel::OverNodes
        } else if tokens >= MANY_TOKENS_OF_COMBINE {
            CombineKernel::ManyTokens
        } else {
            CombineKernel::FewTokens
        }
    }

    /// The grid of a combine of `tokens` on a device with `multiprocessors`. A rank receives rows for its own tokens,
    /// but sends rows for the tokens of all ranks.
    pub(super) fn combine_grid(&self, tokens: usize, multiprocessors: u32) -> Grid {
        if self.forwarders.nodes > 1 {
            return self.even_combine_grid(self.served_tokens(), multiprocessors);
        }
        let own = self.even_combine_grid(tokens, multiprocessors);
        let most = self.even_combine_grid(self.max_tokens, multiprocessors);
        own.with_senders(most.blocks).with_threads(most.threads)
    }

    /// The grid of a combine if all ranks have `tokens`.
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
            let senders = multiprocessors * self.of_ranks([8, 9]) / 12;
            return Grid::split(senders, multiprocessors - senders, most_threads);
        }
        let blocks = at_most((4 * self.pairs_of_two(tokens)).max(LEAST_COMBINE_BLOCKS), multiprocessors);
        Grid::shared(blocks, most_threads)
    }
}

// The rest is for the kernels for few tokens, in which each block does one kind of work.

/// Most (token, rank) pairs of rank-major rows. With twice as many the usual kernels are at least as fast
/// (docs/development/low-latency.md).
const PAIRS_BY_RANK: usize = 128;
/// Most pairs of expert-major rows with scales, with two ranks and with more. There are fewer than of rank-major rows,
/// as a row's position depends on the counts of all earlier sources; and without scales rows have twice as many chunks.
const PAIRS_SCALED: [usize; 2] = [128, 32];
const PAIRS_PLAIN: [usize; 2] = [64, 16];
/// Most pairs if other ranks may have more tokens, for which blocks are reserved: with two ranks, and with more.
const PAIRS_OF_SOME: [usize; 2] = [32, 64];
/// Most pairs of a view's rows without scales for which copies are faster: with two ranks, and with more.
const PAIRS_PLAIN_VIEW: [usize; 2] = [64, 128];
/// Most pairs of combines, whose blocks have at most half as many threads; also if other ranks may have more tokens.
const PAIRS_OF_COMBINE: usize = 32;
const PAIRS_OF_COMBINE_OF_SOME: usize = 16;
/// Most ranks, as a block waits for their counts one after the other.
const FEW_RANKS: usize = 8;
/// Up to this many tokens of this rank, fewer threads suffice, and start sooner.
const LEAST_THREADS_TOKENS: usize = 8;
const LEAST_THREADS: u32 = 256;
/// Up to this many tokens of every rank, the most threads of a combine suffice.
const MORE_THREADS_TOKENS: usize = 16;
/// The fewest blocks of a dispatch: one each to send rows, notify, receive counts, receive rows, and be in reserve.
const LEAST_BLOCKS: u32 = 5;
const WARP: usize = 32;

impl LlPlan {
    /// The grids of the kernels for few tokens on a device with `multiprocessors`; `None` if these kernels do not suit
    /// the routing. A dispatch block gets `shared_bytes`.
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
            DispatchGrid { grid, notify_blocks: 0, serve_blocks, chunk_size: ChunkSize::Small, launch }
        };
        let short_bytes = self.facts.row_bytes / 2;
        let has_room = routing.tokens < self.max_tokens;
        let pairs_of_combine = if has_room { PAIRS_OF_COMBINE_OF_SOME } else { PAIRS_OF_COMBINE };
        suits.then(|| FewGrids {
            rows,
            dispatch: dispatch(self.facts.row_bytes),
            short_dispatch: dispatch(short_bytes),
            short_bytes,
            // With more than two ranks, more blocks would make small batches, even across ranks, slower.
            serving_by_rank: self.of_ranks([multiprocessors, multiprocessors / 2]),
            combine: (rows.plain && self.pairs(routing.tokens) <= pairs_of_combine)
                .then(|| self.few_combine(routing.tokens, multiprocessors)),
        })
    }

    /// `two` in a group of two ranks, otherwise `more`.
    fn of_ranks<T>(&self, [two, more]: [T; 2]) -> T {
        if self.facts.ranks <= 2 { two } else { more }
    }

    /// The number of (token, rank) pairs if each rank has `tokens`.
    fn pairs(&self, tokens: usize) -> usize {
        tokens * self.facts.ranks
    }

    /// The kinds of rows that are few enough if a rank has `tokens`.
    pub fn few_rows(&self, tokens: usize) -> FewRows {
        let suits = self.forwarders.nodes == 1 && self.facts.ranks <= FEW_RANKS;
        let bound = if tokens < self.max_tokens { self.of_ranks(PAIRS_OF_SOME) } else { usize::MAX };
        let is_few = |most: [usize; 2]| suits && self.pairs(tokens) <= self.of_ranks(most).min(bound);
        FewRows {
            by_rank: is_few([PAIRS_BY_RANK; 2]),
            scaled: is_few(PAIRS_SCALED),
            plain: is_few(PAIRS_PLAIN),
            plain_of_view: is_few(PAIRS_PLAIN_VIEW),
        }
    }

    /// The kinds of rows of which no rank can have too many for these kernels; `None` if a device with
    /// `multiprocessors` cannot run them. Where it is not `None`, it is the same on all ranks.
    pub fn few_rows_of_view(&self, multiprocessors: u32) -> Option<FewRows> {
        (self.most_blocks(multiprocessors) >= LEAST_BLOCKS).then(|| self.few_rows(self.max_tokens))
    }

    /// The number of blocks of `threads` such that each warp moves one chunk of `rows`.
    fn few_blocks(&self, rows: usize, threads: u32) -> usize {
        blocks_of_chunks(rows * chunks(self.facts.row_bytes), threads)
    }

    /// The grid of a dispatch of rows with `chunks`, and how many blocks are reserved for ranks with more tokens.
    fn few_dispatch(&self, routing: &Routing, multiprocessors: u32, chunks: usize) -> (Grid, u32) {
        let tokens = routing.tokens;
        // More threads start later, but a second chunk per warp takes longer.
        let fits = |threads| 3 * blocks_of_chunks(self.pairs(tokens) * chunks, threads) <= 2 * multiprocessors as usize;
        let least = self.few_threads(tokens);
        let threads = [LEAST_THREADS, LL_FEW_COMBINE_THREADS]
            .into_iter()
            .find(|threads| *threads >= least && fits(*threads))
            .unwrap_or(LL_FEW_DISPATCH_THREADS);
        let entries = (tokens * routing.top_k).div_ceil(WARP);
        // For short rows more blocks than necessary, so that each has less to do.
        let few_blocks = |rows| self.few_blocks(rows, threads);
        let senders = at_most(few_blocks(tokens), multiprocessors * 3 / 10);
        let notifiers = at_most(entries.max(self.facts.ranks), (multiprocessors / 8).max(1));
        // One block receives counts.
        let room = multiprocessors - senders - notifiers - 1;
        let of_few = at_most(few_blocks(self.pairs(tokens)), room);
        let more = few_blocks(self.pairs(self.max_tokens - tokens));
        let serving = at_most(more, (room - of_few).max(multiprocessors / 4).max(1));
        let of_few = of_few.min(room - serving);
        (grid([senders, notifiers, 1 + of_few + serving], threads), serving)
    }

    fn few_combine(&self, tokens: usize, multiprocessors: u32) -> Grid {
        let threads = self.few_threads(tokens).min(LL_FEW_COMBINE_THREADS);
        let few_blocks = |rows| self.few_blocks(rows, threads);
        let notifiers = at_most(tokens.div_ceil(threads as usize / WARP).max(1), (multiprocessors / 8).max(1));
        let receivers = at_most(few_blocks(tokens), multiprocessors / 3);
        let more = few_blocks(self.pairs(self.max_tokens - tokens));
        let senders = at_most(few_blocks(self.pairs(tokens)).max(more), multiprocessors - receivers - notifiers);
        grid([senders, notifiers, receivers], threads)
    }

    /// The fewest threads of a dispatch block.
    fn few_threads(&self, tokens: usize) -> u32 {
        match tokens {
            _ if self.max_tokens > MORE_THREADS_TOKENS => LL_FEW_DISPATCH_THREADS,
            ..=LEAST_THREADS_TOKENS => LEAST_THREADS,
            _ => LL_FEW_COMBINE_THREADS,
        }
    }
}

/// The number of blocks of `threads` such that each warp moves one of `chunks`.
fn blocks_of_chunks(chunks: usize, threads: u32) -> usize {
    chunks.div_ceil(threads as usize / WARP)
}

fn grid([send_blocks, notifiers, receive_blocks]: [u32; 3], threads: u32) -> Grid {
    Grid { blocks: send_blocks + notifiers + receive_blocks, threads, send_blocks, receive_blocks }
}
