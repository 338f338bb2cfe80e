//! What a handle keeps for its operations: one block of memory that may lie, and be moved, anywhere.
//!
//! A header, then sections, all by their offsets from the block's start. Nothing in it is an address, and nothing that
//! an operation needs is elsewhere: a copy of the bytes serves a handle of an equal group, here or at another address.
//! Both backends write the same numbers into the sections.
//!
//! The library keeps blocks in memory of its own, or in a caller's ([`HandleHome`]). In the former nobody opens them
//! again, so their headers are not written. In the latter each operation compares the header first: what else lies
//! there is refused, not followed. The sections behind a right header are the caller's word.
//!
//! Over several nodes a handle also has numbers on the host (how much each message carries), so its block alone serves
//! nobody, and lies in the library's memory.

use crate::model::group::{Algorithm, GroupFacts};
use crate::model::layout::Layout;
use crate::model::ops::{HandleForm, IntWidth, Routing};
use crate::model::regions::Regions;
use crate::model::tensor::DevPtr;

/// Sections begin at multiples of this.
const SECTION_ALIGN: usize = 256;
/// A block's address is a multiple of this.
pub const BLOCK_ALIGN: usize = 16;

/// Bytes of an (expert, index) pair: both have 32 bits.
const ENTRY_BYTES: usize = 8;
const WORD_BYTES: usize = 4;

/// Where a handle keeps its block.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum HandleHome {
    /// In memory of the library's.
    #[default]
    Own,
    /// In a caller's.
    Given(GivenBlock),
}

impl HandleHome {
    /// The block in a caller's memory.
    pub fn given(self) -> Option<GivenBlock> {
        match self {
            Self::Own => None,
            Self::Given(block) => Some(block),
        }
    }
}

/// A block in a caller's memory, as large as the handle's state is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GivenBlock(pub DevPtr);

/// What decides about sections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StateShape {
    /// Ranks that rows are counted by.
    pub ranks: usize,
    /// Experts of each.
    pub local_experts: usize,
    /// Tokens of a rank that there is room for.
    pub most_tokens: usize,
    /// Ids per token.
    pub top_k: usize,
    /// What the handle is like.
    pub form: HandleForm,
}

impl StateShape {
    /// Of the handles of a group whose ranks are on one node, if it has a bound of tokens.
    pub fn of_group(facts: &GroupFacts, top_k: usize, form: HandleForm) -> Option<Self> {
        Some(Self {
            ranks: facts.ranks,
            local_experts: facts.local_experts(),
            most_tokens: facts.max_tokens?,
            top_k,
            form,
        })
    }

    /// Bytes of the ids that a handle keeps, 64 bits each.
    fn id_bytes(self) -> usize {
        let ids = self.most_tokens * self.top_k * IntWidth::Bits64.bytes();
        if self.form.keeps_ids { ids } else { 0 }
    }
}

/// Sections of an HT handle's block, and its size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HtSections {
    /// u32 `[ranks + 1]`: this rank's first row of each source, then the number of rows.
    pub begins: usize,
    /// u32 `[ranks]`: rows that go from this rank to each.
    pub departures: usize,
    /// i32 `[local_experts]`: received rows per expert.
    pub counts: usize,
    /// `[most_tokens][top_k]` pairs of 32 bits: a token's experts, ascending, each once, then -1; and the row's index
    /// among those that this rank sends to the expert's.
    pub entries: usize,
    /// i64 `[most_tokens][top_k]`: the ids, if the handle keeps them.
    pub ids: usize,
    /// Of the block.
    pub bytes: usize,
}

impl HtSections {
    /// Those of handles of this shape.
    pub fn new(shape: StateShape) -> Self {
        let mut block = regions();
        Self {
            begins: block.take((shape.ranks + 1) * WORD_BYTES),
            departures: block.take(shape.ranks * WORD_BYTES),
            counts: block.take(shape.local_experts * WORD_BYTES),
            entries: block.take(shape.most_tokens * shape.top_k * ENTRY_BYTES),
            ids: block.take(shape.id_bytes()),
            bytes: block.bytes(),
        }
    }
}

