//! Top-k weights: whether and with what weight each dispatched entry of a token takes part in a combine.
//!
//! Dispatch fixed which rows exist; the ids and weights of the combine say how to use them. In between the caller may
//! have masked ids, or permuted (id, weight) pairs. So the entries of the combine are matched with the dispatched ones
//! by id: the m-th entry that names an expert matches the m-th one dispatched to it, and further ones match the last.
//! An id that was not dispatched counts as masked. A dispatched entry without a match takes no part.

use crate::backend::host::message::{Message, Reader};
use crate::backend::host::numeric;
use crate::error::{Error, Result};
use crate::model::group::GroupFacts;

/// How a dispatched entry takes part.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TopkWeight {
    /// The first k of the combine that matches the entry.
    pub k: usize,
    /// The sum of the weights of all k that match it, k ascending.
    pub weight: f32,
}

/// Ids and weights in the caller's memory when the combine runs.
#[derive(Clone, Copy)]
pub struct Wanted<'a> {
    /// int64 `[tokens, top_k]`.
    pub ids: &'a [u8],
    /// f32 `[tokens, top_k]`.
    pub weights: &'a [u8],
}

/// The weight of each dispatched entry of a home rank's tokens, by token, then k; `None` for an entry without a match.
pub struct TopkWeights {
    top_k: usize,
    by_entry: Vec<Option<TopkWeight>>,
}

impl TopkWeights {
    /// Matches the `wanted` entries with the `sent` ones.
    pub fn new(facts: &GroupFacts, top_k: usize, sent: &[i64], wanted: Wanted<'_>) -> Self {
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
    pub fn get(&self, token: usize, k: usize) -> Result<Option<TopkWeight>> {
        self.by_entry
            .get(token * self.top_k..(token + 1) * self.top_k)
            .and_then(|of_token| of_token.get(k))
            .copied()
            .ok_or_else(|| Error::internal("a contribution without a weight"))
    }

    /// Appends the parts that the expert ranks need.
    pub fn write(&self, message: &mut Message<'_>) {
        message.number(self.by_entry.len());
        let topk_weights = self.by_entry.iter();
        message.owned_bytes(topk_weights.clone().map(|matched| u8::from(matched.is_some())).collect());
        let weights = topk_weights.map(|matched| matched.map_or(0.0, |matched| matched.weight));
        message.owned_bytes(weights.flat_map(f32::to_ne_bytes).collect());
    }

    /// Reads what another rank wrote, which omits the order of that rank's sums.
    pub fn read(reader: &mut Reader<'_>, top_k: usize) -> Result<Self> {
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
