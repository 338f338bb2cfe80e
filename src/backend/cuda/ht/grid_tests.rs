//! Tests of HT grids.

use super::*;
use crate::model::group::Algorithm;
use crate::tuning::Tuning;

const H200: DeviceLimits = DeviceLimits { multiprocessors: 132, shared_bytes: 227 << 10 };
const DISPATCH: HtKind = HtKind::Dispatch { forward: true };
/// Bytes of a row of 7168 bfloat16.
const ROW: usize = 14_336;

fn facts(ranks: usize, channels: Option<usize>) -> GroupFacts {
    GroupFacts {
        algorithm: Algorithm::HighThroughput,
        ranks,
        experts: 32 * ranks,
        max_tokens: Some(4096),
        row_bytes: 14_336,
        channels,
        ..GroupFacts::SAMPLE
    }
}

#[test]
fn channels_are_two_blocks_each() {
    for (channels, blocks) in [(1, 2), (4, 8), (1000, 132)] {
        let facts = facts(8, Some(channels));
        assert_eq!(Grid::new(&facts, &Shapes::default(), COMBINE, 64, H200).blocks, blocks);
        assert_eq!(blocks_of_zones(&facts, H200), blocks);
    }
}

#[test]
fn grids_run_at_the_same_time_and_have_both_roles() {
    let shape = |ranks, channels| [2, 132].map(|multiprocessors| (ranks, channels, multiprocessors));
    let channels = [None, Some(1), Some(2), Some(8), Some(12), Some(24), Some(48), Some(66), Some(1000)];
    let of_ranks = |ranks| channels.into_iter().flat_map(move |channels| shape(ranks, channels));
    for (ranks, channels, multiprocessors) in [1, 2, 3, 4, 5, 8, 72].into_iter().flat_map(of_ranks) {
        let (facts, device) = (facts(ranks, channels), DeviceLimits { multiprocessors, ..H200 });
        let most = granted_blocks(&facts).unwrap_or(u32::MAX).min(multiprocessors);
        let check = |grid: Grid, sends| {
            assert!(grid.blocks <= most && grid.send_blocks < grid.blocks, "{facts:?}: {grid:?}");
            assert_eq!(grid.send_blocks > 0, sends, "{facts:?}: {grid:?}");
        };
        for (kind, tokens) in [DISPATCH, COMBINE].into_iter().flat_map(|kind| [(kind, 64), (kind, 4096)]) {
            let grid = Grid::new(&facts, &Shapes::default(), kind, tokens, device);
            check(grid, ranks > 1);
            // Senders also cast the rows that stay on their rank.
            check(grid.of_casts(ranks), true);
            for top_k in [1, 2, 8, 32] {
                check(Grid::of_zones(&facts, kind, top_k, blocks_of_zones(&facts, device)), ranks > 1);
            }
        }
    }
}

#[test]
fn a_measured_grid_goes_first_and_is_one_that_works() {
    let file = r#"{"format": "nccl_ep tuning", "version": 1, "gpu": "G", "ranks": 4, "entries": [
        {"operation": "ht_dispatch", "tokens": 1, "blocks": 1, "threads": 32, "send_blocks": 1},
        {"operation": "ht_dispatch", "tokens": 4096, "blocks": 40, "threads": 512, "send_blocks": 10},
        {"operation": "ht_combine", "tokens": 4096, "blocks": 20, "threads": 1024, "send_blocks": 20}]}"#;
    let shapes = Tuning::parse(file, "G", 4, 132).unwrap().shapes;
    let grid = |kind, tokens, channels| {
        let grid = Grid::new(&facts(4, channels), &shapes, kind, tokens, H200);
        (grid.blocks, grid.send_blocks, grid.warps)
    };
    assert_eq!(grid(DISPATCH, 1, None), (2, 1, 2));
    assert_eq!(grid(DISPATCH, 2000, None), (40, 10, 16));
    assert_eq!(grid(DISPATCH, 0, None), (40, 10, 16));
    assert_eq!(grid(DISPATCH, 2000, Some(8)), (16, 4, 16));
    assert_eq!(grid(DISPATCH, 2000, Some(100)), (40, 10, 16));
    assert_eq!(grid(COMBINE, 4096, None), (20, 19, 16));
    assert_eq!(grid(COMBINE, 4097, None), (24, 9, 16));
    let alone = Grid::new(&facts(1, None), &shapes, COMBINE, 4096, H200);
    assert_eq!((alone.blocks, alone.send_blocks), (20, 0));
}

