//! Parameters of the low-latency kernels.

use core::ffi::c_void;

use crate::common::{PeerTable, RankOnNode, ScaledRows, WaitParams};

pub const LL_MAX_TOP_K: u32 = 32;
/// Packets with counts that a rank sends to each other rank, besides one per local expert.
pub const LL_COUNTS_BESIDE_EXPERTS: u32 = 3;
/// Channels of operations, each with its own epochs: one for whole operations, two for staged ones.
pub const LL_CHANNELS: u32 = 3;
/// The channel of whole operations; staged operations use the other channels.
pub const LL_WHOLE_CHANNEL: u32 = 0;
/// Number of banks: whole operations alternate between 0 and 1; staged channel c has bank c + 1.
pub const LL_BANKS: u32 = 4;
/// Most ranks of a group over several nodes.
pub const LL_MAX_RANKS: usize = 1024;
/// Threads of an `ll_topk_weights` block, a warp per token.
pub const LL_TOPK_WEIGHTS_THREADS: u32 = 128;
/// Number of an entry packet's bits for the row's index among those that its source sends to the expert (rank-major: to
/// the rank); the bits above have the local expert.
pub const LL_INDEX_BITS: u32 = 20;
/// Most threads of a dispatch block, in whole warps.
pub const LL_DISPATCH_THREADS: u32 = 512;
/// Most threads of a dispatch block for rows without scales on one node, which need fewer registers.
pub const LL_PLAIN_DISPATCH_THREADS: u32 = 1024;
/// Most threads of a dispatch block for few tokens; with more they would not have enough registers.
pub const LL_FEW_DISPATCH_THREADS: u32 = 768;
/// Most threads of a combine block for few tokens.
pub const LL_FEW_COMBINE_THREADS: u32 = 512;
/// Most ids of a token in a dispatch for few tokens: one per lane, except for one lane.
pub const LL_FEW_TOP_K: u32 = 31;
/// Most static shared memory of a dispatch block, except for the words per rank (`LL_MAX_RANKS`) over several nodes.
pub const LL_STATIC_SHARED_BYTES: u32 = 1024;
/// Most threads of a combine block, in whole warps.
pub const LL_COMBINE_THREADS: u32 = 768;
/// Most threads of a combine block for many tokens.
pub const LL_COMBINE_QUEUE_THREADS: u32 = 512;
/// Most threads of a combine block in exact mode or over several nodes, which needs more registers.
pub const LL_COMBINE_MANY_THREADS: u32 = 384;
/// Most 16-byte accesses of a lane to the payload, and to the scales, of a chunk with scales; without scales it is one.
pub const LL_SCALED_CHUNK_VECS: u32 = 4;
/// The value of words of a bank's rows that have not arrived; initially of all words.
pub const LL_SENTINEL: u32 = 0xffe7_ff93;

/// The phases of an operation that a launch runs, as bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum LlPhase {
    /// Sends this rank's own rows.
    Send = 1,
    /// Receives rows.
    Receive = 2,
    /// A whole operation on one node.
    SendReceive = 3,
    /// The work for remote sources: a dispatch sends their rows to the peers, a combine sums the rows that peers return
    /// for them.
    Relay = 4,
    /// The phases of a combine before the exchange of sums.
    SendRelay = 5,
    /// A whole dispatch over several nodes.
    All = 7,
}

/// Offsets in every rank's window; equal on all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct LlLayout {
    /// u64 packets `[LL_CHANNELS][ranks]`.
    pub acks: u64,
    /// `LL_BANKS` times `bank_bytes`.
    pub banks: u64,
    /// Size of a bank; its rows are at its start.
    pub bank_bytes: u64,
    /// Offset in a bank: u64 packets `[rows][LlShape::flags]`.
    pub flags: u64,
    /// Offset in a bank: u64 packets `[ranks][local_experts + LL_COUNTS_BESIDE_EXPERTS]`.
    pub counts: u64,
    /// Offset in a bank: u64 packets `[ranks][max_tokens][LL_MAX_TOP_K]`, then as many for rank-major weights.
    pub entries: u64,
}

