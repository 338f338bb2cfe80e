//! HT combine: each rank posts the rows that it received, in that order; each home rank sums them by
//! ascending rank, node by node (`node_sums`).
#![allow(unsafe_code)]

use crate::backend::host::device::{add_waits, bytes, bytes_mut};
use crate::backend::host::fingerprint::Fingerprint;
use crate::backend::host::ht::route::{Destination, ENTRY_BYTES, ID_BYTES, destinations};
use crate::backend::host::ht::{Routed, source};
use crate::backend::host::message::Message;
use crate::backend::host::node_sums::NodeSums;
use crate::backend::host::numeric::{self, copy_row, row};
use crate::error::refusal::{AmongRanks, Operation, Role, Subject};
use crate::error::{Error, Result};
use crate::model::ids::GroupRank;
use crate::model::ops::{HtCombine, WeightGradients};

impl Routed {
    pub(super) fn send_results(&self, op: &HtCombine, epoch: u64) -> Result<()> {
        self.check_capacity(Role::TokensIn, op.expert_rows.rows)?;
        self.check_capacity(Role::WeightsIn, op.gradients.map_or(usize::MAX, |gradients| gradients.rows))?;
        let rows = self.map.received();
        let mut message = self.fingerprint(Operation::HtCombine, op.row.into()).message();
        message.number(rows);
        message.number(op.gradients.map_or(0, |gradients| gradients.top_k));
        message.bytes(self.map.begins.iter().flat_map(|row| row.to_ne_bytes()).collect::<Vec<_>>());
        if self.routing.form.zones.is_some() {
            self.append_sums(op, &mut message)?;
            return self.shared.mailboxes.post(epoch, &message);
        }
        // SAFETY: `rule` has checked the tensor, and it has at least `rows` rows; the caller keeps it
        // until the operation has run.
        message.bytes(unsafe { bytes(op.expert_rows.data, rows * op.row.bytes()) });
        if let Some(WeightGradients { input, top_k, .. }) = op.gradients {
            // SAFETY: as above, `[n, K]` of f32.
            message.bytes(unsafe { bytes(input, rows * top_k * 4) });
        }
        self.shared.mailboxes.post(epoch, &message)
    }

    /// Appends what this rank returns for each row that it received: the sum of its slots by ascending expert, rounded;
    /// and the gradients of its slots.
    fn append_sums(&self, op: &HtCombine, message: &mut Message<'_>) -> Result<()> {
        let (slots, row_bytes) = (op.expert_rows.rows, op.row.bytes());
        // SAFETY: `rule` has checked the tensor `[n, H]`; the caller keeps it until the operation has run.
        let input = unsafe { bytes(op.expert_rows.data, slots * row_bytes) };
        let mut sums = Vec::with_capacity(self.map.received() * row_bytes);
        let mut sum = vec![0.0; op.row.hidden];
        let mut rounded = vec![0; row_bytes];
        for index in 0..self.map.received() {
            sum.fill(0.0);
            for slot in self.map.zones.of_row(index).flatten() {
                numeric::add(&mut sum, row(input, slot, row_bytes)?, op.row.dtype)?;
            }
            numeric::store(&mut rounded, &sum, op.row.dtype)?;
            sums.extend_from_slice(&rounded);
        }
        message.bytes(sums);
        let Some(gradients) = op.gradients else { return Ok(()) };
        // SAFETY: as above, `[rows]` of f32.
        let input = unsafe { bytes(gradients.input, gradients.rows * 4) };
        let mut all = Vec::new();
        for index in 0..self.map.received() {
            let first = all.len();
            for slot in self.map.zones.of_row(index) {
                all.extend_from_slice(slot.map_or(Ok(&[0; 4][..]), |slot| row(input, slot, 4))?);
            }
            all.resize(first + gradients.top_k * 4, 0);
        }
        message.bytes(all);
        Ok(())
    }

