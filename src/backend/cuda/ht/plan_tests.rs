//! Tests of the plan.
#![allow(clippy::unwrap_used)]

use super::*;
use crate::model::group::Algorithm;
use crate::model::node_view::tests::view;
use crate::model::ops::{HandleForm, IntWidth, Zones};
use crate::model::scales::{ScaleType, WireRow};
use crate::model::tensor::{DType, DevPtr, RowType};

const H200: DeviceLimits = DeviceLimits { multiprocessors: 132, shared_bytes: 227 << 10 };

impl HtPlan {
    /// The launch for a handle with these numbers of tokens and of ids per token.
    fn tested_launch(
        &self,
        kind: HtKind,
        row: &MovedRow,
        (tokens, top_k): (usize, usize),
        device: DeviceLimits,
    ) -> HtLaunch {
        let grids = self.grids(&routing(tokens, top_k), device);
        self.launch(kind, row, &grids, Launch::default()).unwrap()
    }
}

fn one_node(facts: &GroupFacts) -> Result<HtPlan> {
    HtPlan::new(facts, &view(&"a".repeat(facts.ranks), 0))
}

fn routing(tokens: usize, top_k: usize) -> Routing {
    Routing { ids: DevPtr::default(), width: IntWidth::Bits64, tokens, top_k, form: HandleForm::default() }
}

fn plan(ranks: usize, row_bytes: usize) -> HtPlan {
    one_node(&GroupFacts {
        algorithm: Algorithm::HighThroughput,
        ranks,
        experts: 32 * ranks,
        max_tokens: Some(4096),
        row_bytes,
        ..GroupFacts::SAMPLE
    })
    .unwrap()
}

#[test]
fn the_common_configuration_fits_144_mib() {
    for ranks in [1, 2, 3, 4, 8, 72] {
        let plan = plan(ranks, 14_336);
        let bytes = plan.bytes + plan.handle(&routing(4096, 8)).bytes;
        assert!(bytes <= 144 << 20, "{ranks} ranks: {bytes}");
        assert!(plan.layout.units.is_power_of_two());
    }
    assert!(plan(8, 1 << 20).bytes <= 96 << 20);
}

#[test]
fn the_largest_message_is_that_of_a_stage() {
    let most = |max_tokens| {
        let facts = GroupFacts { max_tokens, ..plan(4, 14_336).facts };
        let plan = HtPlan::new(&facts, &view("aabb", 0)).unwrap();
        plan.most_message_bytes()
    };
    assert_eq!(plan(4, 14_336).most_message_bytes(), 0);
    assert_eq!(most(None), usize::MAX);
    let row_bytes = 14_336 + 32 * (8 + 4);
    let bound = |tokens: usize| tokens * row_bytes..tokens * row_bytes + 1024;
    assert!(bound(128).contains(&most(Some(128))));
    // A stage has 7.3 MiB of the 58 of all rows.
    assert!(bound(512).contains(&most(Some(4096))));
}

#[test]
fn blocks_of_rows_by_expert_are_divided_by_the_experts_that_a_token_has_on_a_node() {
    let plan = HtPlan::new(&plan(4, 14_336).facts, &view("aabb", 0)).unwrap();
    let form = HandleForm { zones: Some(Zones { alignment: 1, most_slots: None }), ..HandleForm::default() };
    let grids = plan.grids(&Routing { form, ..routing(4096, 8) }, H200);
    let kind = HtKind::Dispatch { forward: true };
    assert_eq!(grids.dispatch, Grid::of_zones(&plan.facts, kind, 4, 132));
}

#[test]
fn rows_that_no_word_can_tell_from_others_are_refused() {
    let facts = |row_bytes| GroupFacts { row_bytes, ..plan(2, 16).facts };
    assert!(one_node(&facts(MOST_ROW_BYTES)).is_ok());
    let error = one_node(&facts(MOST_ROW_BYTES + 16)).unwrap_err();
    assert_eq!(error.text(), "Setting(RowBytes): OfSettings(HtKernelsCount) (got 2097152, expected at most 2097136)");
}

#[test]
fn regions_follow_each_other() {
    let plan = plan(8, 14_336);
    let layout = plan.layout(4096);
    let units = 8 * u64::from(layout.units);
    assert!(layout.counts >= 4096);
    assert!(layout.counts + 2 * 8 * 34 * 8 <= layout.arrivals);
    assert!(layout.arrivals + units * 8 <= layout.credits);
    assert!(layout.credits + units * 4 <= layout.slots);
    assert!(layout.unit_bytes >= 7168 + 224 + 16 + 256);
    assert!(layout.slots + units * layout.unit_bytes <= 4096 + plan.bytes as u64);
    let tally = plan.tally();
    assert!(tally.tally + (2 + 8 + 256) * 4 <= tally.counted && tally.counted + 64 * 8 * 8 <= tally.epochs);
    assert!(tally.own_counts + 2 * 34 * 8 <= tally.bytes);
    let handle = plan.handle(&routing(4096, 8));
    assert!(handle.entries + 4096 * 8 * 8 <= handle.bytes);
}

