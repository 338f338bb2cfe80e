//! Unit tests of the tuning file: accepted, rounded up, and refused values.

use super::*;

const GPU: &str = "NVIDIA H200";

fn text(entries: &str) -> String {
    format!(
        r#"{{"format": "nccl_ep tuning", "version": 1, "gpu": "{GPU}", "ranks": 4,
            "hidden": 7168, "entries": [{entries}]}}"#
    )
}

fn entry(operation: &str, tokens: u64, blocks: u64) -> String {
    format!(
        r#"{{"operation": "{operation}", "tokens": {tokens}, "blocks": {blocks}, "threads": 512,
            "send_blocks": 2, "microseconds": 12.5}}"#
    )
}

fn parse(text: &str) -> Result<Tuning, String> {
    Tuning::parse(text, GPU, 4, 132)
}

#[test]
fn token_counts_are_rounded_up_to_the_next_entry() {
    let entries = [
        entry("ll_dispatch", 8, 16),
        entry("ll_dispatch", 64, 132),
        entry("ht_combine", 4096, 24),
        r#"{"operation": "ht_combine", "tokens": 512, "default": true}"#.to_owned(),
    ];
    let shapes = parse(&text(&entries.join(","))).unwrap().shapes;
    let blocks = |operation, tokens| shapes.choice(operation, tokens).map(|found| found.blocks);
    for tokens in [0, 1, 7, 8] {
        assert_eq!(blocks(Operation::LlDispatch, tokens), Some(16));
    }
    assert_eq!(blocks(Operation::LlDispatch, 9), Some(132));
    assert_eq!(blocks(Operation::LlDispatch, 65), None);
    assert_eq!(blocks(Operation::LlCombine, 1), None);
    assert_eq!(blocks(Operation::HtCombine, 512), None);
    assert_eq!(blocks(Operation::HtCombine, 513), Some(24));
    assert_eq!(blocks(Operation::HtCombine, usize::MAX >> 1), None);
    let found = shapes.choice(Operation::LlDispatch, 1).unwrap();
    assert_eq!((found.threads, found.send_blocks), (512, 2));
}

/// A Python test compares the same file with what `nccl_ep.tune` writes.
#[test]
fn the_writers_sample_is_read() {
    let shapes = parse(include_str!("../../python/tests/data/tuning.json")).unwrap().shapes;
    let shape = Choice { blocks: 32, threads: 512, send_blocks: 8 };
    assert_eq!(shapes.choice(Operation::LlDispatch, 5), Some(shape));
    assert_eq!(shapes.choice(Operation::LlCombine, 5), None);
}

