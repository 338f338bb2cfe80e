//! Dispatch over several nodes: rows cross the network in stages, and a kernel per stage forwards them within the node.
//!
//! The first two stages are on the network while the kernel for this node's own rows runs. A bank is refilled once the
//! kernel that reads it has run.

use crate::backend::cuda::ht::grid::HtKind;
use crate::backend::cuda::ht::kept::{self, Report};
use crate::backend::cuda::ht::nodes::handle::NodesHt;
use crate::backend::cuda::ht::nodes::messages::{Bank, TokenBytes};
use crate::backend::cuda::ht::nodes::stage::{Enqueueing, Handle, Headers, STAGES_IN_FLIGHT, Tokens};
use crate::backend::cuda::ht::plan::HtLaunch;
use crate::backend::cuda::ht::rows::MovedRow;
use crate::backend::cuda::ht::shared::{Inputs, dispatch_params, scaled_rows_of_caller, scaled_rows_of_message};
use crate::backend::cuda::kernels::{self, LaunchShape, to_u32};
use crate::backend::cuda::params::common::KernelOp;
use crate::backend::cuda::params::ht::{HtScaledDispatchParams, HtScaledRows};
use crate::backend::cuda::params::ht_kept::{HtZonesDispatchNodesParams, HtZonesScaledDispatchNodesParams};
use crate::backend::cuda::params::ht_nodes::{
    HT_PACK_THREADS, HtDispatchNodesParams, HtPackParams, HtScaledDispatchNodesParams, HtScaledPackParams, HtStage,
};
use crate::backend::cuda::scaled_rows::scaled_rows;
use crate::error::Result;
use crate::model::ids::SourceIx;
use crate::model::ops::{HtDispatch, Stream};
use crate::model::scales::Cast;
use std::ops::Range;

/// Blocks of `ht_pack`: enough to keep up with a fast network.
const PACK_BLOCKS: u32 = 16;

const ID_BYTES: usize = size_of::<i64>();
const WEIGHT_BYTES: usize = size_of::<f32>();

/// A dispatch, and the launches of its kernels.
struct Dispatch<'a> {
    handle: Handle<'a>,
    op: &'a HtDispatch,
    /// The launch for own tokens, and the one for tokens that arrived from other nodes, in wire form.
    launch: HtLaunch,
    remote_launch: HtLaunch,
    own: Inputs,
}

/// Enqueues the dispatch.
pub fn run(handle: &NodesHt, op: &HtDispatch, stream: Stream) -> Result<()> {
    let group = &handle.group;
    let kind = HtKind::from(op);
    let row = MovedRow::from(op);
    let launch = group.plan.launch(kind, &row, &handle.grids, op.launch)?;
    let remote_launch = match row.cast {
        None => launch,
        Some(_) => group.plan.launch(kind, &row.wire.into(), &handle.grids, op.launch)?,
    };
    let dispatch =
        Dispatch { handle: Handle::new(handle)?, op, launch, remote_launch, own: Inputs::of(op, &handle.routing) };
    let at = &group.enter(stream)?;
    handle.stay_in_graph(at);
    let order = group.order.begin(at)?;
    let mut turn = handle.rails.turn.lock();
    let mut enqueueing = Enqueueing::new(&handle.rails, &mut turn, at, "HT dispatch")?;
    let enqueued = dispatch.enqueue(&mut enqueueing);
    let enqueued = enqueued.and_then(|()| kept::move_ids(group, op, to_u32(handle.routing.top_k)?, at));
    let enqueued = enqueued.and_then(|()| kept::enqueue_report(group, &dispatch.report(), at));
    enqueueing.end(group, order, enqueued)
}

/// Whether kernels check the headers of a stage's messages. One check per operation is enough, as a rank sends its rows
/// even if it has failed.
fn has_header(stage: usize) -> bool {
    stage == 0
}

