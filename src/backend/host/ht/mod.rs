//! High-throughput operations.
//!
//! Dispatch: each rank posts its tokens (forward: with ids and weights); each rank takes the rows
//! that the handle's routing assigns to it. Combine: each rank posts the rows that it received, in
//! that order; each home rank sums them by ascending rank, node by node (`node_sums`).
#![allow(unsafe_code)]

mod agreement;
mod route;

use crate::backend::host::device::{bytes, bytes_mut};
use crate::backend::host::group_state::GroupState;
use crate::backend::host::ht::route::{Departure, HtMap};
use crate::backend::host::node_sums::NodeSums;
use crate::backend::host::numeric;
use crate::backend::host::rows::{copy_row, row};
use crate::backend::host::terms::{Call, Terms};
use crate::backend::{HtBackend, HtRouting};
use crate::error::refusal::{AmongRanks, OfTensor, Role, Subject};
use crate::error::{Error, Result};
use crate::model::ops::{
    HtCombine, HtDispatch, IdsAndWeights, Routing, RowType, Stream, WeightGradients,
};
use crate::model::tensor::DevPtr;
use std::sync::Arc;
use std::time::Duration;

/// An HT handle: the routing at the time when the handle was made.
#[derive(Clone)]
pub struct HostHt {
    shared: Arc<GroupState>,
    routing: Routing,
    map: Arc<HtMap>,
}

impl HostHt {
    /// Exchanges the ids of all ranks. Collective; `wanted` is an error on a rank that refused its
    /// arguments.
    pub fn open(
        shared: Arc<GroupState>,
        wanted: Result<HtRouting>,
        stream: Stream,
        timeout: Duration,
    ) -> Result<Self> {
        let routing = wanted.as_ref().map(|wanted| wanted.routing);
        let routing = routing.map_err(Error::clone);
        let map = agreement::exchange(&shared, wanted, stream, timeout)?;
        Ok(Self {
            shared,
            routing: routing?,
            map: Arc::new(map),
        })
    }

    /// The terms of a call. Ranks may differ in `staged`, which has no effect in HT.
    fn terms(&self, call: Call, row: RowType) -> Terms {
        Terms {
            call,
            staged: false,
            handle: Some(self.map.number),
            top_k: self.routing.top_k,
            row,
        }
    }

    fn send_tokens(&self, op: &HtDispatch, epoch: u64) -> Result<()> {
        let Routing { tokens, top_k, .. } = self.routing;
        let mut message = self.terms(Call::HtDispatch, op.row).message();
        message.number(tokens);
        message.number(usize::from(op.routing_in.is_some()));
        // SAFETY: `rule` has checked the tensor; the caller keeps it until the operation has run.
        message.bytes(unsafe { bytes(op.tokens, tokens * op.row.bytes()) });
        if let Some(IdsAndWeights { ids, weights, .. }) = op.routing_in {
            // SAFETY: as above, `[T, K]` of int64.
            message.bytes(unsafe { bytes(ids, tokens * top_k * 8) });
            // SAFETY: as above, `[T, K]` of f32.
            message.bytes(unsafe { bytes(weights, tokens * top_k * 4) });
        }
        self.shared.exchange.post(epoch, &message)
    }

    fn receive_tokens(&self, op: &HtDispatch, epoch: u64) -> Result<()> {
        let messages = self.shared.exchange.receive_all(epoch)?;
        let terms = self.terms(Call::HtDispatch, op.row);
        let sent: Vec<Sent<'_>> = messages
            .iter()
            .enumerate()
            .map(|(source, message)| Sent::read(message, source, op, &terms))
            .collect::<Result<_>>()?;
        if let Some(out) = op.out {
            self.check_capacity(Role::TokensOut, out.rows)?;
            // SAFETY: `rule` has checked the tensor `[n, H]`; the caller leaves it to the operation.
            let rows = unsafe { bytes_mut(out.data, out.rows * op.row.bytes()) };
            for (index, arrival) in self.map.arrivals.iter().enumerate() {
                copy_row(
                    rows,
                    index,
                    row(
                        source(&sent, arrival.source)?.rows,
                        arrival.token,
                        op.row.bytes(),
                    )?,
                )?;
            }
            if let Some(unused) = rows.get_mut(self.map.arrivals.len() * op.row.bytes()..) {
                unused.fill(0);
            }
        }
        if let Some(out) = op.routing_out {
            self.check_capacity(Role::IdsOut, out.rows)?;
            self.write_routing(&out, &sent)?;
        }
        match op.counter {
            Some(counter) => self.write_counter(counter),
            None => Ok(()),
        }
    }

