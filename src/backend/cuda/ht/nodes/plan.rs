//! The plan of HT operations over several nodes: chunks of tokens, stages, and the layout of a handle's memory.

use crate::backend::cuda::ht::nodes::messages::HEADER_BYTES;
use crate::backend::cuda::kernels::to_u32;
use crate::backend::cuda::params::ht::{HT_MAX_TOP_K, HtEntry};
use crate::backend::cuda::params::ht_nodes::{HT_COUNTS_OF_SOURCE, HT_MOST_CHUNKS, HtNodesMemory, HtOrigin};
use crate::error::Result;
use crate::model::group::GroupFacts;
use crate::model::node_view::NodeView;
use crate::model::regions::Regions;
use crate::model::tensor::DevPtr;
use crate::model::topology::Topology;
use std::ops::Range;

const PACKET_BYTES: usize = 8;
const REGION_ALIGN: usize = 256;
/// Most bytes of a row's tail: an id and a weight for each expert.
const MOST_TAIL_BYTES: usize = HT_MAX_TOP_K as usize * (size_of::<i64>() + size_of::<f32>());

/// How operations are divided into stages: about how many, and within which limits on the bytes that a stage sends to
/// all other nodes together (docs/development/high-throughput.md).
struct StageSizes {
    stages: usize,
    least_bytes: usize,
    most_bytes: usize,
}

/// More stages hide more of the transfers within the node, all but the last stage's, behind the network, but each costs
/// an NCCL launch. With one rank per node these transfers are short.
const ALONE: StageSizes = StageSizes { stages: 2, least_bytes: 16 << 20, most_bytes: 32 << 20 };
const WITH_OTHERS: StageSizes = StageSizes { stages: 8, least_bytes: 4 << 20, most_bytes: 16 << 20 };

/// Up to this many bytes of rows are always packed. More are sent in place, if all tokens of a rank travel, as a second
/// message after the packed rest: over sockets a message costs NCCL 20 us or more, longer than copying so few bytes.
/// For small stages the limit is a quarter of a stage.
const MOST_PACKED_BYTES: usize = 1 << 20;

/// The plan of one group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NodesPlan {
    /// Number of ranks of the group.
    pub ranks: usize,
    /// Number of ranks of this node.
    pub locals: usize,
    /// Number of other nodes.
    pub others: usize,
    /// Number of ranks that this one forwards for, including itself.
    pub forwarded: usize,
    /// The most remote sources of a rank of this node.
    pub width: usize,
    /// Number of chunks of a rank's tokens.
    pub chunks: usize,
    /// Number of experts of each rank.
    pub local_experts: usize,
    /// The intended number of a rank's tokens per stage.
    stage_tokens: usize,
    /// The intended bytes that a rank sends per stage.
    pub stage_bytes: usize,
    /// Up to this many bytes of rows are always packed.
    pub packed_bytes: usize,
}

/// The stages of an operation; the same on all ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stages {
    /// The chunks of each stage.
    pub chunks: Vec<Range<usize>>,
    /// The most tokens of a rank in a stage.
    pub room: usize,
}

impl StageSizes {
    /// The same on all ranks of a group.
    fn of(topology: &Topology) -> Self {
        if topology.ranks() == topology.nodes() { ALONE } else { WITH_OTHERS }
    }

    /// Bytes per stage of an operation that sends `total` bytes, or an unknown number.
    fn stage_bytes(&self, total: Option<usize>) -> usize {
        let wanted = total.map_or(self.most_bytes, |total| total.div_ceil(self.stages));
        wanted.clamp(self.least_bytes, self.most_bytes)
    }
}

/// The offset of a message's first row, and the size of a message of up to `room` tokens.
pub fn message_sizes(room: usize, row_bytes: usize) -> (usize, usize) {
    let first_row = (room * MOST_TAIL_BYTES + HEADER_BYTES).next_multiple_of(REGION_ALIGN);
    let stride = (first_row + room * row_bytes).next_multiple_of(REGION_ALIGN);
    (first_row, stride)
}

/// The sizes for which a handle's memory has room: tokens of this rank and of all others that it forwards for, ids per
/// token.
#[derive(Clone, Copy, Debug, Default)]
pub struct HandleSize {
    pub own: usize,
    pub remote: usize,
    /// The actual number of own tokens.
    pub tokens: usize,
    pub top_k: usize,
    /// Whether the own ids are copied.
    pub keeps_ids: bool,
    /// If rows are ordered by expert: the most slots that may be needed.
    pub slots: usize,
}

/// The parts of a handle's memory.
pub struct HandleParts {
    pub memory: HtNodesMemory,
    /// i64 `[own][top_k]`, if the handle keeps its ids.
    pub ids: DevPtr,
    /// If rows are ordered by expert, `HtZones::slots` and `HtZones::begins`.
    pub slots: DevPtr,
    pub zones: DevPtr,
    pub bytes: usize,
}

