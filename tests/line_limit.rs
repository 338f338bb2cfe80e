//! No source file over 400 lines, no function of C, C++ or Python over 60 (clippy checks Rust functions).
//!
//! Longer ones have more than one reason to exist, and nobody reads them in one go.

#![allow(clippy::unwrap_used)] // A test.

mod sources;

const MAX_FILE: usize = 400;
const MAX_FUNCTION: usize = 60;

const DIRECTORIES: [&str; 10] =
    ["src", "abi", "hostsim", "cuda", "c_tests", "scripts", "tests", "include", "python", "examples"];
const ENDINGS: [&str; 9] = [".rs", ".cu", ".cuh", ".c", ".h", ".cpp", ".hpp", ".py", ".sh"];

/// Generated: the interfaces of all functions with their documentation.
const EXEMPT: [&str; 2] = ["include/nccl_ep.h", "include/nccl_ep_2/nccl_ep.h"];

fn too_long(lines: impl Iterator<Item = (String, usize)>, most: usize) -> Vec<String> {
    lines.filter(|(_, count)| *count > most).map(|(name, count)| format!("{name}: {count} lines")).collect()
}

#[test]
fn no_file_is_over_the_limit() {
    let counts = DIRECTORIES
        .iter()
        .flat_map(|directory| sources::files(directory, &ENDINGS))
        .filter(|file| !EXEMPT.contains(&file.as_str()))
        .map(|file| {
            let lines = sources::read(&file).lines().count();
            (file, lines)
        });
    let found = too_long(counts, MAX_FILE);
    assert!(found.is_empty(), "over {MAX_FILE} lines: {found:#?}");
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

/// The same for Python, without docstrings. A function ends with the last line indented further than its first.
fn python_functions(source: &str) -> Vec<(String, usize)> {
    let lines: Vec<&str> = source.lines().collect();
    let indent = |line: &str| line.len() - line.trim_start().len();
    let starts = |line: &str| ["def ", "async def "].iter().any(|word| line.trim_start().starts_with(word));
    let mut found = Vec::new();
    for (first, line) in lines.iter().enumerate().filter(|(_, line)| starts(line)) {
        let is_in = |it: &&&str| it.is_empty() || indent(it) > indent(line) || it.trim_start().starts_with(')');
        let all: Vec<&str> = lines[first + 1..].iter().take_while(is_in).copied().collect();
        let body = all.iter().rposition(|it| !it.is_empty()).map_or(0, |last| last + 1);
        found.push((line.trim_start().to_owned(), 1 + body - docstring(&all[..body])));
    }
    found
}

/// The number of lines of a function's docstring; `lines` follow the function's first.
fn docstring(lines: &[&str]) -> usize {
    const QUOTES: &str = "\"\"\"";
    let Some(begin) = lines.iter().position(|line| line.trim_start().starts_with(QUOTES)) else { return 0 };
    if begin > 0 && !lines[begin - 1].ends_with(':') {
        return 0; // another text
    }
    let ends = |(number, line): (usize, &&str)| line.matches(QUOTES).count() > usize::from(number == 0);
    lines[begin..].iter().enumerate().position(ends).map_or(0, |last| last + 1)
}

fn check_functions(directories: &[&str], endings: &[&str], functions: fn(&str) -> Vec<(String, usize)>) {
    let files = directories.iter().flat_map(|directory| sources::files(directory, endings));
    let counts = files.flat_map(|file| {
        let functions = functions(&sources::read(&file));
        functions.into_iter().map(move |(name, lines)| (format!("{file}: {name}"), lines))
    });
    let found = too_long(counts, MAX_FUNCTION);
    assert!(found.is_empty(), "over {MAX_FUNCTION} lines: {found:#?}");
}

#[test]
fn no_c_function_is_over_the_limit() {
    let endings = [".c", ".h", ".cpp", ".hpp", ".cu", ".cuh"];
    check_functions(&["c_tests", "cuda", "examples", "include"], &endings, functions);
}

#[test]
fn no_python_function_is_over_the_limit() {
    check_functions(&["python", "scripts", "c_tests", "bench", "examples"], &[".py"], python_functions);
}

#[test]
fn a_function_is_counted_from_its_first_line_to_its_brace() {
    let source = "struct alignas(4) A {\n    int a;\n};\n\nstatic int f(int x,\n             int y) {\n    return x + y;\n}\n\nint b;\n";
    assert_eq!(functions(source), [("static int f(int x,".to_owned(), 4)]);
}

#[test]
fn functions_of_the_device_and_of_types_are_counted() {
    let source = "__device__ void f() {\n    g();\n}\n\nclass A {\n   public:\n    __device__ explicit A(int a)\n        : a_(a) {\n        g();\n    }\n    ~A();\n\n   private:\n    int a_;\n};\n";
    let found = [("__device__ void f() {".to_owned(), 3), ("__device__ explicit A(int a)".to_owned(), 4)];
    assert_eq!(functions(source), found);
}

#[test]
fn a_function_of_python_is_counted_without_its_docstring() {
    let source = "class A:\n    def f(self,\n          x):\n        \"\"\"Says.\n\n        More.\n        \"\"\"\n        y = x\n\n        return y\n\n    def g(\n        self,\n    ):\n        \"\"\"Says.\"\"\"\n        pass\n\n\nB = 1\n";
    let found = [("def f(self,".to_owned(), 5), ("def g(".to_owned(), 4)];
    assert_eq!(python_functions(source), found);
}
