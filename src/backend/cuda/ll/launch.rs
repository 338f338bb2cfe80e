//! What defines a launch of an LL operation: the part of the operation that it runs, its grid, and its sizes.

use crate::backend::cuda::kernels::LaunchShape;
use crate::backend::cuda::ll::chunks::{ChunkSize, Chunks, slot_bytes};
use crate::backend::cuda::params::ll::{LL_CHANNELS, LL_WHOLE_CHANNEL, LlPhase, LlShape, reciprocal};
use crate::backend::cuda::params::ll_view::LL_VIEW_THREADS;
use crate::model::layout::Layout;
use crate::model::ops::{Launch, STAGED_SLOTS, StagedSlot};
use crate::model::scales::WireRow;
use crate::tuning::{Choice, share};
use std::ops::RangeInclusive;

/// Fewest threads of a dispatch block; with fewer, counting entries takes too long.
pub const DISPATCH_LEAST_THREADS: u32 = 5 * 32;
/// Fewest threads of a combine block: one warp receives the ranks' fingerprints, and needs another one for rows.
pub const COMBINE_LEAST_THREADS: u32 = 2 * 32;

/// Warps of a view's block that move rows; the block has one more warp, for everything else.
const ROW_WARPS: usize = LL_VIEW_THREADS as usize / 32 - 1;
/// Most parts into which a row is divided only to occupy more multiprocessors.
const MOST_PARTS: usize = 7;
/// Blocks that fit on a multiprocessor, as the kernels' launch bounds require.
const BLOCKS_PER_MULTIPROCESSOR: usize = 4;

/// The part of an operation that a launch runs, and its channel.
#[derive(Clone, Copy)]
pub struct LaunchPart {
    pub channel: u32,
    pub phases: LlPhase,
    /// Whether the operation's outputs are wanted.
    pub wants_outputs: bool,
}

impl LaunchPart {
    /// A whole operation on one node.
    pub const WHOLE: Self = Self { channel: LL_WHOLE_CHANNEL, phases: LlPhase::SendReceive, wants_outputs: true };

    /// Whether this is a whole operation, or one launch of it, rather than a phase of a staged one.
    pub fn is_whole(self) -> bool {
        self.channel == LL_WHOLE_CHANNEL
    }

    /// The send phase of a staged operation in `slot`.
    pub fn send(slot: StagedSlot) -> Self {
        Self { channel: channel(slot), phases: LlPhase::Send, wants_outputs: true }
    }

    /// The receive phase of a staged operation in `slot`.
    pub fn receive(slot: StagedSlot, wants_outputs: bool) -> Self {
        Self { channel: channel(slot), phases: LlPhase::Receive, wants_outputs }
    }
}

/// The channel of staged operations in `slot`.
fn channel(slot: StagedSlot) -> u32 {
    LL_WHOLE_CHANNEL + 1 + slot.index() as u32
}

const _: () = assert!(LL_CHANNELS as usize == 1 + STAGED_SLOTS);

/// A launch's blocks and their roles: the first `send_blocks` send rows, the last `receive_blocks` do everything else.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grid {
    pub blocks: u32,
    pub threads: u32,
    pub send_blocks: u32,
    pub receive_blocks: u32,
}

impl Grid {
    /// Every block sends and receives.
    pub fn shared(blocks: u32, threads: u32) -> Self {
        Self { blocks, threads, send_blocks: blocks, receive_blocks: blocks }
    }

    /// `senders` blocks send rows, and `receivers` more do everything else; with too few blocks for that, all do both.
    pub fn split(senders: u32, receivers: u32, threads: u32) -> Self {
        if senders == 0 || receivers == 0 {
            return Self::shared((senders + receivers).max(1), threads);
        }
        Self { blocks: senders + receivers, threads, send_blocks: senders, receive_blocks: receivers }
    }

    /// The grid of a tuning file's `choice`, its threads clamped to the kernel's `possible` range.
    pub fn chosen(choice: Choice, possible: RangeInclusive<u32>) -> Self {
        let threads = choice.threads.clamp(*possible.start(), *possible.end());
        let receivers = choice.blocks.saturating_sub(choice.send_blocks);
        Self::split(choice.send_blocks, receivers, threads)
    }

    /// This grid as changed by a call's `launch` options, its threads clamped to the kernel's `possible` range.
    pub fn adjusted(self, launch: Launch, possible: RangeInclusive<u32>) -> Self {
        if launch.is_own() {
            let threads = self.threads.min(*possible.end());
            return Self { threads, ..self };
        }
        let or = |requested, own| if requested == 0 { own } else { requested };
        let blocks = or(launch.blocks, self.blocks);
        let own = share(blocks, self.send_blocks, self.blocks).max(1);
        let choice = Choice {
            blocks,
            threads: or(launch.threads, self.threads),
            send_blocks: or(launch.send_blocks, own).min(blocks),
        };
        Self::chosen(choice, possible)
    }

    /// This grid with at least `blocks` blocks; additional ones receive.
    pub fn with_receivers(self, blocks: u32) -> Self {
        let added = blocks.saturating_sub(self.blocks);
        Self { blocks: self.blocks + added, receive_blocks: self.receive_blocks + added, ..self }
    }

