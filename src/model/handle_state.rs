//! What a handle keeps for its operations: one relocatable block of memory.
//!
//! A header, then sections at offsets from the block's start. The block holds no addresses, and nothing that an
//! operation needs is elsewhere: a copy of the bytes serves a handle of an equal group, at any address. Both backends
//! write the same numbers into the sections.
//!
//! Blocks lie in the library's memory or in a caller's ([`HandleHome`]). The library's are never reopened, so their
//! headers are not written. In a caller's, each operation compares the header first and refuses anything else that lies
//! there. The sections behind a valid header are trusted.
//!
//! Over several nodes a handle also has numbers on the host (how much each message carries). There a block in a
//! caller's memory has another format, with these behind its header (`cuda/ht/nodes/caller_block.rs`).

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

/// Bytes of an (expert, index) pair: both have 32 bits.
const ENTRY_BYTES: usize = 8;
const WORD_BYTES: usize = 4;

/// Where a handle keeps its block, and for how long.
#[derive(Clone, Debug, Default)]
pub struct HandleHome {
    /// In a caller's memory; `None`: in the library's.
    pub caller_block: Option<CallerBlock>,
    pub life: HandleLife,
}

/// Held by somebody for as long as a caller's handle lives, across all its routings.
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

/// A block in a caller's memory, as large as the handle's state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CallerBlock(pub DevPtr);

/// What determines the sections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StateShape {
    /// Ranks by which rows are counted.
    pub ranks: usize,
    pub local_experts: usize,
    /// Tokens per rank for which there is room.
    pub most_tokens: usize,
    pub top_k: usize,
    pub form: HandleForm,
}

impl StateShape {
    /// The shape for a group on one node with a bound on tokens; `None` without the bound.
    pub fn of_group(facts: &GroupFacts, top_k: usize, form: HandleForm) -> Option<Self> {
        Some(Self {
            ranks: facts.ranks,
            local_experts: facts.local_experts(),
            most_tokens: facts.max_tokens?,
            top_k,
            form,
        })
    }

    /// The most slots of a row with zones.
    pub fn slots(self) -> usize {
        self.top_k.min(self.local_experts)
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
    /// u32 `[ranks + 1]`: this rank's first row from each source, then the number of rows.
    pub begins: usize,
    /// u32 `[ranks]`: rows that go from this rank to each.
    pub departures: usize,
    /// i32 `[local_experts]`: received rows per expert.
    pub counts: usize,
    /// `[most_tokens][top_k]` pairs of 32 bits: a token's experts, ascending, each once, then -1; and the row's index
    /// among those that this rank sends to the expert's rank.
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

/// Sections of an LL handle's block, and its size: what a dispatch stores for its combines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LlSections {
    /// i32 `[sources][most_tokens][top_k]`: the expert of each entry of this rank, and of the ranks that it forwards
    /// for; negative if none.
    pub expert_of: usize,
    /// i32 `[ranks][most_tokens][top_k]`: output row of each entry that arrived here, negative if none. Rank-major,
    /// a token's first entry holds its row, whichever entry named this rank.
    pub row_of: usize,
    /// u32 `[ranks + 1]`: tokens of each rank, then on GPUs the view that holds the rows.
    pub tokens_of: usize,
    /// i64 `[most_tokens][top_k]`: room to widen 32-bit ids to what the kernels read, if such are allowed.
    pub ids: usize,
    pub bytes: usize,
}

impl LlSections {
    /// Sections for handles of this shape, on a rank that forwards for `sources`, itself included.
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

/// The regions behind a header.
fn regions() -> Regions {
    let mut block = Regions::new(SECTION_ALIGN);
    block.take(HEADER_WORDS * WORD_BYTES);
    block
}

/// Bytes of the block of a handle with `top_k` ids per token, for a group on one node; `None` without a bound on
/// tokens: handles then have no common size.
pub fn block_bytes(facts: &GroupFacts, top_k: usize, form: HandleForm) -> Option<usize> {
    let shape = StateShape::of_group(facts, top_k, form)?;
    Some(match facts.algorithm {
        Algorithm::LowLatency => LlSections::new(shape, 1).bytes,
        Algorithm::HighThroughput => HtSections::new(shape).bytes,
    })
}

/// The first word of each header: "nEpH".
const MAGIC: u32 = 0x6e45_7048;
/// Changes with the sections or their meaning.
const VERSION: u32 = 2;

pub const HEADER_WORDS: usize = 20;
/// The leading words, which tell whether an operation can use a block. The others describe its routing.
pub const COMPARED_WORDS: usize = 16;
/// HT: the routing's number, the same on all ranks; two words.
pub const NUMBER_WORD: usize = COMPARED_WORDS;
/// HT: the rows that this rank receives, or why there is no routing.
pub const ROWS_WORD: usize = NUMBER_WORD + 2;

/// The layout of the rows that the block describes.
const LAYOUT_WORD: usize = 3;
/// Bit of the ids' word: the block holds the ids.
const KEPT_IDS: u32 = 1 << 8;
/// Lowest bit, in the same word, of the zones' alignment.
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

/// `header` with another layout: each LL dispatch chooses its own.
pub fn with_layout(mut header: [u32; HEADER_WORDS], layout: Layout) -> [u32; HEADER_WORDS] {
    header[LAYOUT_WORD] = layout_number(layout);
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

/// The width of a block's ids, and whether it holds them: then all have 64 bits. Also its zones.
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

/// The header of a block with routing `number`, or 0. The number of rows is not filled in.
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
#[path = "handle_state_tests.rs"]
mod tests;
