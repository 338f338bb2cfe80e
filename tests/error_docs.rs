//! `docs/errors.md` lists every refusal, the sources produce no others, the C tests provoke each, and the other
//! documents quote no others.
//!
//! A literal such as "must be {what}" is a pattern: braces match anything, in the sources and in the tables.

#![allow(clippy::unwrap_used)] // A test.

mod sources;

use std::collections::BTreeSet;

const DOCUMENT: &str = "docs/errors.md";

/// The sources of the texts of refused arguments.
const REFUSING: [&str; 2] = ["abi/common/src", "abi/first/src"];

/// The sources of failures caused by the machine, NCCL, CUDA or another rank: the core, which has no words for
/// arguments.
const FAILING: [&str; 3] = ["src/backend", "src/rule", "src/session"];

/// A file there without refusals: the line about a group, which `docs/env.md` shows.
const NOT_FAILING: &str = "src/session/about.rs";

/// Texts in those sources that the document omits.
const NOT_LISTED: [&str; 7] = [
    // In the file, but returned by no function.
    "\0NCCL EP version ",
    // Stands in for a missing system text.
    "no text",
    "unknown loader error",
    // The targets of links.
    "/memfd:nccl_ep (deleted)",
    "/memfd:ncclep_hostsim (deleted)",
    // In an assertion, and in an attribute.
    "a counter outside the window's header",
    "the context is left when this is dropped",
];

/// Literals whose variable part is the rule itself; a separate literal must follow.
const PREFIXES: [&str; 3] = ["must be at least ", "must be at most ", "must be "];

/// One row of a table of refusals.
struct Row {
    id: String,
    argument: String,
    rule: String,
    result: String,
}

fn rows() -> Vec<Row> {
    let document = sources::read(DOCUMENT);
    document.lines().filter_map(row).collect()
}

/// A row of five cells whose first is an id.
fn row(line: &str) -> Option<Row> {
    let cells: Vec<&str> = line.strip_prefix('|')?.strip_suffix('|')?.split('|').map(str::trim).collect();
    let [id, argument, rule, result, _] = cells[..] else { return None };
    let own = |text: &str| text.to_owned();
    let argument = argument.trim_matches('`');
    is_id(id).then(|| Row { id: own(id), argument: own(argument), rule: own(rule), result: own(result) })
}

/// Words of lower-case letters and digits, joined by hyphens.
fn is_id(text: &str) -> bool {
    let is_word = |word: &str| !word.is_empty() && word.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit());
    text.contains('-') && text.split('-').all(is_word)
}

fn literals_below(directories: &[&str]) -> Vec<String> {
    directories
        .iter()
        .flat_map(|directory| sources::files(directory, &[".rs"]))
        .flat_map(|file| sources::string_literals(sources::parsed(&file), ""))
        .collect()
}

/// The fixed parts of a pattern.
fn fixed_parts(pattern: &str) -> Vec<&str> {
    pattern.split('{').flat_map(|part| part.rsplit('}').next()).collect()
}

/// Whether the parts occur in `text` one after the other.
fn in_order(parts: &[&str], text: &str) -> bool {
    let mut rest = Some(text);
    for part in parts {
        rest = rest.and_then(|rest| rest.split_once(part)).map(|(_, after)| after);
    }
    rest.is_some()
}

/// Whether the fixed parts of `pattern` occur in `text` one after the other.
fn occurs_in(pattern: &str, text: &str) -> bool {
    in_order(&fixed_parts(pattern), text)
}

/// Whether a pattern is specific enough to search for: it has fixed words.
fn is_text(literal: &str) -> bool {
    let words = fixed_parts(literal).concat();
    words.trim().contains(' ') && words.chars().filter(char::is_ascii_alphabetic).count() >= 6
}

/// Whether `pattern` produces exactly `text`.
fn gives(pattern: &str, text: &str) -> bool {
    let parts = fixed_parts(pattern);
    let [first, inner @ .., last] = &parts[..] else { return parts == [text] };
    let rest = text.strip_prefix(first).and_then(|rest| rest.strip_suffix(last));
    rest.is_some_and(|rest| in_order(inner, rest))
}

