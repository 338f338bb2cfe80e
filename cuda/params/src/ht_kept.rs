//! Parameters of the high-throughput kernels for handles that keep their ids, and of those for rows by expert.

use core::ffi::c_void;

use crate::common::{PeerTable, WaitParams};
use crate::ht::{HtCombineParams, HtCount, HtDispatchParams, HtHandleMemory, HtLayout, HtScaledDispatchParams};

/// Threads of a block of `ht_zones`.
pub const HT_ZONES_THREADS: u32 = 512;
/// Experts that a packet of `ht_zones` is about; behind their bits it has how many experts the row is for before them,
/// and a bit for whether there are more.
pub const HT_ZONE_WORD_EXPERTS: u32 = 26;
/// Behind the last slot of a row.
pub const HT_NO_SLOT: u32 = 0xffff_ffff;
/// Instead of a slot that there is not.
pub const HT_DROPPED: u32 = 0xffff_fffe;
/// What a warp of a combine of zones sums at a time, of a row, and rows whose parts are in a stage of its shared memory.
pub const HT_ZONE_PART_BYTES: u32 = 2048;
/// As said.
pub const HT_ZONE_STAGE_ROWS: u32 = 4;
/// Such stages.
pub const HT_ZONE_STAGES: u32 = 2;
/// Shared memory of that warp: a sum on its way, the stages, and a barrier for each of these.
pub const HT_ZONE_BUFFER_BYTES: u32 = (1 + HT_ZONE_STAGES * HT_ZONE_STAGE_ROWS) * HT_ZONE_PART_BYTES + 64;
/// Threads of `ht_counters`, one block.
pub const HT_COUNTERS_THREADS: u32 = 256;
/// Threads of a block of `ht_by_k`.
pub const HT_BY_K_THREADS: u32 = 256;

/// Numbers of a caller's.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct HtNumbers {
    /// The first, or NULL.
    pub data: *mut c_void,
    /// Not zero if they have 64 bits, not 32.
    pub is_wide: u32,
}

/// Where the rows that a rank receives lie by expert.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct HtZones {
    /// `[ranks * max_tokens][most_slots]`: the slots of a row, by ascending expert; `HT_DROPPED` for one that there is
    /// not, `HT_NO_SLOT` behind the last.
    pub slots: *mut u32,
    /// `[experts + 1]`: the first slot of each local expert, then the number of all.
    pub begins: *mut u32,
    /// Most slots of a row.
    pub most_slots: u32,
    /// Slots that there are; `HT_NO_SLOT` if none is dropped.
    pub limit: u32,
    /// Zones are a multiple of this, a power of two.
    pub alignment: u32,
    /// Local experts.
    pub experts: u32,
}

/// What a routing tells its caller; of each, no address if he does not want it.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct HtTold {
    /// Gets the rows for each local expert, with zones the slots.
    pub experts: HtNumbers,
    /// Gets the rows, with zones all slots; none if ranks disagree.
    pub total: HtNumbers,
    /// With zones, gets the first slot of each expert.
    pub offsets: HtNumbers,
    /// With zones, gets their total for the host.
    pub page: *mut HtCount,
    /// The handle's number, which goes there.
    pub epoch: u32,
}

/// Parameters of `ht_zones`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct HtZonesParams {
    /// Where the ranks' windows are.
    pub peers: PeerTable,
    /// Deadline and report.
    pub wait: WaitParams,
    /// What `ht_route` has filled.
    pub handle: HtHandleMemory,
    /// What is to be filled.
    pub zones: HtZones,
    /// The group's offsets.
    pub layout: HtLayout,
    /// As of `ht_route`.
    pub own_counts: *const u64,
    /// What the caller gets.
    pub told: HtTold,
    /// Offset in a window: u64 packets `[ranks][experts / HT_ZONE_WORD_EXPERTS, rounded up][max_tokens]`, by source.
    pub packets: u64,
    /// Most tokens of a rank.
    pub max_tokens: u32,
    /// As of `ht_route`, which has counted.
    pub epochs: *const u32,
    /// The first `send_blocks` of the grid send.
    pub send_blocks: u32,
}

/// Parameters of `ht_counters`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct HtCountersParams {
    /// The rows that this rank receives, or `HT_DISAGREED` and why.
    pub rows: *const u32,
    /// `[local_experts]`: received rows per expert.
    pub counts: *const i32,
    /// What the caller gets.
    pub told: HtTold,
    /// With zones, of the handle; its addresses are NULL without.
    pub zones: HtZones,
    /// Experts per rank.
    pub local_experts: u32,
}

/// Parameters of `ht_by_k`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct HtByKParams {
    /// `[tokens][top_k]`.
    pub topk_idx: *const i64,
    /// `[tokens][top_k]`: by ascending expert, then by k.
    pub gradients: *mut f32,
    /// Experts over all ranks.
    pub experts: u32,
    /// This rank's tokens.
    pub tokens: u32,
    /// Ids per token.
    pub top_k: u32,
}

/// Parameters of `ht_dispatch_zones`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct HtZonesDispatchParams {
    /// As without zones, but weights are `[routing_rows]`, and there are no ids.
    pub rows: HtDispatchParams,
    /// The zones.
    pub zones: HtZones,
}

/// Parameters of `ht_dispatch_zones_scaled`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct HtZonesScaledDispatchParams {
    /// As without zones.
    pub rows: HtScaledDispatchParams,
    /// The zones.
    pub zones: HtZones,
}

/// Parameters of `ht_combine_zones_bf16` and its siblings.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct HtZonesCombineParams {
    /// As without zones, but gradients are `[in_rows]`.
    pub rows: HtCombineParams,
    /// The zones.
    pub zones: HtZones,
}
