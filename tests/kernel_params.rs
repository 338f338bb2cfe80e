//! Host and device agree on the names of kernels and on their parameters.
//!
//! The headers of `PAIRS` are generated and committed; these tests compare them, or rewrite them
//! with NCCL_EP_UPDATE_HEADER=1. They need neither a GPU nor nvcc.

#![allow(clippy::expect_used, clippy::unwrap_used)]

use nccl_ep_core::backend::cuda::kernels::Kernel;
use nccl_ep_core::backend::cuda::params::common::*;
use nccl_ep_core::backend::cuda::params::ht::*;
use nccl_ep_core::backend::cuda::params::ht_nodes::*;
use nccl_ep_core::backend::cuda::params::ll::*;
use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;

mod sources;

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
            SelftestResult,
            ReplayMarkParams,
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
            LlRankOnNode,
            LlHello,
            LlNodes,
            LlDispatchNodesParams,
            LlScaledDispatchParams,
            LlScaledDispatchNodesParams,
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
            HtReceived,
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
            HtSource,
            HtTold,
            HtOrigin,
            HtNodesMemory,
            HtRouteNodesParams,
            HtPlaceParams,
            HtHead,
            HtMessages,
            HtHeadParams,
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
        documentation_style: cbindgen::DocumentationStyle::Cxx,
        header: Some(format!(
            "// Kernel parameters. Generated from {} by\n\
             // NCCL_EP_UPDATE_HEADER=1 cargo test --test kernel_params; do not edit.\n\
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
    String::from_utf8(text).expect("cbindgen writes UTF-8")
}

#[test]
fn the_committed_headers_are_what_the_rust_definitions_give() {
    for pair in PAIRS {
        let path = root().join(pair.header);
        let generated = generate(&pair);
        if std::env::var_os("NCCL_EP_UPDATE_HEADER").is_some() {
            fs::write(&path, &generated).expect("the header can be written");
        }
        let committed = fs::read_to_string(&path).unwrap_or_default();
        assert_eq!(
            committed, generated,
            "run the test once with NCCL_EP_UPDATE_HEADER=1 and commit"
        );
    }
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

/// The names that follow `extern "C" __global__` in a kernel file.
fn entries(source: &str) -> Vec<String> {
    let mut parts = source.split("extern \"C\" __global__");
    parts.next();
    parts
        .filter_map(|part| {
            // `void __launch_bounds__(...) name(`: the name is the last word before the parameters,
            // which begin with `const __grid_constant__`.
            let (head, _) = part.split_once("(const __grid_constant__")?;
            head.split_whitespace().last().map(str::to_owned)
        })
        .collect()
}

#[test]
fn rust_knows_exactly_the_kernels_that_exist() {
    let mut found = BTreeSet::new();
    for file in sources::files("cuda", &[".cu"]) {
        let source = sources::read(&file);
        assert_eq!(
            entries(&source).len(),
            source.matches("__global__").count(),
            "{file}: every kernel is `extern \"C\" __global__` with one struct parameter"
        );
        found.extend(entries(&source));
    }
    let known: BTreeSet<String> = Kernel::ALL.iter().map(|k| k.name().to_owned()).collect();
    assert_eq!(known, found);
}

#[test]
fn the_c_programs_send_the_word_that_means_not_arrived() {
    let source = fs::read_to_string(root().join("c_tests/reference/rows.h")).unwrap();
    let defined = format!("#define kRefMark {LL_MARK:#x}u");
    assert!(source.contains(&defined), "{defined}");
}

#[test]
fn kernels_are_listed_in_the_order_of_their_numbers() {
    for (index, kernel) in Kernel::ALL.into_iter().enumerate() {
        assert_eq!(kernel as usize, index);
    }
}
