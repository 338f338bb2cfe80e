//! Operations that make offers, which let peers access tensors in mapped memory directly (`cuda/ht/offers.cuh`):
//! additional kernel parameters, and how rows that bypass the rings pass through shared memory.

use crate::backend::cuda::driver::stream::StreamScope;
use crate::backend::cuda::ht::grid::WARP;
use crate::backend::cuda::ht::handle::CudaHt;
use crate::backend::cuda::ht::plan::HtLaunch;
use crate::backend::cuda::ht::shared::{HtShared, scaled_rows_of_caller};
use crate::backend::cuda::kernels::{self, LaunchShape, to_u32};
use crate::backend::cuda::params::ht::{HtCombineParams, HtDispatchParams, HtScaledDispatchParams};
use crate::backend::cuda::params::ht_mapped::{
    HT_MAPPED_SHARED_BYTES, HT_MAPPED_STAGES, HT_MAPPED_WARPS, HT_MAX_OBJECTS, HT_OFFER_MAPPED, HT_OFFER_THREADS,
    HT_OFFER_UNIT, HtDirectParams, HtMapped, HtOfferParams, HtPullParams, HtScaledDirectParams,
};
use crate::error::Result;
use crate::model::group::ROW_ALIGN;
use crate::model::objects::{MAX_OBJECTS, OBJECT_ALIGN, ObjectOffset};
use crate::model::ops::{HtCombine, HtDispatch, HtPath, Rows};
use crate::model::scales::WireRow;

const _: () = assert!(MAX_OBJECTS == HT_MAX_OBJECTS as usize && OBJECT_ALIGN == HT_OFFER_UNIT as u64);

/// The largest part of a row that a sending warp moves at a time.
const MOST_PART_BYTES: usize = 16 << 10;
/// Bytes per stage of all sending warps of a block together. Three stages are faster than two with few blocks, and with
/// long rows unless there are very many blocks.
const SENT_BYTES: usize = 28 << 10;
const MOST_SENDERS: usize = 8;
const LONG_PART_BYTES: usize = 8 << 10;
/// Sending blocks: these saturate NVLink, and more are slower, until there are very many.
const SEND_BLOCKS: u32 = 16;
const MANY_BLOCKS: u32 = 96;
/// Sending blocks of more than 16: warps take tokens dynamically, as some blocks share a pair of SMs, which makes warps
/// wait at times, so a few more send; and two more still if many blocks share the remaining work.
const SEND_BLOCKS_OF_MORE: u32 = 18;
const BLOCKS_TO_HELP: u32 = 28;
const SEND_BLOCKS_WITH_HELP: u32 = 20;
/// The most sending blocks from four ranks on.
const SEND_BLOCKS_OF_FOUR: u32 = 48;
/// Up to this many blocks senders also store the rows that stay on their rank.
const FEW_BLOCKS: u32 = 12;
/// Warps that sum in a pull. Each takes a quarter of a row at a time, but no less than so many bytes, or the whole row.
const PULL_WARPS: u32 = 15;
const PULL_PARTS: usize = 4;
const LEAST_PART_BYTES: usize = 512;
/// The most rows of a token for which two stages fit into shared memory.
const ROWS_OF_TWO_STAGES: usize = 4;
/// Up to this many blocks a pull is faster than rings; with more, ring senders store faster than home ranks load.
const MOST_PULL_BLOCKS: u32 = MANY_BLOCKS - 1;
/// The same with four ranks; for more a guess.
const MOST_PULL_BLOCKS_OF_FOUR: u32 = 20;
/// From this many ranks on, a pull is always faster than rings.
const PULL_RANKS: usize = 8;

/// What an operation offers to its peers: a tensor, if they can reach it, and the form of its rows.
#[derive(Clone, Copy, Debug)]
pub struct Offer {
    tensor: Option<ObjectOffset>,
    row_bytes: usize,
    side_row_bytes: usize,
}

