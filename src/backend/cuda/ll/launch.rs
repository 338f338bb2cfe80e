//! How a handle's operations are launched: the part that a launch runs, its grid, and the chunks in which rows travel.
//! One warp moves a chunk.

use crate::backend::cuda::kernels::LaunchShape;
use crate::backend::cuda::ll::views::ViewGrid;
use crate::backend::cuda::params::ll::{
    LL_CHANNELS, LL_SCALED_CHUNK_VECS, LL_WHOLE_CHANNEL, LlPhase, LlShape, reciprocal,
};
use crate::model::group::ROW_ALIGN;
use crate::model::ops::{Launch, STAGED_SLOTS, StagedSlot};
use crate::model::scales::WireRow;
use crate::tuning::{Choice, share};
use std::ops::RangeInclusive;

/// Bytes of a chunk but the last one: 16 for each lane of a warp.
pub const CHUNK_BYTES: usize = 32 * 16;
/// Of a chunk with scales, most of either part.
const SCALED_CHUNK_BYTES: usize = LL_SCALED_CHUNK_VECS as usize * CHUNK_BYTES;

/// Fewest threads of a dispatch block: fewer would count entries for long.
pub const DISPATCH_LEAST_THREADS: u32 = 5 * 32;
/// The same of a combine: one warp hears what the ranks run, and takes no rows.
pub const COMBINE_LEAST_THREADS: u32 = 2 * 32;

/// A line of memory.
const LINE_BYTES: usize = 128;

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

    /// Whether it is of a whole operation.
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

/// The channel of operations in `slot`; whole operations have a channel of their own.
fn channel(slot: StagedSlot) -> u32 {
    LL_WHOLE_CHANNEL + 1 + slot.index() as u32
}

const _: () = assert!(LL_CHANNELS as usize == 1 + STAGED_SLOTS);

/// Blocks of a launch: the first `send_blocks` send rows, the last `receive_blocks` do everything
/// else.
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

    /// `senders` blocks send rows, and `receivers` others do everything else. On a tiny device all
    /// blocks do both.
    pub fn split(senders: u32, receivers: u32, threads: u32) -> Self {
        if senders == 0 || receivers == 0 {
            return Self::shared((senders + receivers).max(1), threads);
        }
        Self { blocks: senders + receivers, threads, send_blocks: senders, receive_blocks: receivers }
    }

    /// The measured grid `choice`, with its threads limited to the kernel's `possible` range.
    pub fn chosen(choice: Choice, possible: RangeInclusive<u32>) -> Self {
        let threads = choice.threads.clamp(*possible.start(), *possible.end());
        let receivers = choice.blocks.saturating_sub(choice.send_blocks);
        Self::split(choice.send_blocks, receivers, threads)
    }

    /// This grid as a call wants it, with threads in the kernel's `possible` range. What the call leaves open is as here.
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

    /// This grid with at least `blocks` blocks. Added blocks receive.
    pub fn with_receivers(self, blocks: u32) -> Self {
        let added = blocks.saturating_sub(self.blocks);
        Self { blocks: self.blocks + added, receive_blocks: self.receive_blocks + added, ..self }
    }

    /// This grid with at least `blocks` blocks. Added blocks send; where all blocks do both, they
    /// do both, too.
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

/// `wanted`, limited to the `blocks` that run at the same time: blocks wait for those of the peers,
/// so all must run.
pub fn at_most(wanted: usize, blocks: u32) -> u32 {
    u32::try_from(wanted).unwrap_or(u32::MAX).min(blocks)
}

/// The grid of a dispatch, ready to be launched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DispatchGrid {
    pub grid: Grid,
    /// Receiving blocks that notify.
    pub notify_blocks: u32,
    pub launch: LaunchShape,
}

impl DispatchGrid {
    /// This grid as a call wants it, of a kernel with so many threads at most.
    pub fn asked(self, launch: Launch, most_threads: u32) -> Self {
        if launch.is_own() {
            return self;
        }
        let grid = self.grid.asked(launch, DISPATCH_LEAST_THREADS..=most_threads);
        Self { grid, notify_blocks: grid.receive_blocks, launch: grid.launch_shape(self.launch.shared_bytes) }
    }
}

