//! Who may import whom: arrows go down only, and `unsafe` stays at the edges.
//!
//! The table is the rule of the house that `docs/architecture.md` explains; this test compares it
//! with what the sources say. Unit tests may use what they like.

#![allow(clippy::unwrap_used)] // A test.

mod sources;

use std::collections::BTreeSet;

/// Module -> what it may use. `x::*` is module `x` and all below it, else an entry is one module or
/// one item. The longest name that fits a module counts; each module may use itself and what is
/// below itself.
const ARROWS: &[(&str, &[&str])] = &[
    ("error", &[]),
    ("env", &["model::*"]),
    ("build_info", &[]),
    ("log", &["env"]),
    ("model", &[]),
    ("tuning", &["env", "log"]),
    ("abi::types", &[]),
    ("abi::read", &["abi::types", "error", "model::*"]),
    ("request", &["abi::read", "error", "model::*"]),
    ("backend", &["error", "model::*"]),
    ("backend::dylib", &[]),
    ("backend::quiet", &[]),
    ("backend::nccl", &["backend::dylib", "error", "model::*"]),
    (
        "backend::bootstrap",
        &["backend", "backend::nccl", "error", "model::*"],
    ),
    (
        "backend::platform",
        &["backend", "backend::bootstrap", "error", "model::*"],
    ),
    (
        "backend::select",
        &[
            "backend::cuda::CudaPlatform",
            "backend::host::HostPlatform",
            "backend::nccl",
            "backend::platform",
            "error",
        ],
    ),
    ("backend::host", SIBLING),
    ("backend::cuda", SIBLING),
    (
        "state",
        &[
            "abi::read",
            "backend",
            "backend::bootstrap",
            "backend::nccl",
            "backend::select",
            "env",
            "error",
            "model::*",
            "request::*",
        ],
    ),
    ("ffi", FFI),
    (
        "ffi::callbacks",
        &[
            "abi::types",
            "backend::DeviceMemory",
            "error",
            "model::*",
            "state::*",
        ],
    ),
];

/// The same for both backends, and neither sees the other.
const SIBLING: &[&str] = &[
    "backend",
    "backend::bootstrap",
    "backend::dylib",
    "backend::quiet",
    "backend::platform",
    "error",
    "log",
    "model::*",
    "tuning::*",
];

const FFI: &[&str] = &[
    "abi::read",
    "abi::types",
    "build_info",
    "error",
    "log",
    "model::*",
    "request::*",
    "state::*",
];

/// The only modules with unsafe code.
const UNSAFE: &[&str] = &[
    "src/abi/read.rs",
    "src/backend/cuda/driver/api.rs",
    "src/backend/cuda/driver/device_name.rs",
    "src/backend/cuda/driver/event.rs",
    "src/backend/cuda/driver/function.rs",
    "src/backend/cuda/driver/mapped.rs",
    "src/backend/cuda/driver/mod.rs",
    "src/backend/cuda/driver/module.rs",
    "src/backend/cuda/driver/stream.rs",
    "src/backend/dylib.rs",
    "src/backend/host/device.rs",
    "src/backend/host/ht/agreement.rs",
    "src/backend/host/ht/mod.rs",
    "src/backend/host/ll/combine.rs",
    "src/backend/host/ll/dispatch.rs",
    "src/backend/host/runtime.rs",
    "src/backend/host/signal.rs",
    "src/backend/host/window.rs",
    "src/backend/nccl.rs",
    "src/ffi/callbacks.rs",
    "src/ffi/group.rs",
    "src/ffi/guard.rs",
    "src/ffi/handle.rs",
    "src/ffi/info.rs",
    "src/ffi/ops.rs",
    "src/ffi/tensor.rs",
];

