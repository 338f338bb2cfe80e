//! Kernel parameters of a stage of an operation, and the streams on which its kernels and messages are enqueued.

use crate::backend::Faults as _;
use crate::backend::cuda::auxiliary::LIBRARY_BLOCK;
use crate::backend::cuda::driver::stream::StreamScope;
use crate::backend::cuda::ht::nodes::handle::NodesHt;
use crate::backend::cuda::ht::nodes::messages::Bank;
use crate::backend::cuda::ht::nodes::plan::NodesPlan;
use crate::backend::cuda::ht::nodes::rails::{Rails, Turn};
use crate::backend::cuda::ht::plan::HtLaunch;
use crate::backend::cuda::ht::shared::HtShared;
use crate::backend::cuda::kernels::to_u32;
use crate::backend::cuda::network::Network;
use crate::backend::cuda::order;
use crate::backend::cuda::params::common::{KernelOp, MessageHeader};
use crate::backend::cuda::params::ht::{HtCommon, HtEntry, HtHandleMemory};
use crate::backend::cuda::params::ht_kept::HtZones;
use crate::backend::cuda::params::ht_nodes::{HtHeaderParams, HtMessages, HtNodesMemory, HtStage};
use crate::backend::net::two_sided::{Label, Message};
use crate::error::Result;
use crate::model::ids::SourceIx;
use crate::model::ops::Stream;
use std::ops::{Deref, Range};
use std::ptr::{null, null_mut};

/// The address `at + bytes`; NULL stays NULL.
pub fn offset_or_null(at: usize, bytes: usize) -> usize {
    match at {
        0 => 0,
        at => at + bytes,
    }
}

/// The number of stages that are on the network at a time.
pub const STAGES_IN_FLIGHT: usize = 2;

/// For own tokens, which are in the caller's tensors rather than in messages.
pub const NO_MESSAGES: HtMessages = HtMessages { rows: null_mut(), stride: 0, row_bytes: 0, tail_bytes: 0 };

/// Whose headers a stage's kernel must check: messages from rail peers, or from remote sources.
#[derive(Clone, Copy)]
pub struct Headers {
    pub of: Bank,
    pub from_rail_peers: bool,
    pub expected: MessageHeader,
}

impl Headers {
    fn count(self, plan: &NodesPlan) -> usize {
        if self.from_rail_peers { plan.others } else { plan.forwarded - 1 }
    }

    /// The ranks that sent them.
    fn ranks(self, network: &Network) -> *const u32 {
        if self.from_rail_peers {
            network.on_device.rail_peers.0 as *const u32
        } else {
            (network.on_device.forwarded.0 as *const u32).wrapping_add(1)
        }
    }
}

/// The tokens of a launch: this rank's own, or forwarded ones.
pub struct Tokens {
    /// The index of the first token's entries.
    pub first: usize,
    pub count: usize,
    entries: *mut HtEntry,
}

/// A handle, as used by an operation.
pub struct Handle<'a> {
    handle: &'a NodesHt,
    pub device: HtNodesMemory,
    /// If rows lie by expert.
    pub zones: Option<HtZones>,
}

impl Deref for Handle<'_> {
    type Target = NodesHt;

    fn deref(&self) -> &NodesHt {
        self.handle
    }
}

impl<'a> Handle<'a> {
    pub fn new(handle: &'a NodesHt) -> Result<Self> {
        let parts = handle.parts()?;
        Ok(Self { handle, device: parts.memory, zones: handle.zones(&parts)? })
    }

    pub(super) fn plan(&self) -> &NodesPlan {
        &self.rails.plan
    }

    /// This rank's tokens in `chunks`.
    pub(super) fn own_tokens(&self, chunks: &Range<usize>) -> Tokens {
        let at = |chunk| self.plan().chunk_begin(self.routing.tokens, chunk);
        self.tokens(self.device.own_entries, at(chunks.start)..at(chunks.end))
    }

    /// The tokens of remote sources in `chunks`.
    pub(super) fn remote_tokens(&self, chunks: &Range<usize>) -> Tokens {
        let before = |chunk| -> usize {
            SourceIx::all(self.plan().forwarded).skip(1).map(|source| self.counts.arriving(source, chunk)).sum()
        };
        self.tokens(self.device.entries, before(chunks.start)..before(chunks.end))
    }

    fn tokens(&self, entries: *mut HtEntry, range: Range<usize>) -> Tokens {
        let entries = entries.wrapping_add(range.start * self.routing.top_k);
        Tokens { first: range.start, count: range.len(), entries }
    }

