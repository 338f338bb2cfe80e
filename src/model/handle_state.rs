//! The state that a handle keeps for its operations, in one relocatable block of memory.
//!
//! A block has a header, then sections at fixed offsets. It has no addresses, and operations need nothing else: so a
//! copy of the bytes serves a handle of an equal group, at any address. Both backends store the same numbers in
//! sections.
//!
//! A block is in the library's memory or in a caller's ([`HandleStorage`]). In a caller's memory it has a header, which
//! each operation checks, so that other content is refused. Sections after a valid header are trusted.
//!
//! Over several nodes the host also needs numbers, such as the sizes of messages. There a block in a caller's memory
//! has another format, with these numbers after the header (`cuda/ht/nodes/caller_block.rs`).

use crate::model::group::{Algorithm, GroupFacts};
use crate::model::layout::Layout;
use crate::model::ops::{HandleForm, IntWidth, Routing};
use crate::model::regions::Regions;
use crate::model::tensor::DevPtr;
use std::sync::{Arc, Weak};

/// Sections begin at multiples of this.
pub const SECTION_ALIGN: usize = 256;
/// A block's address is a multiple of this.
pub const BLOCK_ALIGN: usize = 16;

/// Bytes of an (expert, index) pair, of 32 bits each.
const ENTRY_BYTES: usize = 8;
const WORD_BYTES: usize = 4;

/// Where a handle has its block, and how long it lives.
#[derive(Clone, Debug, Default)]
pub struct HandleStorage {
    /// The block in a caller's memory; `None` if it is in the library's.
    pub caller_block: Option<CallerBlock>,
    pub life: HandleLife,
}

/// Exists, in some clone, for as long as a caller's handle lives, across all its routings.
#[derive(Clone, Debug, Default)]
pub struct HandleLife(Arc<()>);

/// Observes a [`HandleLife`] without extending it.
#[derive(Clone, Debug)]
pub struct WatchedLife(Weak<()>);

impl HandleLife {
    pub fn watch(&self) -> WatchedLife {
        WatchedLife(Arc::downgrade(&self.0))
    }
}

impl WatchedLife {
    pub fn is_of(&self, life: &HandleLife) -> bool {
        self.0.as_ptr() == Arc::as_ptr(&life.0)
    }

    pub fn has_ended(&self) -> bool {
        self.0.strong_count() == 0
    }
}

/// A block in a caller's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CallerBlock(pub DevPtr);

/// The sizes that determine the sections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StateShape {
    /// Number of ranks by which rows are counted.
    pub ranks: usize,
    pub local_experts: usize,
    /// Number of tokens per rank for which there is room.
    pub most_tokens: usize,
    pub top_k: usize,
    pub form: HandleForm,
}

impl StateShape {
    /// The shape for a group on one node; `None` without a bound on tokens.
    pub fn of_group(facts: &GroupFacts, top_k: usize, form: HandleForm) -> Option<Self> {
        Some(Self {
            ranks: facts.ranks,
            local_experts: facts.local_experts(),
            most_tokens: facts.max_tokens?,
            top_k,
            form,
        })
    }

    /// The most slots of a row, with zones.
    pub fn slots(self) -> usize {
        self.top_k.min(self.local_experts)
    }

    /// Bytes of the ids that a handle keeps, of 64 bits each.
    fn id_bytes(self) -> usize {
        let ids = self.most_tokens * self.top_k * IntWidth::Bits64.bytes();
        if self.form.keeps_ids { ids } else { 0 }
    }
}

/// Sections of an HT handle's block, and its size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HtSections {
    /// u32 `[ranks + 1]`: the index of the first row from each source, then the number of received rows.
    pub begins: usize,
    /// u32 `[ranks]`: numbers of rows that this rank sends to each.
    pub departures: usize,
    /// i32 `[local_experts]`: received rows per expert.
    pub counts: usize,
    /// `[most_tokens][top_k]` pairs of 32 bits: an expert, ascending without repetition, then -1; and the row's index
    /// among the rows that this rank sends to the expert's rank.
    pub entries: usize,
    /// i64 `[most_tokens][top_k]`: the ids, if the handle keeps them.
    pub ids: usize,
    /// With zones, u32 `[ranks * most_tokens][slots]`: the slots of each received row, by ascending expert.
    pub slots: usize,
    /// With zones, u32 `[local_experts + 1]`: the first slot of each expert, then the number of all slots.
    pub zones: usize,
    pub bytes: usize,
}

impl HtSections {
    pub fn new(shape: StateShape) -> Self {
        let mut block = regions();
        let zoned = |bytes| {
            if shape.form.zones.is_some() { bytes } else { 0 }
        };
        Self {
            begins: block.take((shape.ranks + 1) * WORD_BYTES),
            departures: block.take(shape.ranks * WORD_BYTES),
            counts: block.take(shape.local_experts * WORD_BYTES),
            entries: block.take(shape.most_tokens * shape.top_k * ENTRY_BYTES),
            ids: block.take(shape.id_bytes()),
            slots: block.take(zoned(shape.ranks * shape.most_tokens * shape.slots() * WORD_BYTES)),
            zones: block.take(zoned((shape.local_experts + 1) * WORD_BYTES)),
            bytes: block.bytes(),
        }
    }
}

