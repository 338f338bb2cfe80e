//! Parameters of the high-throughput kernels for handles that keep their ids, and of those for rows by expert.

use crate::common::{PeerTable, WaitParams};
use crate::ht::{
    HtCombineParams, HtDispatchParams, HtHandleMemory, HtLayout, HtPackets, HtScaledDispatchParams, HtTold,
};
use crate::ht_nodes::{HtCombineNodesParams, HtDispatchNodesParams, HtScaledDispatchNodesParams};

/// Threads of a block of `ht_zones`.
pub const HT_ZONES_THREADS: u32 = 512;
/// Experts covered by a packet of `ht_zones`; above their bits it has the number of the row's experts before them, and
/// a bit for whether there are more.
pub const HT_ZONE_WORD_EXPERTS: u32 = 26;
/// Ends a row's list of slots.
pub const HT_NO_SLOT: u32 = 0xffff_ffff;
/// Stands for a slot beyond the limit.
pub const HT_DROPPED: u32 = 0xffff_fffe;
/// Part of a row that a warp of a combine of zones sums at a time.
pub const HT_ZONE_PART_BYTES: u32 = 2048;
/// Parts of rows in flight to that warp.
pub const HT_ZONE_STAGES: u32 = 6;
/// The warp's shared memory: an outgoing sum, and the stages.
pub const HT_ZONE_BUFFER_BYTES: u32 = (1 + HT_ZONE_STAGES) * HT_ZONE_PART_BYTES;
/// Threads of `ht_counters`, one block.
pub const HT_COUNTERS_THREADS: u32 = 256;
/// Threads of `ht_cut`, one block.
pub const HT_CUT_THREADS: u32 = 512;
/// Threads of a block of `ht_by_k`.
pub const HT_BY_K_THREADS: u32 = 256;

/// The slots of the rows that a rank receives, if they lie by expert.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct HtZones {
    /// `[ranks * max_tokens][most_slots]`: the slots of a row, by ascending expert; `HT_DROPPED` for one beyond the
    /// limit, `HT_NO_SLOT` behind the last.
    pub slots: *mut u32,
    /// `[experts + 1]`: the first slot of each local expert, then the number of all slots.
    pub begins: *mut u32,
    pub most_slots: u32,
    /// Number of slots; `HT_NO_SLOT` if none is dropped.
    pub limit: u32,
    /// Zones are a multiple of this, a power of two.
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
    /// Number of ranks that rows come from.
    pub sources: u32,
    /// Over several nodes, the rank that this launch sends for.
    pub source: u32,
    /// Where `ht_route` received counts; unused over several nodes.
    pub layout: HtLayout,
    pub own_counts: *const u64,
    pub told: HtTold,
    pub packets: HtPackets,
    pub max_tokens: u32,
    /// As in `ht_route`, which has counted; NULL over several nodes.
    pub epochs: *const u32,
    /// Over several nodes, the epoch of `ht_route_nodes`.
    pub epoch: u32,
    /// The first `send_blocks` of the grid send; on one node none do, as `ht_route` has sent.
    pub send_blocks: u32,
}

#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct HtCountersParams {
    /// The rows that this rank receives, or `HT_DISAGREED` and why.
    pub rows: *const u32,
    /// `[local_experts]`: received rows per expert.
    pub counts: *const i32,
    pub told: HtTold,
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
    /// Rows that each rank has room for.
    pub limit: u32,
    pub max_tokens: u32,
    /// Where `ht_route` received counts.
    pub layout: HtLayout,
    pub own_counts: *const u64,
    /// As in `ht_route`, which has counted.
    pub epochs: *const u32,
    /// u32 `[ranks][local_experts]`, zero except while the kernel runs.
    pub tally: *mut u32,
    pub packets: HtPackets,
    /// The rows of each expert that stay, and the number of all rows.
    pub told: HtTold,
}

#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct HtByKParams {
    /// `[tokens][top_k]`.
    pub topk_idx: *const i64,
    /// `[tokens][top_k]`: in by ascending expert, out by k.
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