    /// The parameters of a stage: the tokens in `chunks` whose messages are in `remote`, or own tokens.
    pub(super) fn stage(
        &self,
        chunks: &Range<usize>,
        remote: Option<Bank>,
        headers: Option<Headers>,
    ) -> Result<HtStage> {
        let (memory, plan) = (&self.device, self.plan());
        let is_own = remote.is_none();
        let messages = |bank: Option<Bank>| bank.map_or(Ok(NO_MESSAGES), |it| it.messages());
        // Tokens of a single message are in order.
        let is_in_order = is_own || plan.forwarded <= 2;
        let (departures, arrivals) =
            if is_own { (memory.source_rows, memory.own_arrivals) } else { (memory.departures, memory.arrivals) };
        let row = |table: *mut u32, chunk: usize| table.wrapping_add(chunk * plan.locals).cast_const();
        Ok(HtStage {
            departures: row(departures, chunks.start),
            departures_end: row(departures, chunks.end),
            arrivals: row(arrivals, chunks.start),
            arrivals_end: row(arrivals, chunks.end),
            begins: match (is_own, plan.width) {
                (true, _) => memory.own_begins,
                (false, ..=1) => memory.begins,
                (false, _) => null(),
            },
            piece_starts: memory.piece_starts,
            piece_rows: memory.piece_rows,
            pieces: to_u32(plan.chunks * plan.width)?,
            is_own: u32::from(is_own),
            total: memory.total,
            locals: self.rails.network.on_device.local_ranks.0 as *const u32,
            messages: messages(remote)?,
            origins: if is_in_order { null() } else { memory.origins.wrapping_add(self.remote_tokens(chunks).first) },
            starts: memory.starts.wrapping_add(plan.chunks + 1 + chunks.start),
            chunk_ends: to_u32(plan.chunks + 1)?,
            header_count: to_u32(headers.map_or(0, |it| it.count(plan)))?,
            headers: messages(headers.map(|it| it.of))?,
            header_ranks: headers.map_or(null(), |it| it.ranks(&self.rails.network)),
            expected: headers.map(|it| it.expected).unwrap_or_default(),
        })
    }

    /// The header of messages of stage `stage` of an operation with this launch.
    pub(super) fn header(&self, launch: &HtLaunch, stage: usize) -> Result<MessageHeader> {
        Ok(MessageHeader {
            handle: self.epoch,
            fingerprint: HtShared::fingerprint(launch, self.epoch),
            scales_word: launch.scales_word,
            stage: to_u32(stage)?,
            ..Default::default()
        })
    }

    /// The parameters by which kernel `op` writes `header` to the first `count` messages of `bank`.
    pub(super) fn headers(
        &self,
        op: KernelOp,
        header: MessageHeader,
        bank: Bank,
        count: usize,
    ) -> Result<HtHeaderParams> {
        Ok(HtHeaderParams {
            wait: self.group.context.wait(op),
            messages: bank.messages()?,
            count: to_u32(count)?,
            header,
            sequences: self.group.sequences(),
        })
    }

    /// The parameters for `tokens` that dispatch and combine kernels have in common.
    pub(super) fn common(&self, op: KernelOp, launch: &HtLaunch, tokens: &Tokens) -> Result<HtCommon> {
        let memory = HtHandleMemory {
            entries: tokens.entries,
            begins: null_mut(),
            departures: null_mut(),
            counts: self.device.counts,
            tokens: to_u32(tokens.count)?,
            top_k: self.device.top_k,
        };
        Ok(self.group.common(op, launch, self.epoch, memory, LIBRARY_BLOCK))
    }
}

/// An operation being enqueued: stages on the caller's stream, messages on the side stream.
pub struct Enqueueing<'a> {
    pub rails: &'a Rails,
    pub side: Stream,
    pub turn: &'a mut Turn,
    pub at: &'a StreamScope,
    label: Label,
}

impl<'a> Enqueueing<'a> {
    pub fn new(rails: &'a Rails, turn: &'a mut Turn, at: &'a StreamScope, what: &'static str) -> Result<Self> {
        Ok(Self {
            label: rails.network.exchanges.label(what),
            side: rails.network.on_device.side.of(at.capture)?,
            rails,
            turn,
            at,
        })
    }

    /// Ends the operation, even if only part of it was `enqueued`, as that part uses the banks. If the network has
    /// ended because this rank has failed, the error is that failure.
    pub fn end(&mut self, group: &HtShared, order: order::Turn<'_>, enqueued: Result<()>) -> Result<()> {
        if enqueued.is_err() {
            // The operation also includes messages for which no kernel waits.
            let _ = self.turn.join.join(self.side, self.at.stream);
        }
        let cause = |error| group.context.faults.first().unwrap_or(error);
        order.end().and(enqueued.map_err(cause))
    }

    /// Makes the side stream wait for the caller's stream.
    pub fn fork(&mut self) -> Result<()> {
        self.turn.join.join(self.at.stream, self.side)
    }

    /// Enqueues the messages of stage `stage`.
    pub fn exchange(
        &mut self,
        stage: usize,
        sends: impl Iterator<Item = Message>,
        receives: impl Iterator<Item = Message>,
    ) -> Result<()> {
        let exchanges = &self.rails.network.exchanges;
        exchanges.enqueue(self.label, sends, receives, self.side)?;
        let [even, odd] = &mut self.turn.landed;
        let landed = if stage.is_multiple_of(2) { even } else { odd };
        landed.record(self.side)
    }

    /// Makes the caller's stream wait for the messages of stage `stage`.
    pub fn wait_for(&self, stage: usize) -> Result<()> {
        let [even, odd] = &self.turn.landed;
        let landed = if stage.is_multiple_of(2) { even } else { odd };
        landed.make_wait(self.at.stream)
    }
}
