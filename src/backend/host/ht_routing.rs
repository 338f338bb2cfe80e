//! Who sends which token where: computed once per HT handle from the ids of all ranks.
#![forbid(unsafe_code)]

use crate::backend::bootstrap::Bootstrap;
use crate::backend::host::ht_shape;
use crate::error::{Error, Result};
use crate::model::group::GroupFacts;
use crate::model::ops::Stream;

/// A token that this rank receives.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Arrival {
    /// Its home rank.
    pub source: usize,
    /// Its number there.
    pub token: usize,
    /// Its experts on this rank, as local ids, ascending and without repetition.
    pub experts: Vec<usize>,
}

/// A place where one of this rank's tokens goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Departure {
    /// A rank with at least one of the token's experts.
    pub rank: usize,
    /// The token's row there.
    pub row: usize,
    /// How many of its experts that rank hosts.
    pub experts: usize,
}

/// The routing of one handle, as one rank sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HtMap {
    /// Rows that this rank receives, in order: source rank, then token.
    pub arrivals: Vec<Arrival>,
    /// For each token of this rank, where it goes, by ascending rank.
    pub departures: Vec<Vec<Departure>>,
}

/// The ids of one rank, `[tokens, top_k]`.
pub struct RankIds {
    /// Ids, row by row.
    pub ids: Vec<i64>,
    /// Ids per token.
    pub top_k: usize,
    /// Tokens; not derivable from `ids` when `top_k` is 0.
    pub tokens: usize,
}

impl HtMap {
    /// Computes the map of `facts.rank` from the ids of all ranks.
    pub fn new(facts: &GroupFacts, all: &[RankIds]) -> Self {
        let mut received = vec![0_usize; facts.ranks];
        let mut arrivals = Vec::new();
        let mut departures = Vec::new();
        for (source, of_source) in all.iter().enumerate() {
            for token in 0..of_source.tokens {
                let ids = of_source
                    .ids
                    .get(token * of_source.top_k..(token + 1) * of_source.top_k);
                let mut goes_to = Vec::new();
                for (rank, experts) in by_rank(facts, ids.unwrap_or_default()) {
                    let row = received.get(rank).copied().unwrap_or(0);
                    goes_to.push(Departure {
                        rank,
                        row,
                        experts: experts.len(),
                    });
                    if rank == facts.rank {
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
                if source == facts.rank {
                    departures.push(goes_to);
                }
            }
        }
        Self {
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

/// The ranks that host the experts named in `ids`, ascending, each with its local ids.
fn by_rank(facts: &GroupFacts, ids: &[i64]) -> Vec<(usize, Vec<usize>)> {
    let mut experts: Vec<usize> = ids.iter().filter_map(|&id| facts.expert(id)).collect();
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

/// Most rows that a rank may receive, with `NCCL_EP_AUTO`, too.
const MOST_ROWS: usize = i32::MAX as usize;
const NUMBER_BYTES: usize = 8;

/// Gathers the ids of all ranks. `mine` is an error on a rank that refused its arguments.
pub fn exchange_ids(
    facts: &GroupFacts,
    bootstrap: &Bootstrap,
    mine: Result<RankIds>,
    stream: Stream,
) -> Result<Vec<RankIds>> {
    let shape = mine.as_ref().map_err(Error::clone);
    let shape = shape.map(|mine| (mine.tokens, mine.top_k));
    let most = facts.max_tokens.unwrap_or(MOST_ROWS / facts.ranks);
    let tokens = ht_shape::exchange(bootstrap, shape, most, stream)?;
    let mine = mine?;
    let most = tokens.iter().copied().max().unwrap_or(0);
    let mut padded: Vec<u8> = mine.ids.iter().flat_map(|id| id.to_le_bytes()).collect();
    padded.resize(most * mine.top_k * NUMBER_BYTES, 0);
    let gathered = bootstrap.all_gather(&padded, stream)?;
    Ok(gathered
        .iter()
        .zip(tokens)
        .map(|(bytes, tokens)| RankIds {
            ids: bytes
                .as_chunks::<NUMBER_BYTES>()
                .0
                .iter()
                .take(tokens * mine.top_k)
                .map(|id| i64::from_le_bytes(*id))
                .collect(),
            top_k: mine.top_k,
            tokens,
        })
        .collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::group::{Algorithm, LlCombineMode};

    fn facts(rank: usize) -> GroupFacts {
        GroupFacts {
            algorithm: Algorithm::HighThroughput,
            ranks: 2,
            rank,
            experts: 4,
            max_tokens: None,
            row_bytes: 16,
            ll_combine: LlCombineMode::Exact,
            channels: None,
        }
    }

    fn ids(tokens: usize, ids: &[i64]) -> RankIds {
        RankIds {
            ids: ids.to_vec(),
            top_k: 2,
            tokens,
        }
    }

    #[test]
    fn rows_are_ordered_by_source_and_token_and_not_repeated() {
        let all = [ids(2, &[3, 2, -1, 0]), ids(1, &[2, 9])];
        let map = HtMap::new(&facts(1), &all);
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
            [vec![Departure {
                rank: 1,
                row: 1,
                experts: 1
            }]]
        );
        assert_eq!(map.expert_counts(2), [2, 1]);
    }

    #[test]
    fn a_repeated_expert_counts_once() {
        let map = HtMap::new(&facts(0), &[ids(1, &[1, 1]), ids(0, &[])]);
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