/// Sections of an LL handle's block, and its size. A dispatch stores them for its combines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LlSections {
    /// i32 `[sources][most_tokens][top_k]`: the expert of each entry of this rank and of the ranks that it forwards
    /// for; negative if there is none.
    pub expert_of: usize,
    /// i32 `[ranks][most_tokens][top_k]`: output row of each entry that arrived here, negative if there is none. In
    /// rank-major operations a token's first entry has its row, whichever entry names this rank.
    pub row_of: usize,
    /// u32 `[ranks + 1]`: number of tokens of each rank, then on GPUs the view that has the rows.
    pub tokens_of: usize,
    /// i64 `[most_tokens][top_k]`: for widening 32-bit ids, which kernels do not read, if these are allowed.
    pub ids: usize,
    pub bytes: usize,
}

impl LlSections {
    /// Sections for handles of this shape, on a rank that forwards for `sources`, including itself.
    pub fn new(shape: StateShape, sources: usize) -> Self {
        let entries = shape.most_tokens * shape.top_k * WORD_BYTES;
        let mut block = regions();
        Self {
            expert_of: block.take(sources * entries),
            row_of: block.take(shape.ranks * entries),
            tokens_of: block.take((shape.ranks + 1) * WORD_BYTES),
            ids: block.take(shape.id_bytes()),
            bytes: block.bytes(),
        }
    }
}

/// The regions after a header.
fn regions() -> Regions {
    let mut block = Regions::new(SECTION_ALIGN);
    block.take(HEADER_WORDS * WORD_BYTES);
    block
}

/// Bytes of the block of a handle with `top_k` ids per token, in a group on one node; `None` without a bound on tokens,
/// as handles then have no common size.
pub fn block_bytes(facts: &GroupFacts, top_k: usize, form: HandleForm) -> Option<usize> {
    let shape = StateShape::of_group(facts, top_k, form)?;
    Some(match facts.algorithm {
        Algorithm::LowLatency => LlSections::new(shape, 1).bytes,
        Algorithm::HighThroughput => HtSections::new(shape).bytes,
    })
}

/// The first word of every header: "nEpH".
const MAGIC: u32 = 0x6e45_7048;
/// To be changed with the sections or their meaning.
const VERSION: u32 = 3;

pub const HEADER_WORDS: usize = 20;
/// The number of leading words, by which an operation decides whether it can use a block; the rest is of the routing.
pub const COMPARED_WORDS: usize = 16;
/// HT: the index of the two words with the routing's number, which is the same on all ranks.
pub const NUMBER_WORD: usize = COMPARED_WORDS;
/// HT: the index of the word with the number of rows that this rank receives, or why there is no routing.
pub const ROWS_WORD: usize = NUMBER_WORD + 2;
/// The index of the word with a hash of the compared ones, which kernels compare in their place.
pub const HASH_WORD: usize = ROWS_WORD + 1;

/// The index of the word with the layout of rows.
const LAYOUT_WORD: usize = 3;
/// Bit of the ids' word: the block has the ids.
const KEPT_IDS: u32 = 1 << 8;
/// Lowest bit of the zones' alignment in the ids' word.
const ALIGNMENT_SHIFT: u32 = 16;

/// What word `word` of a header tells if it is `value`, in the terms of callers where they know it.
pub fn shown(word: u32, value: u32) -> String {
    let name = match word {
        3 => return format!("layout {}", LAYOUTS.get(value as usize).unwrap_or(&"unknown")),
        4 => "ranks",
        5 => "rank",
        6 => "local experts",
        7 => "most tokens",
        8 => "tokens",
        9 => "ids per token",
        10 => return ids_shown(value),
        _ => return format!("word {word} {value:#x}"),
    };
    format!("{name} {value}")
}

/// `header` with another layout, which each LL dispatch chooses.
pub fn with_layout(mut header: [u32; HEADER_WORDS], layout: Layout) -> [u32; HEADER_WORDS] {
    header[LAYOUT_WORD] = layout_number(layout);
    with_hash(header)
}

/// `header` with the hash (FNV-1a, by words). It is not 0, as it would be in cleared memory.
fn with_hash(mut header: [u32; HEADER_WORDS]) -> [u32; HEADER_WORDS] {
    let compared = header.iter().take(COMPARED_WORDS);
    let hash = compared.fold(0x811c_9dc5_u32, |hash, word| (hash ^ word).wrapping_mul(0x0100_0193));
    header[HASH_WORD] = hash.max(1);
    header
}

/// By their numbers.
const LAYOUTS: [&str; 4] = ["unknown", "expert-major", "rank-major", "flat"];

const fn layout_number(layout: Layout) -> u32 {
    match layout {
        Layout::ExpertMajor { .. } => 1,
        Layout::RankMajor { .. } => 2,
        Layout::Flat => 3,
    }
}

/// The word for the width of ids, whether the block has them, which then have 64 bits, and its zones.
fn word_of_ids(routing: &Routing) -> u32 {
    let ids = match routing.form.keeps_ids {
        true => KEPT_IDS | IntWidth::Bits64.bytes() as u32,
        false => routing.width.bytes() as u32,
    };
    let zones = routing.form.zones;
    ids | zones.map_or(0, |zones| zones.alignment.ilog2() + 1) << ALIGNMENT_SHIFT
}

/// What [`word_of_ids`] made.
fn ids_shown(word: u32) -> String {
    let kept = if word & KEPT_IDS == 0 { "" } else { "kept " };
    let ids = format!("{kept}ids of {} bits", word % KEPT_IDS * u8::BITS);
    match (word >> ALIGNMENT_SHIFT).checked_sub(1) {
        None => ids,
        Some(log) => format!("{ids} in zones aligned to {}", 1_u64.checked_shl(log).unwrap_or(0)),
    }
}

/// The header of a block with routing `number`, or 0, without the number of rows.
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
    with_hash([
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
    ])
}

#[cfg(test)]
#[path = "handle_state_tests.rs"]
mod tests;