/// Whether a source can produce the rule of `row`, alone or together with its argument.
fn is_made(row: &Row, literals: &[String]) -> bool {
    let whole = format!("{}: {}", row.argument, row.rule);
    let rest = PREFIXES.iter().find_map(|prefix| row.rule.strip_prefix(prefix));
    let is_generic =
        |literal: &str| PREFIXES.iter().any(|prefix| literal.strip_prefix(prefix).is_some_and(|l| l == "{what}"));
    literals.iter().any(|literal| {
        let spelled_out = is_text(literal) && !is_generic(literal);
        rest == Some(literal.as_str()) || (spelled_out && (gives(literal, &row.rule) || gives(literal, &whole)))
    })
}

#[test]
fn every_rule_of_the_tables_is_made_by_the_sources() {
    let literals = literals_below(&["src", REFUSING[0], REFUSING[1]]);
    let rows = rows();
    assert!(rows.len() > 200, "only {} rows were understood", rows.len());
    let unknown: Vec<_> = rows.iter().filter(|row| !is_made(row, &literals)).map(|row| &row.id).collect();
    assert!(unknown.is_empty(), "no source says what {DOCUMENT} says in {unknown:?}");
}

/// Fails if the document lacks a text of the directories' files, other than in arguments of functions named `skipped`.
fn assert_listed(directories: &[&str], skipped: &str) {
    // The document's whole texts are "argument: rule", which tables keep in two cells.
    let document = sources::read(DOCUMENT).replace("` | ", ": ").replace('`', "");
    let files = directories.iter().flat_map(|directory| sources::files(directory, &[".rs"]));
    let missing: Vec<(String, String)> = files
        .filter(|file| !file.ends_with("_tests.rs") && file != NOT_FAILING)
        .flat_map(|file| {
            let literals = sources::string_literals(sources::parsed(&file), skipped);
            literals.into_iter().map(move |literal| (file.clone(), literal))
        })
        .filter(|(_, literal)| is_text(literal) && !NOT_LISTED.contains(&literal.as_str()))
        .filter(|(_, literal)| !document.lines().any(|line| occurs_in(literal, line)))
        .collect();
    assert!(missing.is_empty(), "{DOCUMENT} lacks {missing:#?}");
}

#[test]
fn every_text_of_the_interface_stands_in_the_document() {
    assert_listed(&REFUSING, "");
}

#[test]
fn every_text_of_the_core_stands_in_the_document() {
    // No test can provoke the texts of `Error::internal`.
    assert_listed(&FAILING, "internal");
}

/// Whether the result of `row` repeats an earlier failure of its group.
fn repeats_a_failure(row: &Row) -> bool {
    row.id.ends_with("-group-failed") && row.result == "the failure's own"
}

#[test]
fn ids_are_unique_and_results_are_nccls() {
    let rows = rows();
    let ids: BTreeSet<&str> = rows.iter().map(|row| row.id.as_str()).collect();
    assert_eq!(ids.len(), rows.len());
    let header = sources::read("c_tests/suites/abi/layout.h");
    for row in rows.iter().filter(|row| !repeats_a_failure(row)) {
        assert!(header.contains(&format!("VALUE({}, ", row.result)), "{}: {}", row.id, row.result);
    }
}

#[test]
fn the_c_tests_provoke_exactly_the_ids_of_the_tables() {
    let provoked: BTreeSet<String> = sources::files("c_tests/suites/errors", &[".c"])
        .into_iter()
        .flat_map(|file| sources::read(&file).split('"').map(str::to_owned).collect::<Vec<_>>())
        .filter(|literal| is_id(literal))
        .collect();
    let listed: BTreeSet<String> = rows().into_iter().map(|row| row.id).collect();
    assert_eq!(provoked, listed);
}

/// What a document quotes: lines that begin with a function and a colon, also in comments, and the code in the first
/// column of tables of texts.
fn quotes(document: &str) -> Vec<String> {
    let mut found = Vec::new();
    let mut is_table = false;
    for line in document.replace("\n    (", " (").lines() {
        is_table = line.starts_with("| text |") || is_table && line.starts_with('|');
        let call = line.trim_start_matches(['/', ' ']);
        if is_table {
            found.extend(code(line.split('|').nth(1).unwrap()));
        } else if call.starts_with("ncclEp") && call.split_once(": ").is_some_and(|(name, _)| !name.contains(' ')) {
            found.push(call.to_owned());
        }
    }
    found
}

/// What `text` has between backticks.
fn code(text: &str) -> impl Iterator<Item = String> {
    text.split('`').skip(1).step_by(2).map(|code| code.replace('\n', " "))
}

