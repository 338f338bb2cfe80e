//! The one list of kernels: their names, parameters and launch bounds; and what launches one.
//!
//! A kernel is named by the function that is called like it. `params/kernels.h` is made from the list
//! (`cuda/params/build.rs`); definitions in `cuda/` have their parameters and bounds from there.

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
    /// The kernel without the type of its parameter.
    pub(super) entry: Entry,
    params: PhantomData<fn(P)>,
}

impl<P> Kernel<P> {
    pub(super) fn most_threads(&self) -> u32 {
        self.entry.definition().threads
    }
}

/// What the list says of a kernel.
pub struct Definition {
    /// Name of the `extern "C"` function.
    pub name: &'static str,
    /// The most threads of a block.
    pub threads: u32,
}

macro_rules! kernels {
    ($($kernel:ident($params:ident, $threads:ident, $blocks:literal);)+) => {
        #[allow(non_camel_case_types)] // Named after the kernels.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Entry { $($kernel),+ }

        impl Entry {
            /// All of them, each at the index of its own number.
            pub const ALL: &[Entry] = &[$(Entry::$kernel),+];

            pub const fn definition(self) -> Definition {
                match self {
                    $(Entry::$kernel => Definition {
                        name: stringify!($kernel),
                        threads: $threads,
                    }),+
                }
            }
        }

        $(
            pub const fn $kernel() -> Kernel<$params> {
                Kernel { entry: Entry::$kernel, params: PhantomData }
            }
        )+
    };
}

