//! What is decided about HT kernels before they start: regions of the window, shares of shared memory,
//! grids. Pure functions of the group's facts, of the device and of an operation's shape.
#![forbid(unsafe_code)]

use crate::backend::cuda::launch::LaunchShape;
use crate::backend::cuda::params_ht::{
    HT_COMBINE_THREADS, HT_COUNTS_BESIDE_EXPERTS, HT_DISPATCH_THREADS, HT_LAYOUT_THREADS,
    HT_MAX_TOP_K, HT_SHAPE_COLUMNS_SHIFT, HT_SHAPE_COMBINE, HT_ZERO_BYTES, HtEntry, HtLayout,
};
use crate::backend::cuda::sizes::{Regions, number};
use crate::error::Result;
use crate::model::group::GroupFacts;
use crate::model::ops::RowType;

const PACKET_BYTES: usize = 8;
const CREDIT_BYTES: usize = 4;
/// What travels behind a row for each of its token's experts: an id and a weight.
const TAIL_ENTRY_BYTES: usize = 8;
const COPY_ALIGN: usize = 16;
const REGION_ALIGN: usize = 256;
const WARP: u32 = 32;

/// Slots of all rings into a rank together: enough to hide the round trip of a credit at full speed
/// (docs/performance.md), few enough to stay in L2 where rows are common.
const RING_SLOTS: usize = 2048;
const LEAST_DEPTH: usize = 64;
/// With huge rows rings are shorter, not larger.
const MOST_RING_BYTES: usize = 64 << 20;
const MOST_PIECE_BYTES: usize = 16 << 10;
/// Static shared memory of the kernels, and what the driver reserves.
const RESERVED_SHARED_BYTES: u32 = 3584;
/// A warp's list of announcements: a rank and a number for each rank of a token.
const LIST_BYTES: usize = HT_MAX_TOP_K as usize * 8;

/// Tokens that a block of `ht_layout` numbers, if the device has enough blocks.
const LAYOUT_BLOCK_TOKENS: usize = 128;
const LAYOUT_BLOCKS: usize = 64;

/// Blocks when the caller leaves the choice to us, and how many of them send, in 24ths.
const AUTO_BLOCKS: u32 = 24;
const DISPATCH_SENDERS: u32 = 11;
const COMBINE_SENDERS: u32 = 14;

/// The two operations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum HtKind {
    /// Ids and weights travel with the rows, or not.
    Dispatch { forward: bool },
    /// Columns of gradients that travel with the rows.
    Combine { columns: usize },
}

/// The plan of one group.
#[derive(Clone, Copy, Debug)]
pub(super) struct HtPlan {
    facts: GroupFacts,
    /// Offsets from the start of the group's region.
    layout: HtLayout,
    bytes: usize,
}

/// How an operation is launched and what its kernel is told about sizes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct HtShape {
    pub(super) launch: LaunchShape,
    pub(super) send_blocks: u32,
    pub(super) shape_word: u32,
    pub(super) row_bytes: u32,
    pub(super) piece_bytes: u32,
    pub(super) tail_bytes: u32,
    pub(super) warp_bytes: u32,
    pub(super) copy_warps: u32,
}

/// Offsets in a handle's device memory, and its size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct HandleLayout {
    pub(super) begins: usize,
    pub(super) departures: usize,
    pub(super) counts: usize,
    pub(super) entries: usize,
    pub(super) bytes: usize,
}

/// What the device allows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct DeviceLimits {
    pub(super) multiprocessors: u32,
    /// Shared memory of a block.
    pub(super) shared_bytes: u32,
}

impl DeviceLimits {
    /// Dynamic shared memory that our kernels may have.
    pub(super) fn dynamic_shared_bytes(&self) -> u32 {
        self.shared_bytes.saturating_sub(RESERVED_SHARED_BYTES)
    }
}

impl HtPlan {
    /// The plan for a group of high throughput.
    pub(super) fn new(facts: &GroupFacts) -> Result<Self> {
        let ranks = facts.ranks;
        let slot_bytes = (facts.row_bytes + HT_MAX_TOP_K as usize * TAIL_ENTRY_BYTES)
            .next_multiple_of(REGION_ALIGN);
        let depth = depth(ranks, slot_bytes);
        let mut window = Regions::new(REGION_ALIGN);
        let counts = window.take(
            2 * ranks * (facts.local_experts() + HT_COUNTS_BESIDE_EXPERTS as usize) * PACKET_BYTES,
        );
        let arrivals = window.take(ranks * depth * PACKET_BYTES);
        let credits = window.take(ranks * depth * CREDIT_BYTES);
        let slots = window.take(ranks * depth * slot_bytes);
        let layout = HtLayout {
            counts: counts as u64,
            arrivals: arrivals as u64,
            credits: credits as u64,
            slots: slots as u64,
            slot_bytes: slot_bytes as u64,
            depth: number(depth)?,
            local_experts: number(facts.local_experts())?,
        };
        Ok(Self {
            facts: *facts,
            layout,
            bytes: window.bytes(),
        })
    }

