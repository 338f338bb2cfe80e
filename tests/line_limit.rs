//! No source file over 400 lines, no function of C or C++ over 60 (clippy checks those of Rust,
//! scripts/testing/selftest.py those of Python), no line over 120 columns.
//!
//! Longer ones have more than one reason to exist, and nobody reads them in one go.

#![allow(clippy::unwrap_used)] // A test.

mod sources;

const MAX_FILE: usize = 400;
const MAX_FUNCTION: usize = 60;
const MAX_LINE: usize = 120;

const DIRECTORIES: [&str; 11] =
    ["src", "abi", "hostsim", "cuda", "c_tests", "scripts", "tests", "include", "python", "examples", "bench"];
const DOCUMENTS: [&str; 4] = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"];
const ENDINGS: [&str; 9] = [".rs", ".cu", ".cuh", ".c", ".h", ".cpp", ".hpp", ".py", ".sh"];

/// Generated: the interfaces of all functions with their documentation.
const EXEMPT: [&str; 2] = ["include/nccl_ep.h", "include/nccl_ep_2/nccl_ep.h"];

fn too_long(lines: impl Iterator<Item = (String, usize)>, most: usize) -> Vec<String> {
    lines.filter(|(_, count)| *count > most).map(|(name, count)| format!("{name}: {count} lines")).collect()
}

/// Names and texts of all files.
fn files() -> impl Iterator<Item = (String, String)> {
    let files = DIRECTORIES.iter().flat_map(|directory| sources::files(directory, &ENDINGS));
    files.filter(|file| !EXEMPT.contains(&file.as_str())).map(|file| (file.clone(), sources::read(&file)))
}

#[test]
fn no_file_is_over_the_limit() {
    let found = too_long(files().map(|(file, text)| (file, text.lines().count())), MAX_FILE);
    assert!(found.is_empty(), "over {MAX_FILE} lines: {found:#?}");
}

#[test]
fn no_line_is_over_the_limit() {
    // Rows of tables, and what documents show in blocks, have no other place to end.
    let is_long = |line: &&str| !line.starts_with('|') && line.chars().count() > MAX_LINE;
    let prose = |text: String| text.split("```").step_by(2).collect();
    let documents = sources::files("docs", &[".md"]).into_iter().chain(DOCUMENTS.map(str::to_owned));
    let documents = documents.map(|file| (file.clone(), prose(sources::read(&file))));
    for (file, text) in files().chain(documents) {
        let found: Vec<&str> = text.lines().filter(is_long).collect();
        assert!(found.is_empty(), "{file}: over {MAX_LINE} columns: {found:#?}");
    }
}

/// First lines and lengths of C and C++ functions, including member functions: in Google style a function's brace is in
/// the column where it begins. Statements that look alike are inside a function, so shorter.
fn functions(source: &str) -> Vec<(String, usize)> {
    ["", "    ", "        "].iter().flat_map(|indent| functions_at(source, indent)).collect()
}

fn functions_at(source: &str, indent: &str) -> Vec<(String, usize)> {
    let mut found = Vec::new();
    let mut open: Option<(&str, usize)> = None;
    let lines = source.lines().enumerate();
    for (index, line) in lines.filter_map(|(index, line)| Some((index, line.strip_prefix(indent)?))) {
        let begins = line.starts_with(|c: char| c.is_ascii_alphabetic() || "_~[".contains(c));
        if begins && line.contains('(') && !line.ends_with([';', '}']) {
            open = Some((line, index));
        }
        if line == "};" {
            open = None; // a type's declaration
        }
        if line == "}"
            && let Some((name, first)) = open.take()
        {
            found.push((name.to_owned(), index + 1 - first));
        }
    }
    found
}

#[test]
fn no_c_function_is_over_the_limit() {
    let endings = [".c", ".h", ".cpp", ".hpp", ".cu", ".cuh"];
    let files = ["c_tests", "cuda", "examples", "include"].iter().flat_map(|it| sources::files(it, &endings));
    let counts = files.flat_map(|file| {
        let functions = functions(&sources::read(&file));
        functions.into_iter().map(move |(name, lines)| (format!("{file}: {name}"), lines))
    });
    let found = too_long(counts, MAX_FUNCTION);
    assert!(found.is_empty(), "over {MAX_FUNCTION} lines: {found:#?}");
}

#[test]
fn a_function_is_counted_from_its_first_line_to_its_brace() {
    let source = "struct alignas(4) A {\n    int a;\n};\n\n\
                  static int f(int x,\n             int y) {\n    return x + y;\n}\n\nint b;\n";
    assert_eq!(functions(source), [("static int f(int x,".to_owned(), 4)]);
}

#[test]
fn functions_of_the_device_and_of_types_are_counted() {
    let source = "__device__ void f() {\n    g();\n}\n\nclass A {\n   public:\n    \
                  __device__ explicit A(int a)\n        : a_(a) {\n        g();\n    }\n    ~A();\n\n   \
                  private:\n    int a_;\n};\n";
    let found = [("__device__ void f() {".to_owned(), 3), ("__device__ explicit A(int a)".to_owned(), 4)];
    assert_eq!(functions(source), found);
}
