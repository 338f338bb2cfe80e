//! LL dispatch: each rank posts its ids and rows; each rank takes the rows of its experts, in the
//! order source rank, token, k. Rank-major it posts weights, too, and takes a token's row once, however many of its
//! experts that names, with its ids and weights.
#![allow(unsafe_code)]

use crate::backend::host::device::{add_numbers, add_waits, bytes, bytes_mut, write_counts};
use crate::backend::host::fingerprint::Fingerprint;
use crate::backend::host::ll::HostLl;
use crate::backend::host::ll::last::{LastDispatch, Placed};
use crate::backend::host::numeric::{self, copy_row, row};
use crate::backend::host::scaled::{self, Incoming, Outgoing};
use crate::error::refusal::{AmongRanks, Role, Subject};
use crate::error::{Error, Result};
use crate::model::group::GroupFacts;
use crate::model::ids::GroupRank;
use crate::model::layout::{Layout, RowOf};
use crate::model::ops::{IntWidth, LlDispatch, RankMajorTopk};

impl HostLl {
    pub(super) fn send_tokens(&self, op: &LlDispatch, fingerprint: &Fingerprint, epoch: u64) -> Result<()> {
        let (tokens, top_k) = (self.routing.tokens, self.routing.top_k);
        let mut message = fingerprint.message();
        message.number(tokens);
        let rows = Outgoing { data: op.tokens, tokens, row: op.row, scaled: op.scaled.as_ref() };
        // SAFETY: `rule` has checked the tensors, ids `[T, K]` as wide, weights and rows with their scales;
        // the caller keeps them until the operation has run.
        unsafe {
            let width = self.routing.width;
            let ids = bytes(self.routing.ids, tokens * top_k * width.bytes());
            message.bytes(width.widened(ids));
            if let Some(topk) = &op.topk {
                message.bytes(bytes(topk.weights, tokens * top_k * size_of::<f32>()));
            }
            rows.append(&mut message)?;
        }
        self.shared.mailboxes.post(epoch, &message)
    }

    pub(super) fn receive_tokens(&self, op: &LlDispatch, fingerprint: &Fingerprint, epoch: u64) -> Result<()> {
        let facts = self.facts();
        let rows = self.rows(op.layout)?;
        // All messages, including this rank's own, must have arrived before the first write. Until the send phase has
        // run, perhaps on another stream, earlier work of the caller may still use the output.
        let messages = self.shared.mailboxes.receive_all(epoch)?;
        add_waits(&messages, op.waits);
        let mut nowhere = Vec::new();
        let out = if op.out.is_null() {
            nowhere.resize(rows * op.row.bytes(), 0);
            &mut nowhere[..]
        } else {
            // SAFETY: `rule` has checked the tensor `[L, R*M, H]` or `[R, M, H]`; callers leave it to the operation.
            unsafe { bytes_mut(op.out, rows * op.row.bytes()) }
        };
        let most = facts.max_tokens.unwrap_or(usize::MAX);
        let sent: Vec<SentTokens<'_>> = messages
            .iter()
            .enumerate()
            .map(|(source, message)| SentTokens::read((message, source), fingerprint, most))
            .collect::<Result<_>>()?;
        check_room(facts, op.layout, &sent)?;
        let landed = match &op.topk {
            Some(topk) => self.place_by_rank((op, topk), out, &sent)?,
            None => self.place_by_expert(op, out, &sent)?,
        };
        write_counts(op.counter, &landed.counts)?;
        if let Some((_, totals)) = op.counted() {
            add_numbers(landed.counts.iter().copied(), totals);
        }
        let own = sent.get(facts.rank.index());
        let last = LastDispatch {
            sent: own.map_or(Vec::new(), |own| numeric::i64s(own.ids).collect()),
            tokens: sent.iter().map(|sent| sent.tokens).collect(),
            placed: landed.placed,
        };
        self.keep(last, op.layout)
    }

