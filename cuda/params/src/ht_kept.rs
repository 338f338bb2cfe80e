//! Parameters of the high-throughput kernels for handles that keep their ids, and of those for rows by expert.

use core::ffi::c_void;

use crate::common::{PeerTable, WaitParams};
use crate::ht::{HtCombineParams, HtCount, HtDispatchParams, HtHandleMemory, HtScaledDispatchParams};

/// Threads of a block of `ht_zones`.
pub const HT_ZONES_THREADS: u32 = 512;
/// Behind the last slot of a row.
pub const HT_NO_SLOT: u32 = 0xffff_ffff;
/// Instead of a slot that there is not.
pub const HT_DROPPED: u32 = 0xffff_fffe;
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
    /// Offset in a window: u64 packets `[ranks][max_tokens][experts / 32, rounded up]`, by source.
    pub packets: u64,
    pub max_tokens: u32,
    /// As of `ht_route`, which has counted.
    pub epochs: *const u32,
    /// The first `send_blocks` of the grid send.
    pub send_blocks: u32,
}

#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct HtCountersParams {
    /// The rows that this rank receives, or `HT_DISAGREED` and why.
    pub rows: *const u32,
    /// `[local_experts]`: received rows per expert.
    pub counts: *const i32,
    /// Gets these.
    pub experts: HtNumbers,
    /// Gets the rows, none if ranks disagree.
    pub total: HtNumbers,
    /// With zones, gets the first slot of each expert; `experts` and `total` then are about slots.
    pub offsets: HtNumbers,
    /// With zones, of the handle; its addresses are NULL without.
    pub zones: HtZones,
    /// With zones, gets their total for the host, or NULL.
    pub page: *mut HtCount,
    /// As of `ht_route`.
    pub epoch: u32,
    pub local_experts: u32,
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
