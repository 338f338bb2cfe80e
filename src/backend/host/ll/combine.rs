//! LL combine: each rank posts the rows of its experts back; each home rank sums them in fp32.
//!
//! A *contribution* is one row and the set of k that it covers. Exact mode: one contribution per row of the experts,
//! summed at home by ascending k. Reduce mode: one contribution per token and expert rank, summed at home by ascending
//! rank; a rank with several rows of a token posts `round(sum over k ascending of fma(w[k], row[k], .))`. The home adds
//! a contribution that covers one k as `fma(w[k], row, sum)`, and one that covers several, which is already weighted,
//! as `sum + row`.
//!
//! Over several nodes there is reduce mode only. The contributions of each node other than the
//! home's are summed and rounded there (`node_sums`).
//!
//! Rank-major rows are already sums of a rank, so a rank posts one contribution per token, which is added unchanged, in
//! order of the first k that the dispatch found for the rank, in either mode. Ids and weights of the combine are
//! ignored.
//!
//! The dispatch fixed what a contribution covers, and k is numbered as it was there. The ids of the combine decide
//! whether it takes part and with which weight `w[k]` (`TopkWeights`). Exact mode sums in the order of the combine's
//! ids.
#![allow(unsafe_code)]

use crate::backend::host::device::{add_waits, bytes, bytes_mut};
use crate::backend::host::fingerprint::Fingerprint;
use crate::backend::host::ll::HostLl;
use crate::backend::host::ll::last::{LastDispatch, Placed};
use crate::backend::host::mailboxes::Mailboxes;
use crate::backend::host::message::{Message, Reader};
use crate::backend::host::node_sums::NodeSums;
use crate::backend::host::numeric::{self, row};
use crate::error::{Error, Result};
use crate::model::group::{GroupFacts, LlCombineMode};
use crate::model::ids::GroupRank;
use crate::model::ops::LlCombine;

/// A row that returns to its home rank.
#[derive(Clone, Copy)]
struct Contribution<'a> {
    /// Position in the order of summation on its node.
    order: usize,
    /// The rank that sent it.
    source: usize,
    /// The factor of the row; `None` if the row is already a weighted sum.
    weight: Option<f32>,
    row: &'a [u8],
}

impl HostLl {
    pub(super) fn send_results(&self, op: &LlCombine, fingerprint: &Fingerprint, epoch: u64) -> Result<()> {
        let sums = op.sums == LlCombineMode::Reduce && op.weights.is_some();
        let topk_weights = match sums {
            false => Vec::new(),
            true => self.exchange_weights(op, fingerprint, epoch)?,
        };
        let row_bytes = op.row.bytes();
        let count = self.rows(op.layout)?;
        // SAFETY: `rule` has checked the tensor `[L, R*M, H]` or `[R, M, H]`; the caller keeps it until the
        // operation has run.
        let rows = unsafe { bytes(op.expert_rows, count * row_bytes) };
        let row_of = |placed: &Placed| row(rows, placed.row, row_bytes);
        let last = self.last(op.layout)?;
        let mut message = fingerprint.message();
        for (home, placed) in last.placed.iter().enumerate() {
            let groups: Vec<&[Placed]> = match sums {
                false => placed.chunks(1).collect(),
                true => placed.chunk_by(|a, b| a.token == b.token).collect(),
            };
            message.number(groups.len());
            for group in groups {
                let Some(first) = group.first() else { continue };
                message.number(first.token);
                message.number(group.iter().fold(0, |covers, placed| covers | 1 << placed.k));
                if group.len() == 1 {
                    message.bytes(row_of(first)?);
                } else {
                    let topk_weights =
                        topk_weights.get(home).ok_or_else(|| Error::internal("a home rank without weights"))?;
                    message.bytes(reduce(op, group, row_of, topk_weights)?);
                }
            }
        }
        self.shared.mailboxes.post(epoch, &message)
    }

    /// Posts this rank's weights and returns copies of all ranks' weights. Copying releases the banks, which this rank
    /// may need while it waits for a free bank for its rows.
    fn exchange_weights(&self, op: &LlCombine, fingerprint: &Fingerprint, epoch: u64) -> Result<Vec<TopkWeights>> {
        let mut message = fingerprint.message();
        if let Some(topk_weights) = self.topk_weights(op)? {
            topk_weights.write(&mut message);
        }
        let epoch = Mailboxes::before(epoch);
        self.shared.mailboxes.post(epoch, &message)?;
        let received = self.shared.mailboxes.receive_all(epoch)?;
        add_waits(&received, op.waits);
        received
            .iter()
            .enumerate()
            .map(|(home, message)| TopkWeights::read(&mut fingerprint.read(message, home)?, fingerprint.top_k))
            .collect()
    }