    fn place_by_expert(&self, op: &LlDispatch, out: &mut [u8], sent: &[SentTokens<'_>]) -> Result<Landed> {
        let facts = self.facts();
        let experts = facts.experts_of(facts.rank);
        let mut counts = vec![0_u32; experts.len()];
        let mut placed = Vec::new();
        for sent in sent {
            let mut from_source = Vec::new();
            for (token, k, expert) in sent.entries(facts) {
                let local = expert.checked_sub(experts.start);
                let Some((local, count)) = local.and_then(|e| Some((e, counts.get_mut(e)?))) else { continue };
                let to = RowOf { zone: local, ordinal: *count as usize };
                let row = op.layout.number(to);
                copy_row(out, row, sent.rows.payload(token)?)?;
                if let Some(scaled) = &op.scaled {
                    // SAFETY: `rule` has checked the tensor `[L, R*M, S]`; the caller leaves it to
                    // the operation.
                    unsafe { scaled::store(scaled, to, sent.rows.scales(token)?) }?;
                }
                *count += 1;
                from_source.push(Placed { token, k, row });
            }
            placed.push(from_source);
        }
        Ok(Landed { placed, counts })
    }
}

/// What a dispatch has delivered.
#[derive(Default)]
struct Landed {
    /// The rows from each source rank.
    placed: Vec<Vec<Placed>>,
    /// Rows of each local expert or, rank-major, from each source.
    counts: Vec<u32>,
}

/// Refuses ids that give an expert of this rank more rows than it has slots, before any row is written. Tokens that
/// name an expert once always fit, so some rank repeats ids.
fn check_room(facts: &GroupFacts, layout: Layout, sent: &[SentTokens<'_>]) -> Result<()> {
    let experts = facts.experts_of(facts.rank);
    let Some(capacity) = layout.slots() else { return Ok(()) };
    let most = capacity / facts.ranks;
    // By source, then expert.
    let mut counts = vec![vec![0_usize; experts.len()]; sent.len()];
    for (counts, sent) in counts.iter_mut().zip(sent) {
        for (_, _, expert) in sent.entries(facts) {
            let local = expert.checked_sub(experts.start);
            if let Some(count) = local.and_then(|local| counts.get_mut(local)) {
                *count += 1;
            }
        }
    }
    for (local, expert) in experts.enumerate() {
        let of_expert = |counts: &Vec<usize>| counts.get(local).copied().unwrap_or(0);
        if counts.iter().map(of_expert).sum::<usize>() <= capacity {
            continue;
        }
        let sources = counts.iter().map(of_expert).enumerate();
        if let Some((rank, rows)) = sources.into_iter().find(|&(_, rows)| rows > most) {
            let rule = AmongRanks::RoomForRepeated { rank: GroupRank::new(rank), expert };
            return Err(Error::usage(Subject::Tensor(Role::Ids), rule).got(rows, format_args!("at most {most}")));
        }
    }
    Ok(())
}

/// The message of a source rank.
struct SentTokens<'a> {
    tokens: u32,
    top_k: usize,
    ids: &'a [u8],
    /// f32 `[tokens, top_k]`, if rank-major.
    weights: &'a [u8],
    rows: Incoming<'a>,
}

impl<'a> SentTokens<'a> {
    /// Reads what `source` has sent; at most `most` tokens.
    fn read((message, source): (&'a [u8], usize), fingerprint: &Fingerprint, most: usize) -> Result<Self> {
        let mut reader = fingerprint.read(message, source)?;
        let top_k = fingerprint.top_k;
        let tokens = reader.number()?;
        if tokens > most {
            return Err(Error::internal("more tokens than a rank may have"));
        }
        let ids = reader.array(tokens, top_k * 8)?;
        let weight_bytes = if fingerprint.by_rank { top_k * 4 } else { 0 };
        Ok(Self {
            tokens: u32::try_from(tokens).unwrap_or(u32::MAX),
            top_k,
            ids,
            weights: reader.array(tokens, weight_bytes)?,
            rows: Incoming::read(&mut reader, tokens, fingerprint.row)?,
        })
    }

    /// (token, k, expert) of each entry that names an expert.
    fn entries(&self, facts: &GroupFacts) -> impl Iterator<Item = (usize, usize, usize)> {
        numeric::i64s(self.ids)
            .enumerate()
            .filter_map(|(entry, id)| Some((entry / self.top_k, entry % self.top_k, facts.expert(id)?)))
    }
}

const WEIGHT_BYTES: usize = size_of::<f32>();
/// Every byte of -1, the id of an entry that names no expert of this rank.
const NONE: u8 = 0xff;

impl HostLl {
    /// Writes what all sources have sent to the outputs `[R, M, *]`.
    fn place_by_rank(
        &self,
        (op, topk): (&LlDispatch, &RankMajorTopk),
        out: &mut [u8],
        sent: &[SentTokens<'_>],
    ) -> Result<Landed> {
        let (experts, top_k) = (self.facts().experts_of(self.facts().rank), self.routing.top_k);
        let entries = self.rows(op.layout)? * top_k;
        let width = topk.out_ids.width;
        // SAFETY: `rule` has checked both tensors `[R, M, K]`; the caller leaves them to the operation.
        let (ids, weights) = unsafe {
            (bytes_mut(topk.out_ids.data, entries * width.bytes()), bytes_mut(topk.out_weights, entries * WEIGHT_BYTES))
        };
        ids.fill(NONE);
        let mut landed = Landed::default();
        for (source, sent) in sent.iter().enumerate() {
            let mut placed: Vec<Placed> = Vec::new();
            for (token, k, expert) in sent.entries(self.facts()) {
                let Some(local) = expert.checked_sub(experts.start) else { continue };
                if local >= experts.len() {
                    continue;
                }
                if placed.last().is_none_or(|last| last.token != token) {
                    let to = RowOf { zone: source, ordinal: placed.len() };
                    let at = op.layout.number(to);
                    copy_row(out, at, sent.rows.payload(token)?)?;
                    if let Some(scaled) = &op.scaled {
                        // SAFETY: `rule` has checked the tensor `[R, M, S]`; the caller leaves it to the operation.
                        unsafe { scaled::store(scaled, to, sent.rows.scales(token)?) }?;
                    }
                    copy_row(weights, at, row(sent.weights, token, top_k * WEIGHT_BYTES)?)?;
                    placed.push(Placed { token, k: 0, row: at });
                }
                let at = placed.last().ok_or_else(|| Error::internal("an entry without a row"))?.row;
                let id = (topk.first_id + local) as i64;
                match width {
                    IntWidth::Bits32 => copy_row(ids, at * top_k + k, &(id as i32).to_ne_bytes())?,
                    IntWidth::Bits64 => copy_row(ids, at * top_k + k, &id.to_ne_bytes())?,
                }
            }
            landed.counts.push(placed.len() as u32);
            landed.placed.push(placed);
        }
        Ok(landed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::refusal::Operation;
    use crate::model::ops::RowType;
    use crate::model::scales::WireRow;
    use crate::model::tensor::DType;

    #[test]
    fn tokens_that_are_not_in_the_message_are_refused() {
        let fingerprint = Fingerprint {
            call: Operation::LlDispatch,
            staged: false,
            handle: None,
            top_k: 8,
            by_rank: false,
            exact: false,
            in_view: false,
            row: WireRow::from(RowType { dtype: DType::Bfloat16, hidden: 8 }),
        };
        let read = |tokens| {
            let mut message = fingerprint.message();
            message.number(tokens);
            message.bytes(&[0; 64 + 16]);
            let mut written = vec![0; message.len()];
            message.write_to(&mut written).unwrap();
            SentTokens::read((&written, 0), &fingerprint, usize::MAX).and_then(|sent| Ok(sent.rows.payload(0)?.len()))
        };
        assert_eq!(read(1).unwrap(), 16);
        // With the last two, an unchecked multiplication gives 0 bytes of ids and of rows.
        for tokens in [2, 1 << 60, 1 << 62] {
            assert!(read(tokens).is_err(), "{tokens}");
        }
    }
}
