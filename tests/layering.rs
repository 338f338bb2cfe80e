//! Who may use whom inside the core: arrows go down only, without circles, and `unsafe` stays at the edges.
//!
//! Crates hold what is coarser: no ABI sees the inside of another, and the core sees none. The table is what
//! crates cannot hold; `docs/architecture.md` explains it, and this test compares it with what the sources
//! say. Unit tests may use what they like.

#![allow(clippy::unwrap_used)] // A test.

mod sources;

use std::collections::{BTreeMap, BTreeSet};

/// Module -> what it may use. `x::*` is module `x` and all below it, else an entry is one module or
/// one item. The longest name that fits a module counts; each module may use itself and what is
/// below itself.
const ARROWS: &[(&str, &[&str])] = &[
    ("error", &[]),
    ("env", &["model::*"]),
    ("log", &["env"]),
    ("model", &[]),
    ("tuning", &["env", "log"]),
    ("rule", &["error::*", "model::*"]),
    ("backend", &["error::*", "model::*"]),
    ("backend::dylib", &[]),
    ("backend::quiet", &[]),
    ("backend::nccl", &["backend::dylib", "error::*", "model::*"]),
    (
        "backend::bootstrap",
        &["backend", "backend::nccl", "error::*", "model::*"],
    ),
    (
        "backend::platform",
        &["backend", "backend::bootstrap", "error::*", "model::*"],
    ),
    (
        "backend::select",
        &[
            "backend::cuda::CudaPlatform",
            "backend::host::HostPlatform",
            "backend::nccl",
            "backend::platform",
            "error::*",
        ],
    ),
    ("backend::host", SIBLING),
    ("backend::cuda", SIBLING),
    (
        "session",
        &[
            "backend",
            "backend::bootstrap",
            "backend::nccl",
            "backend::select",
            "env",
            "error::*",
            "model::*",
            "rule::*",
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
    "error::*",
    "log",
    "model::*",
    "tuning::*",
];

/// The only modules with unsafe code.
const UNSAFE: &[&str] = &[
    "abi/first/src/callbacks.rs",
    "abi/first/src/group.rs",
    "abi/first/src/guard.rs",
    "abi/first/src/handle.rs",
    "abi/first/src/info.rs",
    "abi/first/src/ops.rs",
    "abi/first/src/read.rs",
    "abi/first/src/tensor.rs",
    "abi/probe/src/lib.rs",
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
];

/// The sources of the ABIs, which have unsafe code of their own.
const ABIS: [&str; 2] = ["abi/first/src", "abi/probe/src"];

/// Files that are one thing: a context, and what belongs to it and goes with it.
const KNOT: &str = "backend::cuda::driver";

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
    // Modules of one row, such as `session`, see each other; `backend` does not see its siblings.
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
        // `lib.rs` only lists its modules.
        assert!(
            module.is_empty() || allowed(&module).is_some(),
            "{file} has no row in the table"
        );
    }
}

#[test]
fn no_module_leads_back_to_itself() {
    let mut uses: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for (module, _, target) in all_uses() {
        let in_knot = is_below(&module, KNOT) && is_below(&target, KNOT);
        if module != target && !module.is_empty() && !in_knot {
            uses.entry(module).or_default().insert(target);
        }
    }
    assert_eq!(circle(&uses), None);
}

/// Modules of which each uses one that follows, and the last the first; `None` if there are none.
fn circle(uses: &BTreeMap<String, BTreeSet<String>>) -> Option<Vec<String>> {
    let mut left = uses.clone();
    loop {
        // Whoever uses nobody that is left is on no circle.
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
            uses.entry((*from).to_owned())
                .or_default()
                .insert((*to).to_owned());
        }
        circle(&uses)
    };
    assert_eq!(uses(&[("a", "b"), ("b", "c"), ("a", "c")]), None);
    let found = uses(&[("a", "b"), ("b", "c"), ("c", "b"), ("c", "d")]);
    assert_eq!(found, Some(vec!["b".to_owned(), "c".to_owned()]));
}

#[test]
fn unsafe_code_is_where_the_list_says() {
    let allows = |file: &str| sources::read(file).contains("\n#![allow(unsafe_code)]");
    let mut files = module_files();
    files.extend(ABIS.iter().flat_map(|abi| sources::files(abi, &[".rs"])));
    files.sort();
    let found: Vec<&str> = files
        .iter()
        .map(String::as_str)
        .filter(|file| allows(file))
        .collect();
    assert_eq!(found, UNSAFE);
    for file in &files {
        // A module that forbids it forbids it to all below it, too.
        let below = file.trim_end_matches(".rs").trim_end_matches("/mod");
        let above_unsafe = file.ends_with("/lib.rs")
            || UNSAFE.contains(&file.as_str())
            || UNSAFE
                .iter()
                .any(|other| other.starts_with(&format!("{below}/")));
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
    assert!(may_use("session::group", "rule::ht", "rule::ht"));
    assert!(may_use(
        "session::handle",
        "session::group::Group",
        "session::group"
    ));
    for (module, path, target) in [
        (
            "backend::host::ll",
            "backend::cuda::driver",
            "backend::cuda::driver",
        ),
        (
            "backend::host::ll",
            "backend::select::platform",
            "backend::select",
        ),
        ("backend", "backend::host::HostPlatform", "backend::host"),
        (
            "session::group",
            "backend::host::HostPlatform",
            "backend::host",
        ),
        ("model::tensor", "rule", "rule"),
    ] {
        assert!(!may_use(module, path, target), "{module} uses {path}");
    }
}
