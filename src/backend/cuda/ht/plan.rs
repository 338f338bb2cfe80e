//! The plan of HT kernels: regions of the window, shares of shared memory, grids. Computed on the host, by pure
//! functions of the group's facts, the device and an operation's shape.

use crate::backend::cuda::ht::fingerprint::{HtFingerprint, MOST_ROW_BYTES};
use crate::backend::cuda::ht::grid::{DeviceLimits, Grid, HtKind, WARP, blocks_of_zones, granted_blocks};
use crate::backend::cuda::ht::nodes::plan::NodesPlan;
use crate::backend::cuda::ht::offer_regions;
use crate::backend::cuda::ht::rows::MovedRow;
use crate::backend::cuda::kernels::{LaunchShape, to_u32};
use crate::backend::cuda::params::ht::{
    HT_CAST_THREADS, HT_COUNTS_BESIDE_EXPERTS, HT_MAX_TOP_K, HT_POLLED_SLOTS, HT_ROUTE_THREADS, HT_ZERO_BYTES,
    HtLayout, HtPackets, HtShape,
};
use crate::backend::cuda::params::ht_kept::{HT_ZONE_BUFFER_BYTES, HT_ZONE_WORD_EXPERTS};
use crate::backend::cuda::params::ht_mapped::HtMappedLayout;
use crate::backend::cuda::scaled_rows::ScalesWord;
use crate::error::refusal::{OfSettings, Setting, Subject};
use crate::error::{Error, Result};
use crate::model::group::{GroupFacts, most_tokens};
use crate::model::handle_state::{HEADER_WORDS, HtSections, StateShape, header};
use crate::model::node_view::NodeView;
use crate::model::ops::{Launch, Routing};
use crate::model::regions::Regions;
use crate::tuning::Shapes;

const PACKET_BYTES: usize = 8;
const CREDIT_BYTES: usize = 4;
/// Bytes after a row for each of its token's experts: an id and a weight.
const TAIL_ENTRY_BYTES: usize = 8;
const COPY_ALIGN: usize = 16;
const REGION_ALIGN: usize = 256;

/// A unit has room for a row of half the group's bound, the stamp of rows with scales, and scales of this share of the
/// bound: 4 bytes per 128 elements of 4 bytes each.
const SCALES_OF_BOUND: usize = 64;
const STAMP_BYTES: usize = 16;
const UNIT_ALIGN: usize = 128;
/// Units of a slot: a row too large for one unit takes both.
const SLOT_UNITS: usize = 2;

/// Slots of all rings into a rank: enough to hide a credit's round trip at full speed
/// (docs/development/high-throughput.md), but few enough that rows of usual size stay in L2.
const RING_SLOTS: usize = 2048;
const LEAST_DEPTH: usize = 64;
/// Limit on the bytes of all rings: with huge rows they have fewer slots.
const MOST_RING_BYTES: usize = 68 << 20;
/// Bytes of a warp's notify queue (`cuda/ht/notify.cuh`), which has a rank and a number per row.
const NOTIFY_BYTES: usize = HT_MAX_TOP_K as usize * 8;

/// Tokens that a block of `ht_route` numbers, if the device has enough blocks.
const ROUTE_BLOCK_TOKENS: usize = 128;
const ROUTE_BLOCKS: usize = 64;

/// The plan of one group.
#[derive(Clone, Debug)]
pub struct HtPlan {
    /// The facts of this node's ranks, as if they were a group.
    pub facts: GroupFacts,
    /// The most tokens of a rank; without a bound, the most that kernels support.
    pub max_tokens: usize,
    /// The number of experts of all nodes.
    pub all_experts: usize,
    /// `None` on one node.
    pub nodes: Option<NodesPlan>,
    /// Offsets from the start of the group's HT region.
    layout: HtLayout,
    /// Offset of the packets that ranks exchange about rows by expert, and in `ht_cut`.
    packets: usize,
    packets_bank: usize,
    /// The regions for offers: empty over several nodes, and with one rank.
    mapped: HtMappedLayout,
    /// Bytes of the HT region of a window.
    pub bytes: usize,
    /// Grids from a tuning file, which take precedence over the library's own.
    pub shapes: Shapes,
}

/// An operation's launch. The fingerprint still lacks the handle's number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HtLaunch {
    pub launch: LaunchShape,
    pub shape: HtShape,
    /// By which ranks compare their scales; 0 without scales.
    pub scales_word: u32,
    /// Elements that a warp casts at a time; 0 without a cast.
    pub cast_chunk: u32,
}

