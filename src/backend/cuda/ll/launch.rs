//! Launches of a handle's operations: the part that a launch runs, its grid, and the sizes that kernels work with.

use crate::backend::cuda::kernels::LaunchShape;
use crate::backend::cuda::ll::chunks::{Chunks, Cut, slot_bytes};
use crate::backend::cuda::params::ll::{LL_CHANNELS, LL_WHOLE_CHANNEL, LlPhase, LlShape, reciprocal};
use crate::backend::cuda::params::ll_view::LL_VIEW_THREADS;
use crate::model::layout::Layout;
use crate::model::ops::{Launch, STAGED_SLOTS, StagedSlot};
use crate::model::scales::WireRow;
use crate::tuning::{Choice, share};
use std::ops::RangeInclusive;

/// Fewest threads of a dispatch block: counting entries with fewer takes too long.
pub const DISPATCH_LEAST_THREADS: u32 = 5 * 32;
/// The same for a combine: one warp receives the ranks' fingerprints, and handles no rows.
pub const COMBINE_LEAST_THREADS: u32 = 2 * 32;

/// Warps of a rank-major block that move rows; one more warp does everything else.
const ROW_WARPS: usize = LL_VIEW_THREADS as usize / 32 - 1;
/// Most parts into which a token's row is divided so that each block has a multiprocessor to itself.
const MOST_PARTS: usize = 7;
/// Blocks that fit on a multiprocessor, as the list of kernels requires.
const BLOCKS_PER_MULTIPROCESSOR: usize = 4;

/// The part of an operation that a launch runs, and its channel.
#[derive(Clone, Copy)]
pub struct Part {
    pub channel: u32,
    pub phases: LlPhase,
    /// Whether the operation's outputs are wanted.
    pub keep: bool,
}

impl Part {
    /// A whole operation on one node.
    pub const WHOLE: Self = Self { channel: LL_WHOLE_CHANNEL, phases: LlPhase::SendReceive, keep: true };

    /// Whether it belongs to a whole operation.
    pub fn is_whole(self) -> bool {
        self.channel == LL_WHOLE_CHANNEL
    }

    /// The send phase in `slot`.
    pub fn send(slot: StagedSlot) -> Self {
        Self { channel: channel(slot), phases: LlPhase::Send, keep: true }
    }

    /// The receive phase in `slot`.
    pub fn receive(slot: StagedSlot, keep: bool) -> Self {
        Self { channel: channel(slot), phases: LlPhase::Receive, keep }
    }
}

/// The channel of operations in `slot`; whole operations have another one.
fn channel(slot: StagedSlot) -> u32 {
    LL_WHOLE_CHANNEL + 1 + slot.index() as u32
}

const _: () = assert!(LL_CHANNELS as usize == 1 + STAGED_SLOTS);

/// Blocks of a launch: the first `send_blocks` send rows, the last `receive_blocks` do everything else.
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

    /// `senders` blocks send rows, and `receivers` others do everything else. On a tiny device all blocks do both.
    pub fn split(senders: u32, receivers: u32, threads: u32) -> Self {
        if senders == 0 || receivers == 0 {
            return Self::shared((senders + receivers).max(1), threads);
        }
        Self { blocks: senders + receivers, threads, send_blocks: senders, receive_blocks: receivers }
    }

    /// The measured grid `choice`, with its threads clamped to the kernel's `possible` range.
    pub fn chosen(choice: Choice, possible: RangeInclusive<u32>) -> Self {
        let threads = choice.threads.clamp(*possible.start(), *possible.end());
        let receivers = choice.blocks.saturating_sub(choice.send_blocks);
        Self::split(choice.send_blocks, receivers, threads)
    }

    /// This grid with the changes that a call asks for, and threads in the kernel's `possible` range.
    pub fn asked(self, launch: Launch, possible: RangeInclusive<u32>) -> Self {
        if launch.is_own() {
            let threads = self.threads.min(*possible.end());
            return Self { threads, ..self };
        }
        let or = |asked, own| if asked == 0 { own } else { asked };
        let blocks = or(launch.blocks, self.blocks);
        let own = share(blocks, self.send_blocks, self.blocks).max(1);
        let choice = Choice {
            blocks,
            threads: or(launch.threads, self.threads),
            send_blocks: or(launch.send_blocks, own).min(blocks),
        };
        Self::chosen(choice, possible)
    }

    /// This grid with at least `blocks` blocks; added ones receive.
    pub fn with_receivers(self, blocks: u32) -> Self {
        let added = blocks.saturating_sub(self.blocks);
        Self { blocks: self.blocks + added, receive_blocks: self.receive_blocks + added, ..self }
    }

    /// This grid with at least `blocks` blocks; added ones send, or do both if all blocks do.
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

    /// The launch of this grid with `shared_bytes` of dynamic shared memory.
    pub fn launch_shape(&self, shared_bytes: u32) -> LaunchShape {
        LaunchShape { blocks: self.blocks, threads: self.threads, shared_bytes }
    }
}

