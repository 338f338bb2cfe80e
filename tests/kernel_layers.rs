//! The layers of `cuda/`: which headers a kernel file may include, and which files may access other ranks' memory.

#![allow(clippy::unwrap_used)] // A test.

mod sources;

/// Each folder of `cuda/`, and the folders whose headers its files may include.
const FLOORS: [(&str, &[&str]); 7] = [
    ("base", &["base", "params"]),
    ("layout", &["base", "params"]),
    ("peer", &["peer", "base", "params"]),
    ("net", &["net", "peer", "base", "params"]),
    ("ll", &["ll", "net", "layout", "peer", "base", "params"]),
    ("ht", &["ht", "net", "layout", "peer", "base", "params"]),
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

/// The folder of the header that `line` includes, if it is the project's.
fn included_folder(folder: &str, line: &str) -> Option<String> {
    let path = line.strip_prefix("#include \"")?.strip_suffix('"')?;
    let (up, path) = match path.strip_prefix("../") {
        Some(path) => ("", path),
        None => (folder, path),
    };
    Some(path.rsplit_once('/').map_or(up, |(folder, _)| folder).to_owned())
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

#[test]
fn the_readme_names_every_kernel_file() {
    let readme = sources::read("cuda/README.md");
    let words: Vec<_> = readme.split([' ', ',', '\n', ';']).collect();
    for (_, file, _) in kernels() {
        assert!(words.contains(&file.rsplit('/').next().unwrap()), "{file}");
    }
}

const WARP: &str = "cuda/base/warp.cuh";

/// Prefixes of words, and the only files that may contain them outside comments.
const RESERVED: [(&str, &[&str]); 14] = [
    ("asm", &["cuda/base/ptx.cuh"]),
    ("__global__", &["cuda/base/entry.cuh"]),
    ("peers.window", &["cuda/peer/peer.cuh"]),
    (".mapped()", &["cuda/peer/peer.cuh"]),
    ("wait.report", &["cuda/peer/fault.cuh"]),
    ("__shfl", &[WARP]),
    ("__ballot", &[WARP]),
    ("__match", &[WARP]),
    ("__any_sync", &[WARP]),
    ("__all_sync", &[WARP]),
    ("__syncwarp", &[WARP]),
    ("__popc", &[WARP]),
    ("__ffs", &[WARP, "cuda/base/cast.cuh"]), // There of a number.
    ("kAllLanes", &[WARP]),
];

/// Calls `check(file, code)` for each line of the kernels without its comment.
fn each_line(check: impl Fn(&str, &str)) {
    for (_, file, text) in kernels() {
        for line in text.lines() {
            check(&file, line.split("//").next().unwrap_or(line));
        }
    }
}

#[test]
fn some_words_are_in_one_file() {
    each_line(|file, code| {
        for (word, files) in RESERVED {
            assert!(files.contains(&file) || !code.contains(word), "{file}: {code}");
        }
    });
}

/// Whether `code` has the number of lanes as a literal, other than as a shift by half a 64-bit word.
fn names_a_warps_size(code: &str) -> bool {
    let is_word = |c: char| c.is_alphanumeric() || c == '_';
    code.match_indices("32").any(|(at, found)| {
        let (before, after) = (&code[..at], code[at + found.len()..].trim_start_matches('u'));
        let shifts = [">>", "<<"].iter().any(|it| before.trim_end().ends_with(it));
        !shifts && !before.ends_with(is_word) && !after.starts_with(is_word)
    })
}

#[test]
fn only_one_file_knows_how_many_lanes_a_warp_has() {
    each_line(|file, code| {
        // That constant counts parts of 32.
        let is_ratio = code.contains("HT_WHOLE_OF_32");
        assert!(file == WARP || is_ratio || !names_a_warps_size(code), "{file}: {code}");
    });
    assert!(names_a_warps_size("lane % 32u;"));
    assert!(!names_a_warps_size("uint32_t{x} >> 32 | 320 + kOf32"));
}

/// A single switch selects the kernels' CPU build, so neither kernels nor the programs that run on it name it.
#[test]
fn the_cpu_build_is_named_by_nobody_that_it_builds() {
    let endings = [".rs", ".h", ".hpp", ".c", ".cpp", ".cu", ".cuh", ".py", ".md"];
    let parts = ["suites", "programs", "reference", "harness", "forked"];
    let tests = parts.map(|part| format!("c_tests/{part}"));
    let product = ["src", "abi", "cuda", "hostsim", "python/nccl_ep"].map(str::to_owned);
    for file in product.iter().chain(&tests).flat_map(|it| sources::files(it, &endings)) {
        let names = sources::read(&file).to_lowercase().contains("simt");
        assert!(!names || file == "c_tests/harness/harness.c", "{file}");
    }
}

#[test]
fn an_include_names_a_folder() {
    let folder_of = |line| included_folder("ll", line);
    assert_eq!(folder_of("#include \"../base/ptx.cuh\"").as_deref(), Some("base"));
    assert_eq!(folder_of("#include \"bank.cuh\"").as_deref(), Some("ll"));
    assert_eq!(folder_of("#include <cstdint>"), None);
}
