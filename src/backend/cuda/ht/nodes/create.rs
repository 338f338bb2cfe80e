//! Creation of an HT handle over several nodes.
//!
//! First ranks send their number of tokens along the rails, or that they refuse; then their ids. A kernel finds
//! out, with the ranks of the node, where everything goes. The host waits for these steps, as it must know how
//! many rows each message has: so operations need not wait.

use crate::backend::HtRouting;
use crate::backend::cuda::driver::function::LaunchShape;
use crate::backend::cuda::driver::stream::StreamScope;
use crate::backend::cuda::ht::agreement::{disagreement, verdict_refusing, verdict_with};
use crate::backend::cuda::ht::nodes::handle::{Counts, NodesHt};
use crate::backend::cuda::ht::nodes::memory::NodesMemory;
use crate::backend::cuda::ht::nodes::plan::{HandleSize, NodesPlan};
use crate::backend::cuda::ht::nodes::rails::Rails;
use crate::backend::cuda::ht::shared::HtShared;
use crate::backend::cuda::kernels;
use crate::backend::cuda::params::common::KernelOp;
use crate::backend::cuda::params::ht::{HT_ROUTE_THREADS, HT_VERDICT_CODE_SHIFT};
use crate::backend::cuda::params::ht_nodes::{
    HT_PLACE_THREADS, HtNodesMemory, HtPlaceParams, HtRouteNodesParams, HtSource, HtTold,
};
use crate::backend::cuda::regions::to_u32;
use crate::backend::net::two_sided::{Label, Message};
use crate::error::refusal::{AmongRanks, InSequence, Subject};
use crate::error::{Error, Result};
use crate::model::ops::{IdWidth, Routing, Stream};
use crate::model::tensor::DevPtr;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

const ID_BYTES: usize = size_of::<i64>();
const HEADER_BYTES: usize = 2 * size_of::<HtTold>();

/// What a rank says of its part.
#[derive(Clone, Copy)]
struct Header {
    tokens: usize,
    verdict: u32,
}

impl Header {
    fn takes_part(self) -> bool {
        self.verdict >> HT_VERDICT_CODE_SHIFT == 0
    }

    fn id_bytes(self) -> usize {
        if self.takes_part() {
            self.tokens * self.verdict as usize * ID_BYTES
        } else {
            0
        }
    }
}

/// This rank's part of a new handle. Collective.
pub fn open_handle(
    group: &Arc<HtShared>,
    rails: &Arc<Rails>,
    wanted: Result<HtRouting>,
    stream: Stream,
) -> Result<NodesHt> {
    let epoch = group.next_handle();
    let at = &group.enter(stream)?;
    if at.is_captured() {
        return Err(Error::usage(
            Subject::Stream,
            InSequence::NoCaptureOfRouting,
        ));
    }
    let creation = Creation {
        group,
        rails,
        epoch,
        at,
    };
    let own = match &wanted {
        Ok(HtRouting { routing, .. }) => Header {
            tokens: routing.tokens,
            verdict: verdict_with(to_u32(routing.top_k)?),
        },
        Err(error) => Header {
            tokens: 0,
            verdict: verdict_refusing(error),
        },
    };
    creation.send_header(own)?;
    // From here on the others count on this rank.
    creation.open(own, wanted).unwrap_or_else(|error| {
        rails.network.fail(&error);
        Err(error)
    })
}

/// What this rank brings to a handle.
struct Part {
    memory: Arc<NodesMemory>,
    routing: Routing,
    counter: Option<DevPtr>,
    verdict: u32,
    /// Tokens of the remote sources.
    remote: usize,
}

impl Part {
    fn refusing(rails: &Rails, error: &Error) -> Self {
        Self {
            memory: Arc::clone(&rails.spare),
            routing: Routing {
                tokens: 0,
                top_k: 0,
                ids: DevPtr::default(),
                width: IdWidth::Bits64,
            },
            counter: None,
            verdict: verdict_refusing(error),
            remote: 0,
        }
    }

    fn device(&self, plan: &NodesPlan) -> Result<HtNodesMemory> {
        let (own, remote, top_k) = (self.routing.tokens, self.remote, self.routing.top_k);
        let size = HandleSize { own, remote, top_k };
        self.memory.memory(plan, size)
    }
}

struct Creation<'a> {
    group: &'a Arc<HtShared>,
    rails: &'a Arc<Rails>,
    epoch: u32,
    at: &'a StreamScope,
}

