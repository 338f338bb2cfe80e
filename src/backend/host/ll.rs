//! Low-latency operations.
//!
//! Dispatch: each rank posts its ids and rows; each rank takes the rows of its experts in the order
//! source rank, token, k. Combine: each rank posts the rows of its experts back, with the (token, k)
//! they belong to; each home rank sums them in the order of k.
#![allow(unsafe_code)]

use crate::backend::host::device::{bytes, bytes_mut};
use crate::backend::host::exchange::Received;
use crate::backend::host::group::Shared;
use crate::backend::host::message::{Message, Reader};
use crate::backend::host::numeric;
use crate::backend::{LlBackend, Ticket};
use crate::error::{Error, Result};
use crate::model::group::GroupFacts;
use crate::model::ops::{LlCombine, LlDispatch, LlOp, Routing, Stream};
use parking_lot::Mutex;
use std::sync::Arc;

const DISPATCH: &str = "ncclEpDispatch (low latency)";
const COMBINE: &str = "ncclEpCombine (low latency)";

/// An LL handle.
#[derive(Clone)]
pub struct HostLl {
    shared: Arc<Shared>,
    routing: Routing,
    /// Where the last dispatch put the rows of each source rank.
    placed: Arc<Mutex<Vec<Vec<Placed>>>>,
}

/// A row that dispatch has put into this rank's output.
#[derive(Clone, Copy)]
struct Placed {
    token: usize,
    k: usize,
    /// Row of the output `[L * R * M, H]`.
    row: usize,
}

impl HostLl {
    /// A handle whose ids are `routing`, read anew by every operation.
    pub fn new(shared: Arc<Shared>, routing: Routing) -> Self {
        Self {
            shared,
            routing,
            placed: Arc::default(),
        }
    }

    fn send_now(&self, op: &LlOp, epoch: u64) -> Result<()> {
        match op {
            LlOp::Dispatch(op) => self.send_tokens(op, epoch),
            LlOp::Combine(op) => self.send_results(op, epoch),
        }
    }

    fn receive_now(&self, op: &LlOp, epoch: u64) -> Result<()> {
        match op {
            LlOp::Dispatch(op) => self.receive_tokens(op, epoch),
            LlOp::Combine(op) => self.receive_results(op, epoch),
        }
    }

    fn facts(&self) -> &GroupFacts {
        &self.shared.facts
    }

    /// This rank's ids as they are now.
    fn ids(&self) -> &[u8] {
        // SAFETY: `request` has checked the handle's ids; the caller keeps them until its operations
        // have run.
        unsafe {
            bytes(
                self.routing.ids,
                self.routing.tokens * self.routing.top_k * 8,
            )
        }
    }

    fn send_tokens(&self, op: &LlDispatch, epoch: u64) -> Result<()> {
        // SAFETY: `request` has checked the tensor; the caller keeps it until the operation has run.
        let rows = unsafe { bytes(op.tokens, self.routing.tokens * op.row.bytes()) };
        let mut message = Message::default();
        message.number(self.routing.tokens);
        message.number(self.routing.top_k);
        message.number(op.row.bytes());
        message.bytes(self.ids());
        message.bytes(rows);
        self.shared.exchange.post(epoch, &message)
    }