// The parameters, the most threads of a block, how many blocks an SM is to have room for; 0 leaves it to the compiler.
kernels! {
    peer_selftest(PeerSelftestParams, SELFTEST_THREADS, 0);
    replay_mark(ReplayMarkParams, REPLAY_MARK_THREADS, 0);
    handle_header(HandleHeaderParams, HANDLE_HEADER_THREADS, 0);
    add_counts(AddCountsParams, ADD_COUNTS_THREADS, 0);
    handle_ids(HandleIdsParams, HANDLE_IDS_THREADS, 0);

    ll_dispatch(LlDispatchParams, LL_PLAIN_DISPATCH_THREADS, 1);
    ll_dispatch_few(LlDispatchParams, LL_FEW_DISPATCH_THREADS, 1);
    ll_dispatch_few_scaled(LlScaledDispatchParams, LL_FEW_DISPATCH_THREADS, 1);
    ll_dispatch_few_cast_bf16(LlScaledDispatchParams, LL_FEW_DISPATCH_THREADS, 1);
    ll_dispatch_few_cast_f16(LlScaledDispatchParams, LL_FEW_DISPATCH_THREADS, 1);
    ll_dispatch_few_cast_f32(LlScaledDispatchParams, LL_FEW_DISPATCH_THREADS, 1);
    ll_dispatch_scaled(LlScaledDispatchParams, LL_DISPATCH_THREADS, 1);
    ll_dispatch_cast_bf16(LlScaledDispatchParams, LL_DISPATCH_THREADS, 1);
    ll_dispatch_cast_f16(LlScaledDispatchParams, LL_DISPATCH_THREADS, 1);
    ll_dispatch_cast_f32(LlScaledDispatchParams, LL_DISPATCH_THREADS, 1);
    ll_combine_bf16(LlCombineParams, LL_COMBINE_THREADS, 1);
    ll_combine_f16(LlCombineParams, LL_COMBINE_THREADS, 1);
    ll_combine_f32(LlCombineParams, LL_COMBINE_THREADS, 1);
    ll_combine_few_bf16(LlCombineParams, LL_FEW_COMBINE_THREADS, 1);
    ll_combine_few_f16(LlCombineParams, LL_FEW_COMBINE_THREADS, 1);
    ll_combine_few_f32(LlCombineParams, LL_FEW_COMBINE_THREADS, 1);
    ll_combine_many_bf16(LlCombineParams, LL_COMBINE_QUEUE_THREADS, 1);
    ll_combine_many_f16(LlCombineParams, LL_COMBINE_QUEUE_THREADS, 1);
    ll_combine_many_f32(LlCombineParams, LL_COMBINE_QUEUE_THREADS, 1);
    ll_combine_exact_bf16(LlCombineParams, LL_COMBINE_MANY_THREADS, 1);
    ll_combine_exact_f16(LlCombineParams, LL_COMBINE_MANY_THREADS, 1);
    ll_combine_exact_f32(LlCombineParams, LL_COMBINE_MANY_THREADS, 1);

    ll_rank_dispatch(LlRankDispatchParams, LL_PLAIN_DISPATCH_THREADS, 1);
    ll_rank_dispatch_view(LlRankDispatchViewParams, LL_VIEW_THREADS, 4);
    ll_rank_dispatch_view_scaled(LlRankScaledDispatchViewParams, LL_VIEW_THREADS, 4);
    ll_rank_dispatch_view_cast_bf16(LlRankScaledDispatchViewParams, LL_VIEW_THREADS, 4);
    ll_rank_dispatch_view_cast_f16(LlRankScaledDispatchViewParams, LL_VIEW_THREADS, 4);
    ll_rank_dispatch_view_cast_f32(LlRankScaledDispatchViewParams, LL_VIEW_THREADS, 4);
    ll_rank_dispatch_few(LlRankDispatchParams, LL_FEW_DISPATCH_THREADS, 1);
    ll_rank_dispatch_few_scaled(LlRankScaledDispatchParams, LL_FEW_DISPATCH_THREADS, 1);
    ll_rank_dispatch_few_cast_bf16(LlRankScaledDispatchParams, LL_FEW_DISPATCH_THREADS, 1);
    ll_rank_dispatch_few_cast_f16(LlRankScaledDispatchParams, LL_FEW_DISPATCH_THREADS, 1);
    ll_rank_dispatch_few_cast_f32(LlRankScaledDispatchParams, LL_FEW_DISPATCH_THREADS, 1);
    ll_rank_dispatch_scaled(LlRankScaledDispatchParams, LL_DISPATCH_THREADS, 1);
    ll_rank_dispatch_cast_bf16(LlRankScaledDispatchParams, LL_DISPATCH_THREADS, 1);
    ll_rank_dispatch_cast_f16(LlRankScaledDispatchParams, LL_DISPATCH_THREADS, 1);
    ll_rank_dispatch_cast_f32(LlRankScaledDispatchParams, LL_DISPATCH_THREADS, 1);
    ll_rank_combine_bf16(LlRankCombineParams, LL_VIEW_THREADS, 4);
    ll_rank_combine_f16(LlRankCombineParams, LL_VIEW_THREADS, 4);
    ll_rank_combine_f32(LlRankCombineParams, LL_VIEW_THREADS, 4);

    ll_pack(LlPackParams, LL_PACK_THREADS, 0);
    ll_pack_scaled(LlScaledPackParams, LL_PACK_THREADS, 0);
    ll_pack_cast_bf16(LlScaledPackParams, LL_PACK_THREADS, 0);
    ll_pack_cast_f16(LlScaledPackParams, LL_PACK_THREADS, 0);
    ll_pack_cast_f32(LlScaledPackParams, LL_PACK_THREADS, 0);
    ll_rank_pack(LlRankPackParams, LL_PACK_THREADS, 0);
    ll_topk_weights(LlTopkWeightsParams, LL_TOPK_WEIGHTS_THREADS, 0);
    ll_dispatch_nodes(LlDispatchNodesParams, LL_DISPATCH_THREADS, 1);
    ll_dispatch_nodes_scaled(LlScaledDispatchNodesParams, LL_DISPATCH_THREADS, 1);
    ll_rank_dispatch_nodes(LlRankDispatchNodesParams, LL_DISPATCH_THREADS, 1);
    ll_rank_dispatch_nodes_scaled(LlRankScaledDispatchNodesParams, LL_DISPATCH_THREADS, 1);
    ll_rank_combine_nodes_bf16(LlCombineNodesParams, LL_COMBINE_MANY_THREADS, 1);
    ll_rank_combine_nodes_f16(LlCombineNodesParams, LL_COMBINE_MANY_THREADS, 1);
    ll_rank_combine_nodes_f32(LlCombineNodesParams, LL_COMBINE_MANY_THREADS, 1);
    ll_combine_nodes_bf16(LlCombineNodesParams, LL_COMBINE_MANY_THREADS, 1);
    ll_combine_nodes_f16(LlCombineNodesParams, LL_COMBINE_MANY_THREADS, 1);
    ll_combine_nodes_f32(LlCombineNodesParams, LL_COMBINE_MANY_THREADS, 1);

    ht_route(HtRouteParams, HT_ROUTE_THREADS, 0);
    ht_dispatch(HtDispatchParams, HT_DISPATCH_THREADS, 1);
    ht_dispatch_scaled(HtScaledDispatchParams, HT_DISPATCH_THREADS, 1);
    ht_dispatch_cast(HtScaledDispatchParams, HT_CAST_THREADS, 1);
    ht_combine_bf16(HtCombineParams, HT_COMBINE_THREADS, 1);
    ht_combine_f16(HtCombineParams, HT_COMBINE_THREADS, 1);
    ht_combine_f32(HtCombineParams, HT_COMBINE_THREADS, 1);

    ht_counters(HtCountersParams, HT_COUNTERS_THREADS, 0);
    ht_cut(HtCutParams, HT_CUT_THREADS, 0);
    ht_by_k(HtByKParams, HT_BY_K_THREADS, 0);
    ht_zones(HtZonesParams, HT_ZONES_THREADS, 0);
    ht_spread(HtSpreadParams, HT_APART_THREADS, 0);
    ht_gather_bf16(HtGatherParams, HT_APART_THREADS, 0);
    ht_gather_f16(HtGatherParams, HT_APART_THREADS, 0);
    ht_gather_f32(HtGatherParams, HT_APART_THREADS, 0);
    ht_dispatch_zones(HtZonesDispatchParams, HT_DISPATCH_THREADS, 1);
    ht_dispatch_zones_scaled(HtZonesScaledDispatchParams, HT_DISPATCH_THREADS, 1);
    ht_combine_zones_bf16(HtZonesCombineParams, HT_COMBINE_THREADS, 1);
    ht_combine_zones_f16(HtZonesCombineParams, HT_COMBINE_THREADS, 1);
    ht_combine_zones_f32(HtZonesCombineParams, HT_COMBINE_THREADS, 1);

    ht_offer(HtOfferParams, HT_OFFER_THREADS, 1);
    ht_dispatch_direct(HtDirectParams, HT_DISPATCH_THREADS, 1);
    ht_dispatch_direct_scaled(HtScaledDirectParams, HT_DISPATCH_THREADS, 1);
    ht_combine_pull_bf16(HtPullParams, HT_COMBINE_THREADS, 1);
    ht_combine_pull_f16(HtPullParams, HT_COMBINE_THREADS, 1);
    ht_combine_pull_f32(HtPullParams, HT_COMBINE_THREADS, 1);

    ht_route_nodes(HtRouteNodesParams, HT_ROUTE_THREADS, 0);
    ht_room_nodes(HtRoomNodesParams, HT_ROOM_THREADS, 0);
    ht_place(HtPlaceParams, HT_PLACE_THREADS, 0);
    ht_header(HtHeaderParams, HT_HEADER_THREADS, 0);
    ht_pack(HtPackParams, HT_PACK_THREADS, 0);
    ht_pack_scaled(HtScaledPackParams, HT_PACK_THREADS, 0);
    ht_pack_cast_bf16(HtScaledPackParams, HT_PACK_THREADS, 0);
    ht_pack_cast_f16(HtScaledPackParams, HT_PACK_THREADS, 0);
    ht_pack_cast_f32(HtScaledPackParams, HT_PACK_THREADS, 0);
    ht_dispatch_nodes(HtDispatchNodesParams, HT_DISPATCH_THREADS, 1);
    ht_dispatch_nodes_scaled(HtScaledDispatchNodesParams, HT_DISPATCH_THREADS, 1);
    ht_dispatch_nodes_cast(HtScaledDispatchNodesParams, HT_CAST_THREADS, 1);
    ht_combine_nodes_bf16(HtCombineNodesParams, HT_COMBINE_THREADS, 1);
    ht_combine_nodes_f16(HtCombineNodesParams, HT_COMBINE_THREADS, 1);
    ht_combine_nodes_f32(HtCombineNodesParams, HT_COMBINE_THREADS, 1);
}