/// The sizes of an LL operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct LlShape {
    pub local_experts: u32,
    pub max_tokens: u32,
    pub tokens: u32,
    pub top_k: u32,
    /// Bytes per row in transit, with its scales.
    pub row_bytes: u32,
    /// Distance between rows of a bank, in bytes.
    pub slot_bytes: u32,
    /// A row travels in `chunks` chunks of `chunk_bytes` (the last may be shorter), one per warp, plus
    /// `ScaledRows::scale_chunk_bytes` of scales each.
    pub chunk_bytes: u32,
    pub chunks: u32,
    /// Number of flags of a bank's row, one per access of a lane to the payload of its chunks: the same on all ranks,
    /// whatever the chunk size.
    pub flags: u32,
    /// For divisions by the ranks of the group; see `reciprocal`.
    pub ranks_reciprocal: u32,
    /// For divisions by `local_experts`.
    pub local_experts_reciprocal: u32,
    /// For divisions by the words of a source's counts.
    pub counts_reciprocal: u32,
    /// For divisions by `top_k`.
    pub top_k_reciprocal: u32,
    /// For divisions by `chunks`.
    pub chunks_reciprocal: u32,
}

/// 2^32 / `divisor`, rounded down. With it kernels divide by a multiplication and a correction, with a quarter of the
/// code.
pub fn reciprocal(divisor: u32) -> u32 {
    let quotient = (1 << 32) / u64::from(divisor.max(1));
    u32::try_from(quotient).unwrap_or(u32::MAX)
}

/// Device memory of an LL handle, which a dispatch stores for combines.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct LlHandleMemory {
    /// `[sources][max_tokens][top_k]`: the expert of each entry of this rank and of the ranks that it forwards for;
    /// negative if there is none.
    pub expert_of: *mut i32,
    /// `[ranks][max_tokens][top_k]`: output row of each entry that arrived here, negative if there is none. Rank-major:
    /// the output row of each token, at its first entry.
    pub row_of: *mut i32,
    /// `[ranks + 1]`: number of tokens of each rank, then the epoch of the last dispatch if it filled a view, else 0.
    pub tokens_of: *mut u32,
}

/// Device memory of a group, one per channel, initially zero.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct LlChannelState {
    /// The last operation that was sent.
    pub epoch: u32,
    /// Blocks that have read `epoch`.
    pub blocks_started: u32,
    /// Blocks that have summed everything for other ranks.
    pub blocks_relayed: u32,
    /// Blocks that have received everything.
    pub blocks_finished: u32,
    /// The last operation that a receive phase has ended; staged channels only.
    pub received: u32,
}

/// Parameters that LL dispatch and combine have in common.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct LlCommon {
    pub peers: PeerTable,
    pub wait: WaitParams,
    pub layout: LlLayout,
    pub shape: LlShape,
    pub handle: LlHandleMemory,
    pub channel_state: *mut LlChannelState,
    pub channel: u32,
    pub phases: LlPhase,
    /// What all ranks must agree on in an operation; opaque to the kernels.
    pub fingerprint: u32,
    /// What all ranks must agree on about scales, likewise; 0 without scales.
    pub scales_word: u32,
    /// The first `send_blocks` of the grid send rows.
    pub send_blocks: u32,
    /// The last `receive_blocks` do everything else. Both may overlap, and together cover the grid, except in kernels
    /// for few tokens, where blocks in between notify the peers.
    pub receive_blocks: u32,
}

/// Further parameters of operations over several nodes. Sources are the ranks that this one forwards for, and itself as
/// number 0.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct LlNodes {
    /// `[ranks]`.
    pub of_rank: *const RankOnNode,
    /// `[peers]`: the rank with each local index.
    pub rank_of_peer: *const u32,
    /// `[sources]`.
    pub rank_of_source: *const u32,
    /// `[nodes - 1]`, by distance from 1 on.
    pub rail_peers: *const u32,
    /// `[sources - 1]` messages of rows, `rows_stride` apart. In a dispatch, from each source: header, rows, ids and,
    /// rank-major, weights. In a combine, to each source: header, and this node's sums for its tokens.
    pub rows: *mut u8,
    /// `[sources - 1]` messages of a combine, `weights_stride` apart: header, and the weights of the source's entries.
    pub weights: *const u8,
    /// `[nodes - 1]` messages by distance from 1 on, `rows_stride` apart: header, and the node's sums for this rank's
    /// tokens.
    pub returned: *const u8,
    pub rows_stride: u64,
    pub weights_stride: u64,
    pub ranks: u32,
    pub rank: u32,
    /// Number of sources.
    pub sources: u32,
    /// The most tokens of a source from 1 on.
    pub most_tokens: u32,
    /// The handle's number, which headers must have.
    pub handle: u32,
    /// Number of other nodes.
    pub other_nodes: u32,
    /// In a combine, the position of this node in the sums of this rank's tokens, or `OWN_NODE_FIRST`.
    pub own_place: u32,
}