/// Sections of an LL handle's block, and its size: what a dispatch leaves for its combines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LlSections {
    /// i32 `[sources][most_tokens][top_k]`: the expert of each entry of this rank, and of those that it forwards for;
    /// negative if it names none.
    pub expert_of: usize,
    /// i32 `[ranks][most_tokens][top_k]`: row of the output of each entry that came here, negative if none. Rank-major
    /// the first entry of a token has its row, whichever came.
    pub row_of: usize,
    /// u32 `[ranks]`: tokens of each rank.
    pub tokens_of: usize,
    /// i64 `[most_tokens][top_k]`: room for ids of 32 bits as the kernels read them, if they may be such.
    pub ids: usize,
    /// Of the block.
    pub bytes: usize,
}

impl LlSections {
    /// Those of handles of this shape, on a rank that forwards for `sources`, itself included.
    pub fn new(shape: StateShape, sources: usize) -> Self {
        let entries = shape.most_tokens * shape.top_k * WORD_BYTES;
        let mut block = regions();
        Self {
            expert_of: block.take(sources * entries),
            row_of: block.take(shape.ranks * entries),
            tokens_of: block.take(shape.ranks * WORD_BYTES),
            ids: block.take(shape.id_bytes()),
            bytes: block.bytes(),
        }
    }
}

/// The regions behind a header.
fn regions() -> Regions {
    let mut block = Regions::new(SECTION_ALIGN);
    block.take(HEADER_WORDS * WORD_BYTES);
    block
}

/// Bytes of the block of a handle with `top_k` ids per token; `None` if the group's handles have no common size, as
/// there is no bound of tokens. Of a group on one node.
pub fn block_bytes(facts: &GroupFacts, top_k: usize, form: HandleForm) -> Option<usize> {
    let shape = StateShape::of_group(facts, top_k, form)?;
    Some(match facts.algorithm {
        Algorithm::LowLatency => LlSections::new(shape, 1).bytes,
        Algorithm::HighThroughput => HtSections::new(shape).bytes,
    })
}

/// Begins each header: "nEpH".
const MAGIC: u32 = 0x6e45_7048;
/// Changes with the sections, or with what they mean.
const VERSION: u32 = 1;

/// Words of a header.
pub const HEADER_WORDS: usize = 20;
/// The first of them, which tell whether a block is what an operation takes it for. The others tell of its routing.
pub const COMPARED_WORDS: usize = 16;
/// HT: the number of the routing, the same on all ranks; two words.
pub const NUMBER_WORD: usize = COMPARED_WORDS;
/// HT: the rows that this rank receives, or why there is no routing.
pub const ROWS_WORD: usize = NUMBER_WORD + 2;

/// How the rows lie that the block knows of.
const LAYOUT_WORD: usize = 3;
/// Bit of the word of ids: the block has them.
const KEPT_IDS: u32 = 1 << 8;

/// `header` for a block whose rows lie otherwise: each LL dispatch chooses.
pub fn with_layout(mut header: [u32; HEADER_WORDS], layout: Layout) -> [u32; HEADER_WORDS] {
    header[LAYOUT_WORD] = layout_number(layout);
    header
}

const fn layout_number(layout: Layout) -> u32 {
    match layout {
        Layout::ExpertMajor { .. } => 1,
        Layout::RankMajor { .. } => 2,
        Layout::Flat => 3,
    }
}

/// The width of the ids that a block knows of, and whether it keeps them: then all have 64 bits.
fn word_of_ids(routing: &Routing) -> u32 {
    match routing.form.keeps_ids {
        true => KEPT_IDS | IntWidth::Bits64.bytes() as u32,
        false => routing.width.bytes() as u32,
    }
}

