//! Parameters of the high-throughput kernels of groups over several nodes.
//!
//! Every rank *forwards* tokens on its node: its own, and those of its *remote sources*, the remote ranks whose rail
//! peer it is. These *forwarded ranks* are numbered, beginning with itself as 0. A rank's tokens are divided into
//! *chunks*, equally many on all ranks; an operation runs in *stages* over one or more chunks, of own tokens or of all
//! remote ones.

use crate::common::{MessageHeader, PeerTable, RankOnNode, ScaledRows, WaitParams};
use crate::ht::{
    HtCombineParams, HtCount, HtDispatchParams, HtEntry, HtLayout, HtPackets, HtScaledDispatchParams, HtSequences,
};

/// Most chunks of a rank's tokens.
pub const HT_MOST_CHUNKS: u32 = 16;
/// Packets about a forwarded rank that a rank sends to each other rank of its node, besides one per local expert and
/// per chunk: the forwarded rank's verdict and number of tokens.
pub const HT_COUNTS_OF_SOURCE: u32 = 2;
/// Threads of a block of `ht_place`.
pub const HT_PLACE_THREADS: u32 = 256;
/// Threads of `ht_room_nodes`, one block.
pub const HT_ROOM_THREADS: u32 = 256;
/// Bit of the result of `ht_room_nodes`: the rank drops rows of some rank.
pub const HT_ROOM_DROPS: u32 = 0x8000_0000;
/// Threads of a block of `ht_pack`.
pub const HT_PACK_THREADS: u32 = 512;
/// In place of the row of a token without one, or of a rank in padding.
pub const HT_NONE: u32 = 0xffff_ffff;
/// Number of bits of `HtNodesMemory::expert_places` for an expert's position among the token's experts on its node. The
/// bits above are 0 for this node, otherwise 1 + the other node's number.
pub const HT_PLACE_BITS: u32 = 8;
/// Bit of `FaultReport::peer` in HT: the other bits are a rank of the group, not a local index.
pub const HT_RANK_OF_GROUP: u32 = 0x8000_0000;
/// Threads of the block of `ht_header`.
pub const HT_HEADER_THREADS: u32 = 32;
/// If at least this many of 32 tokens travel, all do, so that they can be sent in place.
pub const HT_WHOLE_OF_32: u32 = 31;

/// The group's ranks and nodes, from this rank's point of view.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct HtNodes {
    /// `[ranks]`.
    pub of_rank: *const RankOnNode,
    /// `[local ranks][1 + width]`: the group ranks that each forwards for, itself first, padded with `HT_NONE`.
    pub forwarded_by: *const u32,
    pub ranks: u32,
    pub others: u32,
    /// The most remote sources of a local rank.
    pub width: u32,
    /// Number of ranks that this one forwards for, including itself.
    pub forwarded: u32,
    /// Chunks of a rank's tokens.
    pub chunks: u32,
}

/// A rank that this one forwards for, in mapped host memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct HtForwarded {
    /// `[tokens][top_k]`.
    pub topk_idx: *const i64,
    pub tokens: u32,
    /// Number of tokens of all remote sources before this one.
    pub first: u32,
    /// The rank's number in the group.
    pub rank: u32,
    /// The rank's verdict, as in `HtRouteParams::verdict`.
    pub verdict: u32,
}

/// The origin of a token that came from another node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct HtOrigin {
    /// The index of its remote source, from 0 on.
    pub source: u32,
    /// Its index among the tokens that come here from that rank.
    pub index: u32,
}

/// Device memory of an HT handle over several nodes. Arrays of `chunks + 1` have the totals before each chunk, then the
/// total of all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct HtNodesMemory {
    /// `[tokens][top_k]`: own tokens' experts on this node, numbered by local rank and local expert, ascending,
    /// without repetition.
    pub own_entries: *mut HtEntry,
    /// `[tokens of remote sources][top_k]`: likewise for those tokens that come here, by rank; row indices count within
    /// a source.
    pub raw_entries: *mut HtEntry,
    /// As `raw_entries`, but by chunk, then rank; row indices count over all remote sources.
    pub entries: *mut HtEntry,
    /// `[tokens of remote sources]`: the origin of each token, in the order of `entries`.
    pub origins: *mut HtOrigin,
    /// `[tokens][top_k]`: for own tokens' experts on all nodes, ascending: the node, and the position there.
    pub expert_places: *mut u32,
    /// `[others][tokens]`: own tokens that go to each other node, ascending.
    pub departing_tokens: *mut u32,
    /// `[others][tokens]`: a token's position in `departing_tokens`, or `HT_NONE`.
    pub departing_index: *mut u32,
    /// `[others][chunks + 1]`: numbers of tokens that go to each other node.
    pub departing: *mut u32,
    /// `[forwarded][chunks + 1]`: numbers of tokens that come here from each forwarded rank.
    pub starts: *mut u32,
    /// `[forwarded]`: number of tokens of the remote sources before each.
    pub firsts: *mut u32,
    /// `[forwarded][chunks + 1][local ranks]`: rows of each forwarded rank for each local rank.
    pub source_rows: *mut u32,
    /// `[chunks + 1][local ranks]`: rows from all remote sources together.
    pub departures: *mut u32,
    /// `[ranks][chunks + 1]`: rows that this rank receives from each rank of the group.
    pub received_rows: *mut u32,
    /// `[ranks]`: the first row of each rank in the output.
    pub source_begins: *mut u32,
    /// `[chunks + 1][local ranks]`: rows that this rank receives for own tokens of each local rank.
    pub own_arrivals: *mut u32,
    /// `[chunks + 1][local ranks]`: rows that this rank receives for remote tokens that each local rank forwards.
    pub arrivals: *mut u32,
    /// `[local ranks]`: the first row for own tokens of each.
    pub own_begins: *mut u32,
    /// `[local ranks]`: the first row for remote tokens of each, if these are of one rank.
    pub begins: *mut u32,
    /// `[local ranks][chunks * width + 1]`: rows before each piece (a chunk of a rank), by chunk, then rank.
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
    /// `departing`, `starts`, then the most tokens of a rank, and the number of rows that this rank receives, or
    /// `HT_DISAGREED` and why.
    pub announced: *mut HtCount,
    /// `[local_experts]`, or NULL.
    pub counter: *mut i32,
    /// `[forwarded][local ranks * local_experts]`, zero except while the kernel runs: rows for each expert.
    pub tally: *mut u32,
    /// The counts from this rank to itself. Not in the window, where peers could change them.
    pub own_counts: *mut u64,
    pub max_tokens: u32,
    /// The handle's number.
    pub epoch: u32,
    /// The bank of counts, of which kernels use two alternately.
    pub bank: u32,
    pub verdict: u32,
}

