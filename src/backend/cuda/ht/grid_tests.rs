//! Tests of HT grids.

use super::*;
use crate::model::group::Algorithm;
use crate::tuning::Tuning;

const H200: DeviceLimits = DeviceLimits { multiprocessors: 132, shared_bytes: 227 << 10 };
const COMBINE: HtKind = HtKind::Combine { columns: 0 };
const DISPATCH: HtKind = HtKind::Dispatch { forward: true };

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
        let grid = Grid::new(&facts, &Shapes::default(), COMBINE, 64, H200);
        assert_eq!(grid.blocks, blocks);
        assert!(grid.send_blocks >= 1 && grid.send_blocks < blocks);
    }
    let own = Grid::new(&facts(4, None), &Shapes::default(), DISPATCH, 64, H200);
    assert_eq!((own.blocks, own.send_blocks, own.warps), (24, 8, 24));
    for (ranks, dispatch, combine) in [(2, 9, 9), (3, 9, 9), (4, 8, 9), (8, 8, 9)] {
        for (kind, senders) in [(DISPATCH, dispatch), (COMBINE, combine)] {
            let own = Grid::new(&facts(ranks, None), &Shapes::default(), kind, 64, H200);
            assert_eq!((own.blocks, own.send_blocks), (24, senders));
        }
    }
}

#[test]
fn ranks_and_blocks_decide_how_many_send() {
    for (kind, ranks, channels, senders) in [
        (COMBINE, 2, 66, 49),
        (COMBINE, 4, 66, 9),
        (COMBINE, 8, 66, 60),
        (COMBINE, 8, 48, 44),
        (COMBINE, 4, 8, 9),
        (COMBINE, 4, 4, 4),
        (COMBINE, 2, 8, 6),
        (DISPATCH, 4, 8, 7),
        (DISPATCH, 4, 4, 3),
        (DISPATCH, 2, 8, 6),
        (DISPATCH, 2, 24, 9),
        (DISPATCH, 2, 32, 24),
        (DISPATCH, 4, 24, 8),
        (DISPATCH, 4, 48, 32),
        (COMBINE, 2, 16, 10),
        (COMBINE, 2, 24, 18),
    ] {
        let facts = facts(ranks, Some(channels));
        let grid = Grid::new(&facts, &Shapes::default(), kind, 64, H200);
        assert_eq!(grid.send_blocks, senders);
    }
}

#[test]
fn many_tokens_of_four_ranks_are_dispatched_by_fewer_blocks() {
    let grid = |ranks, channels, tokens| {
        let grid = Grid::new(&facts(ranks, Some(channels)), &Shapes::default(), DISPATCH, tokens, H200);
        (grid.blocks, grid.send_blocks, grid.of_casts(ranks).blocks)
    };
    assert_eq!((grid(4, 66, 2048), grid(4, 66, 2047)), ((32, 8, 132), (132, 44, 132)));
    assert_eq!(
        (grid(4, 12, 4096), grid(2, 66, 4096), grid(8, 66, 4096)),
        ((24, 8, 24), (132, 49, 132), (132, 44, 132))
    );
}

#[test]
fn rows_by_expert_have_fewer_senders_and_all_blocks() {
    for (channels, top_k, senders) in
        [(Some(8), 8, (3, 7)), (Some(12), 8, (4, 10)), (Some(12), 2, (9, 8)), (None, 8, (34, 57))]
    {
        let blocks = blocks_of_zones(&facts(2, channels), H200);
        let grid = |kind| Grid::of_zones(&facts(2, channels), kind, top_k, blocks);
        let (dispatch, combine) = (grid(DISPATCH), grid(COMBINE));
        assert_eq!((dispatch.send_blocks, combine.send_blocks), senders);
        assert_eq!(dispatch.blocks, channels.map_or(132, |channels| 2 * channels as u32));
    }
    assert_eq!(Grid::of_zones(&facts(1, None), COMBINE, 8, 132).send_blocks, 0);
}

#[test]
fn casts_have_more_senders() {
    for (channels, of_two, of_four) in [(1, 1, 1), (4, 6, 4), (8, 12, 9), (12, 17, 13), (16, 23, 18), (1000, 50, 50)] {
        for (ranks, senders) in [(2, of_two), (4, of_four)] {
            let facts = facts(ranks, Some(channels));
            let grid = Grid::new(&facts, &Shapes::default(), DISPATCH, 64, H200);
            assert_eq!(grid.of_casts(ranks).send_blocks, senders);
        }
    }
    let alone = Grid::new(&facts(1, Some(12)), &Shapes::default(), DISPATCH, 64, H200);
    assert_eq!((alone.send_blocks, alone.of_casts(1).send_blocks), (0, 17));
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
    let asked = |grid: Grid, blocks, send_blocks, threads| {
        let launch = Launch { blocks, send_blocks, threads, ..Launch::default() };
        let grid = grid.asked(launch, DISPATCH);
        (grid.blocks, grid.send_blocks, grid.warps)
    };
    assert_eq!(asked(own, 0, 0, 0), (24, 8, 24));
    assert_eq!(asked(own, 12, 0, 0), (12, 4, 24));
    assert_eq!(asked(own, 16, 7, 1024), (16, 7, 24));
    assert_eq!(asked(own, 0, 132, 32), (24, 23, 2));
    assert_eq!(asked(own, 1, 1, 0), (2, 1, 24));
    assert_eq!(asked(own.of_casts(4), 12, 0, 0), (12, 6, 24));
    let combine = Grid::new(&facts(2, Some(8)), &Shapes::default(), COMBINE, 64, H200);
    let warps =
        |send_blocks, blocks| combine.asked(Launch { blocks, send_blocks, ..Launch::default() }, COMBINE).send_warps(2);
    assert_eq!((warps(0, 0), warps(0, 24), warps(0, 32), warps(6, 16)), (Some(3), Some(3), None, None));
    assert_eq!((own.send_warps(4), combine.send_warps(4), combine.send_warps(1)), (None, Some(7), None));
    let alone = Grid::new(&facts(1, None), &Shapes::default(), DISPATCH, 64, H200);
    assert_eq!(asked(alone, 16, 7, 0), (16, 0, 24));
}