impl Offer {
    /// Offers the output of a dispatch, unless it casts: cast rows go through rings.
    pub fn of_dispatch(group: &HtShared, op: &HtDispatch, launch: &HtLaunch) -> Self {
        let WireRow { payload, scales } = op.wire();
        let row_bytes = payload.bytes();
        let scale_bytes = scales.map_or(0, |it| it.bytes().next_multiple_of(ROW_ALIGN));
        let tensor = match launch.cast_chunk {
            0 if op.path != HtPath::Ring => op.out.and_then(|out| locate(group, out, row_bytes)),
            _ => None,
        };
        Self { tensor, row_bytes, side_row_bytes: scale_bytes + launch.shape.tail_bytes as usize }
    }

    /// Offers the input of a combine, unless rings are faster, or gradients need them.
    pub fn of_combine(group: &HtShared, op: &HtCombine, launch: &HtLaunch) -> Self {
        let row_bytes = op.row.bytes();
        let wanted = match op.path {
            HtPath::Auto => is_pull_faster(group.plan.facts.ranks, launch),
            path => path == HtPath::Direct,
        };
        let pulls = op.gradients.is_none() && wanted;
        let tensor = locate(group, op.expert_rows, row_bytes).filter(|_| pulls);
        Self { tensor, row_bytes, side_row_bytes: 0 }
    }
}

/// The object and offset of `rows`, if peers can reach them. An empty tensor may be anywhere.
fn locate(group: &HtShared, rows: Rows, row_bytes: usize) -> Option<ObjectOffset> {
    if rows.rows == 0 {
        return Some(ObjectOffset { object: 0, offset: 0 });
    }
    let bytes = rows.rows.checked_mul(row_bytes)?;
    let objects = &group.context.objects;
    objects.locate(rows.data.0 as u64, bytes as u64)
}

fn is_pull_faster(ranks: usize, launch: &HtLaunch) -> bool {
    let most = if ranks < 4 { MOST_PULL_BLOCKS } else { MOST_PULL_BLOCKS_OF_FOUR };
    ranks >= PULL_RANKS || launch.launch.blocks <= most
}

/// How rows of an operation with offers pass through the shared memory of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OfferStaging {
    pub blocks: u32,
    pub warps: u32,
    pub stages: u32,
    pub part_bytes: usize,
    pub stage_bytes: usize,
    pub stores_local_rows: bool,
    pub takes_tokens: bool,
}

impl OfferStaging {
    /// The fastest setting for a dispatch among `ranks` with this launch (docs/development/high-throughput.md).
    pub fn of_dispatch(ranks: usize, row_bytes: usize, launch: &HtLaunch) -> Result<Self> {
        let LaunchShape { blocks, threads, .. } = launch.launch;
        let part_bytes = even_parts(row_bytes, row_bytes.div_ceil(MOST_PART_BYTES));
        let warps = to_u32((SENT_BYTES / part_bytes).clamp(1, MOST_SENDERS))?;
        let senders = match (ranks, blocks) {
            (..4, ..=SEND_BLOCKS | MANY_BLOCKS..) => blocks,
            (..4, ..BLOCKS_TO_HELP) => SEND_BLOCKS_OF_MORE.min(blocks),
            (..4, _) => SEND_BLOCKS_WITH_HELP,
            (_, ..MANY_BLOCKS) => blocks.min(SEND_BLOCKS),
            _ => SEND_BLOCKS_OF_FOUR,
        };
        Ok(Self {
            blocks: senders,
            // One warp at least remains for everything else.
            warps: warps.min(threads / WARP - 1),
            stages: match blocks {
                ..=FEW_BLOCKS => 3,
                ..MANY_BLOCKS if part_bytes > LONG_PART_BYTES => 3,
                _ => 2,
            },
            part_bytes,
            stage_bytes: part_bytes,
            stores_local_rows: blocks <= FEW_BLOCKS,
            takes_tokens: ranks >= 4 || (SEND_BLOCKS + 1..MANY_BLOCKS).contains(&blocks),
        })
    }