#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct HtRoomNodesParams {
    pub peers: PeerTable,
    pub wait: WaitParams,
    /// The packets by which ranks notify each other of how many rows they keep.
    pub packets: HtPackets,
    pub nodes: HtNodes,
    /// The handle's, `[ranks][chunks + 1]`.
    pub received_rows: *const u32,
    /// `[forwarded - 1]` arrays as `received_rows`, from the remote sources.
    pub arrived: *const u32,
    /// `[ranks]`: how many of this rank's rows each rank keeps, and `HT_ROOM_DROPS`.
    pub kept: *mut HtCount,
    /// The most rows of a rank; rows beyond are dropped.
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
    /// `[tokens][top_k]`: ids of own tokens.
    pub topk_idx: *const i64,
    pub local_experts: u32,
    pub local_ranks: u32,
    /// Number of blocks for pieces; the rest stores `expert_places`.
    pub piece_blocks: u32,
}

/// The messages of a stage, one per rank, at equal distances.
///
/// A message has its tails, from the last to the first, then its header, then its rows. Thus no offset from the first
/// row depends on the number of rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct HtMessages {
    /// The first row of the first message, a multiple of 256.
    pub rows: *mut u8,
    /// Distance between the first rows of consecutive messages.
    pub stride: u64,
    /// Bytes of a row in transit, a multiple of 16.
    pub row_bytes: u32,
    /// Bytes of a row's tail, a multiple of 16: in dispatch `[top_k]` ids of 8 bytes, then as many weights; in combine
    /// gradients.
    pub tail_bytes: u32,
}

/// Parameters of `ht_header`, which writes the headers of messages.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct HtHeaderParams {
    /// Has the failure marks.
    pub wait: WaitParams,
    /// The messages that get the header.
    pub messages: HtMessages,
    pub count: u32,
    /// The header, except for what only the device knows.
    pub header: MessageHeader,
    /// Has the epoch, which the first stage begins.
    pub sequences: *mut HtSequences,
}

#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct HtPackParams {
    /// The headers, and the messages, one for each other node.
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
    /// The chunk after those of the stage.
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

/// A stage of an operation: its range of each pair's rows.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct HtStage {
    /// `[local ranks]`: rows that this rank's dispatch sends to each before this stage.
    pub departures: *const u32,
    /// The same, up to the stage's end.
    pub departures_end: *const u32,
    /// `[local ranks]`: rows that each rank's dispatch sends to this one before this stage.
    pub arrivals: *const u32,
    /// The same, up to the stage's end.
    pub arrivals_end: *const u32,
    /// `[local ranks]`: the output's first row from each; NULL if pieces determine it.
    pub begins: *const u32,
    /// `HtNodesMemory::piece_starts`.
    pub piece_starts: *const u32,
    /// `HtNodesMemory::piece_rows`.
    pub piece_rows: *const u32,
    /// Number of pieces of each local rank.
    pub pieces: u32,
    /// Whether the tokens are this rank's own.
    pub is_own: u32,
    /// `HtNodesMemory::total`.
    pub total: *const u32,
    /// `[local ranks]`: group rank of each local rank.
    pub locals: *const u32,
    /// Remote tokens: the messages with their rows, or for their sums. Own tokens: no rows and tails.
    pub messages: HtMessages,
    /// `HtNodesMemory::origins`, from the stage's first token on; NULL if tokens are in the order of a single message.
    pub origins: *const HtOrigin,
    /// `HtNodesMemory::starts`, from the first remote source and the stage's first chunk on.
    pub starts: *const u32,
    /// `chunks + 1`: the distance between ranks in `starts`.
    pub chunk_ends: u32,
    /// Number of received messages whose headers must be checked.
    pub header_count: u32,
    /// The messages whose headers must be checked.
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

/// Sums from other nodes for own tokens of a stage.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct HtPartials {
    /// One message per other node: rows, with gradients as tails.
    pub messages: HtMessages,
    /// `HtNodesMemory::departing_index`, from the stage's first token on.
    pub departing_index: *const u32,
    /// `HtNodesMemory::departing`, from the stage's first chunk on.
    pub departing: *const u32,
    /// `HtNodesMemory::expert_places`, from the stage's first token on.
    pub expert_places: *const u32,
    /// Number of this rank's tokens: the distance between nodes in `departing_index`.
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
    /// Sums from other nodes for own tokens; `others == 0` for remote tokens.
    pub partials: HtPartials,
}