/// A kernel's entry point.
#[derive(Clone, Copy, Debug)]
pub struct FunctionHandle(pub(super) usize);

/// The kernels' entry points, by [`Entry`].
pub type Functions = Arc<[FunctionHandle]>;

/// How many threads run a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LaunchShape {
    pub blocks: u32,
    pub threads: u32,
    /// Dynamic shared memory per block.
    pub shared_bytes: u32,
}

impl LaunchShape {
    /// Without dynamic shared memory.
    pub const fn new(blocks: u32, threads: u32) -> Self {
        Self { blocks, threads, shared_bytes: 0 }
    }
}

/// `count` in the integer type of kernel parameters.
pub(super) fn to_u32(count: usize) -> Result<u32> {
    u32::try_from(count).map_err(|_| Error::internal(format!("{count} does not fit a kernel")))
}

/// Of kernels that differ in the type of the numbers that they sum or cast, the one for a type.
macro_rules! by_type {
    ($($name:ident($params:ident): $bf16:ident, $f16:ident, $f32:ident;)+) => {
        $(
            pub(super) fn $name(dtype: DType) -> Result<Kernel<$params>> {
                match dtype {
                    DType::Bfloat16 => Ok($bf16()),
                    DType::Float16 => Ok($f16()),
                    DType::Float32 => Ok($f32()),
                    _ => Err(Error::internal(format!("no kernel for rows of {dtype}"))),
                }
            }
        )+
    };
}

