//! Facts that all ranks of a group share: which rank hosts which experts, and the bounds.

use crate::model::ids::GroupRank;
use crate::model::layout::Layout;
use std::ops::Range;
use std::time::Duration;

/// Most experts that one token may name.
pub const MAX_TOP_K: usize = 32;

/// Rows are moved in pieces of this many bytes, so every row is a multiple of it.
pub const ROW_ALIGN: usize = 16;

/// The two modes of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Algorithm {
    /// Few tokens, expert-major 3-D output, staged operations.
    LowLatency = 0,
    /// Many tokens, flat 2-D output, routing fixed when a handle is created.
    HighThroughput = 1,
}

impl Algorithm {
    pub const ALL: [Self; 2] = [Self::LowLatency, Self::HighThroughput];

    /// The name that texts use.
    pub fn name(self) -> &'static str {
        match self {
            Algorithm::LowLatency => "low latency",
            Algorithm::HighThroughput => "high throughput",
        }
    }
}

/// How an LL combine sums; both are deterministic, with fp32 sums.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum LlCombineMode {
    /// Every (token, k) row is sent home and summed there in the order of k: the reference's bits.
    Exact = 0,
    /// An expert rank sums its rows of a token and sends one row: fewer bytes.
    Reduce = 1,
}

impl LlCombineMode {
    pub const ALL: [Self; 2] = [Self::Exact, Self::Reduce];

    /// Its value in the environment variable.
    pub fn name(self) -> &'static str {
        match self {
            Self::Exact => "exact",
            Self::Reduce => "reduce",
        }
    }

    /// Its name among the variants of a combine.
    pub fn variant(self) -> &'static str {
        match self {
            Self::Exact => "ll.exact",
            Self::Reduce => "ll.reduce",
        }
    }

    /// The variant of a rank whose combine is `exact` or not, and that of one which differs.
    pub fn variants(exact: bool) -> [&'static str; 2] {
        match exact {
            true => [Self::Exact, Self::Reduce].map(Self::variant),
            false => [Self::Reduce, Self::Exact].map(Self::variant),
        }
    }
}

/// How the sums of nodes are added; both are deterministic, in fp32.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u32)]
pub enum NodeSums {
    /// The home's node first, not rounded, then the others around the ring.
    #[default]
    HomeFirst = 0,
    /// Each node's sum rounded, nodes ascending: a token's bits do not depend on its home.
    Invariant = 1,
}

impl NodeSums {
    pub const ALL: [Self; 2] = [Self::HomeFirst, Self::Invariant];

    /// Its value in the environment variable.
    pub fn name(self) -> &'static str {
        match self {
            Self::HomeFirst => "home",
            Self::Invariant => "invariant",
        }
    }
}

/// The most tokens each of `ranks` may have for one rank's received rows to be countable in 31 bits.
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
    /// Bound of tokens per rank; `None` for none.
    pub max_tokens: Option<usize>,
    /// Largest row that an operation may move, in bytes.
    pub row_bytes: usize,
    /// Channels to use; `None`: the library chooses.
    pub channels: Option<usize>,
    /// HT: whether handles may have rows that lie by expert, for which there is room in windows then.
    pub zones: bool,
    /// HT: rows that an ABI's tensors must have room for; 0 for none. The same on all ranks.
    pub tensor_rows: usize,
    /// HT: whether rows beyond that are dropped, by which ranks route.
    pub drops: bool,
    /// How long any wait for another rank may last, unless the environment says so; `None`: the library chooses.
    pub timeout: Option<Duration>,
    /// The most SMs that were asked for, which the device must have.
    pub sms: Option<usize>,
    /// How LL combines on one node sum, unless the environment says so.
    pub ll_combine: LlCombineMode,
}

/// What the environment decides about a group; must be the same on every rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GroupChoices {
    pub ll_combine: LlCombineMode,
    /// HT over several nodes: bytes that a rank sends in one pass; `None`: the library chooses.
    pub ht_chunk_bytes: Option<usize>,
}

/// What it decides for this rank alone.
#[derive(Clone, Debug)]
pub struct RankChoices {
    /// How long any wait for another rank may last.
    pub timeout: Duration,
    /// The path of launch shapes measured on this machine.
    pub tuning_file: Option<String>,
    /// Whether operations are checked and counted.
    pub check: bool,
    /// Whether kernels may be launched while those before them run.
    pub programmatic: bool,
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
    /// Bound of tokens per rank; `None` in HT: each handle finds its own.
    pub max_tokens: Option<usize>,
    /// Largest row that an operation may move, in bytes.
    pub row_bytes: usize,
    pub ll_combine: LlCombineMode,
    /// HT over several nodes: bytes that a rank sends in one pass; `None`: the library chooses.
    pub ht_chunk_bytes: Option<usize>,
    /// Channels to use, 2 SMs each; `None`: the library chooses.
    pub channels: Option<usize>,
    /// HT: whether handles may have rows that lie by expert, however many may come.
    pub zones: bool,
    /// HT: rows that an ABI's tensors must have room for; 0 for none.
    pub tensor_rows: usize,
    /// HT: whether rows beyond that are dropped, by which ranks route.
    pub drops: bool,
}

/// The most rows that a rank may receive in groups that have room for zones because that is little.
const MOST_ROWS_WITH_ZONES: usize = 1 << 20;

impl GroupFacts {
    /// HT: whether handles may have rows that lie by expert.
    pub fn has_zones(&self) -> bool {
        self.zones || self.max_tokens.is_some_and(|tokens| tokens.saturating_mul(self.ranks) <= MOST_ROWS_WITH_ZONES)
    }

    pub fn local_experts(&self) -> usize {
        self.experts / self.ranks
    }

    /// The most rows that a rank receives, for one expert (LL) or in all (HT): what all ranks may send.
    pub fn recv_rows(&self) -> Option<usize> {
        self.max_tokens.map(|tokens| tokens * self.ranks)
    }

    /// How the rows that a rank receives in low latency lie where a row is for all its experts.
    pub fn rank_major(&self) -> Layout {
        Layout::RankMajor { ranks: self.ranks, slots: self.max_tokens.unwrap_or(0) }
    }

    /// How the rows that a rank receives lie, unless an operation says otherwise.
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

    /// The expert that the routing entry `id` names; `None` for negative and too large ids, which take no part.
    pub fn expert(&self, id: i64) -> Option<usize> {
        usize::try_from(id).ok().filter(|&expert| expert < self.experts)
    }

    pub fn owner(&self, expert: usize) -> usize {
        expert / self.local_experts()
    }
}

#[cfg(test)]
impl GroupFacts {
    /// What unit tests take where they say nothing else.
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