/// `text` with `#` for each number and, in a pattern, for `{n}`.
fn without_numbers(text: &str) -> String {
    let mut found = String::new();
    for c in text.chars() {
        found.push(if c.is_ascii_digit() { '#' } else { c });
        while found.ends_with("##") {
            found.pop();
        }
    }
    ('A'..='z').fold(found, |text, letter| text.replace(&format!("{{{letter}}}"), "#"))
}

/// The texts of the document: whole refusals, their parts, and examples.
fn texts() -> BTreeSet<String> {
    let document = sources::read(DOCUMENT);
    let cells = document.lines().flat_map(|line| line.split('|').map(|cell| cell.trim().to_owned()));
    let whole = rows().into_iter().map(|row| format!("{}: {}", row.argument, row.rule));
    code(&document).chain(cells).chain(whole).map(|text| without_numbers(&text)).collect()
}

/// Whether `quote` is one of `texts`, perhaps behind names of calls and in front of what was found, or a pattern of
/// them in which other such quotes fill the braces. `..` stands for any.
fn is_said(quote: &str, texts: &BTreeSet<String>) -> bool {
    if let Some((call, rest)) = quote.split_once(": ")
        && call.starts_with("ncclEp")
        && texts.contains(call)
    {
        return is_said(rest, texts);
    }
    let rule = quote.split(" (got ").next().unwrap();
    let fills = |pattern: &String| {
        let is_pattern = pattern.contains('{') && is_text(pattern);
        let fillings = is_pattern.then(|| fillings(pattern, rule)).flatten();
        fillings.is_some_and(|all| all.iter().all(|filling| is_said(filling, texts)))
    };
    rule == ".." || texts.contains(rule) || texts.iter().any(fills)
}

/// What stands in the place of the braces of `pattern`, if it produces `text`.
fn fillings<'a>(pattern: &str, text: &'a str) -> Option<Vec<&'a str>> {
    let parts = fixed_parts(pattern);
    let mut rest = text.strip_prefix(parts[0])?;
    let mut found = Vec::new();
    for part in &parts[1..] {
        let (filling, after) = if part.is_empty() { (rest, "") } else { rest.split_once(part)? };
        found.push(filling);
        rest = after;
    }
    rest.is_empty().then_some(found)
}

#[test]
fn the_documents_quote_texts_of_the_tables_word_by_word() {
    let texts = texts();
    let documents = sources::files("docs", &[".md"]).into_iter().chain(["README.md".to_owned()]);
    let quotes: Vec<String> = documents
        .filter(|document| document != DOCUMENT)
        .flat_map(|document| quotes(&sources::read(&document)))
        .map(|quote| without_numbers(&quote))
        .collect();
    assert!(quotes.len() >= 19, "only {} quotes were understood", quotes.len());
    for quote in quotes {
        assert!(is_said(&quote, &texts), "{DOCUMENT} does not have {quote}");
        let rule = quote.split(" (got ").next().unwrap();
        for word in rule.split([' ', ':', ',', '.']).filter(|word| !word.is_empty()) {
            let other = rule.replacen(word, "changed", 1);
            assert!(!is_said(&other, &texts), "{DOCUMENT} seems to have {other}");
        }
    }
}

#[test]
fn literals_are_found_and_those_of_defects_are_not() {
    let source: syn::File = syn::parse_quote! {
        const A: &str = f(("one", b"t\"wo"), Error::internal(format!("no {}", g(1))), "yes");
    };
    assert_eq!(sources::string_literals(source, "internal"), ["one", "t\"wo", "yes"]);
}

#[test]
fn patterns_fit_with_anything_in_braces() {
    assert!(occurs_in("is not a {kind} of this library", "is not a group of this library"));
    assert!(!occurs_in("is not a {kind} of this library", "is not a group"));
    assert!(gives("rank {rank} refused: {text}", "rank 3 refused: config: must not be NULL"));
    assert!(!gives("is required", "is required today"));
    assert!(!gives("rank {rank} refused", "rank 3 refused: config"));
    let literals = ["must be {what}", "the handle's top-k"].map(str::to_owned);
    let row = |rule: &str| row(&format!("| an-id | `x` | {rule} | ncclInvalidArgument |  |")).unwrap();
    assert!(is_made(&row("must be the handle's top-k"), &literals));
    assert!(!is_made(&row("must be something else"), &literals));
}