    fn receive_tokens(&self, op: &LlDispatch, epoch: u64) -> Result<()> {
        let facts = self.facts();
        let capacity = facts.max_recv_rows().unwrap_or(0);
        let experts = facts.experts_of(facts.rank);
        // SAFETY: `request` has checked the tensor `[L, R*M, H]`; the caller leaves it to the operation.
        let out = unsafe { bytes_mut(op.out, experts.len() * capacity * op.row.bytes()) };
        let mut counts = vec![0_usize; experts.len()];
        let mut placed = Vec::with_capacity(facts.ranks);
        for source in 0..facts.ranks {
            let message = self.shared.exchange.receive(epoch, source)?;
            let sent = SentTokens::read(&message, source, op.row.bytes())?;
            let mut from_source = Vec::new();
            for (token, k, expert) in sent.entries(facts) {
                let Some(count) = expert
                    .checked_sub(experts.start)
                    .and_then(|e| counts.get_mut(e))
                else {
                    continue;
                };
                if *count < capacity {
                    let row = (expert - experts.start) * capacity + *count;
                    copy_row(out, row, sent.row(token)?)?;
                    from_source.push(Placed { token, k, row });
                    *count += 1;
                }
            }
            placed.push(from_source);
        }
        if let Some(counter) = op.counter {
            // SAFETY: `request` has checked the counter `[L]`; the caller leaves it to the operation.
            let counter = unsafe { bytes_mut(counter, counts.len() * 4) };
            for (to, count) in counter.chunks_exact_mut(4).zip(&counts) {
                to.copy_from_slice(&i32::try_from(*count).unwrap_or(i32::MAX).to_ne_bytes());
            }
        }
        *self.placed.lock() = placed;
        Ok(())
    }

    fn send_results(&self, op: &LlCombine, epoch: u64) -> Result<()> {
        let facts = self.facts();
        let row_bytes = op.row.bytes();
        let capacity = facts.max_recv_rows().unwrap_or(0);
        // SAFETY: `request` has checked the tensor `[L, R*M, H]`; the caller keeps it until the
        // operation has run.
        let rows = unsafe { bytes(op.expert_rows, facts.local_experts() * capacity * row_bytes) };
        let placed = self.placed.lock();
        let mut message = Message::default();
        message.number(row_bytes);
        for from_home in placed.iter() {
            message.number(from_home.len());
        }
        for placed in placed.iter().flatten() {
            message.number(placed.token);
            message.number(placed.k);
            message.bytes(row(rows, placed.row, row_bytes)?);
        }
        self.shared.exchange.post(epoch, &message)
    }

    fn receive_results(&self, op: &LlCombine, epoch: u64) -> Result<()> {
        let top_k = self.routing.top_k;
        let row_bytes = op.row.bytes();
        let messages: Vec<Received<'_>> = (0..self.facts().ranks)
            .map(|source| self.shared.exchange.receive(epoch, source))
            .collect::<Result<_>>()?;
        let mut results: Vec<Option<&[u8]>> = vec![None; self.routing.tokens * top_k];
        for (source, message) in messages.iter().enumerate() {
            collect_results(self.facts(), message, source, row_bytes, |token, k, row| {
                if let Some(result) = results.get_mut(token * top_k + k) {
                    *result = Some(row);
                }
            })?;
        }
        // SAFETY: `request` has checked both tensors; the caller leaves them to the operation.
        let (weights, out) = unsafe {
            (
                bytes(op.weights, self.routing.tokens * top_k * 4),
                bytes_mut(op.out, self.routing.tokens * row_bytes),
            )
        };
        let ids = self.ids();
        let mut sums = vec![0.0_f32; op.row.hidden];
        for (token, out) in out.chunks_exact_mut(row_bytes).enumerate() {
            sums.fill(0.0);
            for entry in token * top_k..(token + 1) * top_k {
                // An id that was masked since the dispatch takes no part.
                let id = numeric::i64_at(ids, entry).unwrap_or(-1);
                if let (Some(_), Some(Some(row)), Some(weight)) = (
                    self.facts().expert(id),
                    results.get(entry),
                    numeric::f32_at(weights, entry),
                ) {
                    numeric::add_scaled(&mut sums, weight, row, op.row.dtype)?;
                }
            }
            numeric::store(out, &sums, op.row.dtype)?;
        }
        Ok(())
    }
}

impl LlBackend for HostLl {
    fn run(&self, op: &LlOp, stream: Stream) -> Result<()> {
        let (handle, op, epoch) = (self.clone(), *op, self.shared.exchange.begin());
        self.shared.enqueue(name(&op), stream, move |_| {
            handle.send_now(&op, epoch)?;
            handle.receive_now(&op, epoch)
        })
    }

