//! The project's own files as text, for tests that compare sources and documents.

#![allow(dead_code)] // Each test uses a part of it.
#![allow(clippy::unwrap_used)] // A test.

pub mod modules;

use std::path::{Path, PathBuf};

/// The repository's root.
pub fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

/// The text of `path`, which is relative to the root.
pub fn read(path: &str) -> String {
    let text = std::fs::read_to_string(root().join(path));
    text.map_err(|error| format!("{path}: {error}")).unwrap()
}

/// All files below `directory` whose name ends in one of `endings`, relative to the root, sorted.
pub fn files(directory: &str, endings: &[&str]) -> Vec<String> {
    let mut found = Vec::new();
    visit(&root().join(directory), endings, &mut found);
    found.sort();
    assert!(!found.is_empty(), "{directory} has no files ending in {endings:?}");
    found
}

fn visit(directory: &Path, endings: &[&str], found: &mut Vec<String>) {
    for entry in std::fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        let relative = path.strip_prefix(root()).unwrap().to_str().unwrap().to_owned();
        if path.is_dir() {
            visit(&path, endings, found);
        } else if endings.iter().any(|ending| relative.ends_with(ending)) {
            found.push(relative);
        }
    }
}

/// Rust source without the unit tests at its end.
pub fn without_unit_tests(source: &str) -> &str {
    let shared = source.split("#[cfg(test)]\npub(crate) mod ").next();
    let source = shared.unwrap_or(source);
    source.split("#[cfg(test)]\nmod ").next().unwrap_or(source)
}

/// The string literals of Rust or C source, comments left out, escapes of line ends and quotes undone.
pub fn string_literals(source: &str) -> Vec<String> {
    let mut literals = Vec::new();
    for line in code_lines(source) {
        let mut rest = line.as_str();
        while let Some((_, after)) = rest.split_once('"') {
            let end = closing_quote(after);
            literals.push(after[..end].replace("\\\"", "\""));
            rest = after.get(end + 1..).unwrap_or_default();
        }
    }
    literals
}

/// Lines without comments; a literal that continues on the next line is joined.
fn code_lines(source: &str) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for line in source.replace("'\"'", "' '").lines() {
        if let Some(open) = lines.last_mut().filter(|last| last.ends_with('\\')) {
            open.pop();
            open.push_str(line.trim_start());
        } else if !line.trim_start().starts_with("//") {
            lines.push(line.to_owned());
        }
    }
    lines
}

fn closing_quote(text: &str) -> usize {
    let mut escaped = false;
    for (index, character) in text.char_indices() {
        match character {
            '"' if !escaped => return index,
            '\\' => escaped = !escaped,
            _ => escaped = false,
        }
    }
    text.len()
}
