// KERNEL(name, parameters, most threads of a block, blocks that an SM has room for or 0) of each kernel.
// Generated from src/backend/cuda/kernels.rs by
// NCCL_EP_UPDATE_HEADER=1 cargo test --test kernel_params; do not edit.
#pragma once

#include "params.h"

#define NCCL_EP_KERNELS(KERNEL) \
    KERNEL(peer_selftest, PeerSelftestParams, SELFTEST_THREADS, 0) \
    KERNEL(replay_mark, ReplayMarkParams, REPLAY_MARK_THREADS, 0) \
    KERNEL(handle_header, HandleHeaderParams, HANDLE_HEADER_THREADS, 0) \
    KERNEL(ll_dispatch, LlDispatchParams, LL_PLAIN_DISPATCH_THREADS, 1) \
    KERNEL(ll_dispatch_scaled, LlScaledDispatchParams, LL_DISPATCH_THREADS, 1) \
    KERNEL(ll_dispatch_cast_bf16, LlScaledDispatchParams, LL_DISPATCH_THREADS, 1) \
    KERNEL(ll_dispatch_cast_f16, LlScaledDispatchParams, LL_DISPATCH_THREADS, 1) \
    KERNEL(ll_dispatch_cast_f32, LlScaledDispatchParams, LL_DISPATCH_THREADS, 1) \
    KERNEL(ll_combine_bf16, LlCombineParams, LL_COMBINE_THREADS, 1) \
    KERNEL(ll_combine_f16, LlCombineParams, LL_COMBINE_THREADS, 1) \
    KERNEL(ll_combine_f32, LlCombineParams, LL_COMBINE_THREADS, 1) \
    KERNEL(ll_combine_many_bf16, LlCombineParams, LL_COMBINE_MANY_THREADS, 1) \
    KERNEL(ll_combine_many_f16, LlCombineParams, LL_COMBINE_MANY_THREADS, 1) \
    KERNEL(ll_combine_many_f32, LlCombineParams, LL_COMBINE_MANY_THREADS, 1) \
    KERNEL(ll_combine_exact_bf16, LlCombineParams, LL_COMBINE_MANY_THREADS, 1) \
    KERNEL(ll_combine_exact_f16, LlCombineParams, LL_COMBINE_MANY_THREADS, 1) \
    KERNEL(ll_combine_exact_f32, LlCombineParams, LL_COMBINE_MANY_THREADS, 1) \
    KERNEL(ll_rank_dispatch, LlRankDispatchParams, LL_PLAIN_DISPATCH_THREADS, 1) \
    KERNEL(ll_rank_dispatch_scaled, LlRankScaledDispatchParams, LL_DISPATCH_THREADS, 1) \
    KERNEL(ll_rank_dispatch_cast_bf16, LlRankScaledDispatchParams, LL_DISPATCH_THREADS, 1) \
    KERNEL(ll_rank_dispatch_cast_f16, LlRankScaledDispatchParams, LL_DISPATCH_THREADS, 1) \
    KERNEL(ll_rank_dispatch_cast_f32, LlRankScaledDispatchParams, LL_DISPATCH_THREADS, 1) \
    KERNEL(ll_rank_combine_bf16, LlCombineParams, LL_COMBINE_THREADS, 1) \
    KERNEL(ll_rank_combine_f16, LlCombineParams, LL_COMBINE_THREADS, 1) \
    KERNEL(ll_rank_combine_f32, LlCombineParams, LL_COMBINE_THREADS, 1) \
    KERNEL(ll_pack, LlPackParams, LL_PACK_THREADS, 0) \
    KERNEL(ll_pack_scaled, LlScaledPackParams, LL_PACK_THREADS, 0) \
    KERNEL(ll_pack_cast_bf16, LlScaledPackParams, LL_PACK_THREADS, 0) \
    KERNEL(ll_pack_cast_f16, LlScaledPackParams, LL_PACK_THREADS, 0) \
    KERNEL(ll_pack_cast_f32, LlScaledPackParams, LL_PACK_THREADS, 0) \
    KERNEL(ll_rank_pack, LlRankPackParams, LL_PACK_THREADS, 0) \
    KERNEL(ll_gates, LlGatesParams, LL_GATES_THREADS, 0) \
    KERNEL(ll_dispatch_nodes, LlDispatchNodesParams, LL_DISPATCH_THREADS, 1) \
    KERNEL(ll_dispatch_nodes_scaled, LlScaledDispatchNodesParams, LL_DISPATCH_THREADS, 1) \
    KERNEL(ll_rank_dispatch_nodes, LlRankDispatchNodesParams, LL_DISPATCH_THREADS, 1) \
    KERNEL(ll_rank_dispatch_nodes_scaled, LlRankScaledDispatchNodesParams, LL_DISPATCH_THREADS, 1) \
    KERNEL(ll_rank_combine_nodes_bf16, LlCombineNodesParams, LL_COMBINE_MANY_THREADS, 1) \
    KERNEL(ll_rank_combine_nodes_f16, LlCombineNodesParams, LL_COMBINE_MANY_THREADS, 1) \
    KERNEL(ll_rank_combine_nodes_f32, LlCombineNodesParams, LL_COMBINE_MANY_THREADS, 1) \
    KERNEL(ll_combine_nodes_bf16, LlCombineNodesParams, LL_COMBINE_MANY_THREADS, 1) \
    KERNEL(ll_combine_nodes_f16, LlCombineNodesParams, LL_COMBINE_MANY_THREADS, 1) \
    KERNEL(ll_combine_nodes_f32, LlCombineNodesParams, LL_COMBINE_MANY_THREADS, 1) \
    KERNEL(ht_route, HtRouteParams, HT_ROUTE_THREADS, 0) \
    KERNEL(ht_dispatch, HtDispatchParams, HT_DISPATCH_THREADS, 1) \
    KERNEL(ht_dispatch_scaled, HtScaledDispatchParams, HT_DISPATCH_THREADS, 1) \
    KERNEL(ht_dispatch_cast, HtScaledDispatchParams, HT_CAST_THREADS, 1) \
    KERNEL(ht_combine_bf16, HtCombineParams, HT_COMBINE_THREADS, 1) \
    KERNEL(ht_combine_f16, HtCombineParams, HT_COMBINE_THREADS, 1) \
    KERNEL(ht_combine_f32, HtCombineParams, HT_COMBINE_THREADS, 1) \
    KERNEL(ht_route_nodes, HtRouteNodesParams, HT_ROUTE_THREADS, 0) \
    KERNEL(ht_place, HtPlaceParams, HT_PLACE_THREADS, 0) \
    KERNEL(ht_header, HtHeaderParams, HT_HEADER_THREADS, 0) \
    KERNEL(ht_pack, HtPackParams, HT_PACK_THREADS, 0) \
    KERNEL(ht_pack_scaled, HtScaledPackParams, HT_PACK_THREADS, 0) \
    KERNEL(ht_pack_cast_bf16, HtScaledPackParams, HT_PACK_THREADS, 0) \
    KERNEL(ht_pack_cast_f16, HtScaledPackParams, HT_PACK_THREADS, 0) \
    KERNEL(ht_pack_cast_f32, HtScaledPackParams, HT_PACK_THREADS, 0) \
    KERNEL(ht_dispatch_nodes, HtDispatchNodesParams, HT_DISPATCH_THREADS, 1) \
    KERNEL(ht_dispatch_nodes_scaled, HtScaledDispatchNodesParams, HT_DISPATCH_THREADS, 1) \
    KERNEL(ht_dispatch_nodes_cast, HtScaledDispatchNodesParams, HT_CAST_THREADS, 1) \
    KERNEL(ht_combine_nodes_bf16, HtCombineNodesParams, HT_COMBINE_THREADS, 1) \
    KERNEL(ht_combine_nodes_f16, HtCombineNodesParams, HT_COMBINE_THREADS, 1) \
    KERNEL(ht_combine_nodes_f32, HtCombineNodesParams, HT_COMBINE_THREADS, 1)