    /// The weights of this rank's own tokens; none rank-major.
    fn topk_weights(&self, op: &LlCombine) -> Result<Option<TopkWeights>> {
        let Some(weights) = op.weights else { return Ok(None) };
        let top_k = self.routing.top_k;
        let entries = self.routing.tokens * top_k;
        let width = self.routing.width;
        // SAFETY: `rule` has checked both tensors, ids `[T, K]` as wide and weights `[T, K]` of f32;
        // the caller keeps them until the operation has run.
        let (ids, weights) = unsafe { (bytes(self.routing.ids, entries * width.bytes()), bytes(weights, entries * 4)) };
        let wanted = Wanted { ids: &width.widened(ids), weights };
        let sent = &self.last(op.layout)?.sent;
        Ok(Some(TopkWeights::new(self.facts(), top_k, sent, wanted)))
    }

    pub(super) fn receive_results(&self, op: &LlCombine, fingerprint: &Fingerprint, epoch: u64) -> Result<()> {
        let tokens = self.routing.tokens;
        let messages = self.shared.mailboxes.receive_all(epoch)?;
        add_waits(&messages, op.waits);
        let (topk_weights, last) = (self.topk_weights(op)?, self.last(op.layout)?);
        let mut by_token: Vec<Vec<Contribution<'_>>> = vec![Vec::new(); tokens];
        for (source, message) in messages.iter().enumerate() {
            let reader = fingerprint.read(message, source)?;
            let weigh = |token, covers| match &topk_weights {
                Some(topk_weights) => weigh(op, topk_weights, (token, covers), source),
                None => Ok(self.first_of(&last, token, source).map(|k| (k, None))),
            };
            self.collect(reader, op.row.bytes(), weigh, (source, &mut by_token))?;
        }
        // SAFETY: `rule` has checked the output `[T, H]`; the caller leaves it to the operation.
        let out = unsafe { bytes_mut(op.out, tokens * op.row.bytes()) };
        let mut sums = NodeSums::new(&self.shared.topology, self.facts().rank, op.row);
        let add = |sums: &mut [f32], part: &Contribution<'_>| match part.weight {
            Some(weight) => numeric::add_scaled(sums, weight, part.row, op.row.dtype),
            None => numeric::add(sums, part.row, op.row.dtype),
        };
        let outputs = out.chunks_exact_mut(op.row.bytes());
        for (contributions, out) in by_token.iter_mut().zip(outputs) {
            contributions.sort_by_key(|contribution| contribution.order);
            sums.store(contributions, |part| GroupRank::new(part.source), add, out)?;
        }
        Ok(())
    }

    /// Adds the contributions of `source` for this rank's tokens.
    fn collect<'a>(
        &self,
        mut reader: Reader<'a>,
        row_bytes: usize,
        weigh: impl Fn(usize, usize) -> Result<Option<(usize, Option<f32>)>>,
        (source, by_token): (usize, &mut [Vec<Contribution<'a>>]),
    ) -> Result<()> {
        for home in 0..self.facts().ranks {
            for _ in 0..reader.number()? {
                let (token, covers) = (reader.number()?, reader.number()?);
                let row = reader.bytes(row_bytes)?;
                if home != self.facts().rank.index() {
                    continue;
                }
                check_covers(covers, self.routing.top_k)?;
                let contributions =
                    by_token.get_mut(token).ok_or_else(|| Error::internal("a contribution without a token"))?;
                let Some((order, weight)) = weigh(token, covers)? else { continue };
                contributions.push(Contribution { order, source, weight, row });
            }
        }
        Ok(())
    }

    /// The first k of a token with which the dispatch found an expert of `rank`.
    fn first_of(&self, last: &LastDispatch, token: usize, rank: usize) -> Option<usize> {
        let top_k = self.routing.top_k;
        let ids = last.sent.get(token * top_k..(token + 1) * top_k)?;
        let owner = |id: &i64| self.facts().expert(*id).map(|expert| self.facts().owner(expert));
        ids.iter().position(|id| owner(id) == Some(rank))
    }
}

/// The position in its sum of a contribution of `source` that covers these k of a token, and the factor of its row;
/// none if it takes no part.
fn weigh(
    op: &LlCombine,
    topk_weights: &TopkWeights,
    (token, covers): (usize, usize),
    source: usize,
) -> Result<Option<(usize, Option<f32>)>> {
    if !covers.is_power_of_two() {
        return Ok(Some((source, None)));
    }
    let matched = topk_weights.get(token, covers.trailing_zeros() as usize)?;
    Ok(matched.map(|matched| {
        let order = match op.sums {
            LlCombineMode::Exact => matched.k,
            LlCombineMode::Reduce => source,
        };
        (order, Some(matched.weight))
    }))
}

/// Checks that a contribution covers at least one entry, and only entries of its token.
fn check_covers(covers: usize, top_k: usize) -> Result<()> {
    if covers != 0 && covers >> top_k == 0 {
        return Ok(());
    }
    Err(Error::internal("a contribution for no entry of its token"))
}

/// The weighted sum of the rows of `group`, all of one token, rounded once.
fn reduce<'a>(
    op: &LlCombine,
    group: &[Placed],
    row_of: impl Fn(&Placed) -> Result<&'a [u8]>,
    topk_weights: &TopkWeights,
) -> Result<Vec<u8>> {
    let mut sums = vec![0.0_f32; op.row.hidden];
    for placed in group {
        if let Some(matched) = topk_weights.get(placed.token, placed.k)? {
            numeric::add_scaled(&mut sums, matched.weight, row_of(placed)?, op.row.dtype)?;
        }
    }
    let mut reduced = vec![0; op.row.bytes()];
    numeric::store(&mut reduced, &sums, op.row.dtype)?;
    Ok(reduced)
}

