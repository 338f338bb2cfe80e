//! Allowed dependencies inside the core: they point down only, and `unsafe` stays at the edges.
//!
//! Crates enforce the coarse rules: no ABI sees the inside of another, and the core sees none. The table has the rules
//! that crates cannot enforce; `docs/architecture.md` explains it, and this test compares it with the sources. Unit
//! tests may use anything.

#![allow(clippy::unwrap_used)] // A test.

mod sources;

use quote::ToTokens;
use sources::modules::{Use, all_uses, is_below, module_files, module_of};

/// Module: what it may use. `x::*` is module `x` and everything below it; any other entry is one module or one item.
/// The longest matching name decides; each module may use itself and everything below itself.
const ARROWS: &str = "
error: model::ids
env: model::*
fork: error::*
log: env
named:
model: named
nvtx: env
tuning: log named
rule: error::* model::*
backend: backend::bootstrap backend::device backend::net::two_sided::replays backend::objects error::* model::*
backend::detached: error::*
backend::device: backend::quiescence error::* model::*
backend::dylib: env
backend::quiescence:
backend::nccl: backend::device backend::dylib error::* log model::*
backend::bootstrap: backend::detached backend::device backend::nccl backend::quiescence
    error::* model::*
backend::net: backend::bootstrap backend::detached backend::device backend::nccl::*
    backend::quiescence error::* model::*
backend::objects: backend::bootstrap error::* model::*
backend::select: backend backend::cuda::CudaPlatform backend::host::HostRuntime backend::nccl error::*
backend::host: backend backend::bootstrap backend::device backend::dylib backend::objects::*
    backend::quiescence error::* model::*
backend::cuda: backend backend::bootstrap backend::device backend::dylib backend::objects::*
    backend::quiescence backend::net::* error::* log model::* tuning::*
session: backend backend::bootstrap backend::device backend::nccl backend::objects
    backend::select env error::* fork log model::* rule::* tuning
";

/// Where `unsafe` is allowed; nowhere else is the lint `unsafe_code` switched off.
const UNSAFE: [&str; 9] = [
    "abi/",
    "src/allocations_tests.rs",
    "src/backend/cuda/driver/",
    "src/backend/dylib.rs",
    "src/backend/host/",
    "src/backend/nccl/",
    "src/fork.rs",
    "src/log/sink.rs",
    "src/nvtx.rs",
];

/// A row of the table.
struct Row {
    name: &'static str,
    uses: Vec<&'static str>,
}

fn rows() -> Vec<Row> {
    let mut rows: Vec<Row> = Vec::new();
    for word in ARROWS.split_whitespace() {
        match word.strip_suffix(':') {
            Some(name) => rows.push(Row { name, uses: Vec::new() }),
            None => rows.last_mut().unwrap().uses.push(word),
        }
    }
    rows
}

/// The row that applies to `module`.
fn row_of<'a>(rows: &'a [Row], module: &str) -> Option<&'a Row> {
    let fits = rows.iter().filter(|row| is_below(module, row.name));
    fits.max_by_key(|row| row.name.len())
}

fn may_use(rows: &[Row], it: &Use) -> bool {
    let Some(own) = row_of(rows, &it.module) else { return false };
    // Modules of one row, such as `session`, see each other; `backend` does not see its siblings.
    let in_own_row = row_of(rows, &it.target).is_some_and(|row| row.name == own.name);
    in_own_row || own.uses.iter().any(|entry| fits(entry, it))
}

/// Whether `entry` of the table allows a use.
fn fits(entry: &str, it: &Use) -> bool {
    match entry.strip_suffix("::*") {
        Some(subtree) => is_below(&it.target, subtree),
        None => entry == it.target || entry == it.path,
    }
}

#[test]
fn modules_use_only_what_the_table_allows() {
    let rows = rows();
    let uses = all_uses("src");
    assert!(uses.len() > 100, "only {} uses were found", uses.len());
    for it in uses {
        assert!(may_use(&rows, &it), "{} uses {}", it.module, it.path);
    }
}

#[test]
fn the_table_allows_only_what_modules_use() {
    let rows = rows();
    let uses = all_uses("src");
    for row in &rows {
        let is_own = |it: &&Use| row_of(&rows, &it.module).is_some_and(|own| own.name == row.name);
        let own: Vec<&Use> = uses.iter().filter(is_own).collect();
        for entry in &row.uses {
            let is_used = own.iter().any(|it| fits(entry, it));
            assert!(is_used, "{} does not use {entry}", row.name);
        }
    }
}

#[test]
fn every_module_has_a_row() {
    let rows = rows();
    for file in module_files("src") {
        let module = module_of("src", &file);
        // `lib.rs` only lists its modules.
        let has_row = module.is_empty() || row_of(&rows, &module).is_some();
        assert!(has_row, "{file} has no row in the table");
    }
}

/// What a group agrees on with the others, and what it uses, must come from one reading of the environment.
#[test]
fn one_module_reads_the_environment() {
    // NCCL reads this variable itself when the library calls it, so the library must read it then, too.
    const AS_NCCL: &str = "src/backend/nccl/network.rs";
    for file in module_files("src") {
        let source = sources::parsed(&file).to_token_stream().to_string();
        let reads = ["env :: var", "use std :: env"].iter().any(|it| source.contains(it));
        let may = file == "src/env.rs" || file == AS_NCCL;
        assert!(may || !reads, "{file} reads the environment");
    }
}

#[test]
fn unsafe_code_is_where_the_list_says() {
    let folders = ["src", "abi"];
    let files = folders.iter().flat_map(|folder| sources::files(folder, &[".rs"]));
    let is_unsafe = |file: &String| sources::read(file).contains("allow(unsafe_code)");
    let found: Vec<String> = files.filter(is_unsafe).collect();
    for file in &found {
        let is_listed = UNSAFE.iter().any(|place| file.starts_with(place));
        assert!(is_listed, "{file} must do without unsafe code");
    }
    for place in UNSAFE {
        let is_used = found.iter().any(|file| file.starts_with(place));
        assert!(is_used, "{place} has no unsafe code");
    }
}

#[test]
fn arrows_go_one_way() {
    let rows = rows();
    let may_use = |module: &str, target: &str| {
        let [module, path, target] = [module, target, target].map(str::to_owned);
        may_use(&rows, &Use { module, path, target })
    };
    assert!(may_use("session::group", "rule::ht"));
    assert!(may_use("session::handle", "session::group"));
    assert!(!may_use("backend::host::ll", "backend::cuda::driver"));
    assert!(!may_use("backend::host::ll", "backend::select"));
    assert!(!may_use("backend", "backend::host"));
    assert!(!may_use("session::group", "backend::host"));
    assert!(!may_use("model::tensor", "rule"));
}