    /// Writes local expert ids, ascending, then -1; and their weights, then 0.
    fn write_routing(&self, out: &IdsAndWeights, sent: &[Sent<'_>]) -> Result<()> {
        let top_k = self.routing.top_k;
        let entries = out.rows * top_k;
        // SAFETY: `rule` has checked both tensors `[n, K]`; the caller leaves them to the operation.
        let (ids, weights) = unsafe {
            (
                bytes_mut(out.ids, entries * 8),
                bytes_mut(out.weights, entries * 4),
            )
        };
        ids.fill(0xff); // -1
        weights.fill(0);
        let first = self.shared.facts.experts_of(self.shared.facts.rank).start;
        for (index, arrival) in self.map.arrivals.iter().enumerate() {
            let from = source(sent, arrival.source)?;
            for (column, expert) in arrival.experts.iter().enumerate() {
                let weight = from.weight(arrival.token, first + expert, top_k);
                copy_row(ids, index * top_k + column, &(*expert as i64).to_ne_bytes())?;
                copy_row(weights, index * top_k + column, &weight.to_ne_bytes())?;
            }
        }
        Ok(())
    }

    fn write_counter(&self, counter: DevPtr) -> Result<()> {
        let counts = self.map.expert_counts(self.shared.facts.local_experts());
        // SAFETY: `rule` has checked the counter, L entries at least; the caller leaves it to the
        // operation.
        let out = unsafe { bytes_mut(counter, counts.len() * 4) };
        for (index, count) in counts.iter().enumerate() {
            copy_row(out, index, &count.to_ne_bytes())?;
        }
        Ok(())
    }

    fn send_results(&self, op: &HtCombine, epoch: u64) -> Result<()> {
        self.check_capacity(Role::TokensIn, op.expert_rows.rows)?;
        let rows = self.map.arrivals.len();
        let mut message = self.terms(Call::HtCombine, op.row).message();
        message.number(rows);
        message.number(op.gradients.map_or(0, |gradients| gradients.top_k));
        // SAFETY: `rule` has checked the tensor, and it has at least `rows` rows; the caller keeps it
        // until the operation has run.
        message.bytes(unsafe { bytes(op.expert_rows.data, rows * op.row.bytes()) });
        if let Some(WeightGradients { input, top_k, .. }) = op.gradients {
            // SAFETY: as above, `[n, K]` of f32.
            message.bytes(unsafe { bytes(input, rows * top_k * 4) });
        }
        self.shared.exchange.post(epoch, &message)
    }

    fn receive_results(&self, op: &HtCombine, epoch: u64) -> Result<()> {
        let messages = self.shared.exchange.receive_all(epoch)?;
        let columns = op.gradients.map_or(0, |gradients| gradients.top_k);
        let terms = self.terms(Call::HtCombine, op.row);
        let results: Vec<Results<'_>> = messages
            .iter()
            .enumerate()
            .map(|(source, message)| Results::read(message, source, columns, &terms))
            .collect::<Result<_>>()?;
        let row_bytes = op.row.bytes();
        // SAFETY: `rule` has checked the tensor `[T, H]`; the caller leaves it to the operation.
        let out = unsafe { bytes_mut(op.out, self.routing.tokens * row_bytes) };
        let mut sums = NodeSums::new(&self.shared.topology, self.shared.facts.rank, op.row);
        let add =
            |sums: &mut [f32], (_, row): &(usize, &[u8])| numeric::add(sums, row, op.row.dtype);
        let mut departures = self.map.departures.iter().peekable();
        for (token, out) in out.chunks_exact_mut(row_bytes).enumerate() {
            let mut rows = Vec::new();
            while let Some(departure) = departures.next_if(|next| next.token == token) {
                let from = source(&results, departure.rank)?;
                rows.push((departure.rank, row(from.rows, departure.row, row_bytes)?));
            }
            sums.store(&mut rows, |(rank, _)| *rank, add, out)?;
        }
        match op.gradients {
            Some(gradients) => self.write_gradients(&gradients, &results),
            None => Ok(()),
        }
    }

    /// Writes the gradients of each token's weights by ascending global expert id, then zeros.
    fn write_gradients(&self, gradients: &WeightGradients, results: &[Results<'_>]) -> Result<()> {
        let columns = gradients.top_k;
        // SAFETY: `rule` has checked the tensor `[T, K]`; the caller leaves it to the operation.
        let out = unsafe { bytes_mut(gradients.output, self.routing.tokens * columns * 4) };
        out.fill(0);
        let departures = &self.map.departures;
        for of_token in departures.chunk_by(|a, b| a.token == b.token) {
            let columns_of = |departure: &Departure| {
                let first = departure.row * columns;
                let (rank, count) = (departure.rank, departure.experts.min(columns));
                (first..first + count).map(move |index| (rank, index))
            };
            let found = of_token.iter().flat_map(columns_of).take(columns);
            let begin = of_token.first().map_or(0, |first| first.token) * columns;
            for (column, (rank, index)) in found.enumerate() {
                let weights = source(results, rank)?.weights;
                copy_row(out, begin + column, row(weights, index, 4)?)?;
            }
        }
        Ok(())
    }

    /// Refuses a tensor that cannot hold all received rows: silently losing tokens would be worse.
    fn check_capacity(&self, role: Role, rows: usize) -> Result<()> {
        let received = self.map.arrivals.len();
        if rows >= received {
            return Ok(());
        }
        Err(
            Error::usage(Subject::Size(role, 0), OfTensor::HoldsAllReceived)
                .got(rows, format_args!("{received} or more")),
        )
    }
}

impl HtBackend for HostHt {
    fn dispatch(&self, op: &HtDispatch, stream: Stream) -> Result<()> {
        let (handle, op) = (self.clone(), *op);
        self.shared
            .enqueue_operation(
                Call::HtDispatch,
                stream,
                || (),
                move |epoch| {
                    handle.send_tokens(&op, epoch)?;
                    handle.receive_tokens(&op, epoch)
                },
            )
            .map(drop)
    }

    fn combine(&self, op: &HtCombine, stream: Stream) -> Result<()> {
        let (handle, op) = (self.clone(), *op);
        self.shared
            .enqueue_operation(
                Call::HtCombine,
                stream,
                || (),
                move |epoch| {
                    handle.send_results(&op, epoch)?;
                    handle.receive_results(&op, epoch)
                },
            )
            .map(drop)
    }

    fn num_recv_tokens(&self) -> Result<usize> {
        Ok(self.map.arrivals.len())
    }
}

/// The message of a source rank in a dispatch.
struct Sent<'a> {
    rows: &'a [u8],
    ids: &'a [u8],
    weights: &'a [u8],
}

impl<'a> Sent<'a> {
    fn read(message: &'a [u8], source: usize, op: &HtDispatch, terms: &Terms) -> Result<Self> {
        let mut reader = terms.read(message, source)?;
        let tokens = reader.number()?;
        let forward = reader.number()? != 0;
        if forward != op.routing_in.is_some() {
            let rule = AmongRanks::SameDirection { rank: source };
            return Err(Error::usage(Subject::Tensor(Role::IdsIn), rule));
        }
        let rows = reader.array(tokens, op.row.bytes())?;
        let columns = if forward { terms.top_k } else { 0 };
        Ok(Self {
            rows,
            ids: reader.array(tokens, columns * 8)?,
            weights: reader.array(tokens, columns * 4)?,
        })
    }

