//! Unit tests of choices: their precedence, and what is skipped.
#![allow(clippy::unwrap_used)]

use super::*;

fn choices(ranks: usize, ll_combine: LlCombineMode, nodes: usize) -> Choices {
    let facts = GroupFacts {
        ranks,
        experts: 8 * ranks,
        max_tokens: Some(16),
        row_bytes: 512,
        ll_combine,
        ..GroupFacts::SAMPLE
    };
    Choices::new(&facts, nodes, Some(132), Learned::default())
}

fn request(variant: u32, [blocks, send_blocks, threads]: [u32; 3]) -> ChoiceRequest {
    ChoiceRequest { variant, launch: Launch { blocks, send_blocks, threads, ..Launch::default() } }
}

fn about(top_k: usize) -> About {
    About { tokens: 4, top_k, row_bytes: 512, mapped: false, layout: None }
}

/// What combines of 4 tokens with `top_k` ids each get.
fn combine(choices: &Choices, top_k: usize) -> Chosen {
    choices.of(Operation::LlCombine, || Some(about(top_k)))
}

fn warnings(choices: &Choices) -> usize {
    choices.warned.lock().len()
}

#[test]
fn the_tuning_file_comes_behind_both() {
    let learned = Learned::parse(
        &serde_json::from_str::<Vec<_>>(
            r#"[
            {"operation": "ll_combine", "tokens": 8, "variant": "ll.exact", "blocks": 24, "threads": 512,
             "send_blocks": 8},
            {"operation": "ll_dispatch", "tokens": 8, "blocks": 200, "threads": 512, "send_blocks": 8}]"#,
        )
        .unwrap(),
    )
    .unwrap();
    let facts = choices(8, LlCombineMode::Reduce, 1).facts;
    let choices = Choices::new(&facts, 1, Some(132), learned);
    let exact = |found: &Chosen| found.sums(2, LlCombineMode::Reduce) == LlCombineMode::Exact;
    let found = combine(&choices, 2);
    assert!(found.launch.blocks == 24 && exact(&found));
    choices.set(Operation::LlCombine, Some(request(0, [16, 0, 0])));
    let found = combine(&choices, 2);
    assert!(found.launch == request(0, [16, 0, 0]).launch && exact(&found));
    choices.set(Operation::LlCombine, Some(request(1, [0; 3])));
    let found = combine(&choices, 2);
    assert!(found.launch.blocks == 0 && !exact(&found));
    choices.set(Operation::LlCombine, None);
    let found = choices.of(Operation::LlDispatch, || Some(about(2)));
    assert_eq!(
        found.launch,
        request(0, [132, 5, 512]).launch,
        "as many blocks as there are, of which the same share sends"
    );
    assert_eq!(warnings(&choices), 0);
}

/// Ranks with other numbers of tokens get other shapes of one file, and must sum alike.
#[test]
fn a_shape_that_does_not_fit_costs_no_variant() {
    let file = |[few, many]: [&str; 2]| {
        let entry = |tokens: usize, rest: &str| {
            format!(r#"{{"operation": "ll_combine", "tokens": {tokens}, "variant": "ll.exact", "blocks": {rest}}}"#)
        };
        let entries = format!("[{}, {}]", entry(16, few), entry(128, many));
        Learned::parse(&serde_json::from_str::<Vec<_>>(&entries).unwrap()).unwrap()
    };
    let of = |learned: Learned, tokens: usize| {
        let facts = GroupFacts { channels: Some(16), ..choices(4, LlCombineMode::Reduce, 1).facts };
        let choices = Choices::new(&facts, 1, None, learned);
        let found = choices.of(Operation::LlCombine, || Some(About { tokens, ..about(2) }));
        assert_eq!(found.sums(2, LlCombineMode::Reduce), LlCombineMode::Exact, "{tokens}");
        (found.launch, warnings(&choices))
    };
    let good = [r#"16, "threads": 512, "send_blocks": 8"#, r#"100, "threads": 512, "send_blocks": 50"#];
    assert_eq!(of(file(good), 16), (request(0, [16, 8, 512]).launch, 0));
    assert_eq!(of(file(good), 128), (request(0, [32, 16, 512]).launch, 0));
    for wrong in [r#"16, "threads": 48, "send_blocks": 8"#, r#"16, "threads": 512, "send_blocks": 17"#] {
        assert_eq!(of(file([good[0], wrong]), 16), (request(0, [16, 8, 512]).launch, 0));
        assert_eq!(of(file([good[0], wrong]), 128), (Launch::default(), 1));
    }
}

#[test]
fn what_is_set_or_selected_keeps_its_variant_without_its_launch() {
    let choices = choices(4, LlCombineMode::Reduce, 1);
    let mut wrong = request(2, [133, 0, 0]);
    wrong.launch.in_order = true;
    let is_exact = || {
        let found = combine(&choices, 2);
        assert_eq!(found.launch, Launch { in_order: true, ..Launch::default() });
        found.sums(2, LlCombineMode::Reduce) == LlCombineMode::Exact
    };
    choices.select(Some(Arc::new(move |_| Some(wrong))));
    assert!(is_exact());
    choices.set(Operation::LlCombine, Some(ChoiceRequest { variant: 1, ..wrong }));
    assert!(!is_exact(), "what is set comes first all the same");
    assert_eq!(warnings(&choices), 1);
}

#[test]
fn an_impossible_choice_falls_to_the_next_with_one_warning() {
    let choices = choices(4, LlCombineMode::Reduce, 1);
    choices.select(Some(Arc::new(|_| Some(request(1, [16, 0, 0])))));
    for (count, wrong) in
        [request(6, [0; 3]), request(3, [0; 3]), request(0, [133, 0, 0]), request(0, [8, 9, 0]), request(0, [0, 0, 48])]
            .into_iter()
            .enumerate()
    {
        choices.set(Operation::LlCombine, Some(wrong));
        for _ in 0..2 {
            assert_eq!(combine(&choices, 2).launch.blocks, 16);
        }
        assert_eq!(warnings(&choices), 1 + count);
    }
    choices.select(None);
    assert_eq!(combine(&choices, 2), Chosen::default());
}

#[test]
fn the_callers_channels_bound_blocks() {
    let mut choices = choices(4, LlCombineMode::Reduce, 1);
    choices.facts.channels = Some(4);
    let choices = Choices::new(&choices.facts, 1, None, Learned::default());
    assert_eq!(choices.most_blocks, Some(8));
    choices.set(Operation::LlCombine, Some(request(0, [9, 0, 0])));
    assert_eq!(combine(&choices, 2), Chosen::default());
}

#[test]
fn a_selector_is_not_asked_again_by_what_it_enqueues() {
    let choices = Arc::new(choices(4, LlCombineMode::Reduce, 1));
    let inner = Arc::clone(&choices);
    choices.select(Some(Arc::new(move |_| {
        assert_eq!(combine(&inner, 2), Chosen::default());
        Some(request(0, [16, 0, 0]))
    })));
    for _ in 0..2 {
        assert_eq!(combine(&choices, 2).launch.blocks, 16);
    }
}