/// `wanted`, limited to the `blocks` that run at the same time: blocks wait for the peers' blocks, so all must run.
pub fn at_most(wanted: usize, blocks: u32) -> u32 {
    u32::try_from(wanted).unwrap_or(u32::MAX).min(blocks)
}

/// The grid of a dispatch, ready to be launched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DispatchGrid {
    pub grid: Grid,
    /// Receiving blocks that notify.
    pub notify_blocks: u32,
    /// Receiving blocks reserved for ranks with more tokens, in kernels that have such.
    pub serve_blocks: u32,
    /// The kernel's cut of rows.
    pub cut: Cut,
    pub launch: LaunchShape,
}

impl DispatchGrid {
    /// This grid with the changes that a call asks for, for a kernel with at most `most_threads`.
    pub fn asked(self, launch: Launch, most_threads: u32) -> Self {
        if launch.is_own() {
            return self;
        }
        let grid = self.grid.asked(launch, DISPATCH_LEAST_THREADS..=most_threads);
        let launch = grid.launch_shape(self.launch.shared_bytes);
        Self { grid, notify_blocks: grid.receive_blocks, serve_blocks: 0, cut: Cut::Large, launch }
    }

    /// This grid with at most `most` blocks that serve ranks with more tokens.
    fn serving_at_most(self, most: u32) -> Self {
        let less = self.serve_blocks.saturating_sub(most);
        let grid =
            Grid { blocks: self.grid.blocks - less, receive_blocks: self.grid.receive_blocks - less, ..self.grid };
        let launch = grid.launch_shape(self.launch.shared_bytes);
        Self { grid, serve_blocks: self.serve_blocks - less, launch, ..self }
    }
}

/// The grids of whole operations with the kernels for few tokens, in which blocks between senders and receivers notify
/// the peers.
#[derive(Clone, Copy, Debug)]
pub struct FewGrids {
    /// The kinds of rows of which this rank has few.
    pub rows: FewRows,
    pub dispatch: DispatchGrid,
    /// For rows of at most `short_bytes`, half the group's bound, like those of most casts.
    pub short_dispatch: DispatchGrid,
    pub short_bytes: usize,
    /// The most blocks of a rank-major dispatch that serve ranks with more tokens.
    pub serving_by_rank: u32,
    /// For fewer tokens than dispatches.
    pub combine: Option<Grid>,
}

impl FewGrids {
    /// The grid of a dispatch of rows with `row_bytes`.
    pub fn of_rows(&self, row_bytes: usize, is_rank_major: bool) -> DispatchGrid {
        let grid = if row_bytes <= self.short_bytes { self.short_dispatch } else { self.dispatch };
        if is_rank_major { grid.serving_at_most(self.serving_by_rank) } else { grid }
    }
}

/// The kinds of dispatched rows that are few enough for those kernels.
#[derive(Clone, Copy, Debug)]
pub struct FewRows {
    pub by_rank: bool,
    /// By expert, with scales, and without.
    pub scaled: bool,
    pub plain: bool,
    /// Few enough, without scales, that a view's rows are copied.
    pub plain_of_view: bool,
}

impl FewRows {
    /// Whether there are few rows in this layout, with or without scales.
    pub fn has(self, layout: Layout, scaled: bool) -> bool {
        match scaled {
            _ if layout.is_rank_major() => self.by_rank,
            true => self.scaled,
            false => self.plain,
        }
    }
}

/// What determines the launches of rank-major operations whose rows are not copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ViewGrid {
    pub tokens: usize,
    pub most_tokens: usize,
    pub multiprocessors: u32,
    pub ranks: usize,
}

impl ViewGrid {
    /// The number of parts, and of chunks in each, into which a row of `chunks` is divided: with few tokens more parts
    /// than necessary, as long as three quarters of the multiprocessors have no block; but not if `with_all_warps`.
    pub fn cut(self, chunks: usize, with_all_warps: bool) -> (usize, usize) {
        let most_parts = if with_all_warps { 1 } else { MOST_PARTS };
        let apart = (self.multiprocessors as usize / (4 * self.tokens.max(1))).clamp(1, most_parts);
        let warps = chunks.div_ceil(chunks.div_ceil(ROW_WARPS).max(apart));
        (chunks.div_ceil(warps.max(1)).max(1), warps)
    }