    /// Bytes of the group's region of a window.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// The kernels' offsets when that region begins at `start` of the window.
    pub(super) fn layout(&self, start: usize) -> HtLayout {
        let start = start as u64;
        HtLayout {
            counts: start + self.layout.counts,
            arrivals: start + self.layout.arrivals,
            credits: start + self.layout.credits,
            slots: start + self.layout.slots,
            ..self.layout
        }
    }

    /// The device memory of a handle with `tokens`, or as many as the group allows.
    pub(super) fn handle(&self, tokens: usize, top_k: usize) -> HandleLayout {
        let ranks = self.facts.ranks;
        let tokens = self
            .facts
            .max_tokens
            .unwrap_or_else(|| tokens.next_power_of_two());
        let mut memory = Regions::new(REGION_ALIGN);
        HandleLayout {
            begins: memory.take((ranks + 1) * size_of::<u32>()),
            departures: memory.take(ranks * size_of::<u32>()),
            counts: memory.take(self.facts.local_experts() * size_of::<i32>()),
            entries: memory.take(tokens * top_k * size_of::<HtEntry>()),
            bytes: memory.bytes(),
        }
    }

    /// Grid of `ht_layout` for `tokens`, and how many of them a block numbers.
    pub(super) fn layout_grid(
        &self,
        tokens: usize,
        device: DeviceLimits,
    ) -> Result<(LaunchShape, u32)> {
        let most = LAYOUT_BLOCKS
            .min(device.multiprocessors as usize - 1)
            .max(1);
        let blocks = tokens
            .div_ceil(LAYOUT_BLOCK_TOKENS)
            .max(self.facts.ranks)
            .min(most);
        let block_tokens = tokens.div_ceil(blocks).next_multiple_of(WARP as usize);
        let shape = LaunchShape {
            blocks: number(blocks + 1)?,
            threads: HT_LAYOUT_THREADS,
            shared_bytes: number(self.facts.local_experts() * size_of::<u32>())?,
        };
        Ok((shape, number(block_tokens)?))
    }

    /// How an operation on rows of type `row` is launched; each token has `top_k` ids.
    pub(super) fn shape(
        &self,
        kind: HtKind,
        row: RowType,
        top_k: usize,
        device: DeviceLimits,
    ) -> Result<HtShape> {
        let row_bytes = row.bytes();
        let pieces = row_bytes.div_ceil(MOST_PIECE_BYTES);
        let piece_bytes = row_bytes.div_ceil(pieces).next_multiple_of(COPY_ALIGN);
        let (tail_bytes, tails) = match kind {
            HtKind::Dispatch { forward: true } => {
                (top_k * TAIL_ENTRY_BYTES, top_k.min(self.facts.ranks))
            }
            HtKind::Dispatch { forward: false } => (0, 0),
            HtKind::Combine { columns } => (columns * size_of::<f32>(), 1),
        };
        let tail_bytes = tail_bytes.next_multiple_of(COPY_ALIGN);
        let warp_bytes =
            number((piece_bytes + tails * tail_bytes + LIST_BYTES).next_multiple_of(128))?;
        let most_warps = match kind {
            HtKind::Dispatch { .. } => HT_DISPATCH_THREADS / WARP,
            HtKind::Combine { .. } => HT_COMBINE_THREADS / WARP,
        };
        let zero_bytes = match kind {
            HtKind::Dispatch { .. } => HT_ZERO_BYTES,
            HtKind::Combine { .. } => 0,
        };
        let shared_bytes = device.dynamic_shared_bytes() - zero_bytes;
        let copy_warps = (shared_bytes / warp_bytes).clamp(1, most_warps - 1);
        let (warps, senders, shape_word) = match kind {
            HtKind::Dispatch { forward } => (
                copy_warps + 1,
                DISPATCH_SENDERS,
                u32::from(forward) << HT_SHAPE_COLUMNS_SHIFT,
            ),
            HtKind::Combine { columns } => (
                most_warps,
                COMBINE_SENDERS,
                HT_SHAPE_COMBINE | number(columns)? << HT_SHAPE_COLUMNS_SHIFT,
            ),
        };
        let blocks = self.blocks(device);
        Ok(HtShape {
            launch: LaunchShape {
                blocks,
                threads: warps * WARP,
                shared_bytes: zero_bytes + copy_warps * warp_bytes,
            },
            send_blocks: self.send_blocks(blocks, senders),
            shape_word: shape_word | number(row_bytes / COPY_ALIGN)?,
            row_bytes: number(row_bytes)?,
            piece_bytes: number(piece_bytes)?,
            tail_bytes: number(tail_bytes)?,
            warp_bytes,
            copy_warps,
        })
    }