    /// This grid with at least `blocks` blocks; additional ones send, or do both if all blocks do.
    pub fn with_senders(self, blocks: u32) -> Self {
        let does_both = self.receive_blocks == self.blocks;
        let grown = self.with_receivers(blocks);
        Self {
            send_blocks: self.send_blocks + grown.blocks - self.blocks,
            receive_blocks: if does_both { grown.receive_blocks } else { self.receive_blocks },
            ..grown
        }
    }

    /// This grid with at least `threads` threads.
    pub fn with_threads(self, threads: u32) -> Self {
        let threads = self.threads.max(threads);
        Self { threads, ..self }
    }

    /// The launch shape of this grid with `shared_bytes` of dynamic shared memory.
    pub fn launch_shape(&self, shared_bytes: u32) -> LaunchShape {
        LaunchShape { blocks: self.blocks, threads: self.threads, shared_bytes }
    }
}

/// `wanted`, but at most the `blocks` that can be resident together: blocks wait for peers' blocks, so all must run.
pub fn at_most(wanted: usize, blocks: u32) -> u32 {
    u32::try_from(wanted).unwrap_or(u32::MAX).min(blocks)
}

/// The grid of a dispatch, with everything else that its launch needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DispatchGrid {
    pub grid: Grid,
    /// Receiving blocks that also notify peers.
    pub notify_blocks: u32,
    /// Kernels for few tokens: receiving blocks reserved for ranks that have more tokens than this one.
    pub serve_blocks: u32,
    /// The kernel's chunks of rows with scales.
    pub chunk_size: ChunkSize,
    pub launch: LaunchShape,
}

impl DispatchGrid {
    /// This grid as changed by a call's `launch` options, for a kernel with at most `most_threads`.
    pub fn adjusted(self, launch: Launch, most_threads: u32) -> Self {
        if launch.is_own() {
            return self;
        }
        let grid = self.grid.adjusted(launch, DISPATCH_LEAST_THREADS..=most_threads);
        let launch = grid.launch_shape(self.launch.shared_bytes);
        Self { grid, notify_blocks: grid.receive_blocks, serve_blocks: 0, chunk_size: ChunkSize::Large, launch }
    }

    /// This grid with at most `most` blocks reserved for ranks with more tokens.
    fn serving_at_most(self, most: u32) -> Self {
        let less = self.serve_blocks.saturating_sub(most);
        let grid =
            Grid { blocks: self.grid.blocks - less, receive_blocks: self.grid.receive_blocks - less, ..self.grid };
        let launch = grid.launch_shape(self.launch.shared_bytes);
        Self { grid, serve_blocks: self.serve_blocks - less, launch, ..self }
    }
}

/// The grids of whole operations with the kernels for few tokens. Blocks between senders and receivers notify peers.
#[derive(Clone, Copy, Debug)]
pub struct FewGrids {
    /// The kinds of rows of which this rank has few enough.
    pub rows: FewRows,
    pub dispatch: DispatchGrid,
    /// For rows of at most `short_bytes`, half the group's bound; most casts make such rows.
    pub short_dispatch: DispatchGrid,
    pub short_bytes: usize,
    /// The most blocks of a rank-major dispatch reserved for ranks with more tokens.
    pub serving_by_rank: u32,
    /// `None` already with fewer tokens than for dispatches.
    pub combine: Option<Grid>,
}

impl FewGrids {
    /// The grid of a dispatch of rows with `row_bytes`.
    pub fn of_rows(&self, row_bytes: usize, is_rank_major: bool) -> DispatchGrid {
        let grid = if row_bytes <= self.short_bytes { self.short_dispatch } else { self.dispatch };
        if is_rank_major { grid.serving_at_most(self.serving_by_rank) } else { grid }
    }
}

/// The kinds of dispatched rows that are few enough for the kernels for few tokens.
#[derive(Clone, Copy, Debug)]
pub struct FewRows {
    pub by_rank: bool,
    /// Expert-major rows with scales, and without.
    pub scaled: bool,
    pub plain: bool,
    /// Rank-major rows without scales, few enough that a view's rows are copied instead.
    pub plain_of_view: bool,
}

impl FewRows {
    /// Whether rows in this layout, with or without scales, are few enough.
    pub fn has(self, layout: Layout, scaled: bool) -> bool {
        match scaled {
            _ if layout.is_rank_major() => self.by_rank,
            true => self.scaled,
            false => self.plain,
        }
    }
}

/// Determines the launches of rank-major operations whose rows are not copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ViewGrid {
    pub tokens: usize,
    pub most_tokens: usize,
    pub multiprocessors: u32,
    pub ranks: usize,
}

impl ViewGrid {
    /// The number of parts into which a row of `chunks` is divided, and of chunks in each. With few tokens more
    /// parts than necessary, while three quarters of the multiprocessors have no block; but not `with_all_warps`.
    pub fn divide(self, chunks: usize, with_all_warps: bool) -> (usize, usize) {
        let most_parts = if with_all_warps { 1 } else { MOST_PARTS };
        let apart = (self.multiprocessors as usize / (4 * self.tokens.max(1))).clamp(1, most_parts);
        let warps = chunks.div_ceil(chunks.div_ceil(ROW_WARPS).max(apart));
        (chunks.div_ceil(warps.max(1)).max(1), warps)
    }