    pub(super) fn receive_results(&self, op: &HtCombine, epoch: u64) -> Result<()> {
        let messages = self.shared.mailboxes.receive_all(epoch)?;
        add_waits(&messages, op.waits);
        let columns = op.gradients.map_or(0, |gradients| gradients.top_k);
        let fingerprint = self.fingerprint(Operation::HtCombine, op.row.into());
        let results: Vec<Results<'_>> = messages
            .iter()
            .enumerate()
            .map(|(source, message)| self.results(message, source, columns, &fingerprint))
            .collect::<Result<_>>()?;
        let row_bytes = op.row.bytes();
        // SAFETY: `rule` has checked the tensor `[T, H]`; the caller leaves it to the operation.
        let out = unsafe { bytes_mut(op.out, self.routing.tokens * row_bytes) };
        let mut sums = NodeSums::new(&self.shared.topology, self.shared.facts.rank, op.row);
        let add = |sums: &mut [f32], (_, row): &(usize, &[u8])| numeric::add(sums, row, op.row.dtype);
        for (token, out) in out.chunks_exact_mut(row_bytes).enumerate() {
            let mut rows = Vec::new();
            for to in self.destinations(token) {
                let from = source(&results, to.rank)?;
                rows.push((to.rank, row(from.rows, from.begin + to.index, row_bytes)?));
            }
            sums.store(&mut rows, |(rank, _)| GroupRank::new(*rank), add, out)?;
        }
        match op.gradients {
            Some(gradients) => self.write_gradients(&gradients, &results),
            None => Ok(()),
        }
    }

    /// Writes the gradients of each token's weights by ascending global expert, then zeros; or by k.
    fn write_gradients(&self, gradients: &WeightGradients, results: &[Results<'_>]) -> Result<()> {
        let columns = gradients.top_k;
        // SAFETY: `rule` has checked the tensor `[T, K]`; the caller leaves it to the operation.
        let out = unsafe { bytes_mut(gradients.output, self.routing.tokens * columns * 4) };
        out.fill(0);
        for token in 0..self.routing.tokens {
            let to = self.destinations(token).into_iter();
            let columns_of =
                |to: Destination| (0..to.experts.len().min(columns)).map(move |column| (to.rank, to.index, column));
            let found: Vec<_> = to.flat_map(columns_of).take(columns).collect();
            let places = if gradients.by_k { self.places_of_ids(token) } else { (0..found.len()).map(Some).collect() };
            for (column, place) in places.into_iter().enumerate() {
                let Some((rank, index, theirs)) = place.and_then(|at| found.get(at)).copied() else { continue };
                let from = source(results, rank)?;
                let weight = row(from.weights, (from.begin + index) * columns + theirs, 4)?;
                copy_row(out, token * columns + column, weight)?;
            }
        }
        Ok(())
    }

    /// For each id of `token`, the index of its expert among the token's, ascending; none if it names no expert.
    fn places_of_ids(&self, token: usize) -> Vec<Option<usize>> {
        let width = self.routing.top_k * ID_BYTES;
        let ids = self.map.ids.get(token * width..(token + 1) * width);
        let expert_of = |id| self.shared.facts.expert(id);
        let experts: Vec<_> = numeric::i64s(ids.unwrap_or_default()).map(expert_of).collect();
        let mut all: Vec<_> = experts.iter().flatten().copied().collect();
        all.sort_unstable();
        all.dedup();
        let place = |expert: &Option<usize>| all.binary_search(expert.as_ref()?).ok();
        experts.iter().map(place).collect()
    }

    /// Where `token` has gone, by ascending rank.
    fn destinations(&self, token: usize) -> Vec<Destination> {
        let width = self.routing.top_k * ENTRY_BYTES;
        let entries = self.map.entries.get(token * width..(token + 1) * width);
        destinations(&self.shared.facts, entries.unwrap_or_default())
    }

    /// Reads the message of expert rank `source`.
    fn results<'a>(
        &self,
        message: &'a [u8],
        source: usize,
        columns: usize,
        fingerprint: &Fingerprint,
    ) -> Result<Results<'a>> {
        let mut reader = fingerprint.read(message, source)?;
        let rows = reader.number()?;
        let theirs = reader.number()?;
        if theirs != columns {
            let rule = AmongRanks::SameColumns { rank: GroupRank::new(source) };
            return Err(Error::usage(Subject::Tensor(Role::WeightsIn), rule).got(columns, theirs));
        }
        let facts = &self.shared.facts;
        let mut begins = numeric::u32s(reader.array(facts.ranks + 1, 4)?);
        Ok(Results {
            begin: begins.nth(facts.rank.index()).unwrap_or(0) as usize,
            rows: reader.array(rows, fingerprint.row.payload.bytes())?,
            weights: reader.array(rows, columns * 4)?,
        })
    }
}

/// The message of an expert rank.
struct Results<'a> {
    /// Its first row for a token of this rank.
    begin: usize,
    rows: &'a [u8],
    weights: &'a [u8],
}