    /// Whether combines use all row warps of a block, as blocks also serve ranks that may have more tokens. On two
    /// H200s a pair with 128 tokens and 1 takes 17.1 us with them and 19.5 without; more ranks were not measured.
    pub fn combines_with_all_warps(self) -> bool {
        self.ranks <= 2 && self.tokens < self.most_tokens
    }

    /// Whether several blocks of a multiprocessor poll: then pauses between polls reduced dispatch and combine of 128
    /// tokens on two H200s from 24 to 19 us.
    pub fn polls_gently(self, parts: usize) -> bool {
        self.blocks(parts) > self.multiprocessors
    }

    /// A block for each part of the rank's tokens, as many as run at the same time. If others may have more tokens, at
    /// least one on every second multiprocessor.
    pub fn blocks(self, parts: usize) -> u32 {
        let all = self.multiprocessors as usize;
        let serving = all.div_ceil(2).min(self.most_tokens * parts);
        self.own_blocks(parts).max(serving as u32).min((BLOCKS_PER_MULTIPROCESSOR * all) as u32)
    }

    /// A block for each part of the rank's tokens.
    pub fn own_blocks(self, parts: usize) -> u32 {
        (self.tokens * parts).max(1) as u32
    }

    /// Groups of blocks of a combine: one that receives, and up to one for sending to each other rank, as long as a
    /// quarter of the multiprocessors has no block for the rank's own tokens; otherwise one that does both.
    pub fn groups(self, parts: usize) -> u32 {
        let all = self.multiprocessors as usize;
        let most = BLOCKS_PER_MULTIPROCESSOR * all / self.blocks(parts) as usize;
        (all * 3 / 4 / self.own_blocks(parts) as usize).min(self.ranks).min(most).max(1) as u32
    }
}

/// The kernels of a combine that is not exact.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CombineKernel {
    /// With little code.
    FewTokens,
    /// With more loads in flight.
    ManyTokens,
    OverNodes,
}

/// What all operations of a handle share: its number of tokens and ids per token are fixed.
#[derive(Clone, Copy, Debug)]
pub struct HandlePlan {
    pub dispatch: DispatchGrid,
    /// For rows with scales that are forwarded.
    pub scaled_dispatch: DispatchGrid,
    /// For rows that are cast.
    pub cast_dispatch: DispatchGrid,
    pub combine: Grid,
    /// For work in the background, over several nodes.
    pub relay_dispatch: DispatchGrid,
    pub relay_combine: Grid,
    pub combine_kernel: CombineKernel,
    /// If the kernels for few tokens suit some rows.
    pub few: Option<FewGrids>,
    /// For rank-major operations whose rows are not copied.
    pub view: ViewGrid,
    /// Lacks what depends on the rows.
    pub shape_of_handle: LlShape,
}

impl HandlePlan {
    /// The grid of a combine with the changes that a call asks for, for a kernel with at most `most_threads`.
    pub fn combine_asked(&self, launch: Launch, most_threads: u32) -> Grid {
        self.combine.asked(launch, COMBINE_LEAST_THREADS..=most_threads)
    }

    /// The sizes of an operation on rows that travel as `row`, within the group's limits.
    pub fn shape(&self, row: WireRow, cut: Cut) -> LlShape {
        let (row_bytes, chunks) = (row.slot_bytes(), Chunks::of(row, cut));
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
            let (parts, warps) = grid(tokens, 300, 132).cut(chunks, false);
            assert!(warps <= ROW_WARPS && parts * warps >= chunks);
            assert!((parts - 1) * warps < chunks);
        }
        let cut = |tokens, chunks| grid(tokens, 300, 132).cut(chunks, false);
        assert_eq!((cut(300, 28), cut(300, 29)), ((4, 7), (5, 6)));
        assert_eq!((cut(1, 28), cut(8, 28), cut(8, 14), cut(16, 14)), ((7, 4), (4, 7), (4, 4), (2, 7)));
        assert_eq!((cut(1, 3), cut(1, 0)), ((3, 1), (1, 0)));
        let of_two = |tokens| ViewGrid { ranks: 2, ..grid(tokens, 300, 132) };
        assert!(of_two(1).combines_with_all_warps() && !of_two(300).combines_with_all_warps());
        assert_eq!(of_two(1).cut(28, true), (4, 7));
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