    /// For a combine with this launch, whose tokens have rows on at most `rows` ranks, within `shared_bytes`.
    pub fn of_combine(row_bytes: usize, launch: &HtLaunch, rows: usize, shared_bytes: u32) -> Self {
        // A token without ids has no rows.
        let rows = rows.max(1);
        let warps = PULL_WARPS.min(launch.launch.threads / WARP);
        let stages = if rows <= ROWS_OF_TWO_STAGES { 2 } else { 1 };
        let room = shared_bytes.saturating_sub(HT_MAPPED_SHARED_BYTES) as usize;
        let fits = room / (warps * stages) as usize / rows / ROW_ALIGN * ROW_ALIGN;
        let wanted = even_parts(row_bytes, PULL_PARTS).max(LEAST_PART_BYTES.min(row_bytes));
        let part_bytes = even_parts(row_bytes, row_bytes.div_ceil(wanted.min(fits).max(ROW_ALIGN)));
        Self {
            blocks: launch.launch.blocks,
            warps,
            stages,
            part_bytes,
            stage_bytes: rows * part_bytes,
            stores_local_rows: false,
            takes_tokens: true,
        }
    }

    /// `launch` with enough shared memory, whether rows go through rings or not.
    pub fn launch(&self, launch: LaunchShape) -> Result<LaunchShape> {
        let own = (self.warps * self.stages) as usize * self.stage_bytes;
        let bytes = HT_MAPPED_SHARED_BYTES + to_u32(own)?;
        Ok(LaunchShape { shared_bytes: launch.shared_bytes.max(bytes), ..launch })
    }
}

/// The size of a part if `whole`, not 0, is divided into at most `parts`: a multiple of 16; the last may be smaller.
fn even_parts(whole: usize, parts: usize) -> usize {
    whole.div_ceil(parts).next_multiple_of(ROW_ALIGN)
}

/// The additional parameters of a kernel with offers.
pub fn mapped(group: &HtShared, offer: &Offer, launch: &HtLaunch, staging: &OfferStaging) -> Result<HtMapped> {
    let objects = &group.context.objects;
    debug_assert!(staging.warps <= HT_MAPPED_WARPS && staging.stages <= HT_MAPPED_STAGES);
    Ok(HtMapped {
        layout: group.plan.mapped_layout(&group.layout),
        state: group.offers(),
        objects: objects.table() as *const u64,
        fallbacks: objects.fallbacks_on_device()?,
        offset: offer.tensor.map_or(0, |it| it.offset),
        object: offer.tensor.map_or(0, |it| HT_OFFER_MAPPED | it.object),
        scales_word: launch.scales_word,
        row_bytes: to_u32(offer.row_bytes)?,
        side_row_bytes: to_u32(offer.side_row_bytes)?,
        part_bytes: to_u32(staging.part_bytes)?,
        blocks: staging.blocks,
        warps: staging.warps,
        stages: staging.stages,
        stage_bytes: to_u32(staging.stage_bytes)?,
        stores_local_rows: staging.stores_local_rows.into(),
        takes_tokens: staging.takes_tokens.into(),
    })
}

impl CudaHt {
    /// Whether operations make offers. All ranks get the same answer.
    pub(super) fn makes_offers(&self) -> bool {
        let group = &*self.group;
        group.plan.facts.ranks > 1 && group.context.objects.any()
    }

