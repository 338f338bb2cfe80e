//! Parameters of the kernels that pack low-latency messages between nodes.

use crate::common::{MessageHeader, ScaledRows};
use crate::ll::{LlChannelState, LlShape};

/// Threads of an `ll_pack` block.
pub const LL_PACK_THREADS: u32 = 512;

#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct LlPackParams {
    /// The message's header, except for the epoch.
    pub header: MessageHeader,
    /// The state of the channel before the operation.
    pub channel_state: *const LlChannelState,
    /// `[tokens]` rows.
    pub rows: *const u8,
    /// `[tokens][top_k]`.
    pub ids: *const i64,
    /// Gets the message: the header, the rows, the ids.
    pub message: *mut u8,
    /// Bytes of all rows, a multiple of 16.
    pub row_bytes: u64,
    pub num_ids: u64,
}

#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct LlRankPackParams {
    /// The caller's weights.
    pub weights: *const f32,
    /// Gets the weights.
    pub to: *mut f32,
    pub num_weights: u64,
}

/// Parameters of `ll_pack_scaled` and its siblings.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct LlScaledPackParams {
    /// As without scales.
    pub pack: LlPackParams,
    pub rows: ScaledRows,
    /// The chunks of rows, and this rank's number of tokens.
    pub shape: LlShape,
}
