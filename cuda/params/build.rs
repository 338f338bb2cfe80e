//! Makes the C++ headers of the parameters: `params/*.h` in cargo's folder for the profile, such as `target/release`.
//!
//! They have the names, types and values; what these mean is said here in `src`.

#![allow(dead_code)] // The sizes alone are of interest.

#[path = "src/common.rs"]
mod common;
#[path = "src/ht.rs"]
mod ht;
#[path = "src/ht_kept.rs"]
mod ht_kept;
#[path = "src/ht_mapped.rs"]
mod ht_mapped;
#[path = "src/ht_nodes.rs"]
mod ht_nodes;
#[path = "src/ll.rs"]
mod ll;
#[path = "src/ll_pack.rs"]
mod ll_pack;
#[path = "src/ll_view.rs"]
mod ll_view;

use std::error::Error;
use std::path::{Path, PathBuf};
use std::{env, fs};

/// The list of kernels, of which a header is made as well.
const KERNELS: &str = "../../src/backend/cuda/kernels.rs";

/// Name and size of structs.
macro_rules! sizes {
    ($module:ident: $($name:ident)*) => {
        &[$((stringify!($name), size_of::<$module::$name>())),*]
    };
}

/// A file of definitions.
struct File {
    name: &'static str,
    /// The header that the generated one includes.
    base: Option<&'static str>,
    /// Every struct of the file.
    sizes: &'static [(&'static str, usize)],
}

const FILES: [File; 8] = [
    File {
        name: "common",
        base: None,
        sizes: sizes![common: FaultReport ScaleView ScaledRows WaitParams PeerTable RankOnNode MessageHeader
            SelftestResult ReplayMarkParams HandleHeaderParams CallerBlock HandleIdsParams AddCountsParams
            PeerSelftestParams],
    },
    File {
        name: "ll",
        base: Some("common.h"),
        sizes: sizes![ll: LlLayout LlShape LlHandleMemory LlChannelState LlCommon LlDispatchParams LlCombineParams
            LlNodes LlDispatchNodesParams LlScaledDispatchParams LlScaledDispatchNodesParams
            LlTopk LlRankDispatchParams LlRankScaledDispatchParams LlRankDispatchNodesParams
            LlRankScaledDispatchNodesParams
            LlCombineNodesParams LlTopkWeightsParams],
    },
    File {
        name: "ll_pack",
        base: Some("ll.h"),
        sizes: sizes![ll_pack: LlPackParams LlRankPackParams LlScaledPackParams],
    },
    File {
        name: "ll_view",
        base: Some("ll.h"),
        sizes: sizes![ll_view: LlViewState LlView LlRankDispatchViewParams LlRankScaledDispatchViewParams
            LlRankCombineParams],
    },
    File {
        name: "ht",
        base: Some("common.h"),
        sizes: sizes![ht: HtLayout HtEntry HtHandleMemory HtCount HtNumbers HtReport HtPackets HtFinish HtRouteParams
            HtSequences HtCommon HtShape HtDispatchParams HtScaledRows HtScaledDispatchParams HtCombineParams],
    },
    File {
        name: "ht_kept",
        base: Some("ht_nodes.h"),
        sizes: sizes![ht_kept: HtZones HtZonesParams HtCountersParams HtCutParams HtByKParams
            HtZonesDispatchParams HtZonesScaledDispatchParams HtZonesCombineParams
            HtZonesDispatchNodesParams HtZonesScaledDispatchNodesParams HtZonesCombineNodesParams],
    },
    File {
        name: "ht_mapped",
        base: Some("ht.h"),
        sizes: sizes![ht_mapped: HtMappedLayout HtOfferState HtMapped HtDirectParams HtScaledDirectParams HtPullParams
            HtOfferParams],
    },
    File {
        name: "ht_nodes",
        base: Some("ht.h"),
        sizes: sizes![ht_nodes: HtNodes HtForwarded HtOrigin HtNodesMemory HtRouteNodesParams HtRoomNodesParams
            HtPlaceParams HtMessages HtHeaderParams HtPackParams HtScaledPackParams HtStage HtDispatchNodesParams
            HtScaledDispatchNodesParams HtPartials HtCombineNodesParams],
    },
];

