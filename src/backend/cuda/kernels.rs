//! The list of all kernels: names, parameters and launch bounds, and the types for launching one.
//!
//! `params/kernels.h` is generated from the list (`cuda/params/build.rs`), and the kernels in `cuda/` take their
//! parameters and bounds from that header. For each kernel there is a Rust function of the same name.

use crate::backend::cuda::params::common::*;
use crate::backend::cuda::params::ht::*;
use crate::backend::cuda::params::ht_kept::*;
use crate::backend::cuda::params::ht_mapped::*;
use crate::backend::cuda::params::ht_nodes::*;
use crate::backend::cuda::params::ll::*;
use crate::backend::cuda::params::ll_pack::*;
use crate::backend::cuda::params::ll_view::*;
use crate::error::{Error, Result};
use crate::model::tensor::DType;
use std::marker::PhantomData;
use std::sync::Arc;

/// A kernel whose only parameter is a `P`.
#[derive(Clone, Copy)]
pub struct Kernel<P> {
    /// The kernel's line in the list, and its index within that line.
    pub(super) line: Line,
    pub(super) number: usize,
    params: PhantomData<fn(P)>,
}

impl<P> Kernel<P> {
    pub(super) fn name(&self) -> &'static str {
        self.line.names().get(self.number).copied().unwrap_or_default()
    }

    pub(super) fn most_threads(&self) -> u32 {
        self.line.threads()
    }
}

/// The index within a line with `<T>` of the kernel that sums or casts elements of type `dtype`.
fn number_of(dtype: DType) -> Result<usize> {
    match dtype {
        DType::Bfloat16 => Ok(0),
        DType::Float16 => Ok(1),
        DType::Float32 => Ok(2),
        _ => Err(Error::internal(format!("no kernel for rows of {dtype}"))),
    }
}

/// The names of a line's kernels.
macro_rules! names {
    ($name:expr) => {
        &[$name]
    };
    ($name:expr, $T:ident) => {
        &[concat!($name, "_bf16"), concat!($name, "_f16"), concat!($name, "_f32")]
    };
}

/// The function that returns a line's kernel.
macro_rules! function {
    ($line:ident($params:ident)) => {
        pub const fn $line() -> Kernel<$params> {
            Kernel { line: Line::$line, number: 0, params: PhantomData }
        }
    };
    ($line:ident($params:ident) $T:ident) => {
        pub(super) fn $line(dtype: DType) -> Result<Kernel<$params>> {
            Ok(Kernel { line: Line::$line, number: number_of(dtype)?, params: PhantomData })
        }
    };
}

macro_rules! kernels {
    ($($line:ident$(<$T:ident>)?($params:ident, $threads:ident, $blocks:literal);)+) => {
        #[allow(non_camel_case_types)] // Named after the kernels.
        #[derive(Clone, Copy)]
        pub enum Line { $($line),+ }

        impl Line {
            /// All lines, each at the index of its number.
            pub const ALL: &[Line] = &[$(Line::$line),+];

            /// Names of the `extern "C"` functions.
            pub const fn names(self) -> &'static [&'static str] {
                match self { $(Line::$line => names!(stringify!($line) $(, $T)?)),+ }
            }

            /// The most threads of a block.
            pub const fn threads(self) -> u32 {
                match self { $(Line::$line => $threads),+ }
            }
        }

        $(function!($line($params) $($T)?);)+
    };
}

