//! The core's modules and their uses of each other, parsed from the sources.

use super::{files, read, without_unit_tests};
use std::collections::BTreeSet;

/// `src/a/b.rs` -> `a::b`, `src/a/mod.rs` -> `a`, `src/lib.rs` -> "".
pub fn module_of(file: &str) -> String {
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

/// All modules except files that contain only unit tests.
pub fn module_files() -> Vec<String> {
    let mut files = files("src", &[".rs"]);
    files.retain(|file| !file.ends_with("_tests.rs"));
    files
}

/// Whether `path` is `prefix` or below it.
pub fn is_below(path: &str, prefix: &str) -> bool {
    path.strip_prefix(prefix)
        .is_some_and(|rest| rest.is_empty() || rest.starts_with("::"))
}

/// Every path after `crate::` in code; groups are expanded.
pub fn used_paths(source: &str) -> Vec<String> {
    let is_comment = |line: &&str| !line.trim_start().starts_with("//");
    let code: Vec<&str> = without_unit_tests(source)
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

/// Parses one path, or one group of paths, at the start of `text`; returns the rest.
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
        // The new name in `X as Y` is not a path.
        rest = expand(rest, &path, paths).trim_start_matches(|c| c != ',' && c != '}');
        rest = rest.trim_start_matches(',').trim_start();
    }
    rest.strip_prefix('}').unwrap_or(rest)
}

/// The module of a path: its longest prefix that is a module.
fn target(path: &str, modules: &BTreeSet<String>) -> String {
    let fits = |module: &&String| is_below(path, module);
    modules
        .iter()
        .filter(fits)
        .max_by_key(|module| module.len())
        .cloned()
        .unwrap_or_default()
}

/// Every use of another module: the user, the path, and the module of the path.
pub fn all_uses() -> Vec<(String, String, String)> {
    let files = module_files();
    let modules: BTreeSet<String> = files
        .iter()
        .map(|file| module_of(file))
        .filter(|module| !module.is_empty())
        .collect();
    let of_file = |file: &String| {
        let module = module_of(file);
        used_paths(&read(file))
            .into_iter()
            .map(|path| (module.clone(), path.clone(), target(&path, &modules)))
            .collect::<Vec<_>>()
    };
    files.iter().flat_map(of_file).collect()
}

/// Modules that use one right below themselves by its bare name.
pub fn uses_of_children() -> Vec<(String, String)> {
    let modules: BTreeSet<String> = module_files().iter().map(|file| module_of(file)).collect();
    let of_file = |file: &String| {
        let module = module_of(file);
        let source = read(file);
        let lines = without_unit_tests(&source).lines();
        let names = lines.filter_map(|line| {
            let path = line.strip_prefix("pub ").unwrap_or(line);
            path.strip_prefix("use ")?.split("::").next()
        });
        let children = names.map(|name| (module.clone(), format!("{module}::{name}")));
        children.collect::<Vec<_>>()
    };
    let all = module_files();
    let found = all.iter().flat_map(of_file);
    found.filter(|(_, child)| modules.contains(child)).collect()
}
