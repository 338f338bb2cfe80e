//! Combine over several nodes: for each stage a kernel sums the node's rows for remote tokens, the sums go home over
//! the network, and another kernel adds them to the rows of the home node.
//!
//! While the sums of one stage are on the network, the kernel of the next stage runs. A bank is refilled once the
//! messages, or the kernel, that read it are done.

use crate::backend::cuda::ht::kept;
use crate::backend::cuda::ht::nodes::handle::NodesHt;
use crate::backend::cuda::ht::nodes::messages::{Bank, TokenBytes};
use crate::backend::cuda::ht::nodes::stage::{
    Enqueueing, Handle, Headers, NO_MESSAGES, STAGES_IN_FLIGHT, Tokens, offset_or_null,
};
use crate::backend::cuda::ht::plan::HtLaunch;
use crate::backend::cuda::ht::shared::{Outputs, combine_params};
use crate::backend::cuda::kernels::{self, LaunchShape, to_u32};
use crate::backend::cuda::params::common::{KernelOp, OWN_NODE_FIRST};
use crate::backend::cuda::params::ht_kept::HtZonesCombineNodesParams;
use crate::backend::cuda::params::ht_nodes::{HT_HEADER_THREADS, HtCombineNodesParams, HtPartials, HtStage};
use crate::error::Result;
use crate::model::ids::SourceIx;
use crate::model::ops::{HtCombine, Stream};
use std::ops::Range;
use std::ptr::null;

/// No partial sums: for remote tokens, whose sums go home first.
const NO_PARTIALS: HtPartials = HtPartials {
    messages: NO_MESSAGES,
    departing_index: null(),
    departing: null(),
    expert_places: null(),
    tokens: 0,
    chunk_ends: 0,
    others: 0,
    own_place: OWN_NODE_FIRST,
};

/// A combine, and the launches of its kernels.
struct Combine<'a> {
    handle: Handle<'a>,
    op: &'a HtCombine,
    launch: HtLaunch,
    columns: usize,
}

/// Enqueues the combine.
pub fn run(handle: &NodesHt, op: &HtCombine, stream: Stream) -> Result<()> {
    let group = &handle.group;
    let columns = op.gradients.map_or(0, |gradients| gradients.top_k);
    let combine = Combine {
        handle: Handle::new(handle)?,
        op,
        launch: group.plan.launch(op.into(), &op.row.into(), &handle.grids, op.launch)?,
        columns,
    };
    let at = &group.enter(stream)?;
    handle.stay_in_graph(at);
    let order = group.order.begin(at)?;
    let mut turn = handle.rails.turn.lock();
    let mut enqueueing = Enqueueing::new(&handle.rails, &mut turn, at, "HT combine")?;
    let enqueued = combine.enqueue(&mut enqueueing);
    let enqueued = enqueued.and_then(|()| kept::order_gradients(group, op, &handle.routing, at));
    enqueueing.end(group, order, enqueued)
}