    /// Whether combines use all row warps of a block, because blocks also serve ranks that may have more tokens. If one
    /// of two H200s has 128 tokens and the other 1, this takes 17.1 us instead of 19.5; not measured with more ranks.
    pub fn combines_with_all_warps(self) -> bool {
        self.ranks <= 2 && self.tokens < self.most_tokens
    }

    /// Whether polls pause in between, because several blocks of a multiprocessor poll: on two H200s this reduced
    /// dispatch and combine of 128 tokens from 24 to 19 us.
    pub fn polls_gently(self, parts: usize) -> bool {
        self.blocks(parts) > self.multiprocessors
    }

    /// One block for each part of the rank's tokens, limited to those that run at the same time. If other ranks may
    /// have more tokens, at least one on every second multiprocessor.
    pub fn blocks(self, parts: usize) -> u32 {
        let all = self.multiprocessors as usize;
        let serving = all.div_ceil(2).min(self.most_tokens * parts);
        self.own_blocks(parts).max(serving as u32).min((BLOCKS_PER_MULTIPROCESSOR * all) as u32)
    }

    /// One block for each part of the rank's tokens, without a minimum for other ranks' tokens.
    pub fn own_blocks(self, parts: usize) -> u32 {
        (self.tokens * parts).max(1) as u32
    }

    /// The number of groups of blocks of a combine: one that receives, and up to one per other rank that sends to it,
    /// if own tokens leave a quarter of the multiprocessors without a block; otherwise one that does both.
    pub fn groups(self, parts: usize) -> u32 {
        let all = self.multiprocessors as usize;
        let most = BLOCKS_PER_MULTIPROCESSOR * all / self.blocks(parts) as usize;
        (all * 3 / 4 / self.own_blocks(parts) as usize).min(self.ranks).min(most).max(1) as u32
    }
}

/// The two kernels for a combine that is not exact.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CombineKernel {
    /// Small code, which starts sooner.
    FewTokens,
    /// More loads in flight.
    ManyTokens,
    OverNodes,
}

/// The launches of a handle's operations; planned once, as its numbers of tokens and of ids per token are fixed.
#[derive(Clone, Copy, Debug)]
pub struct HandlePlan {
    pub dispatch: DispatchGrid,
    /// For rows that already have scales.
    pub scaled_dispatch: DispatchGrid,
    /// For rows that the dispatch casts.
    pub cast_dispatch: DispatchGrid,
    pub combine: Grid,
    /// Over several nodes: for background work of staged operations.
    pub relay_dispatch: DispatchGrid,
    pub relay_combine: Grid,
    pub combine_kernel: CombineKernel,
    /// `None` if the kernels for few tokens suit no rows.
    pub few: Option<FewGrids>,
    /// For rank-major operations whose rows are not copied.
    pub view: ViewGrid,
    /// The kernels' sizes, without those that depend on the rows.
    pub shape_of_handle: LlShape,
}

impl HandlePlan {
    /// The grid of a combine as changed by a call's `launch` options, for a kernel with at most `most_threads`.
    pub fn adjusted_combine(&self, launch: Launch, most_threads: u32) -> Grid {
        self.combine.adjusted(launch, COMBINE_LEAST_THREADS..=most_threads)
    }

    /// The kernels' sizes for an operation on rows that travel as `row`, within the group's limits.
    pub fn shape(&self, row: WireRow, chunk_size: ChunkSize) -> LlShape {
        let (row_bytes, chunks) = (row.slot_bytes(), Chunks::of(row, chunk_size));
        LlShape {
            row_bytes: row_bytes as u32,
            slot_bytes: slot_bytes(row_bytes) as u32,
            chunk_bytes: chunks.payload as u32,
            chunks: chunks.count as u32,
            flags: chunks.flags as u32,
            chunks_reciprocal: reciprocal(chunks.count as u32),
            ..self.shape_of_handle
        }
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
            let (parts, warps) = grid(tokens, 300, 132).divide(chunks, false);
            assert!(warps <= ROW_WARPS && parts * warps >= chunks);
            assert!((parts - 1) * warps < chunks);
        }
        let divide = |tokens, chunks| grid(tokens, 300, 132).divide(chunks, false);
        assert_eq!((divide(300, 28), divide(300, 29)), ((4, 7), (5, 6)));
        assert_eq!((divide(1, 28), divide(8, 28), divide(8, 14), divide(16, 14)), ((7, 4), (4, 7), (4, 4), (2, 7)));
        assert_eq!((divide(1, 3), divide(1, 0)), ((3, 1), (1, 0)));
        let of_two = |tokens| ViewGrid { ranks: 2, ..grid(tokens, 300, 132) };
        assert!(of_two(1).combines_with_all_warps() && !of_two(300).combines_with_all_warps());
        assert_eq!(of_two(1).divide(28, true), (4, 7));
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