by_type! {
    ll_dispatch_cast(LlScaledDispatchParams): ll_dispatch_cast_bf16, ll_dispatch_cast_f16, ll_dispatch_cast_f32;
    ll_dispatch_few_cast(LlScaledDispatchParams):
        ll_dispatch_few_cast_bf16, ll_dispatch_few_cast_f16, ll_dispatch_few_cast_f32;
    ll_rank_dispatch_cast(LlRankScaledDispatchParams):
        ll_rank_dispatch_cast_bf16, ll_rank_dispatch_cast_f16, ll_rank_dispatch_cast_f32;
    ll_rank_dispatch_few_cast(LlRankScaledDispatchParams):
        ll_rank_dispatch_few_cast_bf16, ll_rank_dispatch_few_cast_f16, ll_rank_dispatch_few_cast_f32;
    ll_rank_dispatch_view_cast(LlRankScaledDispatchViewParams):
        ll_rank_dispatch_view_cast_bf16, ll_rank_dispatch_view_cast_f16, ll_rank_dispatch_view_cast_f32;
    ll_rank_combine(LlRankCombineParams): ll_rank_combine_bf16, ll_rank_combine_f16, ll_rank_combine_f32;
    ll_rank_combine_nodes(LlCombineNodesParams):
        ll_rank_combine_nodes_bf16, ll_rank_combine_nodes_f16, ll_rank_combine_nodes_f32;
    ll_combine(LlCombineParams): ll_combine_bf16, ll_combine_f16, ll_combine_f32;
    ll_combine_few(LlCombineParams): ll_combine_few_bf16, ll_combine_few_f16, ll_combine_few_f32;
    ll_combine_many(LlCombineParams): ll_combine_many_bf16, ll_combine_many_f16, ll_combine_many_f32;
    ll_combine_exact(LlCombineParams): ll_combine_exact_bf16, ll_combine_exact_f16, ll_combine_exact_f32;
    ll_pack_cast(LlScaledPackParams): ll_pack_cast_bf16, ll_pack_cast_f16, ll_pack_cast_f32;
    ll_combine_nodes(LlCombineNodesParams): ll_combine_nodes_bf16, ll_combine_nodes_f16, ll_combine_nodes_f32;
    ht_combine(HtCombineParams): ht_combine_bf16, ht_combine_f16, ht_combine_f32;
    ht_combine_zones(HtZonesCombineParams): ht_combine_zones_bf16, ht_combine_zones_f16, ht_combine_zones_f32;
    ht_gather(HtGatherParams): ht_gather_bf16, ht_gather_f16, ht_gather_f32;
    ht_pack_cast(HtScaledPackParams): ht_pack_cast_bf16, ht_pack_cast_f16, ht_pack_cast_f32;
    ht_combine_pull(HtPullParams): ht_combine_pull_bf16, ht_combine_pull_f16, ht_combine_pull_f32;
    ht_combine_nodes(HtCombineNodesParams): ht_combine_nodes_bf16, ht_combine_nodes_f16, ht_combine_nodes_f32;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_guide_lists_every_kernel() {
        let guide = include_str!("../../../docs/guide/profiling.md");
        for entry in Entry::ALL {
            // The guide says that a name with the first of these may have the others.
            let name = entry.definition().name.replace("_f16", "_bf16").replace("_f32", "_bf16");
            assert!(guide.contains(&format!("`{name}`")), "{name}");
        }
    }
}