/// What a handle fixes of its launches: the grids of rows without casts, and the ids per token.
#[derive(Clone, Copy, Debug)]
pub struct HandleGrids {
    dispatch: Grid,
    combine: Grid,
    top_k: usize,
    device: DeviceLimits,
    /// Whether rows are ordered by expert.
    zones: bool,
}

/// The layout of the group's memory in which blocks of `ht_route` count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TallyLayout {
    pub tally: usize,
    pub ended: usize,
    pub counted: usize,
    pub epochs: usize,
    pub own_counts: usize,
    pub bytes: usize,
}

impl HtPlan {
    /// The plan of an HT group.
    pub fn new(facts: &GroupFacts, view: &NodeView) -> Result<Self> {
        check_limits(facts)?;
        let has_zones = facts.has_zones();
        let max_tokens = facts.max_tokens.unwrap_or(most_tokens(facts.ranks));
        let nodes = (view.others() > 0).then(|| NodesPlan::new(facts, view));
        let all_experts = facts.experts;
        let ranks = view.locals.len();
        let facts = &GroupFacts { ranks, experts: ranks * facts.local_experts(), ..*facts };
        let unit_bytes = unit_bytes(facts.row_bytes);
        let units = SLOT_UNITS * depth(ranks, SLOT_UNITS * unit_bytes);
        let mut window = Regions::new(REGION_ALIGN);
        let counts = window.take(match &nodes {
            Some(nodes) => 2 * nodes.counts_bytes(),
            None => 2 * ranks * counts_bytes(facts),
        });
        let arrivals = window.take(ranks * units * PACKET_BYTES);
        let credits = window.take(ranks * units * CREDIT_BYTES);
        let slots = window.take(ranks * units * unit_bytes);
        let sources = nodes.as_ref().map_or(ranks, |nodes| nodes.ranks);
        let of_source = (1 + facts.local_experts()).max(max_tokens * mask_words(facts));
        let bank = if has_zones { sources * of_source * PACKET_BYTES } else { 0 };
        let packets_bank = if nodes.is_none() { bank } else { 0 };
        let packets = window.take(bank + packets_bank);
        let mapped = match &nodes {
            None if ranks > 1 => offer_regions::regions(facts, max_tokens, &mut window),
            _ => HtMappedLayout::default(),
        };
        let layout = HtLayout {
            counts: counts as u64,
            arrivals: arrivals as u64,
            credits: credits as u64,
            slots: slots as u64,
            unit_bytes: unit_bytes as u64,
            units: to_u32(units)?,
            local_experts: to_u32(facts.local_experts())?,
            expert_reciprocal: u32::MAX / to_u32(facts.local_experts())?,
        };
        let bytes = window.bytes();
        let facts = *facts;
        let shapes = Shapes::default();
        Ok(Self { facts, max_tokens, all_experts, nodes, layout, packets, packets_bank, mapped, bytes, shapes })
    }

    /// This plan with the grids `shapes` in place of the library's own.
    pub fn tuned(self, shapes: &Shapes) -> Self {
        Self { shapes: shapes.clone(), ..self }
    }

    /// The packets about rows by expert in windows with this layout.
    pub fn packets(&self, layout: &HtLayout) -> HtPackets {
        let offset = layout.counts - self.layout.counts + self.packets as u64;
        HtPackets { offset, bank_bytes: self.packets_bank as u64 }
    }

    /// The kernels' offsets if the HT region begins at `start` of the window.
    pub fn layout(&self, start: usize) -> HtLayout {
        let start = start as u64;
        HtLayout {
            counts: start + self.layout.counts,
            arrivals: start + self.layout.arrivals,
            credits: start + self.layout.credits,
            slots: start + self.layout.slots,
            ..self.layout
        }
    }

    /// The regions for offers in windows with the offsets `of`.
    pub fn mapped_layout(&self, of: &HtLayout) -> HtMappedLayout {
        offer_regions::at(&self.mapped, of.counts - self.layout.counts)
    }

    /// The sections of a handle's block: of the size for the group's bound on tokens, or without one for this routing.
    pub fn handle(&self, routing: &Routing) -> HtSections {
        HtSections::new(StateShape {
            ranks: self.facts.ranks,
            local_experts: self.facts.local_experts(),
            most_tokens: self.facts.max_tokens.unwrap_or_else(|| routing.tokens.next_power_of_two()),
            top_k: routing.top_k,
            form: routing.form,
        })
    }

    /// The header of the block of handle number `number`.
    pub fn header(&self, routing: &Routing, number: u32) -> [u32; HEADER_WORDS] {
        header(&self.facts, routing, number.into())
    }

