//! HT dispatch: each rank posts its tokens, forward with ids and weights; each rank takes the rows that
//! the handle's routing assigns to it.
#![allow(unsafe_code)]

use crate::backend::host::device::{bytes, bytes_mut, write_counts};
use crate::backend::host::fingerprint::Fingerprint;
use crate::backend::host::ht::agreement::write_counters;
use crate::backend::host::ht::route::{self, ENTRY_BYTES};
use crate::backend::host::ht::{Routed, source};
use crate::backend::host::numeric::{self, copy_row};
use crate::backend::host::scaled::{self, Incoming, Outgoing};
use crate::error::refusal::{AmongRanks, Operation, Role, Subject};
use crate::error::{Error, Result};
use crate::model::ids::GroupRank;
use crate::model::layout::RowOf;
use crate::model::ops::{HtDispatch, IdsAndWeights, Routing, Rows};
use crate::model::scales::Scaled;

/// A token that this rank receives.
struct Arrival {
    /// Its home rank.
    source: usize,
    /// Its index there.
    token: usize,
    /// Its experts on this rank: local ids, ascending.
    experts: Vec<usize>,
}

impl Routed {
    pub(super) fn send_tokens(&self, op: &HtDispatch, epoch: u64) -> Result<()> {
        let Routing { tokens, top_k, .. } = self.routing;
        let mut message = self.fingerprint(Operation::HtDispatch, op.wire()).message();
        message.number(tokens);
        message.number(usize::from(op.routing_in.is_some()));
        let rows = Outgoing { data: op.tokens, tokens, row: op.row, scaled: op.scaled.as_ref() };
        // SAFETY: `rule` has checked the tensors; the caller keeps them until the operation has run.
        unsafe { rows.append(&mut message) }?;
        if let Some(IdsAndWeights { ids, weights, .. }) = op.routing_in {
            message.bytes(match self.routing.form.keeps_ids {
                true => &self.map.ids,
                // SAFETY: as above, `[T, K]` of int64.
                false => unsafe { bytes(ids, tokens * top_k * 8) },
            });
            // SAFETY: as above, `[T, K]` of f32.
            message.bytes(unsafe { bytes(weights, tokens * top_k * 4) });
        }
        message.bytes(&self.map.entries);
        self.shared.mailboxes.post(epoch, &message)
    }

    pub(super) fn receive_tokens(&self, op: &HtDispatch, epoch: u64) -> Result<()> {
        let messages = self.shared.mailboxes.receive_all(epoch)?;
        let fingerprint = self.fingerprint(Operation::HtDispatch, op.wire());
        let sent: Vec<SentTokens<'_>> = messages
            .iter()
            .enumerate()
            .map(|(source, message)| SentTokens::read(message, source, op, &fingerprint))
            .collect::<Result<_>>()?;
        let arrivals = self.arrivals(&sent)?;
        if let Some(out) = op.out {
            self.check_capacity(Role::TokensOut, out.rows)?;
            let places = self.places((out.rows, op.keeps_rest), arrivals.len());
            write_rows(&out, op.row.bytes(), (&arrivals, &places), &sent)?;
        }
        if let Some(scaled) = &op.scaled {
            self.check_capacity(Role::ScalesOut, scaled.out.rows)?;
            let places = self.places((scaled.out.rows, op.keeps_rest), arrivals.len());
            write_scales(scaled, (&arrivals, &places), &sent)?;
        }
        if let Some(out) = op.routing_out {
            match self.routing.form.zones {
                None => {
                    self.check_capacity(Role::IdsOut, out.rows)?;
                    self.write_routing((&out, op.first_id), &arrivals, &sent)?;
                }
                Some(_) => {
                    self.check_capacity(Role::WeightsOut, out.rows)?;
                    self.write_weights(&out, &arrivals, &sent)?;
                }
            }
        }
        write_counters(&self.map, self.routing.form, &op.counters)?;
        write_counts(op.counter, &self.map.counts)
    }