    /// How many of so many blocks send: `share` of 24, and none where there is nobody to send to.
    fn send_blocks(&self, blocks: u32, share: u32) -> u32 {
        match self.facts.ranks {
            1 => 0,
            _ => (blocks * share / AUTO_BLOCKS).clamp(1, blocks - 1),
        }
    }

    /// Two multiprocessors for each channel, but no more than there are.
    fn blocks(&self, device: DeviceLimits) -> u32 {
        self.facts
            .channels
            .map_or(AUTO_BLOCKS, |channels| {
                u32::try_from(2 * channels).unwrap_or(u32::MAX)
            })
            .min(device.multiprocessors)
            .max(2)
    }
}

/// Slots of one ring: a power of two, as numbers of rows wrap.
fn depth(ranks: usize, slot_bytes: usize) -> usize {
    let wanted = (RING_SLOTS / (ranks - 1).max(1)).max(LEAST_DEPTH);
    let fits = (MOST_RING_BYTES / (ranks * slot_bytes)).max(4);
    let most = wanted.min(fits);
    1 << most.ilog2()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::dtype::DType;
    use crate::model::group::{Algorithm, LlCombineMode};

    const H200: DeviceLimits = DeviceLimits {
        multiprocessors: 132,
        shared_bytes: 227 << 10,
    };

    fn plan(ranks: usize, row_bytes: usize, channels: Option<usize>) -> HtPlan {
        HtPlan::new(&GroupFacts {
            algorithm: Algorithm::HighThroughput,
            ranks,
            rank: 0,
            experts: 32 * ranks,
            max_tokens: Some(4096),
            row_bytes,
            ll_combine: LlCombineMode::Exact,
            channels,
        })
        .unwrap()
    }

    #[test]
    fn the_common_configuration_fits_256_mib() {
        for ranks in [1, 2, 3, 4, 8, 72] {
            let plan = plan(ranks, 14_336, None);
            let bytes = plan.bytes() + plan.handle(4096, 8).bytes;
            assert!(bytes <= 128 << 20, "{ranks} ranks: {bytes}");
            assert!(plan.layout.depth.is_power_of_two());
        }
        assert!(plan(8, 1 << 20, None).bytes() <= 80 << 20);
    }

    #[test]
    fn regions_follow_each_other() {
        let plan = plan(8, 14_336, None);
        let layout = plan.layout(4096);
        let slots = 8 * u64::from(layout.depth);
        assert!(layout.counts >= 4096);
        assert!(layout.counts + 2 * 8 * 34 * 8 <= layout.arrivals);
        assert!(layout.arrivals + slots * 8 <= layout.credits);
        assert!(layout.credits + slots * 4 <= layout.slots);
        assert!(layout.slot_bytes >= 14_336 + 256);
        assert!(layout.slots + slots * layout.slot_bytes <= 4096 + plan.bytes() as u64);
        let handle = plan.handle(4096, 8);
        assert!(handle.entries + 4096 * 8 * 8 <= handle.bytes);
    }

    #[test]
    fn carriers_fit_and_cover_every_row() {
        let kinds = [
            HtKind::Dispatch { forward: true },
            HtKind::Dispatch { forward: false },
            HtKind::Combine { columns: 0 },
            HtKind::Combine { columns: 32 },
        ];
        for kind in kinds {
            for hidden in [8, 1000, 7168, 8192, 200_000] {
                for shared_bytes in [99 << 10, 163 << 10, 227 << 10] {
                    let device = DeviceLimits {
                        shared_bytes,
                        ..H200
                    };
                    let dtype = DType::Bfloat16;
                    let row = RowType { dtype, hidden };
                    let shape = plan(4, 400_000, None).shape(kind, row, 32, device).unwrap();
                    assert!(shape.launch.shared_bytes <= device.dynamic_shared_bytes());
                    assert_eq!(shape.piece_bytes % 16, 0);
                    assert!(shape.copy_warps * 32 < shape.launch.threads);
                    assert!(shape.piece_bytes + shape.tail_bytes <= shape.warp_bytes);
                }
            }
        }
    }

    #[test]
    fn channels_are_two_blocks_each() {
        let row = RowType {
            dtype: DType::Bfloat16,
            hidden: 64,
        };
        let kind = HtKind::Combine { columns: 0 };
        for (channels, blocks) in [(1, 2), (4, 8), (1000, 132)] {
            let plan = plan(4, 128, Some(channels));
            let shape = plan.shape(kind, row, 8, H200).unwrap();
            assert_eq!(shape.launch.blocks, blocks);
            assert!(shape.send_blocks >= 1 && shape.send_blocks < blocks);
        }
    }
}