#[test]
fn another_machine_or_version_is_refused() {
    let good = text("");
    assert_eq!(parse(&good), Ok(Tuning::default()));
    for (from, to, reason) in [
        ("NVIDIA H200", "NVIDIA B200", "it is for NVIDIA B200, and this is NVIDIA H200"),
        (r#""ranks": 4"#, r#""ranks": 8"#, "it is for 8 ranks, and these are 4"),
        (r#""version": 1"#, r#""version": 2"#, "it has version 2, and we know 1"),
        ("nccl_ep tuning", "recipe", "its format is not"),
        (r#""gpu""#, r#""cpu""#, r#""gpu" is missing"#),
        ("entries", "exits", "it has no list of entries"),
        (r#""entries""#, r#""choices": {}, "entries""#, "its choices are no list"),
        (r#""entries""#, r#""choices": null, "entries""#, "its choices are no list"),
        ("[", "", "expected"),
    ] {
        let refused = parse(&good.replacen(from, to, 1)).unwrap_err();
        assert!(refused.contains(reason), "{refused}");
    }
}

#[test]
fn of_several_files_in_one_that_for_the_machine_counts() {
    let of = |ranks: u32, blocks| {
        text(&entry("ll_dispatch", 8, blocks)).replacen(r#""ranks": 4"#, &format!(r#""ranks": {ranks}"#), 1)
    };
    let head = r#""format": "nccl_ep tuning", "version": 1"#;
    let several = |parts: &[String]| format!(r#"{{{head}, "files": [{}]}}"#, parts.join(","));
    let found = parse(&several(&[of(2, 8), of(4, 16)])).unwrap().shapes.choice(Operation::LlDispatch, 8).unwrap();
    assert_eq!(found.blocks, 16);
    let refused = parse(&several(&[of(2, 8), of(8, 16)])).unwrap_err();
    assert_eq!(refused, "none of its 2 parts is for 4 ranks on NVIDIA H200");
    assert!(parse(&several(&[])).is_err());
}

#[test]
fn what_a_file_says_is_cut_and_cleaned() {
    let long = "x\\u001b".repeat(1 << 20);
    let other = text("").replacen(GPU, &long, 1);
    let unknown = text(&entry("ll_dispatch", 8, 16).replacen("ll_dispatch", &long, 1));
    for text in [other, unknown] {
        let refused = parse(&text).unwrap_err();
        assert!(refused.contains("x?x?") && refused.len() < 200, "{refused}");
        assert!(!refused.contains('\x1b'), "{refused}");
    }
}

#[test]
fn shapes_that_cannot_run_are_refused() {
    let good = entry("ll_dispatch", 8, 16);
    assert!(parse(&text(&good)).is_ok());
    for (from, to, reason) in [
        (r#""blocks": 16"#, r#""blocks": 133"#, "blocks must be 1 to 132"),
        (r#""blocks": 16"#, r#""blocks": 1"#, "send_blocks must be 1 to blocks"),
        (r#""blocks": 16"#, r#""blocks": -1"#, r#""blocks" is missing or no natural"#),
        (r#""threads": 512"#, r#""threads": 500"#, "threads must be a multiple"),
        (r#""tokens": 8"#, r#""tokens": 9"#, "tokens must be a power of two"),
        ("ll_dispatch", "ll_dance", r#"unknown operation "ll_dance""#),
    ] {
        let refused = parse(&text(&good.replacen(from, to, 1))).unwrap_err();
        assert!(refused.starts_with("entry 0: "), "{refused}");
        assert!(refused.contains(reason), "{refused}");
    }
}

fn learned(choices: &str) -> Result<Learned, String> {
    let text = text("").replacen(r#""entries""#, &format!(r#""choices": [{choices}], "entries""#), 1);
    Ok(parse(&text)?.choices)
}

#[test]
fn choices_are_for_rows_as_they_were_measured() {
    let shape = r#""blocks": 16, "threads": 512, "send_blocks": 8"#;
    let of = |operation, tokens, rest: &str| format!(r#"{{"operation": "{operation}", "tokens": {tokens}, {rest}}}"#);
    let found = learned(
        &[
            of("ht_dispatch", 8, r#""variant": "ht.ring", "memory": "symmetric", "row_bytes": 64"#),
            of("ht_dispatch", 64, &format!(r#""variant": "ht.direct", "memory": "symmetric", {shape}"#)),
            of("ll_dispatch", 8, &format!(r#""layout": "view", {shape}"#)),
            of("ll_combine", 8, &format!(r#""variant": "ll.reduce", "memory": "plain", {shape}"#)),
            of("ll_combine", 16, r#""variant": "ll.exact""#),
            of("ll_combine", 16, r#""default": true, "layout": "rank""#),
        ]
        .join(","),
    )
    .unwrap();
    let rows = Rows { row_bytes: 64, layout: None, mapped: true };
    let chosen = |operation, tokens, rows| {
        let Best { variant, shape } = found.choice(operation, tokens, rows);
        (variant.map(Variant::name), shape.map_or(0, |shape| shape.blocks))
    };
    assert_eq!(chosen(Operation::HtDispatch, 3, rows), (Some("ht.ring"), 0));
    assert_eq!(chosen(Operation::HtDispatch, 3, Rows { row_bytes: 32, ..rows }), (Some("ht.direct"), 16));
    assert_eq!(chosen(Operation::HtDispatch, 9, rows), (Some("ht.direct"), 16));
    assert_eq!(chosen(Operation::HtDispatch, 65, rows), (None, 0));
    assert_eq!(chosen(Operation::HtDispatch, 3, Rows { mapped: false, ..rows }), (None, 0));
    let view = Rows { layout: Some(RowLayout::of(true, true)), ..rows };
    assert_eq!(chosen(Operation::LlDispatch, 8, view), (None, 16));
    assert_eq!(chosen(Operation::LlDispatch, 8, Rows { layout: Some(RowLayout::of(true, false)), ..rows }), (None, 0));
    // How ranks sum does not depend on their local tokens or memory.
    let by_expert = Rows { layout: Some(RowLayout::of(false, false)), ..rows };
    for (tokens, mapped, blocks) in [(3, false, 16), (3, true, 0), (16, true, 0), (17, false, 0), (99, true, 0)] {
        let found = chosen(Operation::LlCombine, tokens, Rows { mapped, ..by_expert });
        assert_eq!(found, (Some("ll.exact"), blocks), "{tokens} {mapped}");
    }
}

#[test]
fn choices_that_make_no_sense_are_refused() {
    for (wrong, reason) in [
        (r#"{"operation": "ll", "tokens": 1}"#, "choice 0: unknown operation \"ll\""),
        (r#"{"operation": "ll_combine"}"#, "choice 0: \"tokens\" is missing or no natural number"),
        (r#"{"operation": "ll_combine", "tokens": 1, "variant": "ht.pull"}"#, "choice 0: unknown variant \"ht.pull\""),
        (r#"{"operation": "ll_combine", "tokens": 1, "layout": "flat"}"#, "choice 0: unknown layout \"flat\""),
        (r#"{"operation": "ll_combine", "tokens": 1, "memory": 3}"#, "choice 0: \"memory\" is missing or no text"),
        (r#"{"operation": "ll_combine", "tokens": 1, "blocks": 3}"#, "choice 0: \"threads\" is missing"),
    ] {
        let found = learned(wrong).unwrap_err();
        assert!(found.starts_with(reason), "{found}");
    }
}