/// The grids of whole operations by the kernels for few tokens: blocks between those that send and those that receive
/// tell the peers.
#[derive(Clone, Copy, Debug)]
pub struct FewGrids {
    pub dispatch: DispatchGrid,
    /// Of fewer tokens than dispatches.
    pub combine: Option<Grid>,
}

/// Which of the kernels of a combine that is not exact.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CombineKernel {
    /// With little code.
    FewTokens,
    /// With more on its way at a time.
    ManyTokens,
    OverNodes,
}

/// What is the same for all operations of one handle: its tokens and ids per token do not change.
#[derive(Clone, Copy, Debug)]
pub struct HandlePlan {
    pub dispatch: DispatchGrid,
    /// Of one that forwards rows with scales.
    pub scaled_dispatch: DispatchGrid,
    /// Of one that casts its rows.
    pub cast_dispatch: DispatchGrid,
    pub combine: Grid,
    /// Of what runs in the background, over several nodes.
    pub relay_dispatch: DispatchGrid,
    pub relay_combine: Grid,
    pub combine_kernel: CombineKernel,
    /// Of rows by expert, if those kernels suit.
    pub few: Option<FewGrids>,
    /// Whether no rank has many tokens, which all ranks know: then rows with scales are cut into more chunks.
    pub has_few_pairs: bool,
    /// Of rank-major operations whose rows nobody copies.
    pub view: ViewGrid,
    /// Without what depends on the rows.
    pub shape_of_handle: LlShape,
}

impl HandlePlan {
    /// The grid of a combine as a call wants it, of a kernel with so many threads at most.
    pub fn combine_asked(&self, launch: Launch, most_threads: u32) -> Grid {
        self.combine.asked(launch, COMBINE_LEAST_THREADS..=most_threads)
    }

    /// The sizes of an operation on rows that travel as `row`, which the group's limits bound.
    pub fn shape(&self, row: WireRow) -> LlShape {
        let (row_bytes, chunks) = (row.slot_bytes(), self.chunks(row));
        LlShape {
            row_bytes: row_bytes as u32,
            slot_bytes: slot_bytes(row_bytes) as u32,
            chunk_bytes: chunks.payload as u32,
            chunks: chunks.count as u32,
            chunks_reciprocal: reciprocal(chunks.count as u32),
            ..self.shape_of_handle
        }
    }

    /// How a row that travels as `row` is cut.
    #[inline]
    pub fn chunks(&self, row: WireRow) -> Chunks {
        Chunks::of(row, self.has_few_pairs)
    }
}

/// How a row is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chunks {
    /// How many there are.
    pub count: usize,
    /// Bytes of payload of each; the last may have less.
    pub payload: usize,
    /// Bytes of scales of each; the last has the rest.
    pub scales: usize,
    /// Most 16-byte accesses of either part that a lane has.
    pub accesses: u32,
}

impl Chunks {
    /// Of a row that travels as `row`; `more` of them if it has scales: with few tokens there is a warp for each.
    #[inline]
    pub fn of(row: WireRow, more: bool) -> Self {
        match row.scales {
            None => Self::without_scales(row.payload.bytes()),
            Some(_) => Self::with_scales(row, more),
        }
    }

    #[inline]
    fn without_scales(row_bytes: usize) -> Self {
        let count = chunks(row_bytes);
        Self { count, payload: CHUNK_BYTES, scales: 0, accesses: 1 }
    }

    /// Rows with many scales, which no cast makes, are cut evenly.
    fn with_scales(row: WireRow, more: bool) -> Self {
        // Where a chunk has less than 16 bytes of scales, those of a cast would be in another one.
        let has_own_scales = |cut: &Self| cut.count == 1 || cut.scales > 0;
        let small = more.then(|| Self::at_blocks(row, 1)).flatten().filter(has_own_scales);
        small.or_else(|| Self::at_blocks(row, LL_SCALED_CHUNK_VECS)).unwrap_or_else(|| Self::evenly(row))
    }

    /// Chunks that are cut where the blocks of a cast end, each with the scales of its own elements: with blocks of 128
    /// or 32 elements, a full chunk of the most accesses has a multiple of 16 bytes of them.
    fn at_blocks(row: WireRow, accesses: u32) -> Option<Self> {
        let most = accesses as usize * CHUNK_BYTES;
        let payload = row.payload.bytes();
        let (scales, padded) = (row.scale_bytes(), row.slot_bytes() - payload);
        let count = payload.div_ceil(most).max(1);
        let per_chunk = scales * most / payload.max(1) / ROW_ALIGN * ROW_ALIGN;
        let of_last = padded.saturating_sub((count - 1) * per_chunk);
        let fits = of_last <= most && (count == 1 || per_chunk <= most);
        fits.then(|| Self { count, payload: most, scales: per_chunk.min(most), accesses })
    }

