//! The modules of a crate and their uses of each other, read from its sources.

use super::{files, parsed};
use quote::ToTokens;
use std::collections::BTreeSet;

/// One module that uses another.
pub struct Use {
    pub module: String,
    pub path: String,
    /// The module that is used.
    pub target: String,
}

/// Paths below `src`: `src/a/b.rs` -> `a::b`, `src/a/mod.rs` -> `a`, `src/lib.rs` -> "".
pub fn module_of(folder: &str, file: &str) -> String {
    let path = file.strip_prefix(folder).unwrap();
    let path = path.trim_start_matches('/').strip_suffix(".rs").unwrap();
    let path = path.strip_suffix("/mod").unwrap_or(path);
    if path == "lib" { String::new() } else { path.replace('/', "::") }
}

/// All modules except files that contain only unit tests.
pub fn module_files(folder: &str) -> Vec<String> {
    let mut files = files(folder, &[".rs"]);
    files.retain(|file| !file.ends_with("_tests.rs"));
    files
}

/// Whether `path` is `prefix` or below it.
pub fn is_below(path: &str, prefix: &str) -> bool {
    path.strip_prefix(prefix).is_some_and(|rest| rest.is_empty() || rest.starts_with("::"))
}

/// Every path in `code` of `module` after `crate::` or `super::`, from the root; groups are expanded.
pub fn used_paths(module: &str, code: &syn::File) -> Vec<String> {
    let code = code.to_token_stream().to_string().replace(" :: ", "::");
    let mut paths = Vec::new();
    for (start, found) in code.match_indices("crate::") {
        expand(&code[start + found.len()..], "", &mut paths);
    }
    let parent = module.rsplit_once("::").map(|(parent, _)| parent);
    let parent = parent.map_or(String::new(), |parent| format!("{parent}::"));
    for (start, found) in code.match_indices("super::") {
        expand(&code[start + found.len()..], &parent, &mut paths);
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
    let fits = modules.iter().filter(|module| is_below(path, module));
    let longest = fits.max_by_key(|module| module.len());
    longest.cloned().unwrap_or_default()
}

/// Every use of another module of the crate in `folder`.
pub fn all_uses(folder: &str) -> Vec<Use> {
    let mut uses = Vec::new();
    let files = module_files(folder);
    let modules = files.iter().map(|file| module_of(folder, file));
    let modules: BTreeSet<String> = modules.filter(|module| !module.is_empty()).collect();
    for file in files {
        let module = module_of(folder, &file);
        for path in used_paths(&module, &parsed(&file)) {
            let target = target(&path, &modules);
            uses.push(Use { module: module.clone(), path, target });
        }
    }
    uses
}

/// Modules that use a direct child by its bare name.
pub fn uses_of_children(folder: &str) -> Vec<(String, String)> {
    let files = module_files(folder);
    let modules: BTreeSet<String> = files.iter().map(|file| module_of(folder, file)).collect();
    let of_file = |file: &String| {
        let module = module_of(folder, file);
        let child = |item| match item {
            syn::Item::Use(syn::ItemUse { tree: syn::UseTree::Path(it), .. }) => Some(it.ident),
            _ => None,
        };
        let names = parsed(file).items.into_iter().filter_map(child);
        names.map(|name| (module.clone(), format!("{module}::{name}"))).collect::<Vec<_>>()
    };
    let found = files.iter().flat_map(of_file);
    found.filter(|(_, child)| modules.contains(child)).collect()
}
