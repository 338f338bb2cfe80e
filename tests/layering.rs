//! Allowed dependencies inside the core: arrows go down only, and `unsafe` stays at the edges.
//!
//! Crates enforce the coarse rules: no ABI sees the inside of another, and the core sees none. The
//! table has the rules that crates cannot enforce; `docs/architecture.md` explains it, and this
//! test compares it with the sources. Unit tests may use anything.

#![allow(clippy::unwrap_used)] // A test.

mod sources;

use sources::modules::{all_uses, is_below, module_files, module_of};

/// Module -> what it may use. `x::*` is module `x` and everything below it; any other entry is one
/// module or one item. The longest matching name decides; each module may use itself and everything
/// below itself.
const ARROWS: &[(&str, &[&str])] = &[
    ("error", &["model::ids"]),
    ("env", &["model::*"]),
    ("fork", &["error::*"]),
    ("log", &["env"]),
    ("model", &[]),
    ("nvtx", &["env"]),
    ("tuning", &["log"]),
    ("rule", &["error::*", "model::*"]),
    (
        "backend",
        &["backend::device", "error::*", "model::*", "tuning"],
    ),
    ("backend::detached", &["error::*"]),
    (
        "backend::device",
        &["backend::quiescence", "error::*", "model::*"],
    ),
    ("backend::dylib", &["env"]),
    ("backend::quiescence", &[]),
    (
        "backend::nccl",
        &[
            "backend::device",
            "backend::dylib",
            "error::*",
            "log",
            "model::*",
        ],
    ),
    (
        "backend::bootstrap",
        &[
            "backend::detached",
            "backend::device",
            "backend::nccl",
            "backend::quiescence",
            "error::*",
            "model::*",
        ],
    ),
    (
        "backend::net",
        &[
            "backend::bootstrap",
            "backend::detached",
            "backend::device",
            "backend::nccl::*",
            "backend::quiescence",
            "error::*",
            "model::*",
        ],
    ),
    (
        "backend::platform",
        &[
            "backend",
            "backend::bootstrap",
            "backend::device",
            "backend::net::two_sided::replays",
            "error::*",
            "model::*",
        ],
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
    (
        "backend::host",
        &[
            "backend",
            "backend::bootstrap",
            "backend::device",
            "backend::dylib",
            "backend::quiescence",
            "backend::platform",
            "error::*",
            "model::*",
        ],
    ),
    (
        "backend::cuda",
        &[
            "backend",
            "backend::bootstrap",
            "backend::device",
            "backend::dylib",
            "backend::own_stream",
            "backend::quiescence",
            "backend::net::*",
            "error::*",
            "log",
            "model::*",
            "tuning::*",
        ],
    ),
    (
        "session",
        &[
            "backend",
            "backend::bootstrap",
            "backend::device",
            "backend::nccl",
            "backend::own_stream",
            "backend::select",
            "env",
            "error::*",
            "fork",
            "log",
            "model::*",
            "rule::*",
            "tuning",
        ],
    ),
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
    "abi/probe/src/rail.rs",
    "src/backend/cuda/driver/api.rs",
    "src/backend/cuda/driver/capture_mode.rs",
    "src/backend/cuda/driver/context_handle.rs",
    "src/backend/cuda/driver/device_name.rs",
    "src/backend/cuda/driver/event.rs",
    "src/backend/cuda/driver/function.rs",
    "src/backend/cuda/driver/graph_count.rs",
    "src/backend/cuda/driver/ipc.rs",
    "src/backend/cuda/driver/memory.rs",
    "src/backend/cuda/driver/mod.rs",
    "src/backend/cuda/driver/module.rs",
    "src/backend/cuda/driver/pinned.rs",
    "src/backend/cuda/driver/stream.rs",
    "src/backend/dylib.rs",
    "src/backend/host/device.rs",
    "src/backend/host/futex.rs",
    "src/backend/host/ht/agreement.rs",
    "src/backend/host/ht/combine.rs",
    "src/backend/host/ht/dispatch.rs",
    "src/backend/host/ll/combine.rs",
    "src/backend/host/ll/dispatch.rs",
    "src/backend/host/runtime.rs",
    "src/backend/host/scaled.rs",
    "src/backend/host/window.rs",
    "src/backend/nccl/mod.rs",
    "src/backend/nccl/network.rs",
    "src/backend/nccl/own.rs",
    "src/fork.rs",
    "src/log/sink.rs",
    "src/nvtx.rs",
];

/// The sources of the ABIs, which have their own unsafe code.
const ABIS: [&str; 2] = ["abi/first/src", "abi/probe/src"];

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
    // Rows that share a list, as the two backends do, must together use each of its entries.
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

/// What a group agrees on with the others, and what it uses, come from one reading of the environment.
#[test]
fn one_module_reads_the_environment() {
    // NCCL reads this variable itself, at the moment at which the library asks for it.
    const AS_NCCL: &str = "src/backend/nccl/network.rs";
    for file in module_files() {
        let source = sources::read(&file);
        let source = sources::without_unit_tests(&source);
        let reads = source.contains("env::var") || source.contains("use std::env");
        let may = file == "src/env.rs" || file == AS_NCCL;
        assert!(may || !reads, "{file} reads the environment");
    }
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
        // A module that forbids unsafe code forbids it to all below, too.
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