/// The header of a block with a routing whose number is `number`, or zero. It lacks the number of rows.
pub fn header(facts: &GroupFacts, routing: &Routing, number: u64) -> [u32; HEADER_WORDS] {
    let offset = |bytes: usize| (bytes / SECTION_ALIGN) as u32;
    let shape = StateShape::of_group(facts, routing.top_k, routing.form);
    let sections = shape.map_or([0; 5], |shape| match facts.algorithm {
        Algorithm::LowLatency => {
            let it = LlSections::new(shape, 1);
            [it.expert_of, it.row_of, it.tokens_of, 0, it.bytes].map(offset)
        }
        Algorithm::HighThroughput => {
            let it = HtSections::new(shape);
            [it.begins, it.departures, it.counts, it.entries, it.bytes].map(offset)
        }
    });
    let [first, second, third, fourth, bytes] = sections;
    [
        MAGIC,
        VERSION,
        facts.algorithm as u32,
        layout_number(facts.layout()),
        facts.ranks as u32,
        facts.rank.word(),
        facts.local_experts() as u32,
        facts.max_tokens.unwrap_or(0) as u32,
        routing.tokens as u32,
        routing.top_k as u32,
        word_of_ids(routing),
        first,
        second,
        third,
        fourth,
        bytes,
        number as u32,
        (number >> u32::BITS) as u32,
        0,
        0,
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::group::LlCombineMode;
    use crate::model::ids::GroupRank;

    fn facts(algorithm: Algorithm, max_tokens: Option<usize>) -> GroupFacts {
        GroupFacts {
            algorithm,
            ranks: 8,
            rank: GroupRank::new(3),
            experts: 256,
            max_tokens,
            max_recv_rows: None,
            row_bytes: 16,
            ll_combine: LlCombineMode::Exact,
            ht_chunk_bytes: None,
            channels: None,
        }
    }

    #[test]
    fn sections_follow_the_header_without_overlap() {
        let facts = facts(Algorithm::HighThroughput, Some(8192));
        let shape = StateShape::of_group(&facts, 8, HandleForm::default()).unwrap();
        let ht = HtSections::new(shape);
        let begins = [ht.begins, ht.departures, ht.counts, ht.entries, ht.bytes];
        assert_eq!(begins, [256, 512, 768, 1024, 1024 + 8192 * 8 * 8]);
        let small = StateShape {
            most_tokens: 3,
            ..shape
        };
        let ll = LlSections::new(small, 2);
        let begins = [ll.expert_of, ll.row_of, ll.tokens_of, ll.bytes];
        assert_eq!(begins, [256, 256 + 256, 512 + 768, 1280 + 256]);
    }

    #[test]
    fn a_group_without_a_bound_has_no_size_of_blocks() {
        for algorithm in Algorithm::ALL {
            assert_eq!(
                block_bytes(&facts(algorithm, None), 8, HandleForm::default()),
                None
            );
        }
        let facts = facts(Algorithm::HighThroughput, Some(8192));
        let size = |keeps_ids| block_bytes(&facts, 8, HandleForm { keeps_ids });
        assert_eq!(size(false), Some(1024 + (512 << 10)));
        assert_eq!(size(true), Some(1024 + (1024 << 10)));
    }

    #[test]
    fn kept_ids_are_all_of_one_width() {
        let of = |width, keeps_ids| {
            let routing = Routing {
                ids: DevPtr(64),
                width,
                tokens: 5,
                top_k: 8,
                form: HandleForm { keeps_ids },
            };
            header(&facts(Algorithm::HighThroughput, Some(16)), &routing, 0)
        };
        let (narrow, wide) = (IntWidth::Bits32, IntWidth::Bits64);
        assert_eq!(of(narrow, true), of(wide, true));
        assert_ne!(of(wide, true), of(wide, false));
    }

    #[test]
    fn headers_differ_where_blocks_do() {
        let routing = Routing {
            ids: DevPtr(64),
            width: IntWidth::Bits64,
            tokens: 5,
            top_k: 8,
            form: HandleForm::default(),
        };
        let facts = facts(Algorithm::HighThroughput, Some(16));
        let of = |facts: &GroupFacts, routing: &Routing| {
            let all = header(facts, routing, 7 << 32 | 9);
            assert_eq!(&all[COMPARED_WORDS..], [9, 7, 0, 0]);
            let mut compared = [0; COMPARED_WORDS];
            compared.copy_from_slice(&all[..COMPARED_WORDS]);
            compared
        };
        let mut seen = vec![of(&facts, &routing)];
        let others = [
            GroupFacts {
                algorithm: Algorithm::LowLatency,
                ..facts
            },
            GroupFacts { ranks: 4, ..facts },
            GroupFacts {
                rank: GroupRank::new(4),
                ..facts
            },
            GroupFacts {
                experts: 128,
                ..facts
            },
            GroupFacts {
                max_tokens: Some(17),
                ..facts
            },
        ];
        seen.extend(others.iter().map(|facts| of(facts, &routing)));
        seen.push(of(
            &facts,
            &Routing {
                tokens: 4,
                ..routing
            },
        ));
        seen.push(of(
            &facts,
            &Routing {
                top_k: 7,
                ..routing
            },
        ));
        for (index, header) in seen.iter().enumerate() {
            assert!(!seen[..index].contains(header), "{index}");
        }
        // What ids there were is no matter of the block.
        let elsewhere = Routing {
            ids: DevPtr(128),
            ..routing
        };
        assert_eq!(of(&facts, &elsewhere), of(&facts, &routing));
    }
}
