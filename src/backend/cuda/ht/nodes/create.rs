//! Creation of an HT handle over several nodes.
//!
//! Ranks first announce along the rails their number of tokens, or that they refuse; then they send their ids. A kernel
//! determines where rows go, together with the other ranks of the node. The host waits for the result, as it must know
//! the number of rows of each message; operations then need not wait.

use crate::backend::cuda::agreement::{disagreement, verdict_refusing, verdict_with};
use crate::backend::cuda::auxiliary::LIBRARY_BLOCK;
use crate::backend::cuda::driver::stream::StreamScope;
use crate::backend::cuda::ht::grid::granted_blocks;
use crate::backend::cuda::ht::kept::{self, Report};
use crate::backend::cuda::ht::nodes::caller_block::{self, CallerHt};
use crate::backend::cuda::ht::nodes::cut::Cut;
use crate::backend::cuda::ht::nodes::handle::{Counts, NodesHt};
use crate::backend::cuda::ht::nodes::part::{self, Part};
use crate::backend::cuda::ht::nodes::plan::HandleParts;
use crate::backend::cuda::ht::nodes::rails::{NodesMemory, Rails};
use crate::backend::cuda::ht::shared::HtShared;
use crate::backend::cuda::ht::zones::SlotsOf;
use crate::backend::cuda::kernels::{self, LaunchShape, to_u32};
use crate::backend::cuda::network::two_sided::handshake::{Announced, NewHandle};
use crate::backend::cuda::params::common::KernelOp;
use crate::backend::cuda::params::ht::{HT_ROUTE_THREADS, HT_VERDICT_CODE_SHIFT, HtHandleMemory, HtReport};
use crate::backend::cuda::params::ht_kept::HtZones;
use crate::backend::cuda::params::ht_nodes::{
    HT_PLACE_THREADS, HtForwarded, HtNodesMemory, HtPlaceParams, HtRouteNodesParams,
};
use crate::backend::net::two_sided::Message;
use crate::backend::{HtBackend, HtRouting};
use crate::error::refusal::{InSequence, Subject};
use crate::error::{Error, Result};
use crate::model::handle_state::CallerBlock;
use crate::model::ids::SourceIx;
use crate::model::ops::{RoutingCounters, Stream};
use crate::model::tensor::DevPtr;
use std::ptr::null_mut;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};
use std::time::Duration;

const ID_BYTES: usize = size_of::<i64>();
impl Announced {
    fn takes_part(self) -> bool {
        self.verdict >> HT_VERDICT_CODE_SHIFT == 0
    }

    fn id_bytes(self) -> usize {
        if self.takes_part() { self.tokens * self.verdict as usize * ID_BYTES } else { 0 }
    }
}

/// Creates a handle. Collective.
pub fn open_handle(
    group: &Arc<HtShared>,
    rails: &Arc<Rails>,
    wanted: Result<HtRouting>,
    stream: Stream,
) -> Result<Box<dyn HtBackend>> {
    let at = &group.enter(stream)?;
    if at.is_captured() {
        return Err(Error::usage(Subject::Stream, InSequence::NoCaptureOfRouting));
    }
    let creation = Creation { group, rails, epoch: group.next_handle(), at };
    let wanted = wanted.and_then(|wanted| part::reserve(group, rails, wanted));
    let caller_block = wanted.as_ref().ok().and_then(|it| it.storage.caller_block);
    let own = match &wanted {
        Ok(HtRouting { routing, .. }) => {
            Announced { tokens: routing.tokens, verdict: verdict_with(to_u32(routing.top_k)?) }
        }
        Err(error) => Announced { tokens: 0, verdict: verdict_refusing(error) },
    };
    creation.announce(own)?;
    // From here on, other ranks depend on this one.
    let made = creation.open(own, wanted).and_then(|made| creation.keep(made, caller_block));
    made.unwrap_or_else(|error| {
        rails.network.fail(&error);
        Err(error)
    })
}

struct Creation<'a> {
    group: &'a Arc<HtShared>,
    rails: &'a Arc<Rails>,
    epoch: u32,
    at: &'a StreamScope,
}

