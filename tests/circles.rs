//! No circular dependencies between modules: of the core, of the stand-ins, and of the C tests' harness.

#![allow(clippy::unwrap_used)] // A test.

mod sources;

use sources::modules::{all_uses, used_paths, uses_of_children};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

#[test]
fn no_module_leads_back_to_itself() {
    for folder in ["src", "hostsim/src"] {
        let mut uses: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
        for it in all_uses(folder) {
            if it.module != it.target && !it.module.is_empty() {
                uses.entry(it.module).or_default().insert(it.target);
            }
        }
        for (module, child) in uses_of_children(folder) {
            uses.entry(module).or_default().insert(child);
        }
        assert!(uses.len() > 20, "{folder}: {:?}", uses.keys());
        assert_eq!(circle(&uses), None);
    }
}

/// A module of the harness is a header and the source with the same name.
#[test]
fn no_header_of_the_c_harness_leads_back_to_itself() {
    let harness = Path::new(env!("CARGO_MANIFEST_DIR")).join("c_tests/harness");
    let mut uses: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for entry in fs::read_dir(&harness).unwrap() {
        let path = entry.unwrap().path();
        let module = path.file_stem().unwrap().to_str().unwrap().to_owned();
        let source = fs::read_to_string(&path).unwrap();
        for line in source.lines() {
            let Some(header) = line.strip_prefix("#include \"") else { continue };
            let name = header.trim_start_matches("harness/");
            let target = name.split('.').next().unwrap().to_owned();
            if harness.join(format!("{target}.h")).exists() && target != module {
                uses.entry(module.clone()).or_default().insert(target);
            }
        }
    }
    assert!(uses.contains_key("harness"));
    assert_eq!(circle(&uses), None);
}

/// Modules that each use the next, the last using the first; `None` if there are none.
fn circle(uses: &BTreeMap<String, BTreeSet<String>>) -> Option<Vec<String>> {
    let mut left = uses.clone();
    loop {
        // Modules that use none of the remaining ones are in no circle.
        let modules: BTreeSet<String> = left.keys().cloned().collect();
        left.retain(|_, targets| {
            targets.retain(|target| modules.contains(target));
            !targets.is_empty()
        });
        if left.len() == modules.len() {
            break;
        }
    }
    let mut path = vec![left.keys().next()?.clone()];
    loop {
        let next = left.get(path.last()?)?.first()?.clone();
        if let Some(start) = path.iter().position(|module| *module == next) {
            return Some(path.split_off(start));
        }
        path.push(next);
    }
}

#[test]
fn circles_are_found() {
    let uses = |arrows: &[(&str, &str)]| {
        let mut uses: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
        for (from, to) in arrows {
            uses.entry((*from).to_owned()).or_default().insert((*to).to_owned());
        }
        circle(&uses)
    };
    assert_eq!(uses(&[("a", "b"), ("b", "c"), ("a", "c")]), None);
    let found = uses(&[("a", "b"), ("b", "c"), ("c", "b"), ("c", "d")]);
    assert_eq!(found, Some(vec!["b".to_owned(), "c".to_owned()]));
}

#[test]
fn paths_are_read_with_their_groups() {
    let source = "use crate::a::{self, B, c::{D, E as F}}; fn f(x: super::g::H) {}";
    let source = syn::parse_str(source).unwrap();
    assert_eq!(used_paths("p::m", &source), ["a", "a::B", "a::c::D", "a::c::E", "p::g::H"]);
}