#[test]
fn staging_fits_and_covers_every_row() {
    let kinds = [
        HtKind::Dispatch { forward: true },
        HtKind::Dispatch { forward: false },
        HtKind::Combine { columns: 0 },
        HtKind::Combine { columns: 32 },
    ];
    for kind in kinds {
        for hidden in [8, 1000, 7168, 8192, 200_000] {
            for shared_bytes in [99 << 10, 163 << 10, 227 << 10] {
                let dtype = DType::Bfloat16;
                check_staging(kind, &RowType { dtype, hidden }.into(), shared_bytes);
            }
        }
    }
}

#[test]
fn rows_with_scales_fit_too() {
    let kind = HtKind::Dispatch { forward: true };
    for (dtype, hidden, count, cast) in [
        (DType::Float32, 7168, 56, Some(DType::Bfloat16)),
        (DType::Uint8, 400_000, 12_500, Some(DType::Float32)),
        (DType::Uint8, 2_000_000, 62_500, Some(DType::Bfloat16)),
        (DType::Float32, 16, 90_000, None),
        (DType::Uint8, 3584, 224, None),
    ] {
        let payload = RowType { dtype: DType::Uint8, hidden };
        let scales = Some(ScaleType { dtype, count });
        let wire = WireRow { payload, scales };
        for shared_bytes in [99 << 10, 163 << 10, 227 << 10] {
            check_staging(kind, &MovedRow { wire, cast }, shared_bytes);
        }
    }
}

fn check_staging(kind: HtKind, row: &MovedRow, shared_bytes: u32) {
    let device = DeviceLimits { shared_bytes, ..H200 };
    let HtLaunch { launch, shape, .. } = plan(4, 2_097_136).tested_launch(kind, row, (4096, 32), device);
    assert!(launch.shared_bytes <= device.dynamic_shared_bytes());
    assert_eq!(shape.chunk_bytes % 16, 0);
    assert!(shape.copy_warps * 32 < launch.threads);
    assert!(shape.chunk_bytes + shape.tail_bytes <= shape.warp_bytes);
}

#[test]
fn rows_of_half_the_bound_take_one_unit_with_their_scales() {
    let units = |dtype: DType, hidden, scales| {
        let payload = RowType { dtype, hidden };
        let wire = WireRow { payload, scales };
        let kind = HtKind::Dispatch { forward: true };
        let row = MovedRow { wire, cast: None };
        let launch = plan(4, 14_336).tested_launch(kind, &row, (64, 32), H200);
        launch.shape.row_units
    };
    let scales = |dtype, count| Some(ScaleType { dtype, count });
    assert_eq!(units(DType::Bfloat16, 7168, None), 2);
    assert_eq!(units(DType::Bfloat16, 3584, None), 1);
    assert_eq!(units(DType::Float8E4M3, 7168, scales(DType::Float32, 56)), 1);
    assert_eq!(units(DType::Float8E4M3, 7168, scales(DType::Uint8, 224)), 1);
    assert_eq!(units(DType::Float8E4M3, 7168, scales(DType::Float32, 224)), 2);
    assert_eq!(units(DType::Uint8, 3584, scales(DType::Float8E4M3, 448)), 1);
}

#[test]
fn channels_bound_the_blocks_that_route() {
    let blocks = |channels, tokens| {
        let mut plan = plan(4, 14_336);
        plan.facts.channels = channels;
        let (shape, block_tokens) = plan.route_grid(tokens, false, H200).unwrap();
        let counting = shape.blocks - 1;
        assert!(counting * block_tokens >= u32::try_from(tokens).unwrap());
        shape.blocks
    };
    assert_eq!(blocks(None, 4096), 33);
    assert_eq!(blocks(None, 100_000), 65);
    for channels in [1, 2, 12] {
        assert_eq!(blocks(Some(channels), 4096), 2 * channels as u32);
    }
    assert_eq!(blocks(Some(1000), 100_000), 65);
    assert_eq!(blocks(Some(12), 0), 2);
}

#[test]
fn a_block_that_routes_tells_of_its_tokens_at_once() {
    let grid = |local_experts: usize| {
        let mut plan = plan(4, 14_336);
        plan.facts.experts = 4 * local_experts;
        let (shape, block_tokens) = plan.route_grid(4096, true, H200).unwrap();
        (shape.blocks, block_tokens)
    };
    assert_eq!([8, 128, 500].map(grid), [(33, 128), (44, 96), (65, 64)]);
}

/// Checks all sizes of rows, because rounding up a warp's memory may hide that some lack room.
#[test]
fn a_warp_has_room_for_its_row_a_tail_for_each_rank_and_its_queue() {
    for (ranks, top_k, tail_bytes, tails) in [(4, 3, 32, 3), (2, 3, 32, 2), (4, 8, 64, 4)] {
        for row_bytes in (16..=256).step_by(16) {
            let dtype = DType::Uint8;
            let row = RowType { dtype, hidden: row_bytes }.into();
            let kind = HtKind::Dispatch { forward: true };
            let plan = plan(ranks, 14_336);
            let shape = plan.tested_launch(kind, &row, (64, top_k), H200).shape;
            let needed = row_bytes as u32 + tails * tail_bytes + 32 * 8;
            assert_eq!(shape.tail_bytes, tail_bytes);
            assert_eq!(shape.warp_bytes, needed.next_multiple_of(128), "{row_bytes}");
        }
    }
}