impl Creation<'_> {
    fn new_handle(&self) -> NewHandle<'_> {
        NewHandle {
            network: &self.rails.network,
            faults: &self.group.context.faults,
            what: "HT handle",
            number: self.epoch,
        }
    }

    /// The handle, or (inner error) the refusal that all ranks know of. The outer error is this rank's alone.
    fn open(&self, own: Announced, wanted: Result<HtRouting>) -> Result<Result<NodesHt>> {
        let rails = self.rails;
        let announced = self.wait_for_announcements(own)?;
        let (part, refused) = match wanted {
            Ok(wanted) => (Part::of(self.group, rails, wanted, &announced)?, None),
            Err(error) => (Part::refusing(rails, &error), Some(error)),
        };
        let most_rows = part.routing.form.most_rows;
        self.routed(part, refused, &announced, most_rows)
    }

    /// The handle of `part` after routing. Rows beyond `most_rows`, if that is not `None`, are dropped.
    fn routed(
        &self,
        mut part: Part,
        refused: Option<Error>,
        announced: &[Announced],
        most_rows: Option<usize>,
    ) -> Result<Result<NodesHt>> {
        let rails = self.rails;
        self.route(&part, announced)?;
        let tokens = announced.iter().map(|it| it.tokens).collect();
        let (rows, counts) = self.wait_for_counts(&part.memory, tokens)?;
        if let Some(error) = refused.or_else(|| disagreement(rows, part.verdict)) {
            return Ok(Err(error));
        }
        if let Some(most) = most_rows {
            // The total counts dropped rows, too, so it is reported first; dropping edits the handle's copy of the ids.
            let total = part.counters.total.take();
            self.report(&part, &RoutingCounters { total, ..RoutingCounters::default() })?;
            part.ids = None;
            let cut = Cut { group: self.group, rails, part: &part, epoch: self.epoch, at: self.at };
            if cut.cut(most, self.new_handle().label())? {
                let again = Creation { epoch: self.group.next_handle(), ..*self };
                return again.routed(part, None, announced, None);
            }
        }
        let slots = self.finish_routing(&part, &counts)?;
        let stages = rails.plan.stages(counts.most_tokens());
        Ok(Ok(NodesHt {
            size: part.size,
            group: Arc::clone(self.group),
            rails: Arc::clone(rails),
            memory: Some(part.memory),
            base: part.base,
            grids: self.group.grids(&part.routing),
            routing: part.routing,
            epoch: self.epoch,
            rows: rows as usize,
            slots,
            counts,
            banks: rails.banks_for(stages.room)?,
            stages,
        }))
    }

    /// Stores the handle in the caller's block, if there is one; after a refusal the block gets no routing.
    fn keep(&self, made: Result<NodesHt>, caller_block: Option<CallerBlock>) -> Result<Result<Box<dyn HtBackend>>> {
        let Some(block) = caller_block else {
            return Ok(made.map(|handle| Box::new(handle) as _));
        };
        let handle = match made {
            Ok(handle) => handle,
            Err(error) => return caller_block::forget(block, self.at).map(|()| Err(error)),
        };
        caller_block::store(&handle, block, self.at)?;
        let received = handle.num_recv_tokens(Duration::MAX)?;
        let (group, rails) = (Arc::clone(self.group), Arc::clone(self.rails));
        Ok(Ok(Box::new(CallerHt { group, rails, routing: handle.routing, block, received })))
    }

    /// Announces this rank's number of tokens and verdict.
    fn announce(&self, own: Announced) -> Result<()> {
        let turn = self.group.order.begin(self.at)?;
        turn.end_after(self.rails.handshake.send(&self.new_handle(), own, self.at))
    }

    /// Waits for the announcements of the ranks that this one forwards for; its own comes first.
    fn wait_for_announcements(&self, own: Announced) -> Result<Vec<Announced>> {
        let most = self.group.plan.max_tokens;
        // Verdicts are not checked here: the routing kernel compares those of all ranks.
        let others = self.rails.handshake.wait(&self.new_handle(), most)?;
        Ok(std::iter::once(own).chain(others).collect())
    }

    /// Enqueues the exchange of ids and the kernels that determine where rows go.
    fn route(&self, part: &Part, announced: &[Announced]) -> Result<()> {
        let (rails, view) = (self.rails, &self.rails.network.view);
        let bytes: usize = announced.iter().skip(1).map(|it| it.id_bytes()).sum();
        let ids = rails.ids_for(bytes)?;
        let mut receives = Vec::new();
        let mut data = ids.data();
        let mut first = 0;
        for (index, (it, &rank)) in announced.iter().zip(view.forwarded()).enumerate() {
            let agrees = it.verdict == part.verdict && it.takes_part();
            let mut forwarded = HtForwarded {
                topk_idx: data.0 as *const i64,
                tokens: to_u32(if agrees { it.tokens } else { 0 })?,
                first: to_u32(first)?,
                rank: rank.word(),
                verdict: it.verdict,
            };
            if index == 0 {
                forwarded.topk_idx = part.routing.ids.0 as *const i64;
                forwarded.verdict = part.verdict;
            } else {
                let bytes = it.id_bytes();
                let peer = rank;
                receives.push(Message { peer, data, bytes });
                data = DevPtr(data.0 + bytes);
                first += forwarded.tokens as usize;
            }
            part.memory.forwarded.write(index, forwarded);
        }
        let own = announced.first().map_or(0, |own| own.id_bytes());
        let send = |&peer| Message { peer, data: part.routing.ids, bytes: own };
        // The device reads what was written above only after this fence.
        fence(Ordering::Release);
        let turn = self.group.order.begin(self.at)?;
        let sends = view.rail_peers.iter().map(send);
        let label = self.new_handle().label();
        let exchanges = &rails.network.exchanges;
        let kept = part.ids.map_or(Ok(()), |copy| copy.enqueue(&self.group.context, self.at));
        let exchanged = kept.and_then(|()| exchanges.enqueue(label, sends, receives, self.at.stream));
        turn.end_after(exchanged.and_then(|()| self.launch_route(part)).and_then(|()| self.launch_place(part)))
    }

    fn launch_route(&self, part: &Part) -> Result<()> {
        let (group, rails) = (self.group, self.rails);
        let work = rails.work.data().0;
        let params = HtRouteNodesParams {
            peers: *group.context.peers(),
            wait: group.context.wait(KernelOp::HtRoute),
            layout: group.layout,
            nodes: rails.nodes()?,
            handle: part.device(&rails.plan)?,
            forwarded: part.memory.forwarded.device(),
            announced: part.memory.announced.device(),
            counter: part.counter.unwrap_or_default().0 as *mut i32,
            tally: work as *mut u32,
            own_counts: (work + rails.own_counts) as *mut u64,
            max_tokens: u32::try_from(group.plan.max_tokens).unwrap_or(u32::MAX),
            epoch: self.epoch,
            bank: group.next_bank(),
            verdict: part.verdict,
        };
        let shape = LaunchShape::new(to_u32(rails.plan.forwarded + rails.plan.others + 1)?, HT_ROUTE_THREADS);
        group.context.module.launch(kernels::ht_route_nodes(), shape, &params, self.at)
    }

    fn launch_place(&self, part: &Part) -> Result<()> {
        let plan = &self.rails.plan;
        let multiprocessors = self.group.device.multiprocessors;
        let most = match granted_blocks(&self.group.plan.facts) {
            Some(blocks) => (blocks / 2).clamp(1, multiprocessors) as usize,
            None => multiprocessors as usize,
        };
        let piece_blocks = most.min(plan.chunks * (plan.forwarded - 1));
        let token_blocks = part.routing.tokens.div_ceil(HT_PLACE_THREADS as usize).clamp(1, most);
        let params = HtPlaceParams {
            nodes: self.rails.nodes()?,
            handle: part.device(plan)?,
            topk_idx: part.routing.ids.0 as *const i64,
            local_experts: to_u32(plan.local_experts)?,
            local_ranks: to_u32(plan.locals)?,
            piece_blocks: to_u32(piece_blocks)?,
        };
        let shape = LaunchShape::new(to_u32(piece_blocks + token_blocks)?, HT_PLACE_THREADS);
        self.group.context.module.launch(kernels::ht_place(), shape, &params, self.at)
    }

    /// Reports to the caller. If rows are ordered by expert, assigns their slots, and returns the number of all slots.
    fn finish_routing(&self, part: &Part, counted: &Counts) -> Result<Option<usize>> {
        let plan = &self.rails.plan;
        let HandleParts { memory, slots, zones, .. } = plan.memory(part.base.0, part.size)?;
        let zones = (self.group).zones(part.routing.form.zones, (slots, zones), part.routing.top_k)?;
        let Some(zones) = zones else {
            return self.report(part, &part.counters).map(|()| None);
        };
        let turn = self.group.order.begin(self.at)?;
        let index = plan.announced();
        let page = Some((part.memory.announced.device().wrapping_add(index), self.epoch));
        turn.end_after(self.find_slots(&memory, &zones, counted, kept::report_params(&part.counters, page)))?;
        let read = || Ok((part.memory.announced).complete(index, |it| it.epoch == self.epoch));
        Ok(Some(self.group.wait_for_routing(read)?.value as usize))
    }

    /// Enqueues reporting the numbers of rows to the caller.
    fn report(&self, part: &Part, counters: &RoutingCounters) -> Result<()> {
        let memory = part.device(&self.rails.plan)?;
        let turn = self.group.order.begin(self.at)?;
        let report = Report { rows: memory.total, counts: memory.counts, counters, zones: None };
        turn.end_after(kept::enqueue_report(self.group, &report, self.at))
    }

    /// Enqueues the kernels that assign slots: one for each rank that this one forwards for, itself last.
    fn find_slots(&self, memory: &HtNodesMemory, zones: &HtZones, counted: &Counts, report: HtReport) -> Result<()> {
        let plan = &self.rails.plan;
        let mut entries = memory.raw_entries;
        let sources = SourceIx::all(plan.forwarded).zip(self.rails.network.view.forwarded());
        let mut sources: Vec<_> = sources.zip(&counted.tokens).collect();
        sources.rotate_left(1);
        for ((source, rank), all_tokens) in sources {
            let is_own = source.index() == 0;
            let tokens = if is_own { memory.tokens as usize } else { counted.arriving(source, plan.chunks) };
            let handle = HtHandleMemory {
                entries: if is_own { memory.own_entries } else { entries },
                begins: memory.source_begins,
                departures: null_mut(),
                counts: memory.counts,
                tokens: to_u32(tokens)?,
                top_k: memory.top_k,
            };
            entries = entries.wrapping_add(all_tokens * memory.top_k as usize);
            let of = SlotsOf {
                rows: memory.total,
                sources: to_u32(plan.ranks)?,
                source: rank.word(),
                epoch: Some(self.epoch),
                finds: is_own.then_some(report),
                finish: self.group.finish(LIBRARY_BLOCK),
            };
            self.group.find_slots(&handle, zones, &of, self.at)?;
        }
        Ok(())
    }

    /// Waits for the number of rows, or the reason for a refusal, and for the numbers of the `tokens` that travel.
    fn wait_for_counts(&self, memory: &NodesMemory, tokens: Vec<usize>) -> Result<(u32, Counts)> {
        let plan = &self.rails.plan;
        let read = |index| (memory.announced).complete(index, |it| it.epoch == self.epoch);
        let wait = |index| self.group.wait_for_routing(|| Ok(read(index)));
        let last = plan.announced() - 1;
        let rows = wait(last)?.value;
        let words = (0..last).map(|index| Ok(wait(index)?.value as usize));
        let counts =
            Counts { words: words.collect::<Result<_>>()?, tokens, ends: plan.chunks + 1, others: plan.others };
        Ok((rows, counts))
    }
}