#[test]
fn a_call_says_what_it_wants() {
    let own = Grid::new(&facts(4, None), &Shapes::default(), DISPATCH, 64, H200);
    let requested = |grid: Grid, blocks, send_blocks, threads| {
        let launch = Launch { blocks, send_blocks, threads, ..Launch::default() };
        let grid = grid.adjusted(launch, DISPATCH);
        (grid.blocks, grid.send_blocks, grid.warps)
    };
    assert_eq!(requested(own, 0, 0, 0), (24, 8, 24));
    assert_eq!(requested(own, 12, 0, 0), (12, 4, 24));
    assert_eq!(requested(own, 16, 7, 1024), (16, 7, 24));
    assert_eq!(requested(own, 0, 132, 32), (24, 23, 2));
    assert_eq!(requested(own, 1, 1, 0), (2, 1, 24));
    assert_eq!(requested(own.of_casts(4), 12, 0, 0), (12, 6, 24));
    let combine = Grid::new(&facts(2, Some(8)), &Shapes::default(), COMBINE, 64, H200);
    let launch = |send_blocks, blocks| Launch { blocks, send_blocks, ..Launch::default() };
    let warps = |senders, blocks| combine.adjusted(launch(senders, blocks), COMBINE).send_warps(2, ROW);
    assert_eq!((warps(0, 0), warps(0, 24), warps(0, 32), warps(6, 16)), (Some(3), Some(3), None, None));
    let of = |ranks| (own.send_warps(ranks, ROW), combine.send_warps(ranks, ROW));
    assert_eq!((of(4), of(1)), ((None, Some(7)), (None, None)));
    let alone = Grid::new(&facts(1, None), &Shapes::default(), DISPATCH, 64, H200);
    assert_eq!(requested(alone, 16, 7, 0), (16, 0, 24));
}

#[test]
fn more_warps_of_a_combine_send_shorter_rows() {
    let warps = |ranks, blocks, hidden: usize| {
        let combine = Grid::new(&facts(ranks, None), &Shapes::default(), COMBINE, 64, H200);
        combine.adjusted(Launch { blocks, ..Launch::default() }, COMBINE).send_warps(ranks, 2 * hidden)
    };
    let of = |ranks, blocks| [16, 2048, 2880, 4096, 5120, 7168, 16_384].map(|it| warps(ranks, blocks, it).unwrap_or(0));
    assert_eq!(of(2, 24), [7, 7, 5, 3, 4, 3, 2]);
    assert_eq!(of(2, 16), [7, 7, 6, 5, 4, 3, 2]);
    assert_eq!(of(4, 24), [9, 9, 8, 0, 0, 0, 0]);
    assert_eq!(of(4, 16), [9, 9, 8, 7, 7, 7, 7]);
    assert_eq!((of(2, 25), of(1, 16)), ([0; 7], [0; 7]));
}

#[test]
fn lanes_poll_several_slots_of_short_rows() {
    let most = |ranks, blocks, kind| {
        let grid = Grid::new(&facts(ranks, None), &Shapes::default(), kind, 64, H200);
        let grid = grid.adjusted(Launch { blocks, ..Launch::default() }, kind);
        [4, 6, 8, 10].into_iter().rfind(|kib| grid.polls_several(kind, ranks, kib << 10))
    };
    let of = |ranks, kind| [16, 24, 132].map(|blocks| most(ranks, blocks, kind));
    assert_eq!((of(2, COMBINE), of(4, COMBINE)), ([None, Some(8), Some(8)], [Some(6); 3]));
    assert_eq!((of(2, DISPATCH), of(4, DISPATCH)), ([Some(4), Some(4), None], [Some(4), Some(4), None]));
}

#[test]
fn senders_of_four_ranks_pause_between_polls() {
    let of = |kind: HtKind| [1, 2, 3, 4, 8].map(|ranks| kind.sender_pause(ranks));
    assert_eq!((of(DISPATCH), of(COMBINE)), ([0, 0, 0, 512, 512], [0, 0, 0, 320, 320]));
}
