//! Host and device agree on the kernels and on their parameters.
//!
//! The headers of `PAIRS` and the list of kernels are generated and committed; these tests compare them, or rewrite
//! them with NCCL_EP_UPDATE_HEADER=1. They need neither a GPU nor nvcc.

#![allow(clippy::expect_used, clippy::unwrap_used)]

use nccl_ep_core::backend::cuda::kernels::Entry;
use nccl_ep_core::backend::cuda::params::common::*;
use nccl_ep_core::backend::cuda::params::ht::*;
use nccl_ep_core::backend::cuda::params::ht_nodes::*;
use nccl_ep_core::backend::cuda::params::ll::*;
use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

/// Name and size of structs.
macro_rules! sizes {
    ($($name:ident),* $(,)?) => {
        &[$((stringify!($name), size_of::<$name>())),*]
    };
}

/// A file of definitions and the header generated from it.
struct Pair {
    source: &'static str,
    header: &'static str,
    /// The header that the generated one includes.
    base: Option<&'static str>,
    /// Every struct of the file.
    sizes: &'static [(&'static str, usize)],
}

const PAIRS: [Pair; 4] = [
    Pair {
        source: "src/backend/cuda/params/common.rs",
        header: "cuda/params/common.h",
        base: None,
        sizes: sizes![
            FaultReport,
            ScaleView,
            ScaledRows,
            WaitParams,
            PeerTable,
            RankOnNode,
            MessageHeader,
            SelftestResult,
            ReplayMarkParams,
            HandleHeaderParams,
            PeerSelftestParams
        ],
    },
    Pair {
        source: "src/backend/cuda/params/ll.rs",
        header: "cuda/params/ll.h",
        base: Some("common.h"),
        sizes: sizes![
            LlLayout,
            LlShape,
            LlHandleMemory,
            LlChannelState,
            LlCommon,
            LlDispatchParams,
            LlCombineParams,
            LlNodes,
            LlDispatchNodesParams,
            LlScaledDispatchParams,
            LlScaledDispatchNodesParams,
            LlBeside,
            LlRankDispatchParams,
            LlRankScaledDispatchParams,
            LlRankDispatchNodesParams,
            LlRankScaledDispatchNodesParams,
            LlRankPackParams,
            LlScaledPackParams,
            LlCombineNodesParams,
            LlGatesParams,
            LlPackParams
        ],
    },
    Pair {
        source: "src/backend/cuda/params/ht.rs",
        header: "cuda/params/ht.h",
        base: Some("common.h"),
        sizes: sizes![
            HtLayout,
            HtEntry,
            HtHandleMemory,
            HtCount,
            HtRouteParams,
            HtSequences,
            HtCommon,
            HtShape,
            HtDispatchParams,
            HtScaledRows,
            HtScaledDispatchParams,
            HtCombineParams
        ],
    },
    Pair {
        source: "src/backend/cuda/params/ht_nodes.rs",
        header: "cuda/params/ht_nodes.h",
        base: Some("ht.h"),
        sizes: sizes![
            HtNodes,
            HtForwarded,
            HtOrigin,
            HtNodesMemory,
            HtRouteNodesParams,
            HtPlaceParams,
            HtMessages,
            HtHeaderParams,
            HtPackParams,
            HtScaledPackParams,
            HtPass,
            HtDispatchNodesParams,
            HtScaledDispatchNodesParams,
            HtPartials,
            HtCombineNodesParams
        ],
    },
];