#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct LlDispatchParams {
    pub common: LlCommon,
    /// `[tokens]` rows.
    pub tokens: *const u8,
    /// `[tokens][top_k]`.
    pub topk_idx: *const i64,
    /// `[local_experts][ranks * max_tokens]` rows; NULL to discard received rows.
    pub out: *mut u8,
    /// `[local_experts]`, or NULL.
    pub counter: *mut i32,
    /// `[ranks]`, or NULL: the nanoseconds of waiting for each source are added.
    pub waits: *mut u64,
    /// The first `notify_blocks` of the receiving blocks also notify peers.
    pub notify_blocks: u32,
    /// In kernels for few tokens: how many receiving blocks after the first are reserved for ranks with more tokens.
    pub serve_blocks: u32,
}

/// Parameters of `ll_combine_bf16` and its siblings.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct LlCombineParams {
    pub common: LlCommon,
    /// `[local_experts][ranks * max_tokens]` rows; rank-major `[ranks][max_tokens]`.
    pub rows: *const u8,
    /// `[tokens][top_k]`: entries whose ids do not name an expert any more are masked.
    pub topk_idx: *const i64,
    /// `[tokens][top_k]`; NULL if rank-major and, as `out`, to discard received rows.
    pub weights: *const f32,
    /// `[tokens]` rows.
    pub out: *mut u8,
    /// `[ranks]`, or NULL: the nanoseconds of waiting for each rank are added.
    pub waits: *mut u64,
}

#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct LlDispatchNodesParams {
    /// As on one node.
    pub dispatch: LlDispatchParams,
    pub nodes: LlNodes,
}

/// Parameters of `ll_dispatch_scaled` and its siblings.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct LlScaledDispatchParams {
    /// As without scales.
    pub dispatch: LlDispatchParams,
    pub rows: ScaledRows,
}

/// Parameters of `ll_dispatch_nodes_scaled`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct LlScaledDispatchNodesParams {
    /// As without scales, but `tokens` are rows with scales in wire form.
    pub dispatch: LlDispatchParams,
    pub nodes: LlNodes,
    pub rows: ScaledRows,
}

/// The ids and weights of a rank-major dispatch.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct LlTopk {
    /// `[tokens][top_k]`: the weights of this rank's tokens.
    pub weights: *const f32,
    /// `[ranks][max_tokens][top_k]`: ids, -1 for experts elsewhere and in unused rows.
    pub out_ids: *mut c_void,
    /// `[ranks][max_tokens][top_k]`.
    pub out_weights: *mut f32,
    /// The first local expert's number in `out_ids`.
    pub first_id: u32,
    /// Not zero if ids have 32 bits rather than 64.
    pub has_narrow_ids: u32,
}

#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct LlRankDispatchParams {
    /// As expert-major, but `out` is `[ranks][max_tokens]` rows and `counter` `[ranks]`.
    pub dispatch: LlDispatchParams,
    pub topk: LlTopk,
}

/// Parameters of `ll_rank_dispatch_scaled` and its siblings.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct LlRankScaledDispatchParams {
    /// As without scales.
    pub dispatch: LlRankDispatchParams,
    pub rows: ScaledRows,
}

#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct LlRankDispatchNodesParams {
    /// As on one node.
    pub dispatch: LlRankDispatchParams,
    /// For the other nodes, whose messages have weights after the ids.
    pub nodes: LlNodes,
}

/// Parameters of `ll_rank_dispatch_nodes_scaled`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct LlRankScaledDispatchNodesParams {
    /// As without scales, but `tokens` are rows with scales in wire form.
    pub dispatch: LlRankDispatchParams,
    pub nodes: LlNodes,
    pub rows: ScaledRows,
}

/// Parameters of `ll_combine_nodes_bf16` and its siblings.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct LlCombineNodesParams {
    /// As on one node.
    pub combine: LlCombineParams,
    pub nodes: LlNodes,
}

#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct LlTopkWeightsParams {
    /// The parameters of the combine that follows.
    pub combine: LlCombineNodesParams,
    /// Gets the message: a header, and the weights `[tokens][top_k]`.
    pub message: *mut u8,
}
