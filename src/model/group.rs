//! Facts that all ranks of a group share: which rank hosts which experts, and the bounds.

use crate::model::ids::GroupRank;
use crate::model::layout::Layout;
use std::ops::Range;
use std::time::Duration;

/// Most experts that one token may name.
pub const MAX_TOP_K: usize = 32;

/// Rows move in pieces of this many bytes, so a row's size is a multiple of it.
pub const ROW_ALIGN: usize = 16;

crate::named! {
    /// The two modes of a group.
    Algorithm:
    /// Few tokens, expert-major 3-D output, staged operations.
    LowLatency = 0, "low latency";
    /// Many tokens, flat 2-D output, routing fixed when a handle is created.
    HighThroughput = 1, "high throughput";
}

crate::named! {
    /// How an LL combine sums, with the values of the environment variable; both are deterministic and sum in fp32.
    LlCombineMode:
    /// Every (token, k) row goes home and is summed there in order of k: bit-identical to the reference.
    Exact = 0, "exact";
    /// An expert rank sums its rows of a token and sends one row: fewer bytes.
    Reduce = 1, "reduce";
}

impl LlCombineMode {
    /// The variant of a rank whose combine is `exact` or not, and that of a rank which differs.
    pub fn variants(exact: bool) -> [&'static str; 2] {
        if exact { ["ll.exact", "ll.reduce"] } else { ["ll.reduce", "ll.exact"] }
    }
}

crate::named! {
    /// How the sums of nodes are added, with the values of the environment variable; both are deterministic, in fp32.
    #[derive(Default)]
    NodeSums:
    /// The home node's first, unrounded, then the others in ring order.
    #[default]
    HomeFirst = 0, "home";
    /// Each node's sum rounded, nodes ascending: the result does not depend on a token's home.
    Invariant = 1, "invariant";
}

/// The most tokens per rank with which the rows that one of `ranks` receives fit in 31 bits.
pub fn most_tokens(ranks: usize) -> usize {
    i32::MAX as usize / ranks
}

/// What depends on a group's mode.
#[derive(Clone, Copy, Debug)]
pub enum ByMode<L, H> {
    Ll(L),
    Ht(H),
}

/// A caller's settings of a group, not checked yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GroupSettings {
    pub algorithm: Algorithm,
    /// Experts over all ranks.
    pub experts: usize,
    /// Bound on tokens per rank; `None`: no bound.
    pub max_tokens: Option<usize>,
    /// Largest row that an operation may move, in bytes.
    pub row_bytes: usize,
    /// Channels to use; `None`: the library chooses.
    pub channels: Option<usize>,
    /// HT: whether handles may lay rows out by expert; the windows then have room for it.
    pub zones: bool,
    /// HT: rows that an ABI's tensors must have room for; 0 for none. The same on all ranks.
    pub tensor_rows: usize,
    /// HT: whether routing drops rows beyond that.
    pub drops: bool,
    /// Deadline of any wait for another rank, unless the environment sets one; `None`: the library chooses.
    pub timeout: Option<Duration>,
    /// The largest number of SMs asked for, which the device must have.
    pub sms: Option<usize>,
    /// How LL combines on one node sum, unless the environment sets it.
    pub ll_combine: LlCombineMode,
}

/// The checked configuration of a group: the same on every rank, except for `rank`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GroupFacts {
    pub algorithm: Algorithm,
    /// Ranks of the communicator.
    pub ranks: usize,
    pub rank: GroupRank,
    /// Experts over all ranks; divisible by `ranks`.
    pub experts: usize,
    /// Bound on tokens per rank; `None` in HT: each handle finds its own.
    pub max_tokens: Option<usize>,
    /// Largest row that an operation may move, in bytes.
    pub row_bytes: usize,
    pub ll_combine: LlCombineMode,
    /// HT over several nodes: bytes that a rank sends in one pass; `None`: the library chooses.
    pub ht_chunk_bytes: Option<usize>,
    /// Channels to use, 2 SMs each; `None`: the library chooses.
    pub channels: Option<usize>,
    /// HT: whether handles may lay rows out by expert, even if many may come.
    pub zones: bool,
    /// HT: rows that an ABI's tensors must have room for; 0 for none.
    pub tensor_rows: usize,
    /// HT: whether routing drops rows beyond that.
    pub drops: bool,
}

/// A group whose ranks receive at most this many rows has room for zones unasked: it costs little.
const MOST_ROWS_WITH_ZONES: usize = 1 << 20;

impl GroupFacts {
    /// HT: whether handles may lay rows out by expert.
    pub fn has_zones(&self) -> bool {
        self.zones || self.max_tokens.is_some_and(|tokens| tokens.saturating_mul(self.ranks) <= MOST_ROWS_WITH_ZONES)
    }

    pub fn local_experts(&self) -> usize {
        self.experts / self.ranks
    }

    /// The most rows that a rank receives, per expert (LL) or in total (HT): all that the ranks may send.
    pub fn recv_rows(&self) -> Option<usize> {
        self.max_tokens.map(|tokens| tokens * self.ranks)
    }

    /// The layout of rows that a rank receives in LL with one row for all its experts.
    pub fn rank_major(&self) -> Layout {
        Layout::RankMajor { ranks: self.ranks, slots: self.max_tokens.unwrap_or(0) }
    }

    /// The layout of rows that a rank receives, unless an operation says otherwise.
    pub fn layout(&self) -> Layout {
        match self.algorithm {
            Algorithm::LowLatency => {
                Layout::ExpertMajor { experts: self.local_experts(), slots: self.recv_rows().unwrap_or(0) }
            }
            Algorithm::HighThroughput => Layout::Flat,
        }
    }

    /// Global ids of the experts that `rank` hosts.
    pub fn experts_of(&self, rank: GroupRank) -> Range<usize> {
        let (rank, local) = (rank.index(), self.local_experts());
        rank * local..(rank + 1) * local
    }

    /// The expert that routing entry `id` names; `None` for negative and too large ids, which are ignored.
    pub fn expert(&self, id: i64) -> Option<usize> {
        usize::try_from(id).ok().filter(|&expert| expert < self.experts)
    }

    pub fn owner(&self, expert: usize) -> usize {
        expert / self.local_experts()
    }
}

#[cfg(test)]
impl GroupFacts {
    /// The defaults of unit tests.
    pub const SAMPLE: Self = Self {
        algorithm: Algorithm::LowLatency,
        ranks: 2,
        rank: GroupRank::new(0),
        experts: 8,
        max_tokens: Some(4),
        row_bytes: 16,
        ll_combine: LlCombineMode::Exact,
        ht_chunk_bytes: None,
        channels: None,
        zones: false,
        tensor_rows: 0,
        drops: false,
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn experts_are_dealt_in_blocks() {
        let facts = GroupFacts {
            ranks: 3,
            rank: GroupRank::new(1),
            experts: 12,
            max_tokens: Some(5),
            row_bytes: 32,
            ..GroupFacts::SAMPLE
        };
        assert_eq!(facts.experts_of(facts.rank), 4..8);
        assert_eq!(facts.owner(7), 1);
        assert_eq!(facts.expert(-1), None);
        assert_eq!(facts.expert(12), None);
        assert_eq!(facts.expert(11), Some(11));
    }
}
