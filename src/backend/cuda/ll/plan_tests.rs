use super::*;
use crate::backend::cuda::ll::chunks::{self, ChunkSize};
use crate::backend::cuda::ll::launch::DISPATCH_LEAST_THREADS;
use crate::backend::cuda::params::ll::{LL_COMBINE_QUEUE_THREADS, LL_FEW_COMBINE_THREADS, LL_FEW_DISPATCH_THREADS};
use crate::model::node_view::tests::view;
use crate::model::ops::{HandleForm, IntWidth};
use crate::model::tensor::RowType;
use crate::model::tensor::{DType, DevPtr};
use crate::tuning::{Choice, Tuning};

fn one_node(ranks: usize) -> NodeView {
    view(&"a".repeat(ranks), 0)
}

fn two_nodes(ranks: usize) -> NodeView {
    let (first, second) = (ranks.div_ceil(2), ranks / 2);
    view(&("a".repeat(first) + &"b".repeat(second)), 0)
}

fn facts(max_tokens: usize, ll_combine: LlCombineMode) -> GroupFacts {
    GroupFacts {
        ranks: 8,
        experts: 256,
        max_tokens: Some(max_tokens),
        row_bytes: 14_336,
        ll_combine,
        ..GroupFacts::SAMPLE
    }
}

#[test]
fn the_common_configuration_fits_64_mib() {
    let plan = LlPlan::new(&facts(128, LlCombineMode::Reduce), &one_node(8)).unwrap();
    let handle = plan.handle_memory(8, HandleForm::default());
    assert_eq!(plan.view_bytes(), 14 << 20);
    let bytes = plan.bytes + handle.bytes;
    assert!(bytes <= 64 << 20, "{bytes}");
}

#[test]
fn the_state_of_views_is_behind_the_banks() {
    let one = LlPlan::new(&facts(50, LlCombineMode::Reduce), &one_node(8)).unwrap();
    let layout = one.layout(4096);
    let state = one.view_state(4096).unwrap();
    assert!((layout.banks + 4 * layout.bank_bytes) as usize <= state);
    assert!(state + size_of::<LlViewState>() <= 4096 + one.bytes);
    let several = LlPlan::new(&facts(50, LlCombineMode::Reduce), &two_nodes(8)).unwrap();
    assert_eq!(several.view_state(0), None);
}

#[test]
fn the_largest_message_has_a_row_and_the_most_ids_of_each_token() {
    let facts = facts(128, LlCombineMode::Reduce);
    let plan = LlPlan::new(&facts, &two_nodes(8)).unwrap();
    assert_eq!(plan.most_message_bytes(), 32 + 128 * (14_336 + 32 * 12));
}

#[test]
fn what_kernels_cannot_count_is_refused() {
    let refused = |ranks, local_experts, tokens| {
        let facts = GroupFacts { ranks, experts: ranks * local_experts, ..facts(tokens, LlCombineMode::Reduce) };
        LlPlan::new(&facts, &one_node(facts.ranks)).is_err()
    };
    assert!(!refused(1, 4095, 4) && refused(1, 4096, 4));
    assert!(!refused(8, 752, 4) && refused(8, 753, 4));
    assert!(!refused(8, 2, 131_071) && refused(8, 2, 131_072));
    assert!(!refused(1, 2048, 1_048_575) && refused(1, 2049, 1_048_575));
    let rows_of = |row_bytes| GroupFacts { row_bytes, ..facts(4, LlCombineMode::Reduce) };
    assert!(LlPlan::new(&rows_of(15 << 20), &one_node(8)).is_ok());
    assert!(LlPlan::new(&rows_of((15 << 20) + 16), &one_node(8)).is_err());
}

#[test]
fn regions_do_not_overlap() {
    for mode in [LlCombineMode::Reduce, LlCombineMode::Exact] {
        let plan = LlPlan::new(&facts(50, mode), &one_node(8)).unwrap();
        let layout = plan.layout(4096);
        assert!(layout.acks >= 4096);
        assert!(layout.acks + 3 * 8 * 8 <= layout.banks);
        assert!(plan.rows_bytes as u64 <= layout.flags);
        assert!(layout.flags < layout.counts && layout.counts < layout.entries);
        assert!(layout.entries + 2 * 8 * 50 * 32 * 8 <= layout.bank_bytes);
        assert!(layout.banks + 4 * layout.bank_bytes <= 4096 + plan.bytes as u64);
        assert!(plan.with_sentinel().all(|(start, bytes)| start + bytes <= plan.bytes));
    }
}

#[test]
fn measured_grids_have_threads_for_every_role() {
    let choice = |threads| Choice { blocks: 4, threads, send_blocks: 4 };
    let possible = || DISPATCH_LEAST_THREADS..=LL_DISPATCH_THREADS;
    for (requested, given) in [(32, 160), (160, 160), (256, 256), (1024, 512)] {
        assert_eq!(Grid::chosen(choice(requested), possible()).threads, given);
    }
}

