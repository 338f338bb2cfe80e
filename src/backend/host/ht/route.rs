//! The routing of an HT handle: which rank sends which token where. Computed once per handle from
//! the ids of all ranks.

use crate::backend::host::numeric;
use crate::error::{Code, Error, Result};
use crate::model::group::GroupFacts;

/// A token that this rank receives.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Arrival {
    /// Its home rank.
    pub source: usize,
    /// Its index there.
    pub token: usize,
    /// Its experts on this rank: local ids, ascending, without repetition.
    pub experts: Vec<usize>,
}

/// One destination of one of this rank's tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Departure {
    /// The token.
    pub token: usize,
    /// A rank with at least one of the token's experts.
    pub rank: usize,
    /// The token's row there.
    pub row: usize,
    /// How many of the token's experts that rank hosts.
    pub experts: usize,
}

/// The routing of one handle, as one rank sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HtMap {
    /// Number of the operation that exchanged the ids, the same on all ranks.
    pub number: u64,
    /// Rows that this rank receives, in order: source rank, then token.
    pub arrivals: Vec<Arrival>,
    /// Destinations of this rank's tokens, by token, then rank. Tokens without a destination have
    /// no entry: without ids a rank may have any number of them.
    pub departures: Vec<Departure>,
}

/// The ids of one rank.
pub struct RankIds {
    /// int64 `[tokens, top_k]`.
    pub ids: Vec<u8>,
    /// Ids per token.
    pub top_k: usize,
}

/// Bytes of an id.
pub const ID_BYTES: usize = size_of::<i64>();

impl RankIds {
    /// A copy of `ids`; an error if memory is short.
    pub fn copied(ids: &[u8], top_k: usize) -> Result<Self> {
        let mut own = Vec::new();
        if own.try_reserve_exact(ids.len()).is_err() {
            let text = format!("no host memory for {} bytes of ids", ids.len());
            return Err(Error::new(Code::SystemError, text));
        }
        own.extend_from_slice(ids);
        Ok(Self { ids: own, top_k })
    }

    /// The ids of each token, if tokens have any.
    fn by_token(&self) -> impl Iterator<Item = &[u8]> {
        self.ids.chunks(self.top_k.max(1) * ID_BYTES)
    }
}

impl HtMap {
    /// Computes the map of `facts.rank` from the ids of all ranks, exchanged in operation `number`.
    pub fn new(facts: &GroupFacts, number: u64, all: &[RankIds]) -> Self {
        let mut received = vec![0_usize; facts.ranks];
        let mut arrivals = Vec::new();
        let mut departures = Vec::new();
        for (source, of_source) in all.iter().enumerate() {
            for (token, ids) in of_source.by_token().enumerate() {
                for (rank, experts) in by_rank(facts, ids) {
                    let row = received.get(rank).copied().unwrap_or(0);
                    if source == facts.rank.index() {
                        departures.push(Departure {
                            token,
                            rank,
                            row,
                            experts: experts.len(),
                        });
                    }
                    if rank == facts.rank.index() {
                        arrivals.push(Arrival {
                            source,
                            token,
                            experts,
                        });
                    }
                    if let Some(count) = received.get_mut(rank) {
                        *count += 1;
                    }
                }
            }
        }
        Self {
            number,
            arrivals,
            departures,
        }
    }

    /// Received tokens per local expert.
    pub fn expert_counts(&self, local_experts: usize) -> Vec<i32> {
        let mut counts = vec![0; local_experts];
        for expert in self.arrivals.iter().flat_map(|arrival| &arrival.experts) {
            if let Some(count) = counts.get_mut(*expert) {
                *count += 1;
            }
        }
        counts
    }
}

/// The ranks that host the experts in `ids` (int64), ascending, each with its local ids.
fn by_rank(facts: &GroupFacts, ids: &[u8]) -> Vec<(usize, Vec<usize>)> {
    let mut experts: Vec<usize> = numeric::i64s(ids)
        .filter_map(|id| facts.expert(id))
        .collect();
    experts.sort_unstable();
    experts.dedup();
    let mut ranks: Vec<(usize, Vec<usize>)> = Vec::new();
    for expert in experts {
        let rank = facts.owner(expert);
        let local = expert % facts.local_experts();
        match ranks.last_mut() {
            Some((last, locals)) if *last == rank => locals.push(local),
            _ => ranks.push((rank, vec![local])),
        }
    }
    ranks
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::group::{Algorithm, LlCombineMode};
    use crate::model::ids::GroupRank;

    fn facts(rank: usize) -> GroupFacts {
        GroupFacts {
            algorithm: Algorithm::HighThroughput,
            ranks: 2,
            rank: GroupRank::new(rank),
            experts: 4,
            max_tokens: None,
            max_recv_rows: None,
            row_bytes: 16,
            ll_combine: LlCombineMode::Exact,
            ht_chunk_bytes: None,
            channels: None,
        }
    }

    fn ids(ids: &[i64]) -> RankIds {
        RankIds {
            ids: ids.iter().flat_map(|id| id.to_ne_bytes()).collect(),
            top_k: 2,
        }
    }

    #[test]
    fn rows_are_ordered_by_source_and_token_and_not_repeated() {
        let all = [ids(&[3, 2, -1, 0]), ids(&[2, 9])];
        let map = HtMap::new(&facts(1), 0, &all);
        assert_eq!(
            map.arrivals,
            [
                Arrival {
                    source: 0,
                    token: 0,
                    experts: vec![0, 1]
                },
                Arrival {
                    source: 1,
                    token: 0,
                    experts: vec![0]
                },
            ]
        );
        assert_eq!(
            map.departures,
            [Departure {
                token: 0,
                rank: 1,
                row: 1,
                experts: 1
            }]
        );
        assert_eq!(map.expert_counts(2), [2, 1]);
    }

    #[test]
    fn a_repeated_expert_counts_once() {
        let map = HtMap::new(&facts(0), 0, &[ids(&[1, 1]), ids(&[])]);
        assert_eq!(
            map.arrivals,
            [Arrival {
                source: 0,
                token: 0,
                experts: vec![1]
            }]
        );
        assert_eq!(map.expert_counts(2), [0, 1]);
    }
}
