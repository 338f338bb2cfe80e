//! What an LL dispatch stores for later combines, as one rank sees it: the sections of a handle's block
//! (`model::handle_state`).
#![allow(unsafe_code)]

use crate::backend::host::block::Block;
use crate::backend::host::numeric;
use crate::error::{Error, Result};
use crate::model::group::GroupFacts;
use crate::model::handle_state::{CallerBlock, LlSections, StateShape, header, with_layout};
use crate::model::layout::Layout;
use crate::model::ops::Routing;

/// What a dispatch has found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LastDispatch {
    /// This rank's ids at the time of sending.
    pub sent: Vec<i64>,
    /// Tokens of each source rank.
    pub tokens: Vec<u32>,
    /// The entries from each source, by token, then k.
    pub placed: Vec<Vec<Placed>>,
}

/// An entry that names an expert of this rank; rank-major a token that arrives here, with 0 as its k.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Placed {
    pub token: usize,
    pub k: usize,
    /// Row of the output `[L * R * M, H]`, or `[R * M, H]`.
    pub row: usize,
}

impl LastDispatch {
    /// Stores it in the block of a handle with this routing, with rows in this layout.
    pub fn store(&self, facts: &GroupFacts, routing: &Routing, (block, layout): (CallerBlock, Layout)) -> Result<()> {
        let (sections, per_rank) = sections(facts, routing)?;
        // SAFETY: `rule` has compared the block with the sections; the caller leaves it to the handle's operations.
        let mut block = unsafe { Block::new(block, sections.bytes) };
        let expert_of = |id: &i64| facts.expert(*id).map_or(-1, |expert| expert as i32);
        block.set(sections.expert_of, self.sent.iter().map(expert_of).flat_map(i32::to_ne_bytes))?;
        for (source, placed) in self.placed.iter().enumerate() {
            let mut rows = vec![-1_i32; per_rank];
            for it in placed {
                if let Some(row) = rows.get_mut(it.token * routing.top_k + it.k) {
                    *row = it.row as i32;
                }
            }
            let offset = sections.row_of + source * per_rank * size_of::<i32>();
            block.set(offset, rows.into_iter().flat_map(i32::to_ne_bytes))?;
        }
        block.set(sections.tokens_of, self.tokens.iter().flat_map(|tokens| tokens.to_ne_bytes()))?;
        block.set_header(&with_layout(header(facts, routing, 0), layout))
    }

    /// Loads it from a block, if that belongs to a handle with this routing.
    pub fn load(facts: &GroupFacts, routing: &Routing, (block, layout): (CallerBlock, Layout)) -> Result<Self> {
        let (sections, per_rank) = sections(facts, routing)?;
        // SAFETY: as above.
        let block = unsafe { Block::new(block, sections.bytes) };
        block.header(&with_layout(header(facts, routing, 0), layout))?;
        let words = |offset, count: usize| {
            let bytes = block.section(offset, count * size_of::<i32>())?;
            Ok::<_, Error>(numeric::u32s(bytes).map(u32::cast_signed))
        };
        let sent = words(sections.expert_of, routing.tokens * routing.top_k)?;
        let tokens = words(sections.tokens_of, facts.ranks)?.map(i32::cast_unsigned);
        let mut last = Self { sent: sent.map(i64::from).collect(), tokens: tokens.collect(), placed: Vec::new() };
        for (source, tokens) in last.tokens.iter().enumerate() {
            let offset = sections.row_of + source * per_rank * size_of::<i32>();
            let rows = words(offset, per_rank.min(*tokens as usize * routing.top_k))?;
            let placed = |(entry, row)| {
                let (token, k) = (entry / routing.top_k, entry % routing.top_k);
                Some(Placed { token, k, row: usize::try_from(row).ok()? })
            };
            last.placed.push(rows.enumerate().filter_map(placed).collect());
        }
        Ok(last)
    }
}

/// The sections, and the number of entries per rank.
fn sections(facts: &GroupFacts, routing: &Routing) -> Result<(LlSections, usize)> {
    let shape = StateShape::of_group(facts, routing.top_k, routing.form);
    let shape = shape.ok_or_else(|| Error::internal("a block in a group without a bound"))?;
    Ok((LlSections::new(shape, 1), shape.most_tokens * shape.top_k))
}