fn main() -> Result<(), Box<dyn Error>> {
    let out = PathBuf::from(env::var("OUT_DIR")?);
    // Where everybody finds them: the kernels' CPU build knows no hash of cargo's.
    let profile = out.ancestors().nth(3).ok_or("OUT_DIR is not three folders below the profile's")?;
    let folder = profile.join("params");
    fs::create_dir_all(&folder)?;
    for file in FILES {
        write(&folder.join(file.name).with_extension("h"), &header_of(&file)?)?;
    }
    write(&folder.join("kernels.h"), &list_of_kernels()?)?;
    println!("cargo::metadata=include={}", profile.display());
    println!("cargo::rerun-if-changed=src");
    println!("cargo::rerun-if-changed={KERNELS}");
    Ok(())
}

/// The header of a file, which checks that its structs have the same sizes in C++.
fn header_of(file: &File) -> Result<String, Box<dyn Error>> {
    let path = Path::new("src").join(file.name).with_extension("rs");
    let source = fs::read_to_string(&path)?;
    let named = |start| source.lines().filter_map(move |line: &str| line.strip_prefix(start)?.split(' ').next());
    let missing: Vec<_> =
        named("pub struct ").filter(|name| file.sizes.iter().all(|(known, _)| known != name)).collect();
    if !missing.is_empty() {
        return Err(format!("build.rs lacks the sizes of {missing:?}").into());
    }
    let mut config = cbindgen::Config {
        language: cbindgen::Language::Cxx,
        namespace: Some("nccl_ep".to_owned()),
        pragma_once: true,
        no_includes: true,
        usize_is_size_t: true,
        sys_includes: vec!["cstddef".to_owned(), "cstdint".to_owned()],
        includes: file.base.map(str::to_owned).into_iter().collect(),
        tab_width: 4,
        documentation: false,
        header: Some(format!("// Made from cuda/params/{}, which explains it.", path.display())),
        ..cbindgen::Config::default()
    };
    config.constant.allow_static_const = true;
    config.constant.allow_constexpr = true;
    // Kernels compare and combine these as numbers, by names like those of constants.
    config.enumeration.enum_class = false;
    config.enumeration.rename_variants = cbindgen::RenameRule::QualifiedScreamingSnakeCase;
    // No C function in these files uses the types, so they are requested by name.
    config.export.include = named("pub struct ").chain(named("pub enum ")).map(str::to_owned).collect();
    let check = |(name, size): &(&str, usize)| {
        format!("static_assert(sizeof(nccl_ep::{name}) == {size}, \"{name} as in Rust\");\n")
    };
    config.trailer = Some(file.sizes.iter().map(check).collect());
    let mut text = Vec::new();
    cbindgen::Builder::new().with_config(config).with_src(path).generate()?.write(&mut text);
    Ok(String::from_utf8(text)?)
}

/// `kernel(Params, THREADS, blocks);` of the list as a macro of the C preprocessor; `kernel<T>` stands for three.
fn list_of_kernels() -> Result<String, Box<dyn Error>> {
    let source = fs::read_to_string(KERNELS)?;
    let (_, rest) = source.split_once("\nkernels! {\n").ok_or("kernels.rs has no list")?;
    let (list, _) = rest.split_once("\n}\n").ok_or("the list of kernels has no end")?;
    let mut text = "\
// KERNEL(name, parameters, most threads of a block, blocks that an SM has room for or 0) of each kernel.
// Made from src/backend/cuda/kernels.rs.
#pragma once

#include \"ht_kept.h\"
#include \"ht_mapped.h\"
#include \"ll.h\"
#include \"ll_pack.h\"
#include \"ll_view.h\"

#define NCCL_EP_KERNELS(KERNEL)"
        .to_owned();
    for line in list.lines().filter(|line| !line.trim().is_empty()) {
        let kernel = line.trim().strip_suffix(");").and_then(|line| line.split_once('('));
        let (name, rest) = kernel.ok_or_else(|| format!("no kernel: {line}"))?;
        let names = match name.strip_suffix("<T>") {
            Some(name) => ["bf16", "f16", "f32"].map(|of| format!("{name}_{of}")).to_vec(),
            None => vec![name.to_owned()],
        };
        for name in names {
            text += &format!(" \\\n    KERNEL({name}, {rest})");
        }
    }
    Ok(text + "\n")
}

/// Writes a file unless it says so already: others are made from it.
fn write(path: &Path, text: &str) -> std::io::Result<()> {
    if fs::read_to_string(path).is_ok_and(|old| old == text) { Ok(()) } else { fs::write(path, text) }
}