// Each line: parameters, most threads of a block, blocks that an SM must have room for (0: the compiler decides). A
// line with <T> stands for three kernels, with names ending in _bf16, _f16 and _f32.
kernels! {
    peer_selftest(PeerSelftestParams, SELFTEST_THREADS, 0);
    replay_mark(ReplayMarkParams, REPLAY_MARK_THREADS, 0);
    handle_header(HandleHeaderParams, HANDLE_HEADER_THREADS, 0);
    add_counts(AddCountsParams, ADD_COUNTS_THREADS, 0);
    handle_ids(HandleIdsParams, HANDLE_IDS_THREADS, 0);

    ll_dispatch(LlDispatchParams, LL_PLAIN_DISPATCH_THREADS, 1);
    ll_dispatch_few(LlDispatchParams, LL_FEW_DISPATCH_THREADS, 1);
    ll_dispatch_few_scaled(LlScaledDispatchParams, LL_FEW_DISPATCH_THREADS, 1);
    ll_dispatch_few_cast<T>(LlScaledDispatchParams, LL_FEW_DISPATCH_THREADS, 1);
    ll_dispatch_scaled(LlScaledDispatchParams, LL_DISPATCH_THREADS, 1);
    ll_dispatch_cast<T>(LlScaledDispatchParams, LL_DISPATCH_THREADS, 1);
    ll_combine<T>(LlCombineParams, LL_COMBINE_THREADS, 1);
    ll_combine_few<T>(LlCombineParams, LL_FEW_COMBINE_THREADS, 1);
    ll_combine_many<T>(LlCombineParams, LL_COMBINE_QUEUE_THREADS, 1);
    ll_combine_exact<T>(LlCombineParams, LL_COMBINE_MANY_THREADS, 1);

    ll_rank_dispatch(LlRankDispatchParams, LL_PLAIN_DISPATCH_THREADS, 1);
    ll_rank_dispatch_view(LlRankDispatchViewParams, LL_VIEW_THREADS, 4);
    ll_rank_dispatch_view_scaled(LlRankScaledDispatchViewParams, LL_VIEW_THREADS, 4);
    ll_rank_dispatch_view_cast<T>(LlRankScaledDispatchViewParams, LL_VIEW_THREADS, 4);
    ll_rank_dispatch_few(LlRankDispatchParams, LL_FEW_DISPATCH_THREADS, 1);
    ll_rank_dispatch_few_scaled(LlRankScaledDispatchParams, LL_FEW_DISPATCH_THREADS, 1);
    ll_rank_dispatch_few_cast<T>(LlRankScaledDispatchParams, LL_FEW_DISPATCH_THREADS, 1);
    ll_rank_dispatch_scaled(LlRankScaledDispatchParams, LL_DISPATCH_THREADS, 1);
    ll_rank_dispatch_cast<T>(LlRankScaledDispatchParams, LL_DISPATCH_THREADS, 1);
    ll_rank_combine<T>(LlRankCombineParams, LL_VIEW_THREADS, 4);

    ll_pack(LlPackParams, LL_PACK_THREADS, 0);
    ll_pack_scaled(LlScaledPackParams, LL_PACK_THREADS, 0);
    ll_pack_cast<T>(LlScaledPackParams, LL_PACK_THREADS, 0);
    ll_rank_pack(LlRankPackParams, LL_PACK_THREADS, 0);
    ll_topk_weights(LlTopkWeightsParams, LL_TOPK_WEIGHTS_THREADS, 0);
    ll_dispatch_nodes(LlDispatchNodesParams, LL_DISPATCH_THREADS, 1);
    ll_dispatch_nodes_scaled(LlScaledDispatchNodesParams, LL_DISPATCH_THREADS, 1);
    ll_rank_dispatch_nodes(LlRankDispatchNodesParams, LL_DISPATCH_THREADS, 1);
    ll_rank_dispatch_nodes_scaled(LlRankScaledDispatchNodesParams, LL_DISPATCH_THREADS, 1);
    ll_rank_combine_nodes<T>(LlCombineNodesParams, LL_COMBINE_MANY_THREADS, 1);
    ll_combine_nodes<T>(LlCombineNodesParams, LL_COMBINE_MANY_THREADS, 1);

    ht_route(HtRouteParams, HT_ROUTE_THREADS, 0);
    ht_dispatch(HtDispatchParams, HT_DISPATCH_THREADS, 1);
    ht_dispatch_scaled(HtScaledDispatchParams, HT_DISPATCH_THREADS, 1);
    ht_dispatch_cast(HtScaledDispatchParams, HT_CAST_THREADS, 1);
    ht_combine<T>(HtCombineParams, HT_COMBINE_THREADS, 1);

    ht_counters(HtCountersParams, HT_COUNTERS_THREADS, 0);
    ht_cut(HtCutParams, HT_CUT_THREADS, 0);
    ht_by_k(HtByKParams, HT_BY_K_THREADS, 0);
    ht_zones(HtZonesParams, HT_ZONES_THREADS, 0);
    ht_dispatch_zones(HtZonesDispatchParams, HT_DISPATCH_THREADS, 1);
    ht_dispatch_zones_scaled(HtZonesScaledDispatchParams, HT_DISPATCH_THREADS, 1);
    ht_combine_zones<T>(HtZonesCombineParams, HT_COMBINE_THREADS, 1);

    ht_offer(HtOfferParams, HT_OFFER_THREADS, 1);
    ht_dispatch_direct(HtDirectParams, HT_DISPATCH_THREADS, 1);
    ht_dispatch_direct_scaled(HtScaledDirectParams, HT_DISPATCH_THREADS, 1);
    ht_combine_pull<T>(HtPullParams, HT_COMBINE_THREADS, 1);

    ht_route_nodes(HtRouteNodesParams, HT_ROUTE_THREADS, 0);
    ht_room_nodes(HtRoomNodesParams, HT_ROOM_THREADS, 0);
    ht_place(HtPlaceParams, HT_PLACE_THREADS, 0);
    ht_header(HtHeaderParams, HT_HEADER_THREADS, 0);
    ht_pack(HtPackParams, HT_PACK_THREADS, 0);
    ht_pack_scaled(HtScaledPackParams, HT_PACK_THREADS, 0);
    ht_pack_cast<T>(HtScaledPackParams, HT_PACK_THREADS, 0);
    ht_dispatch_nodes(HtDispatchNodesParams, HT_DISPATCH_THREADS, 1);
    ht_dispatch_nodes_scaled(HtScaledDispatchNodesParams, HT_DISPATCH_THREADS, 1);
    ht_dispatch_nodes_cast(HtScaledDispatchNodesParams, HT_CAST_THREADS, 1);
    ht_combine_nodes<T>(HtCombineNodesParams, HT_COMBINE_THREADS, 1);
    ht_dispatch_zones_nodes(HtZonesDispatchNodesParams, HT_DISPATCH_THREADS, 1);
    ht_dispatch_zones_nodes_scaled(HtZonesScaledDispatchNodesParams, HT_DISPATCH_THREADS, 1);
    ht_combine_zones_nodes<T>(HtZonesCombineNodesParams, HT_COMBINE_THREADS, 1);
}

/// A kernel's entry point.
#[derive(Clone, Copy, Debug)]
pub struct FunctionHandle(pub(super) usize);

/// The kernels' entry points, in the order of [`Line`].
pub type Functions = Arc<[Box<[FunctionHandle]>]>;

/// The grid and block size of a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LaunchShape {
    pub blocks: u32,
    pub threads: u32,
    /// Dynamic shared memory per block.
    pub shared_bytes: u32,
}

impl LaunchShape {
    /// A launch without dynamic shared memory.
    pub const fn new(blocks: u32, threads: u32) -> Self {
        Self { blocks, threads, shared_bytes: 0 }
    }
}

/// `count` as a kernel parameter.
pub(super) fn to_u32(count: usize) -> Result<u32> {
    u32::try_from(count).map_err(|_| Error::internal(format!("{count} does not fit a kernel")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_guide_lists_every_kernel() {
        let guide = include_str!("../../../docs/guide/profiling.md");
        for line in Line::ALL {
            // The guide lists only the name with _bf16, the first, for all three.
            let name = line.names()[0];
            assert!(guide.contains(&format!("`{name}`")), "{name}");
        }
    }
}
