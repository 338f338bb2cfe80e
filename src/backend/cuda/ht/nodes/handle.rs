//! A handle over several nodes after its creation.

use crate::backend::cuda::driver::stream::StreamScope;
use crate::backend::cuda::ht::nodes::plan::{HandleParts, HandleSize, Stages};
use crate::backend::cuda::ht::nodes::rails::{Banks, NodesMemory, Rails};
use crate::backend::cuda::ht::plan::HandleGrids;
use crate::backend::cuda::ht::shared::HtShared;
use crate::backend::cuda::params::ht_kept::HtZones;
use crate::backend::cuda::params::ht_nodes::HtNodesMemory;
use crate::backend::cuda::pool::Pooled;
use crate::error::Result;
use crate::model::ids::SourceIx;
use crate::model::ops::{IntWidth, Routing};
use crate::model::tensor::DevPtr;
use std::ops::Range;
use std::sync::Arc;

/// An HT handle over several nodes.
pub struct NodesHt {
    pub group: Arc<HtShared>,
    pub rails: Arc<Rails>,
    /// The library's memory for the handle; `None` if it was reopened in a caller's block.
    pub memory: Option<Pooled<NodesMemory>>,
    /// The start of the handle's device memory.
    pub base: DevPtr,
    pub size: HandleSize,
    pub routing: Routing,
    pub grids: HandleGrids,
    pub epoch: u32,
    /// The number of rows that this rank receives, and of slots if rows are ordered by expert.
    pub rows: usize,
    pub slots: Option<usize>,
    pub counts: Counts,
    pub stages: Stages,
    pub banks: Arc<Banks>,
}

/// Numbers of tokens before each chunk: of own tokens to each other node, and of tokens from each forwarded rank.
pub struct Counts {
    pub words: Vec<usize>,
    /// The number of all tokens of each forwarded rank, also those that do not come here.
    pub tokens: Vec<usize>,
    /// How many numbers there are per node or forwarded rank.
    pub ends: usize,
    /// The number of other nodes.
    pub others: usize,
}

impl Counts {
    /// Own tokens that go to node `other` before `chunk`.
    pub fn departing(&self, other: usize, chunk: usize) -> usize {
        self.words.get(other * self.ends + chunk).copied().unwrap_or(0)
    }

    /// Own tokens in `chunks` that go to node `other`.
    pub fn departing_in(&self, other: usize, chunks: &Range<usize>) -> usize {
        self.departing(other, chunks.end) - self.departing(other, chunks.start)
    }

    /// Tokens of forwarded rank `source` that arrive before `chunk`.
    pub fn arriving(&self, source: SourceIx, chunk: usize) -> usize {
        self.departing(self.others + source.index(), chunk)
    }

    /// Tokens of forwarded rank `source` in `chunks` that arrive.
    pub fn arriving_in(&self, source: SourceIx, chunks: &Range<usize>) -> usize {
        self.departing_in(self.others + source.index(), chunks)
    }

    /// Whether all own tokens go to node `other`.
    pub fn all_depart(&self, other: usize) -> bool {
        self.tokens.first() == Some(&self.departing(other, self.ends - 1))
    }

    /// Whether all tokens of forwarded rank `source` arrive; equals that rank's `all_depart`.
    pub fn all_arrive(&self, source: SourceIx) -> bool {
        self.tokens.get(source.index()) == Some(&self.arriving(source, self.ends - 1))
    }

    /// The first invalid number, if ranks have at most `most` tokens: larger than that, or smaller than the one before.
    pub fn first_invalid(&self, most: usize) -> Option<usize> {
        let rows = self.words.chunks_exact(self.ends);
        let falls = rows.flat_map(|ends| ends.iter().zip(ends.iter().skip(1))).find(|(end, next)| next < end);
        let exceeds = || self.tokens.iter().chain(&self.words).find(|it| **it > most);
        falls.map(|(_, next)| *next).or_else(|| exceeds().copied())
    }

    pub fn most_tokens(&self) -> usize {
        self.words.last().copied().unwrap_or(0)
    }
}

impl NodesHt {
    /// If `at` is captured, reserves the library's memory for the graph.
    pub fn stay_in_graph(&self, at: &StreamScope) {
        self.memory.iter().for_each(|memory| memory.use_at(at));
    }

    /// The kernel parameters for the handle's memory.
    pub fn device(&self) -> Result<HtNodesMemory> {
        Ok(self.parts()?.memory)
    }

    pub fn parts(&self) -> Result<HandleParts> {
        self.rails.plan.memory(self.base.0, self.size)
    }

    /// The slots of its rows, if these are ordered by expert.
    pub fn zones(&self, parts: &HandleParts) -> Result<Option<HtZones>> {
        self.group.zones(self.routing.form.zones, (parts.slots, parts.zones), self.routing.top_k)
    }

    /// The handle's copy of the ids, if it keeps one.
    pub fn kept_ids(&self) -> Result<Option<(DevPtr, IntWidth)>> {
        let ids = self.parts()?.ids;
        Ok(self.size.keeps_ids.then_some((ids, IntWidth::Bits64)))
    }
}
