//! Handles over several nodes whose block is in a caller's memory. The block has a header, as on one node, then the
//! numbers that the host needs, then the handle's device memory. It is complete when an update returns.
//!
//! The caller may replace the block's content before the next operation. So each operation waits for its stream, reads
//! header and numbers again, and builds a handle from them.

use crate::backend::cuda::driver;
use crate::backend::cuda::driver::stream::StreamScope;
use crate::backend::cuda::ht::nodes::handle::{Counts, NodesHt};
use crate::backend::cuda::ht::nodes::plan::HandleSize;
use crate::backend::cuda::ht::nodes::rails::Rails;
use crate::backend::cuda::ht::shared::HtShared;
use crate::backend::cuda::kernels::to_u32;
use crate::backend::{HtBackend, check_header, foreign_state, opened_again};
use crate::error::refusal::{InSequence, Subject};
use crate::error::{Error, Result};
use crate::model::handle_state::{CallerBlock, HEADER_WORDS, NUMBER_WORD, SECTION_ALIGN};
use crate::model::ops::{HandleForm, HtCombine, HtDispatch, Routing, Stream};
use crate::model::tensor::DevPtr;
use std::sync::Arc;
use std::time::Duration;

const WORD: usize = size_of::<u32>();
/// In place of a number of slots: the handle has none.
const NO_SLOTS: u32 = u32::MAX;

/// Words before the device memory: the header, rows, slots, the tokens of forwarded ranks, and `Counts::words`.
fn words(rails: &Rails) -> usize {
    HEADER_WORDS + 2 + rails.plan.forwarded + rails.plan.announced() - 1
}

/// The start of the handle's device memory in the block.
pub fn memory_of(rails: &Rails, CallerBlock(block): CallerBlock) -> DevPtr {
    DevPtr(block.0 + (words(rails) * WORD).next_multiple_of(SECTION_ALIGN))
}

/// The sizes for any handle of the group: those at the bound on tokens, so that offsets are always the same.
pub fn size_of_any(rails: &Rails, most_tokens: usize, (top_k, form): (usize, HandleForm)) -> HandleSize {
    let (own, remote) = (most_tokens, (rails.plan.forwarded - 1) * most_tokens);
    HandleSize {
        own,
        remote,
        tokens: own,
        top_k,
        keeps_ids: form.keeps_ids,
        slots: rails.slots(most_tokens, top_k, form),
    }
}

/// Bytes of a handle's block; `None` in a group without a bound on tokens.
pub fn block_bytes(group: &HtShared, rails: &Rails, top_k: usize, form: HandleForm) -> Result<Option<usize>> {
    let Some(most) = group.plan.facts.max_tokens else { return Ok(None) };
    let memory = rails.plan.memory(0, size_of_any(rails, most, (top_k, form)))?;
    Ok(Some(memory_of(rails, CallerBlock(DevPtr(0))).0 + memory.bytes))
}

/// The size of a handle with this routing in a caller's block.
pub fn size(group: &HtShared, rails: &Rails, routing: &Routing) -> HandleSize {
    let any = size_of_any(rails, group.plan.max_tokens, (routing.top_k, routing.form));
    HandleSize { tokens: routing.tokens, ..any }
}

/// Enqueues storing header and numbers of `handle`, after the kernels that have filled its memory.
pub fn store(handle: &NodesHt, CallerBlock(block): CallerBlock, at: &StreamScope) -> Result<()> {
    let header = handle.group.plan.header(&handle.routing, handle.epoch);
    let numbers = handle.counts.tokens.iter().chain(&handle.counts.words);
    let mut record = header.to_vec();
    record.push(to_u32(handle.rows)?);
    record.push(handle.slots.map_or(Ok(NO_SLOTS), to_u32)?);
    for number in numbers {
        record.push(to_u32(*number)?);
    }
    let bytes: Vec<u8> = record.iter().flat_map(|word| word.to_ne_bytes()).collect();
    driver::upload(block, &bytes, at.stream)
}

/// Enqueues marking the block as without a routing.
pub fn forget(CallerBlock(block): CallerBlock, at: &StreamScope) -> Result<()> {
    driver::upload(block, &[0; HEADER_WORDS * WORD], at.stream)
}

/// A handle whose block is in a caller's memory.
pub struct CallerHt {
    pub group: Arc<HtShared>,
    pub rails: Arc<Rails>,
    pub routing: Routing,
    pub block: CallerBlock,
    /// The number of rows after its own update; `None` if the handle was opened on an existing block.
    pub received: Option<usize>,
}

impl CallerHt {
    /// Builds the handle from the block's present content.
    fn open(&self, stream: Stream) -> Result<NodesHt> {
        let at = &self.group.enter(stream)?;
        if at.is_captured() {
            return Err(Error::usage(Subject::Stream, InSequence::NoCaptureOfRouting));
        }
        let words = driver::download_words(words(&self.rails), self.block.0, stream)?;
        self.handle(&words).inspect_err(|error| self.rails.network.fail(error))
    }

    fn handle(&self, words: &[u32]) -> Result<NodesHt> {
        let (group, rails, routing) = (&self.group, &self.rails, self.routing);
        check_header(words, &group.plan.header(&routing, 0))?;
        let number = |index: usize| words.get(index).copied().unwrap_or(0);
        let (rows, slots) = (number(HEADER_WORDS) as usize, number(HEADER_WORDS + 1));
        let mut rest = words.iter().skip(HEADER_WORDS + 2).map(|&word| word as usize);
        let tokens = rest.by_ref().take(rails.plan.forwarded).collect();
        let (ends, others) = (rails.plan.chunks + 1, rails.plan.others);
        let counts = Counts { tokens, words: rest.collect(), ends, others };
        let most = group.plan.max_tokens;
        if let Some(found) = counts.first_invalid(most) {
            return Err(foreign_state(HEADER_WORDS as u32 + 2, to_u32(found)?, to_u32(most)?));
        }
        let stages = rails.plan.stages(counts.most_tokens());
        let mut handle = NodesHt {
            group: Arc::clone(group),
            rails: Arc::clone(rails),
            memory: None,
            base: memory_of(rails, self.block),
            size: size(group, rails, &routing),
            routing,
            grids: group.grids(&routing),
            epoch: number(NUMBER_WORD),
            rows,
            slots: (slots != NO_SLOTS).then_some(slots as usize),
            counts,
            banks: rails.banks_for(stages.room)?,
            stages,
        };
        if let Some(ids) = handle.kept_ids()? {
            (handle.routing.ids, handle.routing.width) = ids;
        }
        Ok(handle)
    }
}

impl HtBackend for CallerHt {
    fn dispatch(&self, op: &HtDispatch, stream: Stream) -> Result<()> {
        self.open(stream)?.dispatch(op, stream)
    }

    fn combine(&self, op: &HtCombine, stream: Stream) -> Result<()> {
        self.open(stream)?.combine(op, stream)
    }

    fn add_counts(&self, totals: DevPtr, stream: Stream) -> Result<()> {
        self.open(stream)?.add_counts(totals, stream)
    }

    fn num_recv_tokens(&self, _within: Duration) -> Result<Option<usize>> {
        self.received.ok_or_else(opened_again).map(Some)
    }

    fn num_recv_tokens_in_block(&self, stream: Stream) -> Result<Option<usize>> {
        self.open(stream)?.num_recv_tokens(Duration::MAX)
    }
}
