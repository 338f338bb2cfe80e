//! Boundaries inside the core: dependencies point down only and form no circle, `unsafe` stays at the edges, and no
//! text has a name that only callers of an ABI know.
//!
//! Crates enforce the coarse rules: no ABI sees the inside of another, and the core sees none. The table has the rules
//! that crates cannot enforce; `docs/architecture.md` explains it, and this test compares it with the sources. Unit
//! tests may use anything.

#![allow(clippy::unwrap_used)] // A test.

mod sources;

use quote::ToTokens;
use sources::modules::{Use, all_uses, is_below, module_files, module_of, used_paths, uses_of_children};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;

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
backend: backend::bootstrap backend::device backend::objects error::* model::* tuning
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

/// Of the core and of the stand-ins.
#[test]
fn no_module_leads_back_to_itself() {
    for folder in ["src", "hostsim/src"] {
        let mut uses: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
        for it in all_uses(folder) {
            if it.module != it.target && !it.module.is_empty() {
                uses.entry(it.module).or_default().insert(it.target);
            }
        }
        for (module, child) in uses_of_children(folder) {
            uses.entry(module).or_default().insert(child);
        }
        assert!(uses.len() > 20, "{folder}: {:?}", uses.keys());
        assert_eq!(circle(&uses), None);
    }
}

/// A module of the harness is a header and the source with the same name.
#[test]
fn no_header_of_the_c_harness_leads_back_to_itself() {
    let harness = sources::root().join("c_tests/harness");
    let mut uses: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for entry in fs::read_dir(&harness).unwrap() {
        let path = entry.unwrap().path();
        let module = path.file_stem().unwrap().to_str().unwrap().to_owned();
        let source = fs::read_to_string(&path).unwrap();
        for line in source.lines() {
            let Some(header) = line.strip_prefix("#include \"") else { continue };
            let name = header.trim_start_matches("harness/");
            let target = name.split('.').next().unwrap().to_owned();
            if harness.join(format!("{target}.h")).exists() && target != module {
                uses.entry(module.clone()).or_default().insert(target);
            }
        }
    }
    assert!(uses.contains_key("harness"));
    assert_eq!(circle(&uses), None);
}

/// Modules that each use the next, the last using the first; `None` if there are none.
fn circle(uses: &BTreeMap<String, BTreeSet<String>>) -> Option<Vec<String>> {
    let mut left = uses.clone();
    loop {
        // Modules that use none of the remaining ones are in no circle.
        let modules: BTreeSet<String> = left.keys().cloned().collect();
        left.retain(|_, targets| {
            targets.retain(|target| modules.contains(target));
            !targets.is_empty()
        });
        if left.len() == modules.len() {
            break;
        }
    }
    let mut path = vec![left.keys().next()?.clone()];
    loop {
        let next = left.get(path.last()?)?.first()?.clone();
        if let Some(start) = path.iter().position(|module| *module == next) {
            return Some(path.split_off(start));
        }
        path.push(next);
    }
}

#[test]
fn circles_are_found() {
    let uses = |arrows: &[(&str, &str)]| {
        let mut uses: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
        for (from, to) in arrows {
            uses.entry((*from).to_owned()).or_default().insert((*to).to_owned());
        }
        circle(&uses)
    };
    assert_eq!(uses(&[("a", "b"), ("b", "c"), ("a", "c")]), None);
    let found = uses(&[("a", "b"), ("b", "c"), ("c", "b"), ("c", "d")]);
    assert_eq!(found, Some(vec!["b".to_owned(), "c".to_owned()]));
}

#[test]
fn paths_are_read_with_their_groups() {
    let source = "use crate::a::{self, B, c::{D, E as F}}; fn f(x: super::g::H) {}";
    let source = syn::parse_str(source).unwrap();
    assert_eq!(used_paths("p::m", &source), ["a", "a::B", "a::c::D", "a::c::E", "p::g::H"]);
}

/// Words that only an ABI has: names of its functions, parameters, fields and tags.
const ABI_WORDS: [&str; 13] = [
    "ncclEp",
    "inputs[",
    "outputs[",
    "local_tensors",
    "topk_idx",
    "send_only",
    "ep_group",
    "alloc_fn",
    "num_experts",
    "max_tokens_per_rank",
    "token_size_bytes",
    "TOKENS",
    "config.",
];

#[test]
fn the_core_has_no_words_of_an_abi() {
    // The prefix of the stand-ins' own functions, which are not the library's.
    let stand_ins = "ncclEpHostsim";
    for file in sources::files("src", &[".rs"]) {
        let source = sources::read(&file);
        assert!(!source.contains("no_mangle"), "{file} exports a symbol");
        let named = source.replace(stand_ins, "").contains("ncclEp");
        assert!(!named, "{file} names a function of an ABI");
        let literals = sources::string_literals(sources::parsed(&file), "");
        for literal in literals.iter().filter(|it| !it.starts_with(stand_ins)) {
            let word = ABI_WORDS.iter().find(|word| literal.contains(**word));
            assert_eq!(word, None, "{file} says {literal:?}");
        }
    }
}
