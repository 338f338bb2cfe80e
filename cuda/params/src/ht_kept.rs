//! Parameters of the high-throughput kernels for handles that keep their ids, and of those for rows by expert.

use crate::common::{PeerTable, ScaledRows, WaitParams};
use crate::ht::{
    HtCombineParams, HtDispatchParams, HtHandleMemory, HtLayout, HtPackets, HtScaledDispatchParams, HtTold,
};

/// Threads of a block of `ht_zones`.
pub const HT_ZONES_THREADS: u32 = 512;
/// Threads of a block of `ht_spread` and `ht_gather_bf16`.
pub const HT_APART_THREADS: u32 = 256;
/// Experts that a packet of `ht_zones` is about; behind their bits it has how many experts the row is for before them,
/// and a bit for whether there are more.
pub const HT_ZONE_WORD_EXPERTS: u32 = 26;
/// Behind the last slot of a row.
pub const HT_NO_SLOT: u32 = 0xffff_ffff;
/// Instead of a slot that there is not.
pub const HT_DROPPED: u32 = 0xffff_fffe;
/// What a warp of a combine of zones sums at a time, of a row.
pub const HT_ZONE_PART_BYTES: u32 = 2048;
/// Parts of rows under way to that warp.
pub const HT_ZONE_STAGES: u32 = 6;
/// Its shared memory: a sum on its way, and the stages.
pub const HT_ZONE_BUFFER_BYTES: u32 = (1 + HT_ZONE_STAGES) * HT_ZONE_PART_BYTES;
/// Threads of `ht_counters`, one block.
pub const HT_COUNTERS_THREADS: u32 = 256;
/// Threads of `ht_cut`, one block.
pub const HT_CUT_THREADS: u32 = 512;
/// Threads of a block of `ht_by_k`.
pub const HT_BY_K_THREADS: u32 = 256;

/// Where the rows that a rank receives lie by expert.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct HtZones {
    /// `[ranks * max_tokens][most_slots]`: the slots of a row, by ascending expert; `HT_DROPPED` for one that there is
    /// not, `HT_NO_SLOT` behind the last.
    pub slots: *mut u32,
    /// `[experts + 1]`: the first slot of each local expert, then the number of all.
    pub begins: *mut u32,
    pub most_slots: u32,
    /// Slots that there are; `HT_NO_SLOT` if none is dropped.
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
    /// What `ht_route` has filled.
    pub handle: HtHandleMemory,
    /// What is to be filled.
    pub zones: HtZones,
    /// The rows that this rank receives, or `HT_DISAGREED` and why.
    pub rows: *const u32,
    /// The ranks that rows come from.
    pub sources: u32,
    /// Over several nodes, the one that this launch sends for.
    pub source: u32,
    /// Where `ht_route` has heard of counts; not over several nodes.
    pub layout: HtLayout,
    pub own_counts: *const u64,
    pub told: HtTold,
    pub packets: HtPackets,
    pub max_tokens: u32,
    /// As of `ht_route`, which has counted; NULL over several nodes.
    pub epochs: *const u32,
    /// Over several nodes, that of `ht_route_nodes`.
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
    /// With zones, of the handle; its addresses are NULL without.
    pub zones: HtZones,
    pub local_experts: u32,
}

#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct HtCutParams {
    pub peers: PeerTable,
    pub wait: WaitParams,
    /// What `ht_route` has filled.
    pub handle: HtHandleMemory,
    /// `[tokens][top_k]`: those that the handle keeps.
    pub ids: *mut i64,
    /// Rows that there are on each rank.
    pub limit: u32,
    pub max_tokens: u32,
    /// Where `ht_route` has heard of counts.
    pub layout: HtLayout,
    pub own_counts: *const u64,
    /// As of `ht_route`, which has counted.
    pub epochs: *const u32,
    /// u32 `[ranks][local_experts]`, zero except while the kernel runs.
    pub tally: *mut u32,
    pub packets: HtPackets,
    /// The rows for each expert that stay, and all that come.
    pub told: HtTold,
}

#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct HtByKParams {
    /// `[tokens][top_k]`.
    pub topk_idx: *const i64,
    /// `[tokens][top_k]`: by ascending expert, then by k.
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

/// Parameters of `ht_spread`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct HtSpreadParams {
    /// Who hears of a failure.
    pub peers: PeerTable,
    /// Deadline and report.
    pub wait: WaitParams,
    /// The zones.
    pub zones: HtZones,
    /// `[experts]`: received rows per expert.
    pub counts: *const i32,
    /// `[received][row_bytes]`: rows as they come.
    pub rows: *const u8,
    /// `[out_rows][row_bytes]`: slots, or NULL.
    pub out: *mut u8,
    /// Scales, from rows as they come to slots; none have 0 bytes.
    pub scales: ScaledRows,
    /// Of a row without scales, a multiple of 16.
    pub row_bytes: u32,
    /// Slots of `out`.
    pub out_rows: u32,
    /// Slots that there are scales for.
    pub scale_rows: u32,
    /// `[received][top_k]`: by ascending expert.
    pub weights: *const f32,
    /// `[weight_rows]`, or NULL.
    pub out_weights: *mut f32,
    /// Its length.
    pub weight_rows: u32,
    /// Rows.
    pub received: u32,
    /// Ids per token.
    pub top_k: u32,
}

/// Parameters of `ht_gather_bf16` and its siblings.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct HtGatherParams {
    /// Who hears of a failure.
    pub peers: PeerTable,
    /// Deadline and report.
    pub wait: WaitParams,
    /// The zones.
    pub zones: HtZones,
    /// `[in_rows]`: the rows of slots.
    pub rows: *const u8,
    /// `[received]`: gets the sum of each row's slots.
    pub out: *mut u8,
    /// `[in_rows]`, or NULL.
    pub gradients: *const f32,
    /// `[received][columns]`.
    pub out_gradients: *mut f32,
    /// Slots of the tensors.
    pub in_rows: u32,
    /// Rows.
    pub received: u32,
    /// Of a row, a multiple of 16.
    pub row_bytes: u32,
    /// Gradients of a row.
    pub columns: u32,
}