    /// The memory in which blocks of `ht_route` count.
    pub fn tally(&self) -> TallyLayout {
        let mut memory = Regions::new(REGION_ALIGN);
        TallyLayout {
            tally: memory.take((2 + self.facts.ranks + self.facts.experts) * size_of::<u32>()),
            ended: memory.take(size_of::<u32>()),
            counted: memory.take(ROUTE_BLOCKS * self.facts.ranks * PACKET_BYTES),
            epochs: memory.take(size_of::<u32>()),
            own_counts: memory.take(2 * counts_bytes(&self.facts)),
            bytes: memory.bytes(),
        }
    }

    /// Most bytes of a message between nodes; 0 on one node.
    pub fn most_message_bytes(&self) -> usize {
        let Self { nodes, facts, .. } = self;
        let of = |it: &NodesPlan| it.most_message_bytes(facts.row_bytes, facts.max_tokens);
        nodes.as_ref().map_or(0, of)
    }

    /// The grid of `ht_route` for `tokens`, including one block that receives, and how many tokens each other block
    /// numbers: with `zones`, at most as many as its warps can notify of at once.
    pub fn route_grid(&self, tokens: usize, zones: bool, device: DeviceLimits) -> Result<(LaunchShape, u32)> {
        let units = (HT_ROUTE_THREADS / WARP) as usize / mask_words(&self.facts);
        let of_block = match zones {
            true => ROUTE_BLOCK_TOKENS.min(units.max(1) * WARP as usize),
            false => ROUTE_BLOCK_TOKENS,
        };
        let granted = granted_blocks(&self.facts).unwrap_or(u32::MAX);
        let all = granted.min(device.multiprocessors).max(2) as usize;
        let most = ROUTE_BLOCKS.min(all - 1);
        let blocks = tokens.div_ceil(of_block).clamp(1, most);
        let block_tokens = tokens.div_ceil(blocks).next_multiple_of(WARP as usize);
        let shape = LaunchShape::new(to_u32(blocks + 1)?, HT_ROUTE_THREADS);
        Ok((shape, to_u32(block_tokens)?))
    }

    /// Units of a slot that a row of `bytes` takes. Rows of combines always take all.
    fn row_units(&self, kind: HtKind, bytes: usize) -> u32 {
        match kind {
            HtKind::Dispatch { .. } if bytes as u64 <= self.layout.unit_bytes => 1,
            _ => SLOT_UNITS as u32,
        }
    }

    /// What a handle with this routing fixes of its launches.
    pub fn grids(&self, routing: &Routing, device: DeviceLimits) -> HandleGrids {
        let Routing { tokens, top_k, .. } = *routing;
        let zones = routing.form.zones.is_some();
        let grid = |kind| match zones {
            false => Grid::new(&self.facts, &self.shapes, kind, tokens, device),
            true => self.grid_of_zones(kind, top_k, blocks_of_zones(&self.facts, device)),
        };
        HandleGrids {
            dispatch: grid(HtKind::Dispatch { forward: true }),
            combine: grid(HtKind::Combine { columns: 0 }),
            top_k,
            device,
            zones,
        }
    }

    /// The grid of `blocks` for rows by expert, by how many experts a token has on a node on average.
    fn grid_of_zones(&self, kind: HtKind, top_k: usize, blocks: u32) -> Grid {
        let ranks = self.nodes.map_or(self.facts.ranks, |nodes| nodes.ranks);
        Grid::of_zones(&self.facts, kind, (top_k * self.facts.ranks).div_ceil(ranks), blocks)
    }

    fn grid(&self, kind: HtKind, row: &MovedRow, of: &HandleGrids, requested: Launch) -> Grid {
        let of_handle = match kind {
            HtKind::Dispatch { .. } => of.dispatch,
            HtKind::Combine { .. } => of.combine,
        };
        let plain = match requested.blocks {
            // The number of senders depends on the number of blocks, so the grid is planned anew.
            1.. if of.zones => self.grid_of_zones(kind, of.top_k, requested.blocks.max(2)),
            _ => of_handle,
        };
        let grid = match row.cast {
            Some(_) => plain.of_casts(self.facts.ranks),
            None => plain,
        };
        grid.adjusted(requested, kind)
    }

