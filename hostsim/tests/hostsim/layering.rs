//! No import circles: of two modules at most one imports the other, also by way of others.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// The modules that each module imports.
type Imports = BTreeMap<String, BTreeSet<String>>;

#[test]
fn modules_import_without_circles() {
    let mut sources = BTreeMap::new();
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    collect(&root, "", &mut sources);
    assert!(sources.len() > 20, "{:?}", sources.keys());
    let imports = imports_of(&sources);
    assert!(imports["cuda::reset"].contains("cuda::event"));
    assert!(imports["nccl::api"].contains("cuda::stream"));
    assert_eq!(circle(&imports), None);
}

#[test]
fn a_circle_is_found() {
    let sources = BTreeMap::from([
        ("a", "use super::other;\nuse crate::b::{c::*, d::Thing};"),
        ("b::c", "fn f() { super::d::g() }"),
        ("b::d", "use crate::a;\n#[cfg(test)]\nuse super::c;"),
    ]);
    let sources = sources
        .into_iter()
        .map(|(name, text)| (name.to_owned(), text.to_owned()));
    let imports = imports_of(&sources.collect());
    assert_eq!(
        circle(&imports),
        Some(vec!["a".into(), "b::c".into(), "b::d".into(), "a".into()])
    );
}

/// The text of each module; that of a folder's `mod.rs` by the name of the folder.
fn collect(folder: &Path, prefix: &str, sources: &mut BTreeMap<String, String>) {
    for entry in std::fs::read_dir(folder).expect("a folder") {
        let path = entry.expect("an entry").path();
        let stem = path
            .file_stem()
            .expect("a name")
            .to_string_lossy()
            .into_owned();
        let name = match stem.as_str() {
            "mod" | "lib" => prefix.trim_end_matches("::").to_owned(),
            _ => format!("{prefix}{stem}"),
        };
        if path.is_dir() {
            collect(&path, &format!("{name}::"), sources);
        } else {
            sources.insert(name, std::fs::read_to_string(&path).expect("a source"));
        }
    }
}

fn imports_of(sources: &BTreeMap<String, String>) -> Imports {
    let known = |path: &str| {
        let mut path = path;
        while !sources.contains_key(path) {
            path = path.rsplit_once("::")?.0;
        }
        Some(path.to_owned())
    };
    let all = sources.iter().map(|(name, text)| {
        let paths = paths_in(text).into_iter().map(|path| absolute(name, &path));
        let mut found: BTreeSet<String> = paths.filter_map(|path| known(&path)).collect();
        found.remove(name);
        (name.clone(), found)
    });
    all.collect()
}

/// The paths that begin with `crate` or `super`, outside of comments and tests.
fn paths_in(text: &str) -> Vec<String> {
    let code = text.split("#[cfg(test)]").next().unwrap_or_default();
    let lines = code
        .lines()
        .map(|line| line.split("//").next().unwrap_or_default());
    let code = lines.collect::<Vec<_>>().join("\n");
    let starts = ["crate::", "super::"]
        .into_iter()
        .flat_map(|word| code.match_indices(word));
    let mut paths = Vec::new();
    for (start, _) in starts {
        if !code[..start].ends_with([':', '_']) {
            expand("", &mut code[start..].chars().peekable(), &mut paths);
        }
    }
    paths
}

/// Reads one path, or the tree in the braces that end it.
fn expand(
    prefix: &str,
    rest: &mut std::iter::Peekable<std::str::Chars<'_>>,
    paths: &mut Vec<String>,
) {
    let mut path = prefix.to_owned();
    while let Some(next) = rest.next_if(|c| c.is_alphanumeric() || "_:".contains(*c)) {
        path.push(next);
    }
    if rest.next_if_eq(&'{').is_none() {
        paths.push(path);
        return;
    }
    while rest.next_if_eq(&'}').is_none() && rest.peek().is_some() {
        if rest.next_if(|c| c.is_whitespace() || *c == ',').is_none() {
            expand(&path, rest, paths);
            // What may follow a name: `as other`, or the star of `*`.
            while rest.next_if(|c| !",}".contains(*c)).is_some() {}
        }
    }
}

/// A path that begins with `super` or `crate`, seen from a module.
fn absolute(module: &str, path: &str) -> String {
    let mut base: Vec<&str> = module.split("::").collect();
    let mut rest = path;
    while let Some(shorter) = rest.strip_prefix("super::") {
        base.pop();
        rest = shorter;
    }
    if let Some(from_root) = rest.strip_prefix("crate::") {
        base.clear();
        rest = from_root;
    }
    base.push(rest);
    base.join("::")
}

/// The modules of one circle, if there is one: each imports the next.
fn circle(imports: &Imports) -> Option<Vec<String>> {
    fn visit(
        name: &str,
        imports: &Imports,
        way: &mut Vec<String>,
        done: &mut BTreeSet<String>,
    ) -> Option<Vec<String>> {
        if let Some(at) = way.iter().position(|seen| seen == name) {
            let mut found = way.split_off(at);
            found.push(name.to_owned());
            return Some(found);
        }
        if !done.insert(name.to_owned()) {
            return None;
        }
        way.push(name.to_owned());
        let found = imports
            .get(name)
            .into_iter()
            .flatten()
            .find_map(|next| visit(next, imports, way, done));
        way.pop();
        found
    }
    let mut done = BTreeSet::new();
    imports
        .keys()
        .find_map(|name| visit(name, imports, &mut Vec::new(), &mut done))
}