impl Creation<'_> {
    fn label(&self) -> Label {
        Label {
            what: "HT handle",
            number: u64::from(self.epoch),
        }
    }

    /// The handle, or the refusal that all ranks come to. Another error is this rank's alone, and the others do not
    /// know of it.
    fn open(&self, own: Header, wanted: Result<HtRouting>) -> Result<Result<NodesHt>> {
        let rails = self.rails;
        let headers = self.wait_for_headers(own)?;
        let (part, refused) = match wanted {
            Ok(wanted) => (self.prepare(wanted, &headers)?, None),
            Err(error) => (Part::refusing(rails, &error), Some(error)),
        };
        self.route(&part, &headers)?;
        let tokens = headers.iter().map(|header| header.tokens).collect();
        let (rows, counts) = self.wait_for_counts(&part.memory, tokens)?;
        if let Some(error) = refused.or_else(|| disagreement(rows, part.verdict)) {
            return Ok(Err(error));
        }
        let passes = rails.plan.passes(counts.most_tokens());
        Ok(Ok(NodesHt {
            remote: part.remote,
            group: Arc::clone(self.group),
            rails: Arc::clone(rails),
            memory: part.memory,
            routing: part.routing,
            epoch: self.epoch,
            received: rows as usize,
            counts,
            banks: rails.banks_for(passes.room)?,
            passes,
        }))
    }

    /// Sends this rank's header along its rails.
    fn send_header(&self, own: Header) -> Result<()> {
        let rails = self.rails;
        let told = |value| HtTold {
            value,
            epoch: self.epoch,
        };
        rails.headers.write(0, told(to_u32(own.tokens)?));
        rails.headers.write(1, told(own.verdict));
        // The device reads them after this.
        fence(Ordering::Release);
        let at = |source: usize| DevPtr(rails.headers.device() as usize + source * HEADER_BYTES);
        let message = |peer, source| Message {
            peer,
            data: at(source),
            bytes: HEADER_BYTES,
        };
        let sends: Vec<_> = rails.gateways.iter().map(|&it| message(it, 0)).collect();
        let sources = rails.remote_sources().iter().zip(1..);
        let receives: Vec<_> = sources.map(|(&peer, it)| message(peer, it)).collect();
        let transport = rails.network.transport()?;
        let turn = self.group.order.begin(self.at)?;
        let sent = transport.exchange(self.label(), &sends, &receives, self.at.stream);
        turn.end_after(sent)
    }

    /// Waits for the headers of this rank's sources; its own is the first.
    fn wait_for_headers(&self, own: Header) -> Result<Vec<Header>> {
        let transport = self.rails.network.transport()?;
        let mut mark = self.rails.headers_arrived.lock();
        mark.record(self.at.stream)?;
        self.group
            .wait_for_routing(|| Ok(mark.is_over()?.then_some(())))?;
        if let Some(fault) = transport.health() {
            return Err(fault);
        }
        let sources = self.rails.remote_sources().iter().zip(1..);
        let others = sources.map(|(&rank, source)| self.header(rank, source));
        let headers = std::iter::once(Ok(own))
            .chain(others)
            .collect::<Result<Vec<_>>>()?;
        self.check(&headers)?;
        Ok(headers)
    }

    /// The header of `rank`, which is source number `source`.
    fn header(&self, rank: usize, source: usize) -> Result<Header> {
        let word = |index| {
            let word = self.rails.headers.read(2 * source + index);
            let word = word.ok_or_else(|| Error::internal("no header"))?;
            if word.epoch == self.epoch {
                return Ok(word.value);
            }
            // The rank was at something else.
            let same = AmongRanks::Same { rank };
            Err(Error::usage(Subject::Handle, same).got(self.epoch, word.epoch))
        };
        Ok(Header {
            tokens: word(0)? as usize,
            verdict: word(1)?,
        })
    }

    fn check(&self, headers: &[Header]) -> Result<()> {
        let most = self.group.plan.max_tokens();
        match headers.iter().find(|header| header.tokens > most) {
            None => Ok(()),
            Some(_) => Err(Error::internal(format!(
                "a rank announces more than {most} tokens"
            ))),
        }
    }

    /// Memory for the handle.
    fn prepare(&self, wanted: HtRouting, headers: &[Header]) -> Result<Part> {
        let routing = wanted.routing;
        let verdict = verdict_with(to_u32(routing.top_k)?);
        let agreeing = headers.iter().skip(1).filter(|it| it.verdict == verdict);
        let remote = agreeing.map(|header| header.tokens).sum();
        let rails = self.rails;
        let (own, top_k) = (routing.tokens, routing.top_k);
        let size = HandleSize { own, remote, top_k };
        let (_, bytes) = rails.plan.memory(0, size)?;
        let context = self.group.context.module.context();
        // Of one size where the group has a bound, so that later handles can use it.
        let room = |own, remote| HandleSize { own, remote, top_k };
        let room = match self.group.plan.row_sizes().1 {
            Some(most) => room(most, (rails.plan.sources - 1) * most),
            None => room(own.next_power_of_two(), remote),
        };
        let make = || NodesMemory::new(context, &rails.memory, &rails.plan, room);
        Ok(Part {
            memory: rails.pool.take(|memory| memory.waste(bytes), make)?,
            routing,
            counter: wanted.counter,
            verdict,
            remote,
        })
    }

    /// Enqueues the exchange of ids and the kernels that find out where rows go.
    fn route(&self, part: &Part, headers: &[Header]) -> Result<()> {
        let rails = self.rails;
        let bytes: usize = headers.iter().skip(1).map(|it| it.id_bytes()).sum();
        let ids = rails.ids_for(bytes)?;
        let mut receives = Vec::new();
        let mut data = ids.data();
        let mut first = 0;
        for (index, (header, &rank)) in headers.iter().zip(rails.network.sources()).enumerate() {
            let agrees = header.verdict == part.verdict && header.takes_part();
            let mut source = HtSource {
                topk_idx: data.0 as *const i64,
                tokens: to_u32(if agrees { header.tokens } else { 0 })?,
                first: to_u32(first)?,
                rank: to_u32(rank)?,
                verdict: header.verdict,
            };
            if index == 0 {
                source.topk_idx = part.routing.ids.0 as *const i64;
                source.verdict = part.verdict;
            } else {
                let bytes = header.id_bytes();
                let peer = rank;
                receives.push(Message { peer, data, bytes });
                data = DevPtr(data.0 + bytes);
                first += source.tokens as usize;
            }
            part.memory.sources.write(index, source);
        }
        let own = headers.first().map_or(0, |own| own.id_bytes());
        let send = |&peer: &usize| Message {
            peer,
            data: part.routing.ids,
            bytes: own,
        };
        let sends: Vec<_> = rails.gateways.iter().map(send).collect();
        // The device reads the sources after this.
        fence(Ordering::Release);
        let turn = self.group.order.begin(self.at)?;
        let transport = rails.network.transport()?;
        let exchanged = transport.exchange(self.label(), &sends, &receives, self.at.stream);
        turn.end_after(
            exchanged
                .and_then(|()| self.launch_route(part))
                .and_then(|()| self.launch_place(part)),
        )
    }

    fn launch_route(&self, part: &Part) -> Result<()> {
        let (group, rails) = (self.group, self.rails);
        let work = rails.work.data().0;
        let params = HtRouteNodesParams {
            peers: group.context.peers(),
            wait: group.context.wait(KernelOp::HtRoute),
            layout: group.layout,
            nodes: rails.nodes()?,
            handle: part.device(&rails.plan)?,
            sources: part.memory.sources.device(),
            told: part.memory.told.device(),
            counter: part.counter.unwrap_or_default().0 as *mut i32,
            received: part.memory.received.device(),
            tally: work as *mut u32,
            own_counts: (work + rails.own_counts) as *mut u64,
            max_tokens: u32::try_from(group.plan.max_tokens()).unwrap_or(u32::MAX),
            epoch: self.epoch,
            bank: group.next_bank(),
            verdict: part.verdict,
        };
        let shape = LaunchShape {
            blocks: to_u32(rails.plan.sources + rails.plan.others + 1)?,
            threads: HT_ROUTE_THREADS,
            shared_bytes: 0,
        };
        let module = &group.context.module;
        module.launch(kernels::ht_route_nodes(), shape, &params, self.at)
    }

    fn launch_place(&self, part: &Part) -> Result<()> {
        let plan = &self.rails.plan;
        let params = HtPlaceParams {
            nodes: self.rails.nodes()?,
            handle: part.device(plan)?,
            topk_idx: part.routing.ids.0 as *const i64,
            local_experts: to_u32(plan.local_experts)?,
            local_ranks: to_u32(plan.locals)?,
            piece_blocks: 0,
        };
        let multiprocessors = self.group.device.multiprocessors;
        let most = match self.group.plan.granted_blocks() {
            Some(blocks) => (blocks / 2).clamp(1, multiprocessors) as usize,
            None => multiprocessors as usize,
        };
        let pieces = plan.chunks * (plan.sources - 1);
        let homes = part.routing.tokens.div_ceil(HT_PLACE_THREADS as usize);
        let (piece_blocks, home_blocks) = (pieces.min(most), homes.clamp(1, most));
        let params = HtPlaceParams {
            piece_blocks: to_u32(piece_blocks)?,
            ..params
        };
        let shape = LaunchShape {
            blocks: to_u32(piece_blocks + home_blocks)?,
            threads: HT_PLACE_THREADS,
            shared_bytes: 0,
        };
        let module = &self.group.context.module;
        module.launch(kernels::ht_place(), shape, &params, self.at)
    }

    /// Waits for the number of rows, or why there is none, and for what travels of the sources' `tokens`.
    fn wait_for_counts(&self, memory: &NodesMemory, tokens: Vec<usize>) -> Result<(u32, Counts)> {
        let received = || Ok(memory.received.complete(0, |it| it.epoch == self.epoch));
        let rows = self.group.wait_for_routing(received)?.rows;
        let plan = &self.rails.plan;
        let words: Vec<usize> = (0..plan.told())
            .map(|index| {
                let told = || Ok(memory.told.complete(index, |it| it.epoch == self.epoch));
                Ok(self.group.wait_for_routing(told)?.value as usize)
            })
            .collect::<Result<_>>()?;
        let counts = Counts {
            words,
            tokens,
            ends: plan.chunks + 1,
            others: plan.others,
        };
        Ok((rows, counts))
    }
}