    /// The launch of an operation on rows `row` with the handle's grids `of` and the call's options `requested`.
    pub fn launch(&self, kind: HtKind, row: &MovedRow, of: &HandleGrids, requested: Launch) -> Result<HtLaunch> {
        let HandleGrids { top_k, device, .. } = *of;
        let grid = self.grid(kind, row, of, requested);
        let (row_bytes, mut staging) = (row.image_bytes(), row.staging());
        if let (HtKind::Combine { .. }, true) = (kind, of.zones) {
            staging.chunk_bytes = HT_ZONE_BUFFER_BYTES as usize;
            staging.buffer_bytes = staging.chunk_bytes;
        }
        let (tail_bytes, tails) = match kind {
            HtKind::Dispatch { forward: true } => (top_k * TAIL_ENTRY_BYTES, top_k.min(self.facts.ranks)),
            HtKind::Dispatch { forward: false } => (0, 0),
            HtKind::Combine { columns } => (columns * size_of::<f32>(), 1),
        };
        let tail_bytes = tail_bytes.next_multiple_of(COPY_ALIGN);
        let warp_bytes = to_u32((staging.buffer_bytes + tails * tail_bytes + NOTIFY_BYTES).next_multiple_of(128))?;
        let zero_bytes = match kind {
            HtKind::Dispatch { .. } => HT_ZERO_BYTES,
            HtKind::Combine { .. } => 0,
        };
        let shared_bytes = device.dynamic_shared_bytes() - zero_bytes;
        let most_warps = match row.cast {
            Some(_) => grid.warps.min(HT_CAST_THREADS / WARP),
            None => grid.warps,
        };
        let copy_warps = (shared_bytes / warp_bytes).clamp(1, most_warps - 1);
        // None of these has been measured over several nodes.
        let (one_node, ranks) = (self.nodes.is_none(), self.facts.ranks);
        let send_warps = grid.send_warps(ranks, row_bytes).filter(|_| one_node);
        let copy_warps = send_warps.map_or(copy_warps, |warps| warps.min(copy_warps));
        let row_units = self.row_units(kind, row_bytes + tail_bytes);
        let slot_bytes = row_bytes * SLOT_UNITS / row_units as usize;
        let warps = match kind {
            HtKind::Dispatch { .. } => copy_warps + 1,
            HtKind::Combine { .. } => grid.warps,
        };
        Ok(HtLaunch {
            launch: LaunchShape {
                blocks: grid.blocks,
                threads: warps * WARP,
                shared_bytes: zero_bytes + copy_warps * warp_bytes,
            },
            shape: HtShape {
                fingerprint: HtFingerprint::new(kind, row.wire)?.0,
                row_bytes: to_u32(row_bytes)?,
                row_units,
                chunk_bytes: to_u32(staging.chunk_bytes)?,
                tail_bytes: to_u32(tail_bytes)?,
                warp_bytes,
                copy_warps,
                send_blocks: send_warps.map_or(grid.send_blocks, |_| grid.blocks),
                polls_several: (one_node && grid.polls_several(kind, ranks, slot_bytes)).into(),
                sender_pause: if one_node { kind.sender_pause(ranks) } else { 0 },
            },
            scales_word: ScalesWord::of(row.wire).0,
            cast_chunk: to_u32(staging.cast_chunk)?,
        })
    }
}

/// Words that `ht_zones` sends per row.
fn mask_words(facts: &GroupFacts) -> usize {
    facts.local_experts().div_ceil(HT_ZONE_WORD_EXPERTS as usize)
}

/// Bytes of the packets that a rank sends to another about a new handle.
fn counts_bytes(facts: &GroupFacts) -> usize {
    (facts.local_experts() + HT_COUNTS_BESIDE_EXPERTS as usize) * PACKET_BYTES
}

/// Refuses facts that do not fit the fields of the kernels' words.
fn check_limits(facts: &GroupFacts) -> Result<()> {
    if facts.row_bytes <= MOST_ROW_BYTES {
        return Ok(());
    }
    Err(Error::usage(Subject::Setting(Setting::RowBytes), OfSettings::HtKernelsCount)
        .got(facts.row_bytes, format_args!("at most {MOST_ROW_BYTES}")))
}

/// Bytes of a unit, so that two have room for the longest row and what follows it.
fn unit_bytes(row_bytes: usize) -> usize {
    let tail_bytes = HT_MAX_TOP_K as usize * TAIL_ENTRY_BYTES;
    let scale_bytes = row_bytes.div_ceil(SCALES_OF_BOUND);
    (row_bytes.div_ceil(2) + scale_bytes + STAMP_BYTES + tail_bytes).next_multiple_of(UNIT_ALIGN)
}

/// Slots of one ring: a power of two, because row numbers wrap around at 2^32.
fn depth(ranks: usize, slot_bytes: usize) -> usize {
    let wanted = (RING_SLOTS / (ranks - 1).max(1)).max(LEAST_DEPTH);
    let fits = (MOST_RING_BYTES / (ranks * slot_bytes)).max(HT_POLLED_SLOTS as usize);
    let most = wanted.min(fits);
    1 << most.ilog2()
}

#[cfg(test)]
#[path = "plan_tests.rs"]
mod tests;
