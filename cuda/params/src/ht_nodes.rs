//! Parameters of the high-throughput kernels of groups over several nodes.
//!
//! Every rank *forwards* tokens on its node: its own, and those of the remote ranks whose rail peer it is. These
//! *forwarded ranks* are numbered, beginning with itself as 0. A rank's tokens are divided into *chunks*, equally many
//! on all ranks; an operation runs in *stages* over one or more chunks, of own tokens or of all remote ones.

use crate::common::{MessageHeader, PeerTable, RankOnNode, ScaledRows, WaitParams};
use crate::ht::{
    HtCombineParams, HtCount, HtDispatchParams, HtEntry, HtLayout, HtPackets, HtScaledDispatchParams, HtSequences,
};

/// Most chunks of a rank's tokens.
pub const HT_MOST_CHUNKS: u32 = 16;
/// Packets with which a rank notifies each other rank of its node about a forwarded rank, besides one per local expert
/// and the rows of each chunk: its verdict and its number of tokens.
pub const HT_COUNTS_OF_SOURCE: u32 = 2;
/// Threads of a block of `ht_place`.
pub const HT_PLACE_THREADS: u32 = 256;
/// Threads of `ht_room_nodes`, one block.
pub const HT_ROOM_THREADS: u32 = 256;
/// Bit of its result: the rank drops rows of some rank.
pub const HT_ROOM_DROPS: u32 = 0x8000_0000;
/// Threads of a block of `ht_pack`.
pub const HT_PACK_THREADS: u32 = 512;
/// A token without a row, a place without a rank.
pub const HT_NONE: u32 = 0xffff_ffff;
/// Bits of `HtNodesMemory::expert_places` for the place of an expert among the token's experts on its node. Above
/// them is 0 for this node, else one more than the other node's number.
pub const HT_PLACE_BITS: u32 = 8;
/// Bit of `FaultReport::peer` in HT: the other bits are a rank as the group numbers it, not a local index.
pub const HT_RANK_OF_GROUP: u32 = 0x8000_0000;
/// Threads of the block of `ht_header`.
pub const HT_HEADER_THREADS: u32 = 32;
/// A rank's tokens all travel, so that they can be sent in place, if at least this many of 32 do.
pub const HT_WHOLE_OF_32: u32 = 31;

/// The group's ranks on their nodes, as this rank sees them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct HtNodes {
    /// `[ranks]`.
    pub of_rank: *const RankOnNode,
    /// `[local ranks][1 + width]`: whom each forwards for, itself first, as group ranks, padded with `HT_NONE`.
    pub forwarded_by: *const u32,
    pub ranks: u32,
    pub others: u32,
    /// The most remote ranks that a local rank forwards for.
    pub width: u32,
    /// Ranks that this one forwards for, itself included.
    pub forwarded: u32,
    /// Chunks of a rank's tokens.
    pub chunks: u32,
}

/// A rank that this one forwards for, in host memory that the device maps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct HtForwarded {
    /// `[tokens][top_k]`.
    pub topk_idx: *const i64,
    pub tokens: u32,
    /// Tokens of the remote ranks before it.
    pub first: u32,
    /// Group rank.
    pub rank: u32,
    /// Its verdict, as in `HtRouteParams::verdict`.
    pub verdict: u32,
}

/// The origin of a token that came from another node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct HtOrigin {
    /// Its remote rank, from 0 on.
    pub source: u32,
    /// Its index among the tokens that come here from that rank.
    pub index: u32,
}