impl NodesPlan {
    /// The plan for the rank of `facts`.
    pub fn new(facts: &GroupFacts, view: &NodeView) -> Self {
        let others = view.others();
        // Bytes of a token that goes to all other nodes.
        let token_bytes = facts.row_bytes * others.max(1);
        let division = StageSizes::of(&view.topology);
        let total = facts.max_tokens.map(|tokens| tokens * token_bytes);
        let stage_bytes = facts.ht_chunk_bytes.unwrap_or(division.stage_bytes(total));
        let stage_tokens = (stage_bytes / token_bytes).max(1);
        let chunks = facts.max_tokens.map_or(division.stages, |tokens| {
            let chunks = tokens.div_ceil(stage_tokens);
            chunks.clamp(1, HT_MOST_CHUNKS as usize)
        });
        Self {
            ranks: facts.ranks,
            locals: view.locals.len(),
            others,
            forwarded: view.forwarded().len(),
            width: view.width(),
            chunks,
            local_experts: facts.local_experts(),
            stage_tokens,
            stage_bytes,
            packed_bytes: MOST_PACKED_BYTES.min(stage_bytes / 4),
        }
    }

    /// Bytes of a bank's packets.
    pub fn counts_bytes(&self) -> usize {
        let packets = self.local_experts + self.chunks + HT_COUNTS_OF_SOURCE as usize;
        self.ranks * packets * PACKET_BYTES
    }

    /// The number of counts that the device reports to the host.
    pub fn announced(&self) -> usize {
        (self.others + self.forwarded) * (self.chunks + 1) + 2
    }

    /// The stages of a handle whose ranks have at most `most_tokens`.
    pub fn stages(&self, most_tokens: usize) -> Stages {
        let chunks = self.chunks;
        let tokens = |width: usize| (most_tokens * width).div_ceil(chunks);
        let limit = self.stage_tokens.max(tokens(1));
        let fits = |&stages: &usize| tokens(chunks.div_ceil(stages)) <= limit;
        let count = (1..=chunks).find(fits).unwrap_or(chunks);
        Stages {
            chunks: (0..count).map(|stage| chunks * stage / count..chunks * (stage + 1) / count).collect(),
            room: tokens(chunks.div_ceil(count)).max(1),
        }
    }

    /// The most tokens of a stage, for any handle whose ranks have at most `most_tokens`: fewer tokens may go in fewer,
    /// larger stages.
    pub fn room(&self, most_tokens: usize) -> usize {
        let of_chunk = most_tokens.div_ceil(self.chunks);
        most_tokens.min(self.stage_tokens.max(of_chunk)).max(1)
    }

    /// Most bytes of a message with rows of up to `row_bytes`; without a bound on tokens, unlimited.
    pub fn most_message_bytes(&self, row_bytes: usize, max_tokens: Option<usize>) -> usize {
        max_tokens.map_or(usize::MAX, |tokens| {
            let ids = tokens * HT_MAX_TOP_K as usize * size_of::<i64>();
            message_sizes(self.room(tokens), row_bytes).1.max(ids)
        })
    }

    /// The index of the first of `tokens` in `chunk`.
    pub fn chunk_begin(&self, tokens: usize, chunk: usize) -> usize {
        tokens * chunk / self.chunks
    }