/// `src/a/b.rs` -> `a::b`, `src/a/mod.rs` -> `a`, `src/lib.rs` -> "".
fn module_of(file: &str) -> String {
    let path = file
        .strip_prefix("src/")
        .unwrap()
        .strip_suffix(".rs")
        .unwrap();
    let path = path.strip_suffix("/mod").unwrap_or(path);
    if path == "lib" {
        String::new()
    } else {
        path.replace('/', "::")
    }
}

/// All modules but those that are unit tests from end to end.
fn module_files() -> Vec<String> {
    let mut files = sources::files("src", &[".rs"]);
    files.retain(|file| !file.ends_with("_tests.rs"));
    files
}

/// Whether `path` is `prefix` or below it.
fn is_below(path: &str, prefix: &str) -> bool {
    path.strip_prefix(prefix)
        .is_some_and(|rest| rest.is_empty() || rest.starts_with("::"))
}

/// Every path that begins with `crate::` in code, without that beginning; groups are spelled out.
fn used_paths(source: &str) -> Vec<String> {
    let is_comment = |line: &&str| !line.trim_start().starts_with("//");
    let code: Vec<&str> = sources::without_unit_tests(source)
        .lines()
        .filter(is_comment)
        .collect();
    let code = code.join("\n");
    let mut paths = Vec::new();
    for (start, found) in code.match_indices("crate::") {
        expand(&code[start + found.len()..], "", &mut paths);
    }
    paths
}

/// Reads one path, or one group of paths, off the start of `text`; returns what follows.
fn expand<'a>(text: &'a str, prefix: &str, paths: &mut Vec<String>) -> &'a str {
    let is_path = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == ':';
    let end = text.find(|c| !is_path(c)).unwrap_or(text.len());
    let (own, mut rest) = text.split_at(end);
    let path = format!("{prefix}{own}");
    let Some(group) = rest.strip_prefix('{') else {
        paths.push(path.trim_end_matches(':').replace("::self", ""));
        return rest;
    };
    rest = group.trim_start();
    while !rest.is_empty() && !rest.starts_with('}') {
        // A new name, as in `X as Y`, is no path.
        rest = expand(rest, &path, paths).trim_start_matches(|c| c != ',' && c != '}');
        rest = rest.trim_start_matches(',').trim_start();
    }
    rest.strip_prefix('}').unwrap_or(rest)
}

/// The module that a path leads to: its longest beginning that is one.
fn target(path: &str, modules: &BTreeSet<String>) -> String {
    let fits = |module: &&String| is_below(path, module);
    modules
        .iter()
        .filter(fits)
        .max_by_key(|module| module.len())
        .cloned()
        .unwrap_or_default()
}

fn allowed(module: &str) -> Option<&'static [&'static str]> {
    let fits = ARROWS.iter().filter(|(name, _)| is_below(module, name));
    fits.max_by_key(|(name, _)| name.len())
        .map(|(_, uses)| *uses)
}

/// Whether `module` may use `path`, which leads into module `target`.
fn may_use(module: &str, path: &str, target: &str) -> bool {
    let own = ARROWS
        .iter()
        .map(|(name, _)| *name)
        .filter(|name| is_below(module, name));
    let own = own.max_by_key(|name| name.len()).unwrap_or(module);
    // Modules of one row, such as `ffi`, see each other; `backend` does not see its siblings.
    let in_own_row = is_below(target, own)
        && ARROWS
            .iter()
            .all(|(name, _)| *name == own || name.len() < own.len() || !is_below(target, name));
    in_own_row
        || allowed(module).is_some_and(|uses| uses.iter().any(|entry| fits(entry, path, target)))
}

/// Whether `entry` of the table allows `path`, which leads into module `target`.
fn fits(entry: &str, path: &str, target: &str) -> bool {
    match entry.strip_suffix("::*") {
        Some(subtree) => is_below(target, subtree),
        None => entry == target || entry == path,
    }
}