fn routing(tokens: usize) -> Routing {
    Routing { ids: DevPtr(8), width: IntWidth::Bits64, tokens, top_k: 2, form: HandleForm::default() }
}

#[test]
fn chunks_cover_every_row() {
    let plan = LlPlan::new(&facts(8, LlCombineMode::Reduce), &one_node(8)).unwrap();
    let routing = routing(3);
    for hidden in [8, 16, 1000, 1024, 1032, 7168] {
        let row = RowType { dtype: DType::Bfloat16, hidden };
        let shape = plan.of_handle(&routing, 132).unwrap().shape(row.into(), ChunkSize::Large);
        assert_eq!(shape.chunk_bytes % 16, 0);
        assert!(shape.chunk_bytes as usize <= chunks::CHUNK_BYTES);
        assert!(shape.chunks * shape.chunk_bytes >= shape.row_bytes);
        assert!((shape.chunks - 1) * shape.chunk_bytes < shape.row_bytes);
    }
}

fn dispatch_grid(plan: &LlPlan, tokens: usize, multiprocessors: u32) -> (Grid, u32) {
    plan.dispatch_grid(tokens, multiprocessors, MULTIPROCESSORS_PER_SENDER, LL_DISPATCH_THREADS)
}

/// The shapes of a tuning file with these entries, for 8 ranks.
fn shapes(entries: &str) -> Shapes {
    let head = r#""format": "nccl_ep tuning", "version": 1, "gpu": "G", "ranks": 8"#;
    let file = format!(r#"{{{head}, "entries": [{entries}]}}"#);
    Tuning::parse(&file, "G", 8, 132).unwrap().shapes
}

#[test]
fn a_measured_grid_goes_first() {
    let shapes = shapes(
        r#"{"operation": "ll_dispatch", "tokens": 16, "blocks": 20, "threads": 1024, "send_blocks": 5},
        {"operation": "ll_combine", "tokens": 16, "blocks": 7, "threads": 64, "send_blocks": 7}"#,
    );
    let own = LlPlan::new(&facts(1024, LlCombineMode::Reduce), &one_node(8)).unwrap();
    let plan = own.clone().tuned(&shapes);
    let split = Grid::split(5, 127, LL_DISPATCH_THREADS);
    assert_eq!(dispatch_grid(&plan, 9, 132), (split, 15));
    assert_eq!(plan.even_combine_grid(16, 132), Grid::shared(7, 64));
    let serving = Grid::shared(132, LL_COMBINE_QUEUE_THREADS);
    assert_eq!(plan.combine_grid(16, 132), serving);
    assert_eq!(dispatch_grid(&plan, 17, 132), dispatch_grid(&own, 17, 132));
}

#[test]
fn a_measured_grid_over_nodes_is_that_of_the_most_tokens_of_a_rank() {
    let shapes = shapes(
        r#"{"operation": "ll_dispatch", "tokens": 128, "blocks": 120, "threads": 1024, "send_blocks": 30},
        {"operation": "ll_combine", "tokens": 128, "blocks": 48, "threads": 64, "send_blocks": 48}"#,
    );
    let own = LlPlan::new(&facts(128, LlCombineMode::Reduce), &two_nodes(8)).unwrap();
    let plan = own.tuned(&shapes);
    for tokens in [1, 128] {
        let split = Grid::split(24, 72, LL_DISPATCH_THREADS);
        assert_eq!(dispatch_grid(&plan, tokens, 96), (split, 72));
        assert_eq!(plan.combine_grid(tokens, 96), Grid::shared(48, 64));
    }
}

#[test]
fn a_rank_with_few_tokens_serves_those_of_the_others() {
    for max_tokens in [1, 128, 1024] {
        let plan = LlPlan::new(&facts(max_tokens, LlCombineMode::Reduce), &one_node(8)).unwrap();
        let (even, _) = dispatch_grid(&plan, max_tokens, 132);
        let even_combine = plan.combine_grid(max_tokens, 132);
        for tokens in [0, 1, 3, 16, 128].into_iter().filter(|&it| it <= max_tokens) {
            let (grid, notify_blocks) = dispatch_grid(&plan, tokens, 132);
            assert!(grid.blocks == even.blocks && grid.receive_blocks >= even.receive_blocks);
            assert!((1..=grid.receive_blocks).contains(&notify_blocks));
            let combine = plan.combine_grid(tokens, 132);
            assert!(combine.send_blocks >= even_combine.send_blocks);
        }
    }
}

#[test]
fn grids_grow_with_the_work_and_stay_resident() {
    for multiprocessors in [1, 2, 108, 132] {
        let mut last = 0;
        for tokens in [1, 4, 5, 16, 64, 128, 256, 1024] {
            let plan = LlPlan::new(&facts(tokens, LlCombineMode::Reduce), &one_node(8)).unwrap();
            let handle = plan.of_handle(&routing(tokens), multiprocessors).unwrap();
            let dispatch = handle.dispatch.grid;
            for grid in [dispatch, handle.scaled_dispatch.grid, handle.cast_dispatch.grid, handle.combine] {
                assert!(grid.blocks <= multiprocessors);
                assert!(grid.send_blocks >= 1 && grid.receive_blocks >= 1);
                assert!(grid.send_blocks + grid.receive_blocks >= grid.blocks);
            }
            assert!(dispatch.blocks >= last);
            last = dispatch.blocks;
        }
    }
}

#[test]
fn a_callers_channels_bound_the_blocks() {
    let facts = GroupFacts { channels: Some(4), ..facts(128, LlCombineMode::Reduce) };
    let plan = LlPlan::new(&facts, &one_node(8)).unwrap();
    let handle = plan.of_handle(&routing(128), 132).unwrap();
    assert_eq!((handle.dispatch.grid.blocks, handle.combine.blocks), (8, 8));
    assert_eq!(handle.cast_dispatch.grid.blocks, 8);
}

#[test]
fn few_tokens_have_blocks_of_each_kind() {
    for (ranks, max_tokens) in [(1, 1), (1, 64), (2, 1), (2, 16), (2, 32), (2, 64), (4, 4), (4, 16), (8, 2), (8, 500)] {
        let facts = GroupFacts { ranks, ..facts(max_tokens, LlCombineMode::Reduce) };
        let plan = LlPlan::new(&facts, &one_node(ranks)).unwrap();
        let most = max_tokens.min(128 / ranks);
        for (tokens, multiprocessors) in [(0, 5), (1, 5), (1, 132), (8.min(most), 132), (most, 5), (most, 132)] {
            let handle = plan.of_handle(&routing(tokens), multiprocessors).unwrap();
            let Some(few) = handle.few else {
                assert!(tokens < max_tokens && ranks * tokens > if ranks <= 2 { 32 } else { 64 });
                continue;
            };
            let lengths = [few.short_bytes, few.short_bytes + 1];
            let kinds = lengths.iter().flat_map(|bytes| [true, false].map(|by_rank| (*bytes, by_rank)));
            for (dispatch, by_rank) in kinds.map(|(bytes, by_rank)| (few.of_rows(bytes, by_rank), by_rank)) {
                let Grid { blocks, threads, send_blocks, receive_blocks } = dispatch.grid;
                assert!(threads.is_multiple_of(32) && threads <= LL_FEW_DISPATCH_THREADS);
                assert!(blocks <= multiprocessors && send_blocks + receive_blocks < blocks && receive_blocks >= 2);
                assert!(tokens == 0 || send_blocks >= 1);
                let serving = dispatch.serve_blocks;
                assert_eq!(serving > 0, tokens < max_tokens);
                assert!(serving <= if by_rank && ranks > 2 { multiprocessors / 2 } else { multiprocessors });
                assert!(tokens == 0 || serving + 1 < receive_blocks);
            }
            let Some(Grid { blocks, threads, send_blocks, receive_blocks }) = few.combine else {
                assert!(ranks * tokens > if ranks <= 2 && tokens == max_tokens { 32 } else { 16 });
                continue;
            };
            assert!(threads.is_multiple_of(32) && threads <= LL_FEW_COMBINE_THREADS);
            assert!(blocks <= multiprocessors && send_blocks + receive_blocks < blocks && send_blocks >= 1);
            assert!(tokens == 0 || receive_blocks >= 1);
        }
    }
}

#[test]
fn not_all_operations_are_of_few_tokens() {
    let few = |plan: &LlPlan, top_k, multiprocessors| {
        let routing = Routing { top_k, ..routing(1) };
        plan.of_handle(&routing, multiprocessors).unwrap().few.is_some()
    };
    let plan = |ranks, max_tokens, view: &NodeView| {
        LlPlan::new(&GroupFacts { ranks, ..facts(max_tokens, LlCombineMode::Reduce) }, view).unwrap()
    };
    let suits = plan(8, 2, &one_node(8));
    assert!(few(&suits, 31, 5) && !few(&suits, 32, 5) && !few(&suits, 31, 4));
    assert!(few(&plan(8, 17, &one_node(8)), 2, 132) && !few(&plan(8, 2, &two_nodes(8)), 2, 132));
    assert!(!few(&plan(16, 1, &one_node(16)), 2, 132));
    let entry = r#"{"operation": "ll_combine", "tokens": 1, "blocks": 7, "threads": 64, "send_blocks": 7}"#;
    assert!(!few(&suits.tuned(&shapes(entry)), 2, 132));
}