/// Device memory of an HT handle of such a group. Arrays with `chunks + 1` entries count what precedes each chunk, then
/// everything.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct HtNodesMemory {
    /// `[tokens][top_k]`: the experts of the own tokens on this node, numbered by local rank and local expert,
    /// ascending, without repetition.
    pub own_entries: *mut HtEntry,
    /// `[tokens of remote ranks][top_k]`: the same of those tokens of each that come here; indices are
    /// within a rank.
    pub raw_entries: *mut HtEntry,
    /// The same by chunk, then rank; indices count the rows from all remote ranks.
    pub entries: *mut HtEntry,
    /// `[tokens of remote ranks]`: whose each is, in the order of `entries`.
    pub origins: *mut HtOrigin,
    /// `[tokens][top_k]`: for the own tokens' experts on all nodes, ascending: the node, and the position there.
    pub expert_places: *mut u32,
    /// `[others][tokens]`: the own tokens that go to each other node, ascending.
    pub departing_tokens: *mut u32,
    /// `[others][tokens]`: a token's position in that list, or `HT_NONE`.
    pub departing_index: *mut u32,
    /// `[others][chunks + 1]`: tokens that go to each other node.
    pub departing: *mut u32,
    /// `[forwarded][chunks + 1]`: tokens that come here from each forwarded rank.
    pub starts: *mut u32,
    /// `[forwarded]`: tokens of the remote ranks before each.
    pub firsts: *mut u32,
    /// `[forwarded][chunks + 1][local ranks]`: rows of each forwarded rank for each local rank.
    pub source_rows: *mut u32,
    /// `[chunks + 1][local ranks]`: rows from all remote ranks together.
    pub departures: *mut u32,
    /// `[ranks][chunks + 1]`: rows that this rank receives from each rank of the group.
    pub received_rows: *mut u32,
    /// `[ranks]`: their first rows in the output.
    pub source_begins: *mut u32,
    /// `[chunks + 1][local ranks]`: rows that this rank receives of the own tokens of each local rank.
    pub own_arrivals: *mut u32,
    /// `[chunks + 1][local ranks]`: the same of the remote tokens that each forwards.
    pub arrivals: *mut u32,
    /// `[local ranks]`: the first row of the own tokens of each.
    pub own_begins: *mut u32,
    /// `[local ranks]`: the first row of the remote tokens of each, where they are of one rank.
    pub begins: *mut u32,
    /// `[local ranks][chunks * width + 1]`: rows before each piece (a rank's chunk), by chunk, then rank.
    pub piece_starts: *mut u32,
    /// `[local ranks][chunks * width]`: the first row of each piece in the output.
    pub piece_rows: *mut u32,
    /// The number of rows that this rank receives, or `HT_DISAGREED` and why.
    pub total: *mut u32,
    /// `[local_experts]`: received rows per expert.
    pub counts: *mut i32,
    pub tokens: u32,
    pub top_k: u32,
}

#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct HtRouteNodesParams {
    pub peers: PeerTable,
    pub wait: WaitParams,
    /// Offsets in the windows; here the counts are u64 packets `[2][ranks][local_experts + chunks +
    /// HT_COUNTS_OF_SOURCE]`, by `bank`.
    pub layout: HtLayout,
    pub nodes: HtNodes,
    /// Gets filled.
    pub handle: HtNodesMemory,
    /// `[forwarded]`.
    pub forwarded: *const HtForwarded,
    /// `[others][chunks + 1]`, then `[forwarded][chunks + 1]`, then the most tokens of a rank, and
    /// the rows that this rank receives, or `HT_DISAGREED` and why.
    pub announced: *mut HtCount,
    /// `[local_experts]`, or NULL.
    pub counter: *mut i32,
    /// `[forwarded][local ranks * local_experts]`, zero except while the kernel runs: rows for each expert.
    pub tally: *mut u32,
    /// Like the counts, from this rank to itself. Not in the window, where peers could change it.
    pub own_counts: *mut u64,
    pub max_tokens: u32,
    /// Handles of the group so far, this one included.
    pub epoch: u32,
    /// Which of the two banks of counts to use: they alternate from kernel to kernel.
    pub bank: u32,
    pub verdict: u32,
}

#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct HtRoomNodesParams {
    pub peers: PeerTable,
    pub wait: WaitParams,
    /// Where ranks tell each other.
    pub packets: HtPackets,
    pub nodes: HtNodes,
    /// `[ranks][chunks + 1]`: the handle's.
    pub received_rows: *const u32,
    /// `[forwarded - 1]` times the same, received from the remote ranks.
    pub arrived: *const u32,
    /// `[ranks]`: how many of this rank's rows each rank keeps, and `HT_ROOM_DROPS`.
    pub told: *mut HtCount,
    /// Rows that each rank has room for.
    pub limit: u32,
    /// The epoch of `ht_route_nodes`.
    pub epoch: u32,
}

#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct HtPlaceParams {
    pub nodes: HtNodes,
    /// The handle that `ht_route_nodes` has filled.
    pub handle: HtNodesMemory,
    /// `[tokens][top_k]`: the own ids.
    pub topk_idx: *const i64,
    pub local_experts: u32,
    pub local_ranks: u32,
    /// Blocks for pieces; the others store expert_places.
    pub piece_blocks: u32,
}

/// The messages of a stage, one for each rank that takes part, at equal distances.
///
/// A message is contiguous: its tails, from the last to the first, its header, its rows. Everything is located relative
/// to the first row, so no position depends on the number of rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct HtMessages {
    /// The first row of the first message, a multiple of 256.
    pub rows: *mut u8,
    /// Distance between the first rows of consecutive messages.
    pub stride: u64,
    /// Bytes of a row in transit, a multiple of 16.
    pub row_bytes: u32,
    /// Bytes that accompany each row, a multiple of 16: in dispatch `[top_k]` ids of 8 bytes, then as many weights; in
    /// combine gradients.
    pub tail_bytes: u32,
}

