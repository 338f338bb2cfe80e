//! The kernels by name, and the parameters of each.
//!
//! `tests/kernel_params.rs` compares the names with the entries of `cuda/*.cu`.
#![forbid(unsafe_code)]

use crate::backend::cuda::params::common::{
    PeerSelftestParams, REPLAY_MARK_THREADS, ReplayMarkParams, SELFTEST_THREADS,
};
use crate::backend::cuda::params::ht::{
    HT_CAST_THREADS, HT_COMBINE_THREADS, HT_DISPATCH_THREADS, HT_ROUTE_THREADS, HtCombineParams,
    HtDispatchParams, HtRouteParams, HtScaledDispatchParams,
};
use crate::backend::cuda::params::ht_nodes::{
    HT_HEAD_THREADS, HT_PACK_THREADS, HT_PLACE_THREADS, HtCombineNodesParams,
    HtDispatchNodesParams, HtHeadParams, HtPackParams, HtPlaceParams, HtRouteNodesParams,
    HtScaledDispatchNodesParams, HtScaledPackParams,
};
use crate::backend::cuda::params::ll::{
    LL_COMBINE_THREADS, LL_DISPATCH_THREADS, LL_GATES_THREADS, LL_PACK_THREADS,
    LlCombineNodesParams, LlCombineParams, LlDispatchNodesParams, LlDispatchParams, LlGatesParams,
    LlPackParams, LlScaledDispatchNodesParams, LlScaledDispatchParams, LlScaledPackParams,
};
use crate::error::{Error, Result};
use crate::model::scales::Cast;
use crate::model::tensor::DType;

/// A kernel's entry point.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kernel {
    /// `cuda/selftest.cu`.
    PeerSelftest,
    /// `cuda/replay_mark.cu`.
    ReplayMark,
    /// `cuda/ll/dispatch.cu`.
    LlDispatch,
    /// `cuda/ll/combine.cu`.
    LlCombineBf16,
    /// `cuda/ll/combine.cu`.
    LlCombineF16,
    /// `cuda/ll/combine.cu`.
    LlCombineF32,
    /// `cuda/ll/dispatch.cu`.
    LlDispatchNodes,
    /// `cuda/ll/dispatch.cu`.
    LlDispatchScaled,
    /// `cuda/ll/dispatch.cu`.
    LlDispatchCastBf16,
    /// `cuda/ll/dispatch.cu`.
    LlDispatchCastF16,
    /// `cuda/ll/dispatch.cu`.
    LlDispatchCastF32,
    /// `cuda/ll/dispatch.cu`.
    LlDispatchNodesScaled,
    /// `cuda/ll/gates.cu`.
    LlGates,
    /// `cuda/ll/pack.cu`.
    LlPack,
    /// `cuda/ll/pack.cu`.
    LlPackScaled,
    /// `cuda/ll/pack.cu`.
    LlPackCastBf16,
    /// `cuda/ll/pack.cu`.
    LlPackCastF16,
    /// `cuda/ll/pack.cu`.
    LlPackCastF32,
    /// `cuda/ll/combine.cu`.
    LlCombineNodesBf16,
    /// `cuda/ll/combine.cu`.
    LlCombineNodesF16,
    /// `cuda/ll/combine.cu`.
    LlCombineNodesF32,
    /// `cuda/ht/route.cu`.
    HtRoute,
    /// `cuda/ht/dispatch.cu`.
    HtDispatch,
    /// `cuda/ht/dispatch.cu`.
    HtDispatchScaled,
    /// `cuda/ht/dispatch.cu`.
    HtDispatchCast,
    /// `cuda/ht/combine.cu`.
    HtCombineBf16,
    /// `cuda/ht/combine.cu`.
    HtCombineF16,
    /// `cuda/ht/combine.cu`.
    HtCombineF32,
    /// `cuda/ht/route_nodes.cu`.
    HtRouteNodes,
    /// `cuda/ht/place.cu`.
    HtPlace,
    /// `cuda/ht/pack.cu`.
    HtPack,
    /// `cuda/ht/pack.cu`.
    HtPackScaled,
    /// `cuda/ht/pack.cu`.
    HtPackCastBf16,
    /// `cuda/ht/pack.cu`.
    HtPackCastF16,
    /// `cuda/ht/pack.cu`.
    HtPackCastF32,
    /// `cuda/ht/head.cu`.
    HtHead,
    /// `cuda/ht/dispatch.cu`.
    HtDispatchNodes,
    /// `cuda/ht/dispatch.cu`.
    HtDispatchNodesScaled,
    /// `cuda/ht/dispatch.cu`.
    HtDispatchNodesCast,
    /// `cuda/ht/combine.cu`.
    HtCombineNodesBf16,
    /// `cuda/ht/combine.cu`.
    HtCombineNodesF16,
    /// `cuda/ht/combine.cu`.
    HtCombineNodesF32,
}