fn generate(pair: &Pair) -> String {
    let mut config = cbindgen::Config {
        language: cbindgen::Language::Cxx,
        namespace: Some("nccl_ep".to_owned()),
        pragma_once: true,
        no_includes: true,
        usize_is_size_t: true,
        sys_includes: vec!["cstddef".to_owned(), "cstdint".to_owned()],
        includes: pair.base.map(str::to_owned).into_iter().collect(),
        tab_width: 4,
        documentation: false,
        header: Some(format!(
            "// Kernel parameters, explained in {}, from which\n\
             // NCCL_EP_UPDATE_HEADER=1 cargo test --test kernel_params makes this; do not edit.\n\
             // clang-format off",
            pair.source
        )),
        ..cbindgen::Config::default()
    };
    config.constant.allow_static_const = true;
    config.constant.allow_constexpr = true;
    // Kernels compare and combine these as numbers, by names like those of constants.
    config.enumeration.enum_class = false;
    config.enumeration.rename_variants = cbindgen::RenameRule::QualifiedScreamingSnakeCase;
    // No C function in these files uses the types, so they are requested by name.
    let source = fs::read_to_string(root().join(pair.source)).unwrap();
    let enums = source.lines().filter_map(|it| it.strip_prefix("pub enum "));
    let structs = pair.sizes.iter().map(|(name, _)| *name);
    let names = structs.chain(enums.filter_map(|it| it.split(' ').next()));
    config.export.include = names.map(str::to_owned).collect();
    let checks: String = pair
        .sizes
        .iter()
        .map(|(name, size)| {
            format!("static_assert(sizeof(nccl_ep::{name}) == {size}, \"{name} as in Rust\");\n")
        })
        .collect();
    config.trailer = Some(checks.trim_end().to_owned());
    let bindings = cbindgen::Builder::new()
        .with_config(config)
        .with_src(root().join(pair.source))
        .generate()
        .expect("they are plain #[repr(C)] Rust");
    let mut text = Vec::new();
    bindings.write(&mut text);
    let text = String::from_utf8(text).expect("cbindgen writes UTF-8");
    // Only structs and enums stay apart.
    text.replace(";\n\nconstexpr", ";\nconstexpr")
}

/// The list of kernels as a macro of the C preprocessor.
fn generate_list() -> String {
    let mut text = "\
// KERNEL(name, parameters, most threads of a block, blocks that an SM has room for or 0) of each kernel.
// Generated from src/backend/cuda/kernels.rs by
// NCCL_EP_UPDATE_HEADER=1 cargo test --test kernel_params; do not edit.
#pragma once

#include \"params.h\"

#define NCCL_EP_KERNELS(KERNEL)"
        .to_owned();
    for entry in Entry::ALL {
        let it = entry.definition();
        text += &format!(
            " \\\n    KERNEL({}, {}, {}, {})",
            it.name, it.params, it.bound, it.blocks
        );
    }
    text + "\n"
}

/// Compares `header` with what it was generated from, or writes it anew.
fn compare(header: &str, generated: &str) {
    let path = root().join(header);
    if std::env::var_os("NCCL_EP_UPDATE_HEADER").is_some() {
        fs::write(&path, generated).expect("the header can be written");
    }
    assert_eq!(
        fs::read_to_string(&path).unwrap_or_default(),
        generated,
        "run the test once with NCCL_EP_UPDATE_HEADER=1 and commit"
    );
}

#[test]
fn the_committed_headers_are_what_the_rust_definitions_give() {
    for pair in PAIRS {
        compare(pair.header, &generate(&pair));
    }
    compare("cuda/params/kernels.h", &generate_list());
}

#[test]
fn the_size_of_every_struct_is_compared() {
    for pair in PAIRS {
        let source = fs::read_to_string(root().join(pair.source)).unwrap();
        let defined: BTreeSet<&str> = source
            .lines()
            .filter_map(|line| line.strip_prefix("pub struct ")?.split(' ').next())
            .collect();
        let compared: BTreeSet<&str> = pair.sizes.iter().map(|(name, _)| *name).collect();
        assert_eq!(compared, defined);
    }
}

#[test]
fn the_c_programs_send_the_word_that_means_not_arrived() {
    let source = fs::read_to_string(root().join("c_tests/reference/rows.h")).unwrap();
    let defined = format!("#define kRefMark {LL_MARK:#x}u");
    assert!(source.contains(&defined), "{defined}");
}
