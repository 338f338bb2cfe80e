//! `include/nccl_ep.h` is cbindgen's output for the sources; `make header` regenerates it.

#![allow(clippy::unwrap_used)] // A test.

use std::path::{Path, PathBuf};

/// In the header's reading order.
const SOURCES: [&str; 6] = [
    "abi/first/src/types.rs",
    "abi/first/src/group.rs",
    "abi/first/src/tensor.rs",
    "abi/first/src/handle.rs",
    "abi/first/src/ops.rs",
    "abi/first/src/info.rs",
];

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

fn generate(root: &Path) -> String {
    let config = cbindgen::Config::from_file(root.join("abi/first/cbindgen.toml")).unwrap();
    let builder = SOURCES
        .iter()
        .fold(cbindgen::Builder::new().with_config(config), |b, source| {
            b.with_src(root.join(source))
        });
    let mut text = Vec::new();
    builder.generate().unwrap().write(&mut text);
    tidy(&String::from_utf8(text).unwrap())
}

/// Removes Rust's `# Safety` sections, which a C programmer takes for granted. Collapses runs of
/// blank lines.
fn tidy(header: &str) -> String {
    let mut kept: Vec<&str> = Vec::new();
    let mut skipping = false;
    for line in header.trim_start().lines() {
        if line.trim() == "// # Safety" {
            skipping = true;
            while kept.last().is_some_and(|last| last.trim() == "//") {
                kept.pop();
            }
        }
        skipping &= line.trim_start().starts_with("//");
        let repeated_blank = line.is_empty() && kept.last().is_some_and(|last| last.is_empty());
        if !skipping && !repeated_blank {
            kept.push(line);
        }
    }
    kept.join("\n") + "\n"
}

#[test]
fn the_committed_header_is_fresh() {
    let path = root().join("include/nccl_ep.h");
    let generated = generate(&root());
    if std::env::var_os("NCCL_EP_UPDATE_HEADER").is_some() {
        std::fs::write(&path, &generated).unwrap();
    }
    let committed = std::fs::read_to_string(&path).unwrap();
    assert!(
        committed == generated,
        "include/nccl_ep.h is stale: run `make header`"
    );
}