impl Combine<'_> {
    fn enqueue(&self, at: &mut Enqueueing<'_>) -> Result<()> {
        let chunks = &self.handle.stages.chunks;
        for (stage, chunks) in chunks.iter().enumerate().take(STAGES_IN_FLIGHT) {
            self.sum_remote(at, stage, chunks)?;
        }
        for (stage, chunks_of_stage) in chunks.iter().enumerate() {
            at.wait_for(stage)?;
            self.launch_own(at, stage, chunks_of_stage)?;
            if let Some(later) = chunks.get(stage + STAGES_IN_FLIGHT) {
                self.sum_remote(at, stage + STAGES_IN_FLIGHT, later)?;
            }
        }
        Ok(())
    }

    /// Bytes of a row and its gradients.
    fn bytes(&self) -> TokenBytes {
        TokenBytes::new(self.op.row, self.columns * size_of::<f32>())
    }

    /// The bank of this node's sums, which go to the remote sources.
    fn departing(&self, stage: usize) -> Bank {
        self.handle.banks.of_remote(stage, self.bytes())
    }

    /// The bank of other nodes' sums, which come from the rail peers.
    fn arriving(&self, stage: usize) -> Bank {
        self.handle.banks.own(stage, self.bytes())
    }

    /// Enqueues summing a stage of remote tokens, and sending the sums home.
    fn sum_remote(&self, at: &mut Enqueueing<'_>, stage: usize, chunks: &Range<usize>) -> Result<()> {
        let counts = &self.handle.counts;
        let tokens = self.handle.remote_tokens(chunks);
        let bank = self.departing(stage);
        let rows = self.handle.stage(chunks, Some(bank), None)?;
        let out = Outputs { rows: bank.rows, gradients: 0 };
        self.launch(at, rows, &tokens, out, NO_PARTIALS)?;
        at.fork()?;
        self.launch_headers(at, stage, bank)?;
        let view = &at.rails.network.view;
        let home = view.remote().iter().enumerate().map(|(index, &peer)| {
            let tokens = counts.arriving_in(SourceIx::new(1 + index), chunks);
            bank.parcel(index, tokens, true).with_rows(peer)
        });
        let bank = self.arriving(stage);
        let come = view.rail_peers.iter().enumerate().map(|(other, &peer)| {
            let tokens = counts.departing_in(other, chunks);
            bank.parcel(other, tokens, true).with_rows(peer)
        });
        at.exchange(stage, home, come)
    }

    /// Enqueues writing the headers, which say whether the sums are valid, on the side stream. The first stage also
    /// begins the epoch, even on a rank that sends no sums.
    fn launch_headers(&self, at: &Enqueueing<'_>, stage: usize, bank: Bank) -> Result<()> {
        let (handle, count) = (&self.handle, self.handle.plan().forwarded - 1);
        if count == 0 && stage > 0 {
            return Ok(());
        }
        let header = handle.header(&self.launch, stage)?;
        let params = handle.headers(KernelOp::HtCombine, header, bank, count)?;
        let shape = LaunchShape::new(1, HT_HEADER_THREADS);
        self.handle.group.context.module.launch_on(kernels::ht_header(), shape, &params, at.side)
    }

    /// Enqueues summing a stage of this rank's own tokens.
    fn launch_own(&self, at: &Enqueueing<'_>, stage: usize, chunks: &Range<usize>) -> Result<()> {
        let (handle, op) = (&self.handle, self.op);
        let tokens = handle.own_tokens(chunks);
        let bank = self.arriving(stage);
        let (device, plan) = (&handle.device, handle.plan());
        let partials = HtPartials {
            messages: bank.messages()?,
            departing_index: device.departing_index.wrapping_add(tokens.first),
            departing: device.departing.wrapping_add(chunks.start),
            expert_places: device.expert_places.wrapping_add(tokens.first * handle.routing.top_k),
            tokens: device.tokens,
            chunk_ends: to_u32(plan.chunks + 1)?,
            others: to_u32(plan.others)?,
            own_place: handle.rails.network.own_node_order(),
        };
        let (row, gradients) = (bank.bytes.row, self.columns * size_of::<f32>());
        let all = Outputs::of(op);
        let out = Outputs {
            rows: offset_or_null(all.rows, tokens.first * row),
            gradients: offset_or_null(all.gradients, tokens.first * gradients),
        };
        let headers = Headers { of: bank, from_rail_peers: true, expected: handle.header(&self.launch, stage)? };
        let rows = handle.stage(chunks, None, Some(headers))?;
        self.launch(at, rows, &tokens, out, partials)
    }

    /// Launches the kernel for tokens whose sums and gradients go to `out`.
    fn launch(
        &self,
        at: &Enqueueing<'_>,
        stage: HtStage,
        tokens: &Tokens,
        out: Outputs,
        partials: HtPartials,
    ) -> Result<()> {
        let (handle, op) = (&self.handle, self.op);
        let common = handle.common(KernelOp::HtCombine, &self.launch, tokens)?;
        let rows = HtCombineNodesParams { of_node: combine_params(op, common, &out), stage, partials };
        let (module, shape) = (&handle.group.context.module, self.launch.launch);
        let Some(zones) = handle.zones else {
            return module.launch(kernels::ht_combine_nodes(op.row.dtype)?, shape, &rows, at.at);
        };
        let kernel = kernels::ht_combine_zones_nodes(op.row.dtype)?;
        module.launch(kernel, shape, &HtZonesCombineNodesParams { rows, zones }, at.at)
    }
}
