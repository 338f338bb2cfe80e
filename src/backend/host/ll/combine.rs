//! LL combine: each rank posts the rows of its experts back; each home rank sums them in fp32.
//!
//! A *contribution* is one row and the set of k that it covers. Exact mode: one contribution per row of
//! the experts, summed at home by ascending k. Reduce mode: one contribution per token and expert rank,
//! summed at home by ascending rank; a rank with several rows of a token posts
//! `round(sum over k ascending of fma(w[k], row[k], .))`. At home a contribution that covers one k enters
//! as `fma(w[k], row, sum)`, one that covers several, being weighted already, as `sum + row`.
//!
//! What a contribution covers was settled by the dispatch. An id that was masked since then takes no
//! part: its row is left out of either sum.
#![allow(unsafe_code)]

use crate::backend::host::device::{bytes, bytes_mut};
use crate::backend::host::exchange::Exchange;
use crate::backend::host::ll::{HostLl, Placed};
use crate::backend::host::message::{Message, Reader};
use crate::backend::host::numeric;
use crate::backend::host::rows::{row, same_rows_on_ranks, tell_rows};
use crate::error::{Error, Result};
use crate::model::group::{GroupFacts, LlCombineMode};
use crate::model::ops::{LlCombine, RowType};

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
    pub(super) fn send_results(&self, op: &LlCombine, epoch: u64) -> Result<()> {
        let facts = self.facts();
        let gates = match facts.ll_combine {
            LlCombineMode::Exact => Vec::new(),
            LlCombineMode::Reduce => self.exchange_gates(op, epoch)?,
        };
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
        tell_rows(&mut message, op.row);
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
                    let gates = gates.get(home).map_or(&[][..], Vec::as_slice);
                    message.owned_bytes(self.reduce(op, group, row_of, gates)?);
                }
            }
        }
        self.shared.exchange.post(epoch, &message)
    }

    /// Posts this rank's gates and returns those of all ranks. They are copied, so that no bank is held
    /// while this rank waits for a free one for its rows.
    fn exchange_gates(&self, op: &LlCombine, epoch: u64) -> Result<Vec<Vec<u8>>> {
        let gates = self.gates(op);
        let mut message = Message::default();
        message.number(gates.top_k);
        message.number(gates.ids.len());
        message.bytes(gates.ids);
        message.bytes(gates.weights);
        let epoch = Exchange::before(epoch);
        self.shared.exchange.post(epoch, &message)?;
        let received = self.shared.exchange.receive_all(epoch)?;
        Ok(received.iter().map(|message| message.to_vec()).collect())
    }

    /// The gates of this rank's own tokens.
    fn gates(&self, op: &LlCombine) -> Gates<'_> {
        let top_k = self.routing.top_k;
        let entries = self.routing.tokens * top_k;
        // SAFETY: `request` has checked both tensors, ids `[T, K]` of int64 and weights `[T, K]` of f32;
        // the caller keeps them until the operation has run.
        let (ids, weights) = unsafe {
            (
                bytes(self.routing.ids, entries * 8),
                bytes(op.weights, entries * 4),
            )
        };
        Gates {
            top_k,
            ids,
            weights,
        }
    }

    /// The weighted sum of the rows of `group`, all of one token, rounded once.
    fn reduce<'a>(
        &self,
        op: &LlCombine,
        group: &[Placed],
        row_of: impl Fn(&Placed) -> Result<&'a [u8]>,
        gates: &[u8],
    ) -> Result<Vec<u8>> {
        let gates = Gates::read(gates)?;
        let mut sums = vec![0.0_f32; op.row.hidden];
        for placed in group {
            if let Some(weight) = gates.weight(self.facts(), placed.token, placed.k)? {
                numeric::add_scaled(&mut sums, weight, row_of(placed)?, op.row.dtype)?;
            }
        }
        let mut reduced = vec![0; op.row.bytes()];
        numeric::store(&mut reduced, &sums, op.row.dtype)?;
        Ok(reduced)
    }

    pub(super) fn receive_results(&self, op: &LlCombine, epoch: u64) -> Result<()> {
        let tokens = self.routing.tokens;
        let messages = self.shared.exchange.receive_all(epoch)?;
        let mut by_token: Vec<Vec<Contribution<'_>>> = vec![Vec::new(); tokens];
        for (source, message) in messages.iter().enumerate() {
            self.collect(message, source, op.row, &mut by_token)?;
        }
        let gates = self.gates(op);
        // SAFETY: `request` has checked the output `[T, H]`; the caller leaves it to the operation.
        let out = unsafe { bytes_mut(op.out, tokens * op.row.bytes()) };
        let mut sums = vec![0.0_f32; op.row.hidden];
        let outputs = out.chunks_exact_mut(op.row.bytes());
        for (token, (contributions, out)) in by_token.iter_mut().zip(outputs).enumerate() {
            sums.fill(0.0);
            contributions.sort_by_key(|contribution| contribution.order);
            for contribution in contributions {
                let (covers, row) = (contribution.covers, contribution.row);
                if !covers.is_power_of_two() {
                    numeric::add(&mut sums, row, op.row.dtype)?;
                    continue;
                }
                let k = covers.trailing_zeros() as usize;
                if let Some(weight) = gates.weight(self.facts(), token, k)? {
                    numeric::add_scaled(&mut sums, weight, row, op.row.dtype)?;
                }
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
        type_of_rows: RowType,
        by_token: &mut [Vec<Contribution<'a>>],
    ) -> Result<()> {
        let mut reader = Reader::new(message);
        same_rows_on_ranks(&mut reader, source, type_of_rows)?;
        for home in 0..self.facts().ranks {
            for _ in 0..reader.number()? {
                let (token, covers) = (reader.number()?, reader.number()?);
                let row = reader.bytes(type_of_rows.bytes())?;
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
}

/// With what weight each entry of a home rank's tokens takes part, when the combine runs.
struct Gates<'a> {
    top_k: usize,
    /// int64 `[tokens, top_k]`.
    ids: &'a [u8],
    /// f32 `[tokens, top_k]`.
    weights: &'a [u8],
}

impl<'a> Gates<'a> {
    fn read(message: &'a [u8]) -> Result<Self> {
        let mut reader = Reader::new(message);
        let (top_k, id_bytes) = (reader.number()?, reader.number()?);
        Ok(Self {
            top_k,
            ids: reader.bytes(id_bytes)?,
            weights: reader.rest(),
        })
    }

    /// The weight of an entry; nothing if its id names no expert.
    fn weight(&self, facts: &GroupFacts, token: usize, k: usize) -> Result<Option<f32>> {
        let entry = token * self.top_k + k;
        numeric::i64_at(self.ids, entry)
            .zip(numeric::f32_at(self.weights, entry))
            .map(|(id, weight)| facts.expert(id).map(|_| weight))
            .ok_or_else(|| Error::internal("a contribution without a weight"))
    }
}