    /// Enqueues a dispatch with offers; `rows` are the parameters that its kernel would have without.
    // Not inlined, so that operations without offers do not carry these parameters.
    #[inline(never)]
    pub(super) fn dispatch_with_offers(
        &self,
        op: &HtDispatch,
        rows: HtDispatchParams,
        launch: &HtLaunch,
        at: &StreamScope,
        after: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        let group = &*self.group;
        let offer = Offer::of_dispatch(group, op, launch);
        let staging = OfferStaging::of_dispatch(group.plan.facts.ranks, op.row.bytes(), launch)?;
        let mapped = mapped(group, &offer, launch, &staging)?;
        let shape = staging.launch(launch.launch)?;
        let Some(given) = &op.scaled else {
            let kernel = kernels::ht_dispatch_direct();
            return self.enqueue(kernel, shape, &HtDirectParams { rows, mapped }, at, after);
        };
        let common = rows.common;
        let scaled = scaled_rows_of_caller(op.row, given, launch)?;
        let rows = HtScaledDispatchParams { rows, scaled };
        if given.cast().is_none() {
            let params = HtScaledDirectParams { rows, mapped };
            return self.enqueue(kernels::ht_dispatch_direct_scaled(), shape, &params, at, after);
        }
        let one_block = LaunchShape::new(1, HT_OFFER_THREADS);
        let params = HtOfferParams { common, mapped };
        self.enqueue(kernels::ht_offer(), one_block, &params, at, || {
            let (kernel, shape) = (kernels::ht_dispatch_cast(), launch.launch);
            (group.context.module).launch(kernel, shape, &rows, at)?;
            after()
        })
    }

    /// Enqueues a combine with offers, likewise.
    #[inline(never)]
    pub(super) fn combine_with_offers(
        &self,
        op: &HtCombine,
        rows: HtCombineParams,
        launch: &HtLaunch,
        at: &StreamScope,
        after: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        let group = &*self.group;
        let offer = Offer::of_combine(group, op, launch);
        let rows_of_token = self.routing.top_k.min(group.plan.facts.ranks);
        let shared_bytes = group.device.dynamic_shared_bytes();
        let staging = OfferStaging::of_combine(op.row.bytes(), launch, rows_of_token, shared_bytes);
        let mapped = mapped(group, &offer, launch, &staging)?;
        let shape = staging.launch(launch.launch)?;
        let kernel = kernels::ht_combine_pull(op.row.dtype)?;
        self.enqueue(kernel, shape, &HtPullParams { rows, mapped }, at, after)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::cuda::params::ht::HtShape;

    const SHARED: u32 = (227 << 10) - 3584;

    fn launch(blocks: u32, threads: u32) -> HtLaunch {
        let shape = HtShape {
            fingerprint: 0,
            row_bytes: 0,
            row_units: 1,
            chunk_bytes: 0,
            tail_bytes: 0,
            warp_bytes: 0,
            copy_warps: 1,
            send_blocks: 1,
            polls_several: 0,
            sender_pause: 0,
        };
        HtLaunch { launch: LaunchShape { blocks, threads, shared_bytes: 1000 }, shape, scales_word: 0, cast_chunk: 0 }
    }

    /// Checks the limits of any setting in a launch with this number of threads.
    fn check(it: &OfferStaging, threads: u32) {
        assert!(it.part_bytes > 0 && it.part_bytes.is_multiple_of(16));
        assert!(it.warps >= 1 && it.warps * WARP <= threads && it.stages <= HT_MAPPED_STAGES);
        let shape = it.launch(launch(4, threads).launch).unwrap();
        assert!(shape.shared_bytes <= SHARED, "{it:?}");
    }

    #[test]
    fn a_dispatch_sends_and_has_a_warp_for_the_rest() {
        for (ranks, threads) in [2, 3, 4, 8].into_iter().flat_map(|ranks| [(ranks, 64), (ranks, 480)]) {
            for blocks in [2, 8, 12, 13, 16, 17, 24, 28, 95, 96, 132] {
                for row_bytes in [16, 32, 528, 7168, 14_336, 40_000, 1 << 20] {
                    let it = OfferStaging::of_dispatch(ranks, row_bytes, &launch(blocks, threads)).unwrap();
                    check(&it, threads - WARP);
                    assert!((1..=blocks).contains(&it.blocks));
                }
            }
        }
    }

    #[test]
    fn a_combine_has_room_for_the_rows_of_a_token() {
        for rows in [0, 1, 2, 4, 8, 32] {
            for row_bytes in [16, 32, 528, 14_336, 1 << 20] {
                for threads in [64, 512] {
                    check(&OfferStaging::of_combine(row_bytes, &launch(4, threads), rows, SHARED), threads);
                }
            }
        }
    }
}
