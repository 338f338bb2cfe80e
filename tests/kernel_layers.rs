//! The floors of `cuda/`: which headers a kernel file may include, and which files may access
//! another rank's memory.

#![allow(clippy::unwrap_used)] // A test.

mod sources;

/// Each folder of `cuda/`, and the folders whose headers its files may include.
const FLOORS: [(&str, &[&str]); 6] = [
    ("params", &["params"]),
    ("base", &["base", "params"]),
    ("peer", &["peer", "base", "params"]),
    ("ll", &["ll", "peer", "base", "params"]),
    ("ht", &["ht", "peer", "base", "params"]),
    ("", &["peer", "base", "params"]),
];

/// The kernel files: their folder below `cuda/`, their path, their text.
fn kernels() -> Vec<(String, String, String)> {
    let files = sources::files("cuda", &[".h", ".cuh", ".cu"]);
    let read = |file: String| {
        let below = file.strip_prefix("cuda/").unwrap();
        let folder = below.rsplit_once('/').map_or("", |(folder, _)| folder);
        (folder.to_owned(), file.clone(), sources::read(&file))
    };
    files.into_iter().map(read).collect()
}

/// The folder of the header that `line` includes, if it is ours.
fn included_folder(folder: &str, line: &str) -> Option<String> {
    let path = line.strip_prefix("#include \"")?.strip_suffix('"')?;
    let (up, path) = match path.strip_prefix("../") {
        Some(path) => ("", path),
        None => (folder, path),
    };
    Some(
        path.rsplit_once('/')
            .map_or(up, |(folder, _)| folder)
            .to_owned(),
    )
}

#[test]
fn kernel_files_include_what_is_on_their_floor_or_below() {
    for (folder, file, text) in kernels() {
        let (_, allowed) = FLOORS.iter().find(|(name, _)| *name == folder).unwrap();
        for line in text.lines() {
            if let Some(included) = included_folder(&folder, line) {
                assert!(allowed.contains(&included.as_str()), "{file}: {line}");
            }
        }
    }
}

/// Words that only one file may contain, except in comments.
const RESERVED: [(&str, &str); 5] = [
    ("asm", "cuda/base/ptx.cuh"),
    ("__global__", "cuda/base/entry.cuh"),
    ("peers.window", "cuda/peer/peer.cuh"),
    (".mapped()", "cuda/peer/peer.cuh"),
    ("wait.report", "cuda/peer/fault.cuh"),
];

#[test]
fn some_words_are_in_one_file() {
    for (_, file, text) in kernels() {
        let code = |line: &&str| !line.trim_start().starts_with("//");
        for line in text.lines().filter(code) {
            let code = line.split("//").next().unwrap_or(line);
            for (word, home) in RESERVED {
                assert!(file == home || !code.contains(word), "{file}: {line}");
            }
        }
    }
}

#[test]
fn an_include_names_a_folder() {
    let folder_of = |line| included_folder("ll", line);
    assert_eq!(
        folder_of("#include \"../base/ptx.cuh\"").as_deref(),
        Some("base")
    );
    assert_eq!(folder_of("#include \"bank.cuh\"").as_deref(), Some("ll"));
    assert_eq!(folder_of("#include <cstdint>"), None);
}
