//! LL dispatch: each rank posts its ids and rows; each rank takes the rows of its experts, in the
//! order source rank, token, k.
#![allow(unsafe_code)]

use crate::backend::host::device::{bytes, bytes_mut};
use crate::backend::host::ll::{HostLl, Placed};
use crate::backend::host::message::{Message, Reader};
use crate::backend::host::rows::{copy_row, row, same_on_ranks, same_rows_on_ranks, tell_rows};
use crate::error::Result;
use crate::model::group::GroupFacts;
use crate::model::ops::{LlDispatch, RowType};

impl HostLl {
    pub(super) fn send_tokens(&self, op: &LlDispatch, epoch: u64) -> Result<()> {
        let (tokens, top_k) = (self.routing.tokens, self.routing.top_k);
        // SAFETY: `request` has checked both tensors, ids `[T, K]` of int64 and rows `[T, H]`; the
        // caller keeps them until the operation has run.
        let (ids, rows) = unsafe {
            (
                bytes(self.routing.ids, tokens * top_k * 8),
                bytes(op.tokens, tokens * op.row.bytes()),
            )
        };
        let mut message = Message::default();
        message.number(tokens);
        message.number(top_k);
        tell_rows(&mut message, op.row);
        message.bytes(ids);
        message.bytes(rows);
        self.shared.exchange.post(epoch, &message)
    }

    pub(super) fn receive_tokens(&self, op: &LlDispatch, epoch: u64) -> Result<()> {
        let facts = self.facts();
        let capacity = facts.max_recv_rows().unwrap_or(0);
        let experts = facts.experts_of(facts.rank);
        // All of them, this rank's own as well, before the first write: until the send phase has run,
        // perhaps on another stream, the output belongs to what the caller has enqueued before it.
        let messages = self.shared.exchange.receive_all(epoch)?;
        // SAFETY: `request` has checked the tensor `[L, R*M, H]`; the caller leaves it to the operation.
        let out = unsafe { bytes_mut(op.out, experts.len() * capacity * op.row.bytes()) };
        let mut counts = vec![0_usize; experts.len()];
        let mut placed = Vec::with_capacity(facts.ranks);
        for (source, message) in messages.iter().enumerate() {
            let sent = SentTokens::read(message, source, self.routing.top_k, op.row)?;
            let mut from_source = Vec::new();
            for (token, k, expert) in sent.entries(facts) {
                let local = expert.checked_sub(experts.start);
                let Some((local, count)) = local.and_then(|e| Some((e, counts.get_mut(e)?))) else {
                    continue;
                };
                let row = (*count < capacity).then_some(local * capacity + *count);
                if let Some(row) = row {
                    copy_row(out, row, sent.row(token)?)?;
                    *count += 1;
                }
                from_source.push(Placed { token, k, row });
            }
            placed.push(from_source);
        }
        if let Some(counter) = op.counter {
            // SAFETY: `request` has checked the counter `[L]`; the caller leaves it to the operation.
            let counter = unsafe { bytes_mut(counter, counts.len() * 4) };
            for (index, count) in counts.iter().enumerate() {
                copy_row(
                    counter,
                    index,
                    &i32::try_from(*count).unwrap_or(i32::MAX).to_ne_bytes(),
                )?;
            }
        }
        *self.placed.lock() = placed;
        Ok(())
    }
}

/// What a source rank posts.
struct SentTokens<'a> {
    top_k: usize,
    row_bytes: usize,
    ids: &'a [u8],
    rows: &'a [u8],
}

impl<'a> SentTokens<'a> {
    /// `top_k` and `row` are this rank's.
    fn read(message: &'a [u8], source: usize, top_k: usize, row: RowType) -> Result<Self> {
        let mut reader = Reader::new(message);
        let tokens = reader.number()?;
        same_on_ranks("topk_idx.sizes[1]", top_k, source, reader.number()?)?;
        same_rows_on_ranks(&mut reader, source, row)?;
        let ids = reader.bytes(tokens * top_k * 8)?;
        Ok(Self {
            top_k,
            row_bytes: row.bytes(),
            ids,
            rows: reader.bytes(tokens * row.bytes())?,
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