    /// The weight of `expert` for `token`: the last one if the token names it twice, 0 if not at
    /// all.
    fn weight(&self, token: usize, expert: usize, top_k: usize) -> f32 {
        (token * top_k..(token + 1) * top_k)
            .rev()
            .find(|&entry| numeric::i64_at(self.ids, entry) == i64::try_from(expert).ok())
            .and_then(|entry| numeric::f32_at(self.weights, entry))
            .unwrap_or(0.0)
    }
}

/// The message of an expert rank in a combine.
struct Results<'a> {
    rows: &'a [u8],
    weights: &'a [u8],
}

impl<'a> Results<'a> {
    fn read(message: &'a [u8], source: usize, columns: usize, terms: &Terms) -> Result<Self> {
        let mut reader = terms.read(message, source)?;
        let rows = reader.number()?;
        let theirs = reader.number()?;
        if theirs != columns {
            let rule = AmongRanks::SameColumns { rank: source };
            return Err(Error::usage(Subject::Tensor(Role::WeightsIn), rule).got(columns, theirs));
        }
        Ok(Self {
            rows: reader.array(rows, terms.row.bytes())?,
            weights: reader.array(rows, columns * 4)?,
        })
    }
}

fn source<T>(all: &[T], rank: usize) -> Result<&T> {
    all.get(rank)
        .ok_or_else(|| Error::internal("a rank without a message"))
}