impl Kernel {
    /// All kernels; each stands at the index of its own number.
    pub const ALL: [Kernel; 42] = [
        Kernel::PeerSelftest,
        Kernel::ReplayMark,
        Kernel::LlDispatch,
        Kernel::LlCombineBf16,
        Kernel::LlCombineF16,
        Kernel::LlCombineF32,
        Kernel::LlDispatchNodes,
        Kernel::LlDispatchScaled,
        Kernel::LlDispatchCastBf16,
        Kernel::LlDispatchCastF16,
        Kernel::LlDispatchCastF32,
        Kernel::LlDispatchNodesScaled,
        Kernel::LlGates,
        Kernel::LlPack,
        Kernel::LlPackScaled,
        Kernel::LlPackCastBf16,
        Kernel::LlPackCastF16,
        Kernel::LlPackCastF32,
        Kernel::LlCombineNodesBf16,
        Kernel::LlCombineNodesF16,
        Kernel::LlCombineNodesF32,
        Kernel::HtRoute,
        Kernel::HtDispatch,
        Kernel::HtDispatchScaled,
        Kernel::HtDispatchCast,
        Kernel::HtCombineBf16,
        Kernel::HtCombineF16,
        Kernel::HtCombineF32,
        Kernel::HtRouteNodes,
        Kernel::HtPlace,
        Kernel::HtPack,
        Kernel::HtPackScaled,
        Kernel::HtPackCastBf16,
        Kernel::HtPackCastF16,
        Kernel::HtPackCastF32,
        Kernel::HtHead,
        Kernel::HtDispatchNodes,
        Kernel::HtDispatchNodesScaled,
        Kernel::HtDispatchNodesCast,
        Kernel::HtCombineNodesBf16,
        Kernel::HtCombineNodesF16,
        Kernel::HtCombineNodesF32,
    ];

