//! The headers are cbindgen's output for the sources; `make header` regenerates them.

#![allow(clippy::unwrap_used)] // A test.

mod sources;

use sources::root;

/// A generated header.
struct Header {
    path: &'static str,
    config: &'static str,
    /// Files of the folder that `config` is in, in reading order.
    sources: &'static [&'static str],
}

const HEADERS: [Header; 3] = [
    Header {
        path: "include/nccl_ep.h",
        config: "abi/first/cbindgen.toml",
        sources: &["types", "group", "tensor", "handle", "ops", "info", "choices", "statistics", "memory", "pool"],
    },
    Header {
        path: "include/nccl_ep_2/nccl_ep.h",
        config: "abi/second/cbindgen.toml",
        sources: &["types", "group", "tensor", "handle", "dispatch", "combine", "info"],
    },
    Header { path: "include/nccl_ep_2/nccl_ep/ep_enums.h", config: "abi/second/enums.toml", sources: &["enums"] },
];

fn generate(header: &Header) -> String {
    let config = root().join(header.config);
    let source = |name: &&str| config.with_file_name(format!("src/{name}.rs"));
    let builder = cbindgen::Builder::new().with_config(cbindgen::Config::from_file(&config).unwrap());
    let builder = header.sources.iter().map(source).fold(builder, cbindgen::Builder::with_src);
    let mut text = Vec::new();
    builder.generate().unwrap().write(&mut text);
    tidy(&String::from_utf8(text).unwrap())
}

/// Removes Rust's `# Safety` sections, which are obvious to a C programmer, and collapses runs of blank lines.
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
fn the_committed_headers_are_fresh() {
    for header in &HEADERS {
        let path = root().join(header.path);
        let generated = generate(header);
        if std::env::var_os("NCCL_EP_UPDATE_HEADER").is_some() {
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(&path, &generated).unwrap();
        }
        let committed = std::fs::read_to_string(&path).unwrap_or_default();
        let name = header.path;
        assert!(committed == generated, "{name} is stale: run `make header`");
    }
}
