//! LL combine: each rank posts the rows of its experts back; each home rank sums them in fp32.
//!
//! A *contribution* is one row and the set of k that it covers. Exact mode: one contribution per row of
//! the experts, summed at home by ascending k. Reduce mode: one contribution per token and expert rank,
//! summed at home by ascending rank; a rank with several rows of a token posts
//! `round(sum over k ascending of fma(w[k], row[k], .))`. At home a contribution that covers one k enters
//! as `fma(w[k], row, sum)`, one that covers several, being weighted already, as `sum + row`.
#![allow(unsafe_code)]

use crate::backend::host::device::{bytes, bytes_mut};
use crate::backend::host::exchange::Received;
use crate::backend::host::ll::{Epochs, HostLl, Placed};
use crate::backend::host::message::{Message, Reader};
use crate::backend::host::numeric;
use crate::backend::host::rows::{row, same_row_bytes};
use crate::error::{Error, Result};
use crate::model::group::LlCombineMode;
use crate::model::ops::LlCombine;

/// A row that comes home.
#[derive(Clone, Copy)]
struct Contribution<'a> {
    /// Place in the order of summation.
    order: usize,
    /// Bit k is set for each covered k.
    covers: usize,
    row: &'a [u8],
}

impl HostLl {
    pub(super) fn send_results(&self, op: &LlCombine, epochs: Epochs) -> Result<()> {
        let weights = self.exchange_weights(op, epochs.weights)?;
        let facts = self.facts();
        let row_bytes = op.row.bytes();
        let capacity = facts.max_recv_rows().unwrap_or(0);
        // SAFETY: `request` has checked the tensor `[L, R*M, H]`; the caller keeps it until the
        // operation has run.
        let rows = unsafe { bytes(op.expert_rows, facts.local_experts() * capacity * row_bytes) };
        // An entry that found no slot counts as a row of zeros.
        let zeros = vec![0; row_bytes];
        let row_of = |placed: &Placed| {
            placed
                .row
                .map_or(Ok(&zeros[..]), |index| row(rows, index, row_bytes))
        };
        let placed = self.placed.lock();
        let mut message = Message::default();
        message.number(row_bytes);
        for (home, placed) in placed.iter().enumerate() {
            let groups: Vec<&[Placed]> = match facts.ll_combine {
                LlCombineMode::Exact => placed.chunks(1).collect(),
                LlCombineMode::Reduce => placed.chunk_by(|a, b| a.token == b.token).collect(),
            };
            message.number(groups.len());
            for group in groups {
                let Some(first) = group.first() else { continue };
                message.number(first.token);
                message.number(
                    group
                        .iter()
                        .fold(0, |covers, placed| covers | 1 << placed.k),
                );
                if group.len() == 1 {
                    message.bytes(row_of(first)?);
                } else {
                    let weights = weights.get(home).map(|weights| &weights[..]);
                    message.owned_bytes(reduce(op, group, row_of, weights.unwrap_or_default())?);
                }
            }
        }
        self.shared.exchange.post(epochs.rows, &message)
    }