    fn send(&self, op: &LlOp, stream: Stream) -> Result<Ticket> {
        let (handle, op, epoch) = (self.clone(), *op, self.shared.exchange.begin());
        self.shared
            .enqueue(name(&op), stream, move |_| handle.send_now(&op, epoch))?;
        Ok(Ticket(epoch))
    }

    fn receive(&self, op: &LlOp, ticket: Ticket, stream: Stream) -> Result<()> {
        // Waiting for this rank's own message orders the phases, whatever their streams.
        let (handle, op) = (self.clone(), *op);
        self.shared.enqueue(name(&op), stream, move |_| {
            handle.receive_now(&op, ticket.0)
        })
    }

    fn abandon(&self, ticket: Ticket) {
        self.shared.exchange.abandon(ticket.0);
    }
}

fn name(op: &LlOp) -> &'static str {
    match op {
        LlOp::Dispatch(_) => DISPATCH,
        LlOp::Combine(_) => COMBINE,
    }
}

/// What a source rank posts in a dispatch.
struct SentTokens<'a> {
    top_k: usize,
    row_bytes: usize,
    ids: &'a [u8],
    rows: &'a [u8],
}

impl<'a> SentTokens<'a> {
    fn read(message: &'a [u8], source: usize, row_bytes: usize) -> Result<Self> {
        let mut reader = Reader::new(message);
        let (tokens, top_k) = (reader.number()?, reader.number()?);
        same_row_bytes(reader.number()?, source, row_bytes)?;
        let ids = reader.bytes(tokens * top_k * 8)?;
        Ok(Self {
            top_k,
            row_bytes,
            ids,
            rows: reader.bytes(tokens * row_bytes)?,
        })
    }

    /// (token, k, expert) of all entries that name an expert.
    fn entries(&self, facts: &GroupFacts) -> impl Iterator<Item = (usize, usize, usize)> {
        self.ids
            .as_chunks::<8>()
            .0
            .iter()
            .enumerate()
            .filter_map(|(entry, id)| {
                let expert = facts.expert(i64::from_ne_bytes(*id))?;
                Some((entry / self.top_k, entry % self.top_k, expert))
            })
    }

    fn row(&self, token: usize) -> Result<&'a [u8]> {
        row(self.rows, token, self.row_bytes)
    }
}

/// Calls `each` with (token, k, row) of everything that `source` posts for this rank in a combine.
fn collect_results<'a>(
    facts: &GroupFacts,
    message: &'a [u8],
    source: usize,
    row_bytes: usize,
    mut each: impl FnMut(usize, usize, &'a [u8]),
) -> Result<()> {
    let mut reader = Reader::new(message);
    same_row_bytes(reader.number()?, source, row_bytes)?;
    let counts: Vec<usize> = (0..facts.ranks)
        .map(|_| reader.number())
        .collect::<Result<_>>()?;
    for (home, count) in counts.into_iter().enumerate() {
        for _ in 0..count {
            let (token, k) = (reader.number()?, reader.number()?);
            let row = reader.bytes(row_bytes)?;
            if home == facts.rank {
                each(token, k, row);
            }
        }
    }
    Ok(())
}

/// Refuses rows of another width than this rank's.
pub fn same_row_bytes(theirs: usize, source: usize, mine: usize) -> Result<()> {
    if theirs == mine {
        return Ok(());
    }
    let rule = format!("must be the same on every rank, but rank {source} differs");
    Err(Error::usage("row bytes", rule).got(mine, theirs))
}

/// Row `index` of `rows`.
pub fn row(rows: &[u8], index: usize, row_bytes: usize) -> Result<&[u8]> {
    rows.get(index * row_bytes..(index + 1) * row_bytes)
        .ok_or_else(|| Error::internal("a row outside its tensor"))
}

/// Copies `from` to row `index` of `rows`.
pub fn copy_row(rows: &mut [u8], index: usize, from: &[u8]) -> Result<()> {
    let bytes = from.len();
    rows.get_mut(index * bytes..(index + 1) * bytes)
        .ok_or_else(|| Error::internal("a row outside its tensor"))?
        .copy_from_slice(from);
    Ok(())
}