    /// The name of the kernel's `extern "C" __global__` function.
    pub fn name(self) -> &'static str {
        match self {
            Kernel::PeerSelftest => "peer_selftest",
            Kernel::ReplayMark => "replay_mark",
            Kernel::LlDispatch => "ll_dispatch",
            Kernel::LlCombineBf16 => "ll_combine_bf16",
            Kernel::LlCombineF16 => "ll_combine_f16",
            Kernel::LlCombineF32 => "ll_combine_f32",
            Kernel::LlDispatchNodes => "ll_dispatch_nodes",
            Kernel::LlDispatchScaled => "ll_dispatch_scaled",
            Kernel::LlDispatchCastBf16 => "ll_dispatch_cast_bf16",
            Kernel::LlDispatchCastF16 => "ll_dispatch_cast_f16",
            Kernel::LlDispatchCastF32 => "ll_dispatch_cast_f32",
            Kernel::LlDispatchNodesScaled => "ll_dispatch_nodes_scaled",
            Kernel::LlGates => "ll_gates",
            Kernel::LlPack => "ll_pack",
            Kernel::LlPackScaled => "ll_pack_scaled",
            Kernel::LlPackCastBf16 => "ll_pack_cast_bf16",
            Kernel::LlPackCastF16 => "ll_pack_cast_f16",
            Kernel::LlPackCastF32 => "ll_pack_cast_f32",
            Kernel::LlCombineNodesBf16 => "ll_combine_nodes_bf16",
            Kernel::LlCombineNodesF16 => "ll_combine_nodes_f16",
            Kernel::LlCombineNodesF32 => "ll_combine_nodes_f32",
            Kernel::HtRoute => "ht_route",
            Kernel::HtDispatch => "ht_dispatch",
            Kernel::HtDispatchScaled => "ht_dispatch_scaled",
            Kernel::HtDispatchCast => "ht_dispatch_cast",
            Kernel::HtCombineBf16 => "ht_combine_bf16",
            Kernel::HtCombineF16 => "ht_combine_f16",
            Kernel::HtCombineF32 => "ht_combine_f32",
            Kernel::HtRouteNodes => "ht_route_nodes",
            Kernel::HtPlace => "ht_place",
            Kernel::HtPack => "ht_pack",
            Kernel::HtPackScaled => "ht_pack_scaled",
            Kernel::HtPackCastBf16 => "ht_pack_cast_bf16",
            Kernel::HtPackCastF16 => "ht_pack_cast_f16",
            Kernel::HtPackCastF32 => "ht_pack_cast_f32",
            Kernel::HtHead => "ht_head",
            Kernel::HtDispatchNodes => "ht_dispatch_nodes",
            Kernel::HtDispatchNodesScaled => "ht_dispatch_nodes_scaled",
            Kernel::HtDispatchNodesCast => "ht_dispatch_nodes_cast",
            Kernel::HtCombineNodesBf16 => "ht_combine_nodes_bf16",
            Kernel::HtCombineNodesF16 => "ht_combine_nodes_f16",
            Kernel::HtCombineNodesF32 => "ht_combine_nodes_f32",
        }
    }

    /// The most threads per block that it is launched with.
    pub(super) fn threads(self) -> u32 {
        match self {
            Kernel::PeerSelftest => SELFTEST_THREADS,
            Kernel::ReplayMark => REPLAY_MARK_THREADS,
            Kernel::LlDispatch
            | Kernel::LlDispatchNodes
            | Kernel::LlDispatchScaled
            | Kernel::LlDispatchCastBf16
            | Kernel::LlDispatchCastF16
            | Kernel::LlDispatchCastF32
            | Kernel::LlDispatchNodesScaled => LL_DISPATCH_THREADS,
            Kernel::LlGates => LL_GATES_THREADS,
            Kernel::LlPack
            | Kernel::LlPackScaled
            | Kernel::LlPackCastBf16
            | Kernel::LlPackCastF16
            | Kernel::LlPackCastF32 => LL_PACK_THREADS,
            Kernel::LlCombineBf16
            | Kernel::LlCombineF16
            | Kernel::LlCombineF32
            | Kernel::LlCombineNodesBf16
            | Kernel::LlCombineNodesF16
            | Kernel::LlCombineNodesF32 => LL_COMBINE_THREADS,
            Kernel::HtRoute | Kernel::HtRouteNodes => HT_ROUTE_THREADS,
            Kernel::HtPlace => HT_PLACE_THREADS,
            Kernel::HtPack
            | Kernel::HtPackScaled
            | Kernel::HtPackCastBf16
            | Kernel::HtPackCastF16
            | Kernel::HtPackCastF32 => HT_PACK_THREADS,
            Kernel::HtHead => HT_HEAD_THREADS,
            Kernel::HtDispatch
            | Kernel::HtDispatchScaled
            | Kernel::HtDispatchNodesScaled
            | Kernel::HtDispatchNodes => HT_DISPATCH_THREADS,
            Kernel::HtDispatchCast | Kernel::HtDispatchNodesCast => HT_CAST_THREADS,
            Kernel::HtCombineBf16
            | Kernel::HtCombineF16
            | Kernel::HtCombineF32
            | Kernel::HtCombineNodesBf16
            | Kernel::HtCombineNodesF16
            | Kernel::HtCombineNodesF32 => HT_COMBINE_THREADS,
        }
    }
}

