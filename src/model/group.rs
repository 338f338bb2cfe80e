//! The configuration of a group, which all ranks share: modes, bounds, and which rank hosts which experts.

use crate::model::ids::GroupRank;
use crate::model::layout::Layout;
use std::ops::Range;
use std::time::Duration;

/// Most experts that one token may name.
pub const MAX_TOP_K: usize = 32;

/// A row's size is a multiple of this, as kernels move rows by accesses of 16 bytes.
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
    /// How an LL combine sums; the names are values of the environment variable. Both ways are deterministic, in fp32.
    LlCombineMode:
    /// The row of every (token, k) goes home and is summed there in order of k: bit-identical to the reference.
    Exact = 0, "exact";
    /// Expert ranks sum their rows of a token and send one row: fewer bytes.
    Reduce = 1, "reduce";
}

impl LlCombineMode {
    /// The names of this rank's variant, whose combine is `exact` or not, and of a rank's that differs.
    pub fn variants(exact: bool) -> [&'static str; 2] {
        if exact { ["ll.exact", "ll.reduce"] } else { ["ll.reduce", "ll.exact"] }
    }
}

crate::named! {
    /// How nodes' sums are added; the names are values of the environment variable. Both are deterministic, in fp32.
    #[derive(Default)]
    NodeSums:
    /// First the home node's sum, unrounded, then the others in ring order.
    #[default]
    HomeFirst = 0, "home";
    /// Each node's sum is rounded, and nodes are in ascending order, so the result does not depend on a token's home.
    Invariant = 1, "invariant";
}

/// The most tokens per rank such that the number of rows that one of `ranks` receives fits in 31 bits.
pub fn most_tokens(ranks: usize) -> usize {
    i32::MAX as usize / ranks
}

/// One of two values, by a group's mode.
#[derive(Clone, Copy, Debug)]
pub enum ByMode<L, H> {
    Ll(L),
    Ht(H),
}

/// A caller's settings of a group, before they are checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GroupSettings {
    pub algorithm: Algorithm,
    /// Experts over all ranks.
    pub experts: usize,
    /// Bound on tokens per rank; `None` without a bound.
    pub max_tokens: Option<usize>,
    /// Largest row that an operation may move, in bytes.
    pub row_bytes: usize,
    /// Channels to use; `None`: the library chooses.
    pub channels: Option<usize>,
    /// HT: whether handles may order rows by expert, for which windows need room.
    pub zones: bool,
    /// HT: the most rows of a tensor in the caller's ABI; 0 if unlimited. The same on all ranks.
    pub tensor_rows: usize,
    /// HT: whether routing drops rows beyond that.
    pub drops: bool,
    /// Timeout of waits for other ranks, unless the environment sets one; `None`: the library chooses.
    pub timeout: Option<Duration>,
    /// The largest number of SMs that the caller asks for; the device must have as many.
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
    /// Bound on tokens per rank; `None` only in HT, where each handle then has its own.
    pub max_tokens: Option<usize>,
    /// Largest row that an operation may move, in bytes.
    pub row_bytes: usize,
    pub ll_combine: LlCombineMode,
    /// HT over several nodes: bytes that a rank sends in one pass; `None`: the library chooses.
    pub ht_chunk_bytes: Option<usize>,
    /// Channels to use, 2 SMs each; `None`: the library chooses.
    pub channels: Option<usize>,
    /// HT: whether handles may order rows by expert, however many may come.
    pub zones: bool,
    /// HT: the most rows of a tensor in the caller's ABI; 0 if unlimited.
    pub tensor_rows: usize,
    /// HT: whether routing drops rows beyond that.
    pub drops: bool,
}

/// Groups whose ranks receive at most this many rows always have room for zones, as it costs little.
const MOST_ROWS_WITH_ZONES: usize = 1 << 20;

impl GroupFacts {
    /// HT: whether handles may order rows by expert.
    pub fn has_zones(&self) -> bool {
        self.zones || self.max_tokens.is_some_and(|tokens| tokens.saturating_mul(self.ranks) <= MOST_ROWS_WITH_ZONES)
    }

    pub fn local_experts(&self) -> usize {
        self.experts / self.ranks
    }

    /// The most rows that a rank receives, per expert (LL) or in total (HT): as many as all ranks may send.
    pub fn recv_rows(&self) -> Option<usize> {
        self.max_tokens.map(|tokens| tokens * self.ranks)
    }

    /// LL: the layout of rank-major rows, of which there is one per token for all experts of the rank.
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

    /// The expert with the number `id`; `None` for negative and too large ids, which are ignored.
    pub fn expert(&self, id: i64) -> Option<usize> {
        usize::try_from(id).ok().filter(|&expert| expert < self.experts)
    }

    pub fn owner(&self, expert: usize) -> usize {
        expert / self.local_experts()
    }
}

#[cfg(test)]
impl GroupFacts {
    /// An example for unit tests.
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
