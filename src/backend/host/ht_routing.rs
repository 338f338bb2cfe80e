//! Who sends which token where: computed once per HT handle from the ids of all ranks.
#![forbid(unsafe_code)]

use crate::backend::bootstrap::Bootstrap;
use crate::backend::host::ht_shape;
use crate::backend::host::numeric;
use crate::error::{Code, Error, Result};
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
    /// The token.
    pub token: usize,
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
    /// Where this rank's tokens go, by token, then rank. Tokens that go nowhere cost nothing: without ids
    /// a rank may have any number of them.
    pub departures: Vec<Departure>,
}

/// The ids of one rank.
pub struct RankIds {
    /// int64 `[tokens, top_k]`.
    pub ids: Vec<u8>,
    /// Tokens; not derivable from `ids` when `top_k` is 0.
    pub tokens: usize,
    /// Ids per token.
    pub top_k: usize,
}

impl RankIds {
    /// Ids of `tokens` tokens, all 0 yet. The caller says how many, so there may be no memory for them.
    pub fn zeroed(tokens: usize, top_k: usize) -> Result<Self> {
        let mut ids = Vec::new();
        extend(&mut ids, tokens * top_k * ID_BYTES)?;
        Ok(Self { ids, tokens, top_k })
    }

    /// The ids of each token, if tokens have any.
    fn by_token(&self) -> impl Iterator<Item = &[u8]> {
        self.ids.chunks(self.top_k.max(1) * ID_BYTES)
    }
}

/// Fills `bytes` up to `length` with zeros.
fn extend(bytes: &mut Vec<u8>, length: usize) -> Result<()> {
    let more = length.saturating_sub(bytes.len());
    if bytes.try_reserve_exact(more).is_err() {
        let text = format!("no host memory for {length} bytes of ids");
        return Err(Error::new(Code::SystemError, text));
    }
    bytes.resize(length, 0);
    Ok(())
}

impl HtMap {
    /// Computes the map of `facts.rank` from the ids of all ranks.
    pub fn new(facts: &GroupFacts, all: &[RankIds]) -> Self {
        let mut received = vec![0_usize; facts.ranks];
        let mut arrivals = Vec::new();
        let mut departures = Vec::new();
        for (source, of_source) in all.iter().enumerate() {
            for (token, ids) in of_source.by_token().enumerate() {
                for (rank, experts) in by_rank(facts, ids) {
                    let row = received.get(rank).copied().unwrap_or(0);
                    if source == facts.rank {
                        departures.push(Departure {
                            token,
                            rank,
                            row,
                            experts: experts.len(),
                        });
                    }
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

/// The ranks that host the experts named in `ids`, int64, ascending, each with its local ids.
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

/// Most rows that a rank may receive, with `NCCL_EP_AUTO`, too.
const MOST_ROWS: usize = i32::MAX as usize;
const ID_BYTES: usize = size_of::<i64>();

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
    let RankIds { mut ids, top_k, .. } = mine?;
    let longest = tokens.iter().copied().max().unwrap_or(0);
    extend(&mut ids, longest * top_k * ID_BYTES)?;
    let gathered = bootstrap.all_gather(&ids, stream)?;
    let of_rank = |(mut ids, tokens): (Vec<u8>, usize)| {
        ids.truncate(tokens * top_k * ID_BYTES);
        RankIds { ids, tokens, top_k }
    };
    Ok(gathered.into_iter().zip(tokens).map(of_rank).collect())
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
            ids: ids.iter().flat_map(|id| id.to_ne_bytes()).collect(),
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
    fn tokens_without_ids_cost_nothing() {
        let many = i32::MAX as usize;
        let all = [
            RankIds::zeroed(many, 0).unwrap(),
            RankIds::zeroed(0, 0).unwrap(),
        ];
        let map = HtMap::new(&facts(0), &all);
        assert!(map.arrivals.is_empty() && map.departures.is_empty());
    }

    #[test]
    fn ids_without_memory_are_an_error() {
        let error = RankIds::zeroed(1 << 56, 2).err().unwrap();
        assert_eq!(error.code(), Code::SystemError);
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