impl Dispatch<'_> {
    fn enqueue(&self, at: &mut Enqueueing<'_>) -> Result<()> {
        let chunks = &self.handle.stages.chunks;
        at.fork()?;
        for (stage, chunks) in chunks.iter().enumerate().take(STAGES_IN_FLIGHT) {
            self.send(at, stage, chunks)?;
        }
        self.launch_own(at)?;
        for (stage, chunks_of_stage) in chunks.iter().enumerate() {
            at.wait_for(stage)?;
            self.launch_remote(at, stage, chunks_of_stage)?;
            if let Some(later) = chunks.get(stage + STAGES_IN_FLIGHT) {
                at.fork()?;
                self.send(at, stage + STAGES_IN_FLIGHT, later)?;
            }
        }
        Ok(())
    }

    fn bytes(&self) -> TokenBytes {
        // A rank without tokens may have NULL for its ids.
        let columns = match self.op.routing_in {
            None => 0,
            Some(_) => self.handle.routing.top_k,
        };
        TokenBytes::new(self.op.wire(), columns * (ID_BYTES + WEIGHT_BYTES))
    }

    /// The bank of messages from the remote sources.
    fn arriving(&self, stage: usize) -> Bank {
        self.handle.banks.of_remote(stage, self.bytes())
    }

    /// The bank of messages to the rail peers.
    fn departing(&self, stage: usize) -> Bank {
        self.handle.banks.own(stage, self.bytes())
    }

    /// Enqueues packing and exchanging a stage's messages.
    fn send(&self, at: &mut Enqueueing<'_>, stage: usize, chunks: &Range<usize>) -> Result<()> {
        if self.needs_packing(stage, chunks) {
            self.launch_pack(at, stage, chunks)?;
        }
        let (counts, view) = (&self.handle.counts, &self.handle.rails.network.view);
        let to = self.departing(stage);
        let sends = view.rail_peers.iter().enumerate().flat_map(|(other, &peer)| {
            let tokens = counts.departing_in(other, chunks);
            let apart = self.rows_go_separately(counts.all_depart(other), tokens);
            let rows = self.op.tokens.0 + counts.departing(other, chunks.start) * to.bytes.row;
            to.parcel(other, tokens, has_header(stage)).parts(peer, apart.then_some(rows))
        });
        let from = self.arriving(stage);
        let receives = view.remote().iter().enumerate().flat_map(|(index, &peer)| {
            let source = SourceIx::new(1 + index);
            let tokens = counts.arriving_in(source, chunks);
            let apart = self.rows_go_separately(counts.all_arrive(source), tokens);
            let parcel = from.parcel(index, tokens, has_header(stage));
            parcel.parts(peer, apart.then_some(parcel.first_row))
        });
        at.exchange(stage, sends, receives)
    }

    /// Whether rows go as a second message, directly from the caller's tensor; sender and receiver get the same answer.
    /// Rows with scales never do, as their packed form exists only in the message.
    fn rows_go_separately(&self, all_travel: bool, tokens: usize) -> bool {
        let may_be = all_travel && self.op.scaled.is_none();
        may_be && tokens * self.bytes().row > self.handle.plan().packed_bytes
    }

    fn needs_packing(&self, stage: usize, chunks: &Range<usize>) -> bool {
        let counts = &self.handle.counts;
        let is_packed = |other: usize| {
            let tokens = counts.departing_in(other, chunks);
            tokens > 0 && !self.rows_go_separately(counts.all_depart(other), tokens)
        };
        has_header(stage) || self.bytes().tail > 0 || (0..self.handle.plan().others).any(is_packed)
    }

    /// Enqueues packing the messages, on the side stream.
    fn launch_pack(&self, at: &Enqueueing<'_>, stage: usize, chunks: &Range<usize>) -> Result<()> {
        let (handle, op) = (&self.handle, self.op);
        let plan = handle.plan();
        let header = handle.header(&self.launch, stage)?;
        let bank = self.departing(stage);
        let params = HtPackParams {
            headers: handle.headers(KernelOp::HtDispatch, header, bank, plan.others)?,
            handle: handle.device,
            tokens: op.tokens.0 as *const u8,
            topk_idx: self.own.ids as *const i64,
            weights: self.own.weights as *const f32,
            packed_bytes: match &op.scaled {
                None => plan.packed_bytes as u64,
                Some(_) => u64::MAX,
            },
            chunks: to_u32(plan.chunks)?,
            first_chunk: to_u32(chunks.start)?,
            end_chunk: to_u32(chunks.end)?,
        };
        let shape = LaunchShape::new(PACK_BLOCKS.min(handle.group.device.multiprocessors), HT_PACK_THREADS);
        let module = &handle.group.context.module;
        match &op.scaled {
            None => module.launch_on(kernels::ht_pack(), shape, &params, at.side),
            Some(scaled) => {
                let kernel = match scaled.cast() {
                    Some(cast) => kernels::ht_pack_cast(cast.from)?,
                    None => kernels::ht_pack_scaled(),
                };
                let params = HtScaledPackParams { pack: params, rows: scaled_rows(op.row, scaled)? };
                module.launch_on(kernel, shape, &params, at.side)
            }
        }
    }

    fn launch_own(&self, at: &Enqueueing<'_>) -> Result<()> {
        let op = self.op;
        let chunks = 0..self.handle.plan().chunks;
        let tokens = self.handle.own_tokens(&chunks);
        let stage = self.handle.stage(&chunks, None, None)?;
        let params = self.params(&self.launch, stage, &tokens, &self.own)?;
        match &op.scaled {
            None => self.launch_plain(at, &params),
            Some(scaled) => {
                let rows = scaled_rows_of_caller(op.row, scaled, &self.launch)?;
                self.launch_scaled(at, &self.launch, scaled.cast(), params, rows)
            }
        }
    }

    fn launch_remote(&self, at: &Enqueueing<'_>, stage: usize, chunks: &Range<usize>) -> Result<()> {
        let bank = self.arriving(stage);
        let tokens = self.handle.remote_tokens(chunks);
        let headers = has_header(stage).then_some(Headers {
            of: bank,
            from_rail_peers: false,
            expected: self.handle.header(&self.launch, stage)?,
        });
        let rows = self.handle.stage(chunks, Some(bank), headers)?;
        // Only rows: ids and weights are read from the messages.
        let inputs = Inputs { rows: bank.rows, ..Inputs::default() };
        let launch = &self.remote_launch;
        let params = self.params(launch, rows, &tokens, &inputs)?;
        match &self.op.scaled {
            None => self.launch_plain(at, &params),
            Some(scaled) => {
                let rows = scaled_rows_of_message(self.op.row, scaled, launch)?;
                self.launch_scaled(at, launch, None, params, rows)
            }
        }
    }

    /// The parameters for tokens with these inputs.
    fn params(
        &self,
        launch: &HtLaunch,
        stage: HtStage,
        tokens: &Tokens,
        inputs: &Inputs,
    ) -> Result<HtDispatchNodesParams> {
        let common = self.handle.common(KernelOp::HtDispatch, launch, tokens)?;
        Ok(HtDispatchNodesParams { of_node: dispatch_params(self.op, common, inputs), stage })
    }

    fn launch_plain(&self, at: &Enqueueing<'_>, rows: &HtDispatchNodesParams) -> Result<()> {
        let (module, shape) = (&self.handle.group.context.module, self.launch.launch);
        let Some(zones) = self.handle.zones else {
            return module.launch(kernels::ht_dispatch_nodes(), shape, rows, at.at);
        };
        let params = HtZonesDispatchNodesParams { rows: *rows, zones };
        module.launch(kernels::ht_dispatch_zones_nodes(), shape, &params, at.at)
    }

    /// Launches the kernel for rows with scales: those of a cast, or `None`.
    fn launch_scaled(
        &self,
        at: &Enqueueing<'_>,
        launch: &HtLaunch,
        cast: Option<&Cast>,
        params: HtDispatchNodesParams,
        scaled: HtScaledRows,
    ) -> Result<()> {
        let (module, shape) = (&self.handle.group.context.module, launch.launch);
        let rows = params.of_node;
        let rows =
            HtScaledDispatchNodesParams { of_node: HtScaledDispatchParams { rows, scaled }, stage: params.stage };
        if let Some(zones) = self.handle.zones {
            let params = HtZonesScaledDispatchNodesParams { rows, zones };
            return module.launch(kernels::ht_dispatch_zones_nodes_scaled(), shape, &params, at.at);
        }
        let kernel = match cast {
            Some(_) => kernels::ht_dispatch_nodes_cast(),
            None => kernels::ht_dispatch_nodes_scaled(),
        };
        module.launch(kernel, shape, &rows, at.at)
    }

    /// What it reports to the caller.
    fn report(&self) -> Report<'_> {
        let device = &self.handle.device;
        Report { rows: device.total, counts: device.counts, counters: &self.op.counters, zones: self.handle.zones }
    }
}