/// Parameters of `ht_header`, which writes the headers of messages.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct HtHeaderParams {
    /// For the failure marks.
    pub wait: WaitParams,
    /// What is sent.
    pub messages: HtMessages,
    pub count: u32,
    /// The header, without what only the device knows.
    pub header: MessageHeader,
    /// For the epoch, which begins with the first stage.
    pub sequences: *mut HtSequences,
}

#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct HtPackParams {
    /// The headers and the messages that get them: one for each other node.
    pub headers: HtHeaderParams,
    pub handle: HtNodesMemory,
    /// `[tokens]` rows.
    pub tokens: *const u8,
    /// `[tokens][top_k]`; not read if rows have no tails.
    pub topk_idx: *const i64,
    /// `[tokens][top_k]`; likewise.
    pub weights: *const f32,
    /// If all tokens travel and their rows have more bytes than this, rows are sent in place.
    pub packed_bytes: u64,
    /// Chunks of a rank's tokens.
    pub chunks: u32,
    /// The chunks of the stage.
    pub first_chunk: u32,
    /// The chunk after them.
    pub end_chunk: u32,
}

/// Parameters of `ht_pack_scaled`, and of `ht_pack_cast_bf16` and its siblings.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct HtScaledPackParams {
    /// As without scales; all rows are packed.
    pub pack: HtPackParams,
    pub rows: ScaledRows,
}

/// A stage of an operation: its part of each pair's rows.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct HtStage {
    /// `[local ranks]`: rows that this rank sends to each in dispatch before this stage.
    pub departures: *const u32,
    /// The same, up to the stage's end.
    pub departures_end: *const u32,
    /// `[local ranks]`: rows that each sends to this rank in dispatch before this stage.
    pub arrivals: *const u32,
    /// The same, up to the stage's end.
    pub arrivals_end: *const u32,
    /// `[local ranks]`: the output's first row from each; NULL: by pieces.
    pub begins: *const u32,
    /// `HtNodesMemory::piece_starts`.
    pub piece_starts: *const u32,
    /// `HtNodesMemory::piece_rows`.
    pub piece_rows: *const u32,
    /// Pieces of each local rank.
    pub pieces: u32,
    /// Whether the tokens are this rank's own.
    pub is_own: u32,
    /// `HtNodesMemory::total`.
    pub total: *const u32,
    /// `[local ranks]`: group rank of each local rank.
    pub locals: *const u32,
    /// Where the rows of remote tokens are, or their sums go; without rows and tails for own tokens.
    pub messages: HtMessages,
    /// `HtNodesMemory::origins`, of the first token of the stage. NULL: there is one message, with all in order.
    pub origins: *const HtOrigin,
    /// `HtNodesMemory::starts`, of the first remote rank and the first chunk of the stage.
    pub starts: *const u32,
    /// `chunks + 1`: the distance between ranks in `starts`.
    pub chunk_ends: u32,
    /// Number of received messages whose headers must be read.
    pub header_count: u32,
    /// These messages.
    pub headers: HtMessages,
    /// `[header_count]`: the group ranks that sent them.
    pub header_ranks: *const u32,
    /// The expected headers, except for the epoch.
    pub expected: MessageHeader,
}

#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct HtDispatchNodesParams {
    /// As on one node, for the tokens of the stage; begins and departures are not used.
    pub of_node: HtDispatchParams,
    pub stage: HtStage,
}

/// Parameters of `ht_dispatch_nodes_scaled` and `_cast`. Scales follow rows from other nodes; then `rows.from` is NULL.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct HtScaledDispatchNodesParams {
    /// As on one node, for the tokens of the stage; begins and departures are not used.
    pub of_node: HtScaledDispatchParams,
    pub stage: HtStage,
}

/// Sums from other nodes, for the own tokens of a stage.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct HtPartials {
    /// One for each other node: rows, with gradients as tails.
    pub messages: HtMessages,
    /// `HtNodesMemory::departing_index`, of the first token of the stage.
    pub departing_index: *const u32,
    /// `HtNodesMemory::departing`, of the first chunk of the stage.
    pub departing: *const u32,
    /// `HtNodesMemory::expert_places`, of the first token of the stage.
    pub expert_places: *const u32,
    /// All tokens of this rank: the distance between nodes in `departing_index`.
    pub tokens: u32,
    /// `chunks + 1`: the distance between nodes in `departing`.
    pub chunk_ends: u32,
    pub others: u32,
    /// The position of this node in the sums, or `OWN_NODE_FIRST`.
    pub own_place: u32,
}

/// Parameters of `ht_combine_nodes_bf16` and its siblings.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct HtCombineNodesParams {
    /// As on one node, for the tokens of the stage; begins and departures are not used.
    pub of_node: HtCombineParams,
    pub stage: HtStage,
    /// Partial sums from other nodes, for the own tokens; `others == 0` for remote tokens.
    pub partials: HtPartials,
}
