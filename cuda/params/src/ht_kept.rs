//! Parameters of the high-throughput kernels for handles that keep their ids, and for rows ordered by expert.

use crate::common::{PeerTable, WaitParams};
use crate::ht::{
    HtCombineParams, HtDispatchParams, HtFinish, HtHandleMemory, HtLayout, HtPackets, HtReport, HtScaledDispatchParams,
};
use crate::ht_nodes::{HtCombineNodesParams, HtDispatchNodesParams, HtScaledDispatchNodesParams};

/// Threads of a block of `ht_zones`.
pub const HT_ZONES_THREADS: u32 = 512;
/// Experts per packet of `ht_zones`, one bit each; the bits above have the number of the row's experts in earlier
/// packets, and whether there are experts in later ones.
pub const HT_ZONE_WORD_EXPERTS: u32 = 26;
/// Ends a row's list of slots.
pub const HT_NO_SLOT: u32 = 0xffff_ffff;
/// In place of a slot beyond the limit.
pub const HT_DROPPED: u32 = 0xffff_fffe;
/// Bytes of a row that a warp of a combine with zones sums at a time.
pub const HT_ZONE_PART_BYTES: u32 = 2048;
/// Number of loads of this size that the warp has in flight.
pub const HT_ZONE_STAGES: u32 = 6;
/// Shared memory of the warp: an outgoing sum, and the stages.
pub const HT_ZONE_BUFFER_BYTES: u32 = (1 + HT_ZONE_STAGES) * HT_ZONE_PART_BYTES;
/// Threads of `ht_counters`, one block.
pub const HT_COUNTERS_THREADS: u32 = 256;
/// Threads of `ht_cut`, one block.
pub const HT_CUT_THREADS: u32 = 512;
/// Threads of a block of `ht_by_k`.
pub const HT_BY_K_THREADS: u32 = 256;

/// The slots of the rows that a rank receives, if rows are ordered by expert.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct HtZones {
    /// `[ranks * max_tokens][most_slots]`: the slots of a row, by ascending expert; `HT_DROPPED` for one beyond the
    /// limit, `HT_NO_SLOT` after the last.
    pub slots: *mut u32,
    /// `[experts + 1]`: the first slot of each local expert, then the number of all slots.
    pub begins: *mut u32,
    pub most_slots: u32,
    /// Number of slots; `HT_NO_SLOT` if none is dropped.
    pub limit: u32,
    /// The size of a zone is a multiple of this power of two.
    pub alignment: u32,
    pub experts: u32,
}

#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct HtZonesParams {
    pub peers: PeerTable,
    pub wait: WaitParams,
    /// Filled by `ht_route`.
    pub handle: HtHandleMemory,
    /// Gets filled.
    pub zones: HtZones,
    /// The rows that this rank receives, or `HT_DISAGREED` and why.
    pub rows: *const u32,
    /// Number of source ranks.
    pub sources: u32,
    /// Over several nodes, the source of the rows that this launch notifies of.
    pub source: u32,
    /// Where `ht_route` received counts; unused over several nodes.
    pub layout: HtLayout,
    pub own_counts: *const u64,
    pub report: HtReport,
    pub packets: HtPackets,
    pub max_tokens: u32,
    /// The counter of `ht_route`; NULL over several nodes.
    pub epochs: *const u32,
    /// Over several nodes, the epoch of `ht_route_nodes`.
    pub epoch: u32,
    /// The first `send_blocks` of the grid send; none on one node, where `ht_route` has sent.
    pub send_blocks: u32,
    pub finish: HtFinish,
}

#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct HtCountersParams {
    /// The rows that this rank receives, or `HT_DISAGREED` and why.
    pub rows: *const u32,
    /// `[local_experts]`: received rows per expert.
    pub counts: *const i32,
    pub report: HtReport,
    /// The handle's zones; NULL addresses without zones.
    pub zones: HtZones,
    pub local_experts: u32,
}

#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct HtCutParams {
    pub peers: PeerTable,
    pub wait: WaitParams,
    /// Filled by `ht_route`.
    pub handle: HtHandleMemory,
    /// `[tokens][top_k]`: the ids that the handle keeps.
    pub ids: *mut i64,
    /// The most rows of a rank; rows beyond are dropped.
    pub limit: u32,
    pub max_tokens: u32,
    /// Where `ht_route` received counts.
    pub layout: HtLayout,
    pub own_counts: *const u64,
    /// The counter of `ht_route`.
    pub epochs: *const u32,
    /// u32 `[ranks][local_experts]`, zero except while the kernel runs.
    pub tally: *mut u32,
    pub packets: HtPackets,
    /// Gets the remaining rows of each expert, and the number of all rows.
    pub report: HtReport,
    pub finish: HtFinish,
}

#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct HtByKParams {
    /// `[tokens][top_k]`.
    pub topk_idx: *const i64,
    /// `[tokens][top_k]`: input by ascending expert, output by k.
    pub gradients: *mut f32,
    pub experts: u32,
    pub tokens: u32,
    pub top_k: u32,
}

/// Parameters of `ht_dispatch_zones`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct HtZonesDispatchParams {
    /// As without zones, but weights are `[routing_rows]`, and there are no ids.
    pub rows: HtDispatchParams,
    pub zones: HtZones,
}

/// Parameters of `ht_dispatch_zones_scaled`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct HtZonesScaledDispatchParams {
    /// As without zones.
    pub rows: HtScaledDispatchParams,
    pub zones: HtZones,
}

/// Parameters of `ht_combine_zones_bf16` and its siblings.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct HtZonesCombineParams {
    /// As without zones, but gradients are `[in_rows]`.
    pub rows: HtCombineParams,
    pub zones: HtZones,
}

/// Parameters of `ht_dispatch_zones_nodes`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct HtZonesDispatchNodesParams {
    /// As without zones, but weights are `[routing_rows]`, and there are no ids.
    pub rows: HtDispatchNodesParams,
    pub zones: HtZones,
}

/// Parameters of `ht_dispatch_zones_nodes_scaled`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct HtZonesScaledDispatchNodesParams {
    /// As without zones.
    pub rows: HtScaledDispatchNodesParams,
    pub zones: HtZones,
}

/// Parameters of `ht_combine_zones_nodes_bf16` and its siblings.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct HtZonesCombineNodesParams {
    /// As without zones, but gradients are `[in_rows]`.
    pub rows: HtCombineNodesParams,
    pub zones: HtZones,
}