    /// The tokens that arrive here, in order: source rank, then token.
    fn arrivals(&self, sent: &[SentTokens<'_>]) -> Result<Vec<Arrival>> {
        let facts = &self.shared.facts;
        let mut arrivals = Vec::new();
        for (source, (from, end)) in sent.iter().zip(self.map.begins.iter().skip(1)).enumerate() {
            let width = self.routing.top_k.max(1) * ENTRY_BYTES;
            for (token, entries) in from.entries.chunks(width).enumerate() {
                let here = |to: &route::Destination| to.rank == facts.rank.index();
                arrivals.extend(route::destinations(facts, entries).into_iter().find(here).map(|here| Arrival {
                    source,
                    token,
                    experts: here.experts,
                }));
            }
            if arrivals.len() != *end as usize {
                return Err(Error::internal(format!("rank {source} sends other rows than it has told")));
            }
        }
        Ok(arrivals)
    }

    /// Writes the ids of experts, ascending, padded with -1; and their weights, padded with 0.
    fn write_routing(
        &self,
        (out, first_id): (&IdsAndWeights, usize),
        arrivals: &[Arrival],
        sent: &[SentTokens<'_>],
    ) -> Result<()> {
        let top_k = self.routing.top_k;
        let entries = out.rows * top_k;
        // SAFETY: `rule` has checked both tensors `[n, K]`; the caller leaves them to the operation.
        let (ids, weights) = unsafe { (bytes_mut(out.ids, entries * 8), bytes_mut(out.weights, entries * 4)) };
        ids.fill(0xff); // -1
        weights.fill(0);
        let first = self.shared.facts.experts_of(self.shared.facts.rank).start;
        for (index, arrival) in arrivals.iter().enumerate() {
            let from = source(sent, arrival.source)?;
            for (column, expert) in arrival.experts.iter().enumerate() {
                let weight = from.weight(arrival.token, first + expert, top_k);
                let id = (first_id + expert) as i64;
                copy_row(ids, index * top_k + column, &id.to_ne_bytes())?;
                copy_row(weights, index * top_k + column, &weight.to_ne_bytes())?;
            }
        }
        Ok(())
    }

    /// Writes the weight of each slot, and zeros elsewhere.
    fn write_weights(&self, out: &IdsAndWeights, arrivals: &[Arrival], sent: &[SentTokens<'_>]) -> Result<()> {
        // SAFETY: `rule` has checked the tensor `[n]`; the caller leaves it to the operation.
        let weights = unsafe { bytes_mut(out.weights, out.rows * 4) };
        weights.fill(0);
        let first = self.shared.facts.experts_of(self.shared.facts.rank).start;
        for (index, arrival) in arrivals.iter().enumerate() {
            let from = source(sent, arrival.source)?;
            for (expert, slot) in arrival.experts.iter().zip(self.map.zones.of_row(index)) {
                let Some(slot) = slot else { continue };
                let weight = from.weight(arrival.token, first + expert, self.routing.top_k);
                copy_row(weights, slot, &weight.to_ne_bytes())?;
            }
        }
        Ok(())
    }

    /// Where received rows go in a tensor of `rows`, whose rest may be kept.
    fn places(&self, (rows, keeps_rest): (usize, bool), arrivals: usize) -> Places {
        if self.routing.form.zones.is_none() {
            let filled = (0..arrivals).map(|row| (row, row)).collect();
            let end = if keeps_rest { arrivals } else { rows };
            return Places { filled, empty: (arrivals..end).collect() };
        }
        let zones = &self.map.zones;
        let filled: Vec<_> =
            (0..arrivals).flat_map(|row| zones.of_row(row).flatten().map(move |slot| (slot, row))).collect();
        let mut is_empty = vec![true; rows];
        for (slot, _) in &filled {
            if let Some(is_empty) = is_empty.get_mut(*slot) {
                *is_empty = false;
            }
        }
        let empty = zones.zones(rows).flatten().filter(|slot| is_empty.get(*slot) == Some(&true));
        Places { empty: empty.collect(), filled }
    }
}

/// Rows of a tensor that get received rows, each with the row's index; and those that get zeros.
struct Places {
    filled: Vec<(usize, usize)>,
    empty: Vec<usize>,
}

/// Writes the received rows, and zeros.
fn write_rows(
    out: &Rows,
    row_bytes: usize,
    (arrivals, places): (&[Arrival], &Places),
    sent: &[SentTokens<'_>],
) -> Result<()> {
    // SAFETY: `rule` has checked the tensor `[n, H]`; the caller leaves it to the operation.
    let rows = unsafe { bytes_mut(out.data, out.rows * row_bytes) };
    for (place, index) in &places.filled {
        let arrival = source(arrivals, *index)?;
        copy_row(rows, *place, source(sent, arrival.source)?.rows.payload(arrival.token)?)?;
    }
    let none = vec![0; row_bytes];
    places.empty.iter().try_for_each(|place| copy_row(rows, *place, &none))
}

/// Writes the scales of the received rows, and zeros.
fn write_scales(scaled: &Scaled, (arrivals, places): (&[Arrival], &Places), sent: &[SentTokens<'_>]) -> Result<()> {
    let none = vec![0; scaled.scales.bytes()];
    let store = |place: usize, scales| {
        let row = RowOf { zone: 0, ordinal: place };
        // SAFETY: `rule` has checked the tensor `[n, S]`; the caller leaves it to the operation.
        unsafe { scaled::store(scaled, row, scales) }
    };
    for (place, index) in &places.filled {
        let arrival = source(arrivals, *index)?;
        store(*place, source(sent, arrival.source)?.rows.scales(arrival.token)?)?;
    }
    places.empty.iter().try_for_each(|place| store(*place, &none))
}

/// The message of a source rank.
struct SentTokens<'a> {
    rows: Incoming<'a>,
    ids: &'a [u8],
    weights: &'a [u8],
    /// Where its tokens go.
    entries: &'a [u8],
}

impl<'a> SentTokens<'a> {
    fn read(message: &'a [u8], source: usize, op: &HtDispatch, fingerprint: &Fingerprint) -> Result<Self> {
        let mut reader = fingerprint.read(message, source)?;
        let tokens = reader.number()?;
        let forward = reader.number()? != 0;
        if forward != op.routing_in.is_some() {
            let rule = AmongRanks::SameDirection { rank: GroupRank::new(source) };
            return Err(Error::usage(Subject::Tensor(Role::IdsIn), rule));
        }
        let rows = Incoming::read(&mut reader, tokens, fingerprint.row)?;
        let columns = if forward { fingerprint.top_k } else { 0 };
        Ok(Self {
            rows,
            ids: reader.array(tokens, columns * 8)?,
            weights: reader.array(tokens, columns * 4)?,
            entries: reader.array(tokens, fingerprint.top_k * ENTRY_BYTES)?,
        })
    }

    /// The weight of `expert` for `token`: the sum, by ascending k, over the entries that name it;
    /// 0 if none does. A single weight keeps its bits.
    fn weight(&self, token: usize, expert: usize, top_k: usize) -> f32 {
        let ids = self.ids.get(token * top_k * 8..).unwrap_or_default();
        let weights = self.weights.get(token * top_k * 4..).unwrap_or_default();
        let entries = numeric::i64s(ids).zip(numeric::f32s(weights)).take(top_k);
        entries
            .filter_map(|(id, weight)| (id == expert as i64).then_some(weight))
            .reduce(|sum, weight| sum + weight)
            .unwrap_or(0.0)
    }
}