    /// The parts of a handle's memory that begins at `base`.
    pub fn memory(&self, base: usize, size: HandleSize) -> Result<HandleParts> {
        let HandleSize { own, remote, tokens, top_k, keeps_ids, slots } = size;
        let ends = self.chunks + 1;
        let pieces = self.chunks * self.width;
        let mut regions = Regions::new(REGION_ALIGN);
        let mut take = |count: usize, size: usize| base + regions.take(count * size);
        let mut entries = |tokens: usize| take(tokens * top_k, size_of::<HtEntry>()) as *mut HtEntry;
        let (own_entries, raw_entries) = (entries(own), entries(remote));
        let entries = entries(remote);
        let origins = take(remote, size_of::<HtOrigin>()) as *mut HtOrigin;
        let mut words = |count: usize| take(count, size_of::<u32>()) as *mut u32;
        let memory = HtNodesMemory {
            own_entries,
            raw_entries,
            entries,
            origins,
            expert_places: words(own * top_k),
            departing_tokens: words(self.others * own),
            departing_index: words(self.others * own),
            departing: words(self.others * ends),
            starts: words(self.forwarded * ends),
            firsts: words(self.forwarded),
            source_rows: words(self.forwarded * ends * self.locals),
            departures: words(ends * self.locals),
            received_rows: words(self.ranks * ends),
            source_begins: words(self.ranks),
            own_arrivals: words(ends * self.locals),
            arrivals: words(ends * self.locals),
            own_begins: words(self.locals),
            begins: words(self.locals),
            piece_starts: words(self.locals * (pieces + 1)),
            piece_rows: words(self.locals * pieces),
            total: words(1),
            counts: words(self.local_experts).cast(),
            tokens: to_u32(tokens)?,
            top_k: to_u32(top_k)?,
        };
        let ids = if keeps_ids { own * top_k } else { 0 };
        let begins = if slots > 0 { self.local_experts + 1 } else { 0 };
        let mut part = |count: usize, size: usize| DevPtr(base + regions.take(count * size));
        let ids = part(ids, size_of::<i64>());
        let (slots, zones) = (part(slots, size_of::<u32>()), part(begins, size_of::<u32>()));
        Ok(HandleParts { memory, ids, slots, zones, bytes: regions.bytes() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::group::{Algorithm, LlCombineMode};
    use crate::model::node_view::tests::view;

    fn plan(names: &str, rank: usize, max_tokens: Option<usize>, row_bytes: usize) -> NodesPlan {
        let view = view(names, rank);
        NodesPlan::new(&facts(&view, max_tokens, row_bytes), &view)
    }

    fn facts(view: &NodeView, max_tokens: Option<usize>, row_bytes: usize) -> GroupFacts {
        GroupFacts {
            algorithm: Algorithm::HighThroughput,
            ranks: view.topology.ranks(),
            rank: view.rank,
            experts: 4 * view.topology.ranks(),
            max_tokens,
            row_bytes,
            ll_combine: LlCombineMode::Reduce,
            ..GroupFacts::SAMPLE
        }
    }

    #[test]
    fn stages_are_as_large_as_all_ranks_have_agreed() {
        let view = view("aabb", 0);
        let facts = GroupFacts { ht_chunk_bytes: Some(1 << 20), ..facts(&view, Some(512), 4096) };
        let agreed = NodesPlan::new(&facts, &view);
        assert_eq!((agreed.stage_bytes, agreed.chunks), (1 << 20, 2));
        assert_eq!(plan("aabb", 0, Some(512), 4096).chunks, 1);
    }

    #[test]
    fn large_operations_have_several_stages() {
        let large = plan("aabb", 0, Some(4096), 14_336);
        assert_eq!(large.chunks, 8);
        let stages = large.stages(4096);
        assert_eq!(stages.chunks.len(), 8);
        assert!(stages.room * 14_336 <= WITH_OTHERS.most_bytes);
        for few in [0, 100] {
            let chunks = large.stages(few).chunks;
            assert_eq!((chunks.len(), chunks.first()), (1, Some(&(0..8))));
        }
        assert_eq!(plan("aabb", 0, Some(128), 14_336).chunks, 1);
        assert_eq!(plan("aabb", 0, None, 14_336).chunks, WITH_OTHERS.stages);
        assert_eq!(plan("ab", 0, Some(4096), 14_336).chunks, ALONE.stages);
        // The number of chunks is the same on all ranks, whatever their node's size.
        assert_eq!(plan("aaab", 3, Some(4096), 14_336).chunks, 8);
    }

    #[test]
    fn stages_have_all_chunks_and_no_more_tokens_than_room() {
        for max_tokens in [Some(4096), Some(777), Some(1), None] {
            for names in ["ab", "abc", "aaba"] {
                let plan = plan(names, 0, max_tokens, 100_000);
                for most in [0, 1, 2, 100, 777, 4096] {
                    let Stages { chunks, room } = plan.stages(most);
                    assert_eq!(chunks.first().map(|it| it.start), Some(0));
                    assert_eq!(chunks.last().map(|it| it.end), Some(plan.chunks));
                    for (a, b) in chunks.iter().zip(chunks.iter().skip(1)) {
                        assert_eq!(a.end, b.start);
                    }
                    for stage in chunks {
                        let at = |chunk| plan.chunk_begin(most, chunk);
                        assert!(at(stage.end) - at(stage.start) <= room);
                    }
                }
            }
        }
    }

    #[test]
    fn banks_of_a_bound_have_room_for_every_handle() {
        for (names, bound) in [("ab", 1500), ("aabb", 2048), ("aabbccdd", 4096)] {
            let plan = plan(names, 0, Some(bound), 14_336);
            let room = |tokens| plan.stages(tokens).room;
            assert!((0..=bound).all(|tokens| room(tokens) <= plan.room(bound)));
            assert!((0..=bound).any(|tokens| room(tokens) == plan.room(bound)));
        }
    }

    #[test]
    fn a_rank_without_remote_sources_has_room_for_those_of_its_peers() {
        let plan = plan("aaba", 1, Some(8), 16);
        assert_eq!((plan.forwarded, plan.width, plan.locals), (1, 1, 3));
        let size = HandleSize { own: 8, remote: 0, tokens: 8, top_k: 2, keeps_ids: true, slots: 0 };
        let HandleParts { memory, ids, bytes, .. } = plan.memory(1 << 20, size).unwrap();
        assert_eq!(memory.tokens, 8);
        assert!(memory.counts as usize + 16 <= ids.0 && ids.0 + 8 * 2 * 8 <= (1 << 20) + bytes);
        assert_eq!(memory.raw_entries, memory.entries);
    }
}