/// Every use of another module: who, the path, and the module that it leads to.
fn all_uses() -> Vec<(String, String, String)> {
    let files = module_files();
    let modules: BTreeSet<String> = files
        .iter()
        .map(|file| module_of(file))
        .filter(|module| !module.is_empty())
        .collect();
    let of_file = |file: &String| {
        let module = module_of(file);
        used_paths(&sources::read(file))
            .into_iter()
            .map(|path| (module.clone(), path.clone(), target(&path, &modules)))
            .collect::<Vec<_>>()
    };
    files.iter().flat_map(of_file).collect()
}

#[test]
fn modules_use_only_what_the_table_allows() {
    let uses = all_uses();
    let forbidden: Vec<String> = uses
        .iter()
        .filter(|(module, path, target)| !may_use(module, path, target))
        .map(|(module, path, _)| format!("{module} uses {path}"))
        .collect();
    assert!(uses.len() > 100, "only {} uses were found", uses.len());
    assert!(forbidden.is_empty(), "not in the table: {forbidden:#?}");
}

#[test]
fn the_table_allows_only_what_modules_use() {
    let uses = all_uses();
    // Rows that share a list, as the two backends do, need each of its entries together.
    let is_used = |list: &[&str], entry: &str| {
        uses.iter().any(|(module, path, target)| {
            allowed(module).is_some_and(|own| std::ptr::eq(own, list)) && fits(entry, path, target)
        })
    };
    let idle: Vec<String> = ARROWS
        .iter()
        .flat_map(|(name, list)| list.iter().map(move |entry| (name, list, entry)))
        .filter(|(_, list, entry)| !is_used(list, entry))
        .map(|(name, _, entry)| format!("{name} does not use {entry}"))
        .collect();
    assert!(idle.is_empty(), "{idle:#?}");
}

#[test]
fn every_module_has_a_row() {
    for file in module_files() {
        let module = module_of(&file);
        // `lib.rs` and `abi/mod.rs` only list their modules.
        let lists_only = ["", "abi"].contains(&module.as_str());
        assert!(
            lists_only || allowed(&module).is_some(),
            "{file} has no row in the table"
        );
    }
}

#[test]
fn unsafe_code_is_where_the_list_says() {
    let allows = |file: &str| sources::read(file).contains("\n#![allow(unsafe_code)]");
    let files = module_files();
    let found: Vec<&str> = files
        .iter()
        .map(String::as_str)
        .filter(|file| allows(file))
        .collect();
    assert_eq!(found, UNSAFE);
    for file in &files {
        let module = module_of(file);
        // A module that forbids it forbids it to all below it, too.
        let above_unsafe = UNSAFE
            .iter()
            .any(|other| module.is_empty() || is_below(&module_of(other), &module));
        let forbids = sources::read(file).contains("#![forbid(unsafe_code)]");
        assert!(
            forbids || above_unsafe,
            "{file} must say #![forbid(unsafe_code)]"
        );
    }
}

#[test]
fn paths_are_read_with_their_groups() {
    let source =
        "use crate::a::{self, B, c::{D, E as F}};\n// crate::no\nfn f(x: crate::g::H) {}\n";
    assert_eq!(
        used_paths(source),
        ["a", "a::B", "a::c::D", "a::c::E", "g::H"]
    );
}

#[test]
fn arrows_go_one_way() {
    assert!(may_use("state::group", "request::ht", "request::ht"));
    assert!(may_use("ffi::group", "ffi::guard::guard", "ffi::guard"));
    assert!(may_use(
        "ffi::callbacks",
        "backend::DeviceMemory",
        "backend"
    ));
    assert!(!may_use("ffi::group", "backend::DeviceMemory", "backend"));
    assert!(!may_use(
        "backend::host::ll",
        "backend::cuda::driver",
        "backend::cuda::driver"
    ));
    assert!(!may_use(
        "backend::host::ll",
        "backend::select::platform",
        "backend::select"
    ));
    assert!(!may_use(
        "backend",
        "backend::host::HostPlatform",
        "backend::host"
    ));
    assert!(!may_use("model::tensor", "request", "request"));
}