/// The type of a kernel's only parameter.
pub trait KernelParams: Copy {
    /// The kernels that take it: one, or one per type of rows in the order bfloat16, float16,
    /// float32. Where a dispatch may cast, the one that forwards comes before these.
    const KERNELS: &'static [Kernel];
}

/// The kernel that takes `P` and sums rows of `dtype`.
pub(super) fn for_rows<P: KernelParams>(dtype: DType) -> Result<Kernel> {
    of_type::<P>(0, dtype)
}

/// The kernel that takes `P` and dispatches rows with scales, as they are or by `cast`.
pub(super) fn for_scales<P: KernelParams>(cast: Option<&Cast>) -> Result<Kernel> {
    match (cast, P::KERNELS) {
        (Some(cast), _) => of_type::<P>(1, cast.from),
        (None, [forward, ..]) => Ok(*forward),
        (None, []) => Err(Error::internal("no kernel for rows with scales")),
    }
}

fn of_type<P: KernelParams>(first: usize, dtype: DType) -> Result<Kernel> {
    let index = match dtype {
        DType::Bfloat16 => Some(first),
        DType::Float16 => Some(first + 1),
        DType::Float32 => Some(first + 2),
        _ => None,
    };
    index
        .and_then(|index: usize| P::KERNELS.get(index).copied())
        .ok_or_else(|| Error::internal(format!("no kernel for rows of {dtype}")))
}

macro_rules! kernels_by_params {
    ($($params:ty: $($kernel:ident),+;)+) => {
        $(impl KernelParams for $params {
            const KERNELS: &'static [Kernel] = &[$(Kernel::$kernel),+];
        })+
    };
}

kernels_by_params! {
    PeerSelftestParams: PeerSelftest;
    ReplayMarkParams: ReplayMark;
    LlDispatchParams: LlDispatch;
    LlCombineParams:
        LlCombineBf16, LlCombineF16, LlCombineF32;
    LlDispatchNodesParams: LlDispatchNodes;
    LlScaledDispatchParams:
        LlDispatchScaled, LlDispatchCastBf16, LlDispatchCastF16, LlDispatchCastF32;
    LlScaledDispatchNodesParams: LlDispatchNodesScaled;
    LlScaledPackParams:
        LlPackScaled, LlPackCastBf16, LlPackCastF16, LlPackCastF32;
    LlGatesParams: LlGates;
    LlPackParams: LlPack;
    LlCombineNodesParams:
        LlCombineNodesBf16, LlCombineNodesF16, LlCombineNodesF32;
    HtRouteParams: HtRoute;
    HtDispatchParams: HtDispatch;
    HtScaledDispatchParams:
        HtDispatchScaled, HtDispatchCast, HtDispatchCast, HtDispatchCast;
    HtCombineParams:
        HtCombineBf16, HtCombineF16, HtCombineF32;
    HtRouteNodesParams: HtRouteNodes;
    HtPlaceParams: HtPlace;
    HtPackParams: HtPack;
    HtScaledPackParams:
        HtPackScaled, HtPackCastBf16, HtPackCastF16, HtPackCastF32;
    HtScaledDispatchNodesParams:
        HtDispatchNodesScaled, HtDispatchNodesCast, HtDispatchNodesCast, HtDispatchNodesCast;
    HtHeadParams: HtHead;
    HtDispatchNodesParams: HtDispatchNodes;
    HtCombineNodesParams:
        HtCombineNodesBf16, HtCombineNodesF16, HtCombineNodesF32;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_guide_lists_every_kernel() {
        let guide = include_str!("../../../docs/guide/profiling.md");
        for kernel in Kernel::ALL {
            // The guide says that a name with the first of these may have the others.
            let name = kernel
                .name()
                .replace("_f16", "_bf16")
                .replace("_f32", "_bf16");
            assert!(guide.contains(&format!("`{name}`")), "{name}");
        }
    }
}