    /// Posts this rank's weights and returns those of all ranks, each `[top_k][tokens, top_k]`; nothing
    /// without an epoch.
    fn exchange_weights(&self, op: &LlCombine, epoch: Option<u64>) -> Result<Vec<Received<'_>>> {
        let Some(epoch) = epoch else {
            return Ok(Vec::new());
        };
        let mut message = Message::default();
        message.number(self.routing.top_k);
        // SAFETY: `request` has checked the weights `[T, K]` of f32; the caller keeps them until the
        // operation has run.
        message.bytes(unsafe { bytes(op.weights, self.routing.tokens * self.routing.top_k * 4) });
        self.shared.exchange.post(epoch, &message)?;
        self.receive_all(epoch)
    }

    pub(super) fn receive_results(&self, op: &LlCombine, epoch: u64) -> Result<()> {
        let (tokens, top_k) = (self.routing.tokens, self.routing.top_k);
        let messages = self.receive_all(epoch)?;
        let mut by_token: Vec<Vec<Contribution<'_>>> = vec![Vec::new(); tokens];
        for (source, message) in messages.iter().enumerate() {
            self.collect(message, source, op.row.bytes(), &mut by_token)?;
        }
        // SAFETY: `request` has checked the weights `[T, K]` of f32 and the output `[T, H]`; the caller
        // leaves them to the operation.
        let (ids, weights, out) = unsafe {
            (
                bytes(self.routing.ids, tokens * top_k * 8),
                bytes(op.weights, tokens * top_k * 4),
                bytes_mut(op.out, tokens * op.row.bytes()),
            )
        };
        let mut sums = vec![0.0_f32; op.row.hidden];
        let outputs = out.chunks_exact_mut(op.row.bytes());
        for (token, (contributions, out)) in by_token.iter_mut().zip(outputs).enumerate() {
            sums.fill(0.0);
            contributions.sort_by_key(|contribution| contribution.order);
            for contribution in contributions {
                // An id that was masked since the dispatch takes no part.
                let single = contribution.covers.is_power_of_two();
                let entry = token * top_k + contribution.covers.trailing_zeros() as usize;
                let id = numeric::i64_at(ids, entry).unwrap_or(-1);
                if single && self.facts().expert(id).is_none() {
                    continue;
                }
                let weight = match contribution.covers.is_power_of_two() {
                    true => weight_at(weights, token, contribution.covers.ilog2(), top_k)?,
                    false => 1.0,
                };
                numeric::add_scaled(&mut sums, weight, contribution.row, op.row.dtype)?;
            }
            numeric::store(out, &sums, op.row.dtype)?;
        }
        Ok(())
    }

    /// Adds what `source` posts for this rank's tokens.
    fn collect<'a>(
        &self,
        message: &'a [u8],
        source: usize,
        row_bytes: usize,
        by_token: &mut [Vec<Contribution<'a>>],
    ) -> Result<()> {
        let mut reader = Reader::new(message);
        same_row_bytes(reader.number()?, source, row_bytes)?;
        for home in 0..self.facts().ranks {
            for _ in 0..reader.number()? {
                let (token, covers) = (reader.number()?, reader.number()?);
                let row = reader.bytes(row_bytes)?;
                let order = match self.facts().ll_combine {
                    LlCombineMode::Exact => covers,
                    LlCombineMode::Reduce => source,
                };
                if home == self.facts().rank
                    && let Some(contributions) = by_token.get_mut(token)
                {
                    contributions.push(Contribution { order, covers, row });
                }
            }
        }
        Ok(())
    }

    pub(super) fn receive_all(&self, epoch: u64) -> Result<Vec<Received<'_>>> {
        (0..self.facts().ranks)
            .map(|source| self.shared.exchange.receive(epoch, source))
            .collect()
    }
}

/// The weighted sum of the rows of `group`, all of one token, rounded once.
fn reduce<'a>(
    op: &LlCombine,
    group: &[Placed],
    row_of: impl Fn(&Placed) -> Result<&'a [u8]>,
    weights: &[u8],
) -> Result<Vec<u8>> {
    let mut reader = Reader::new(weights);
    let top_k = reader.number()?;
    let weights = reader.rest();
    let mut sums = vec![0.0_f32; op.row.hidden];
    for placed in group {
        let k = u32::try_from(placed.k).unwrap_or(u32::MAX);
        let weight = weight_at(weights, placed.token, k, top_k)?;
        numeric::add_scaled(&mut sums, weight, row_of(placed)?, op.row.dtype)?;
    }
    let mut reduced = vec![0; op.row.bytes()];
    numeric::store(&mut reduced, &sums, op.row.dtype)?;
    Ok(reduced)
}

fn weight_at(weights: &[u8], token: usize, k: u32, top_k: usize) -> Result<f32> {
    numeric::f32_at(weights, token * top_k + k as usize)
        .ok_or_else(|| Error::internal("a contribution without a weight"))
}