/// How a dispatched entry takes part.
#[derive(Clone, Copy, Debug, PartialEq)]
struct TopkWeight {
    /// The first k of the combine that matches the entry.
    k: usize,
    /// The sum of the weights of all k that match it, k ascending.
    weight: f32,
}

/// Ids and weights in the caller's memory when the combine runs.
#[derive(Clone, Copy)]
struct Wanted<'a> {
    /// int64 `[tokens, top_k]`.
    ids: &'a [u8],
    /// f32 `[tokens, top_k]`.
    weights: &'a [u8],
}

/// Top-k weights: the weight of each dispatched entry of a home rank's tokens, by token, then k; `None` for an entry
/// without a match, which takes no part.
///
/// Dispatch fixed which rows exist; the ids and weights of the combine say how to use them. In between the caller may
/// have masked ids, or permuted (id, weight) pairs. So the entries of the combine are matched with the dispatched ones
/// by id: the m-th entry that names an expert matches the m-th one dispatched to it, and further ones match the last.
/// An id that was not dispatched counts as masked.
struct TopkWeights {
    top_k: usize,
    by_entry: Vec<Option<TopkWeight>>,
}

impl TopkWeights {
    /// Matches the `wanted` entries with the `sent` ones.
    fn new(facts: &GroupFacts, top_k: usize, sent: &[i64], wanted: Wanted<'_>) -> Self {
        let ids: Vec<i64> = numeric::i64s(wanted.ids).collect();
        let weights: Vec<f32> = numeric::f32s(wanted.weights).collect();
        let width = top_k.max(1);
        let tokens = sent.chunks(width).zip(ids.chunks(width));
        let by_entry = tokens
            .zip(weights.chunks(width))
            .flat_map(|((sent, ids), weights)| match_token(facts, sent, ids, weights))
            .collect();
        Self { top_k, by_entry }
    }

    /// The weight of entry `k` of `token`, by the dispatch's numbering.
    fn get(&self, token: usize, k: usize) -> Result<Option<TopkWeight>> {
        self.by_entry
            .get(token * self.top_k..(token + 1) * self.top_k)
            .and_then(|of_token| of_token.get(k))
            .copied()
            .ok_or_else(|| Error::internal("a contribution without a weight"))
    }

    /// Appends the parts that the expert ranks need.
    fn write(&self, message: &mut Message<'_>) {
        message.number(self.by_entry.len());
        let topk_weights = self.by_entry.iter();
        message.bytes(topk_weights.clone().map(|matched| u8::from(matched.is_some())).collect::<Vec<_>>());
        let weights = topk_weights.map(|matched| matched.map_or(0.0, |matched| matched.weight));
        message.bytes(weights.flat_map(f32::to_ne_bytes).collect::<Vec<_>>());
    }

    /// Reads what another rank wrote, which omits the order of that rank's sums.
    fn read(reader: &mut Reader<'_>, top_k: usize) -> Result<Self> {
        let entries = reader.number()?;
        let takes_part = reader.bytes(entries)?;
        let weights = numeric::f32s(reader.array(entries, size_of::<f32>())?);
        let matched = |(takes_part, weight): (&u8, f32)| (*takes_part != 0).then_some(TopkWeight { k: 0, weight });
        Ok(Self { top_k, by_entry: takes_part.iter().zip(weights).map(matched).collect() })
    }
}

/// The weights of the `sent` entries of one token.
fn match_token(facts: &GroupFacts, sent: &[i64], ids: &[i64], weights: &[f32]) -> Vec<Option<TopkWeight>> {
    let mut topk_weights: Vec<Option<TopkWeight>> = vec![None; sent.len()];
    for (k, (id, &weight)) in ids.iter().zip(weights).enumerate() {
        if facts.expert(*id).is_none() {
            continue;
        }
        let before = ids.iter().take(k).filter(|other| *other == id).count();
        let entries = || (0..sent.len()).filter(|&entry| sent.get(entry) == Some(id));
        let entry = entries().nth(before).or_else(|| entries().next_back());
        if let Some(matched) = entry.and_then(|entry| topk_weights.get_mut(entry)) {
            *matched = Some(match *matched {
                None => TopkWeight { k, weight },
                Some(matched) => TopkWeight { weight: matched.weight + weight, ..matched },
            });
        }
    }
    topk_weights
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_entries_of_the_token_are_covered() {
        for covers in [1, 0b1000, 0b1111] {
            assert!(check_covers(covers, 4).is_ok(), "{covers}");
        }
        for covers in [0, 0b1_0000, 0b1_0001, usize::MAX] {
            assert!(check_covers(covers, 4).is_err(), "{covers}");
        }
        assert!(check_covers(u32::MAX as usize, 32).is_ok());
    }
}