    fn evenly(row: WireRow) -> Self {
        let payload = row.payload.bytes();
        let padded = row.slot_bytes() - payload;
        let count = payload.max(padded).div_ceil(SCALED_CHUNK_BYTES).max(1);
        Self {
            count,
            payload: payload.div_ceil(count).next_multiple_of(ROW_ALIGN),
            scales: padded.div_ceil(count).next_multiple_of(ROW_ALIGN),
            accesses: LL_SCALED_CHUNK_VECS,
        }
    }
}

/// Bytes of a slot for a row of `row_bytes`. Slots begin at whole lines of memory: stores over NVLink to parts of
/// lines take longer.
pub fn slot_bytes(row_bytes: usize) -> usize {
    row_bytes.next_multiple_of(LINE_BYTES)
}

/// Most chunks of a row of `row_bytes`, its scales included.
pub fn chunks(row_bytes: usize) -> usize {
    row_bytes.div_ceil(CHUNK_BYTES).max(1)
}

// So the flags of a slot suffice for rows of either kind.
const _: () = assert!(CHUNK_BYTES <= SCALED_CHUNK_BYTES);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::scales::{Cast, ScaleType, cast_counts};
    use crate::model::tensor::{DType, RowType};

    fn wire(hidden: usize, dtype: DType, count: usize) -> WireRow {
        WireRow { payload: RowType { dtype: DType::Float8E4M3, hidden }, scales: Some(ScaleType { dtype, count }) }
    }

    fn rest(row: WireRow, chunks: Chunks) -> usize {
        let padded = row.slot_bytes() - row.payload.bytes();
        padded - padded.min((chunks.count - 1) * chunks.scales)
    }

    #[test]
    fn the_scales_of_a_cast_are_in_the_chunk_of_their_elements() {
        for hidden in (16..20_000).step_by(16) {
            for dtype in [DType::Float32, DType::Uint8, DType::Int32] {
                let (large, small) = cast_counts(dtype, hidden).unwrap();
                for count in [Some(large), small].into_iter().flatten() {
                    let row = wire(hidden, dtype, count);
                    let scales = row.scales.unwrap();
                    let cast = Cast::new(DType::Bfloat16, hidden, scales, false).unwrap();
                    let of_block = match dtype {
                        DType::Float32 => 4,
                        _ => 1,
                    };
                    for more in [false, true] {
                        let cut = Chunks::of(row, more);
                        assert_eq!(cut.payload, cut.accesses as usize * CHUNK_BYTES);
                        if cut.count > 1 {
                            assert_eq!(cut.scales, cut.payload / cast.block * of_block);
                        }
                        // The kernels keep them in one access of each lane.
                        assert!(rest(row, cut) <= 4 * ROW_ALIGN, "{hidden} {dtype} {count}");
                    }
                }
            }
        }
    }

    #[test]
    fn every_row_fits_its_chunks() {
        for hidden in [16, 32, 2048, 2064, 3584, 7168, 16_384] {
            for dtype in [DType::Uint8, DType::Float16, DType::Float32] {
                for count in [1, 3, 56, 57, 448, 1000, 5000] {
                    let row = wire(hidden, dtype, count);
                    for more in [false, true] {
                        let cut = Chunks::of(row, more);
                        let most = cut.accesses as usize * CHUNK_BYTES;
                        assert!(cut.count <= chunks(row.slot_bytes()));
                        assert!(cut.payload <= most && cut.scales <= most && rest(row, cut) <= most);
                        assert!(cut.count * cut.payload >= hidden);
                        assert_eq!((cut.payload % ROW_ALIGN, cut.scales % ROW_ALIGN), (0, 0));
                    }
                }
            }
        }
    }

    #[test]
    fn rows_without_scales_are_cut_into_accesses_of_a_warp() {
        let count = |bytes| Chunks::without_scales(bytes).count;
        assert_eq!([16, 512, 528, 14_336].map(count), [1, 1, 2, 28]);
    }
}
