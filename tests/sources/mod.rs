//! The project's own files as text, for tests that compare sources and documents.

#![allow(dead_code)] // Each test uses a part of it.
#![allow(clippy::unwrap_used)] // A test.

pub mod modules;

use proc_macro2::TokenTree;
use quote::ToTokens;
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

/// The Rust source `file` without its comments and modules of unit tests.
pub fn parsed(file: &str) -> syn::File {
    let source = read(file);
    let is_code = |line: &&str| !line.trim_start().starts_with("//");
    let code: Vec<&str> = source.lines().filter(is_code).collect();
    let mut file = syn::parse_file(&code.join("\n")).unwrap();
    let is_test = |it: &syn::Attribute| it.parse_args::<syn::Ident>().is_ok_and(|condition| condition == "test");
    file.items.retain(|item| !matches!(item, syn::Item::Mod(it) if it.attrs.iter().any(is_test)));
    file
}

/// The texts in Rust code, except in the arguments of functions named `skipped`.
pub fn string_literals(code: impl ToTokens, skipped: &str) -> Vec<String> {
    let mut literals = Vec::new();
    let mut skips = false;
    for token in code.into_token_stream() {
        match &token {
            TokenTree::Group(group) if !skips => literals.extend(string_literals(group.stream(), skipped)),
            TokenTree::Literal(it) => match syn::Lit::new(it.clone()) {
                syn::Lit::Str(it) => literals.push(it.value()),
                syn::Lit::ByteStr(it) => literals.extend(String::from_utf8(it.value())),
                syn::Lit::CStr(it) => literals.extend(it.value().into_string()),
                _ => {}
            },
            _ => {}
        }
        skips = matches!(token, TokenTree::Ident(it) if it == skipped);
    }
    literals
}
