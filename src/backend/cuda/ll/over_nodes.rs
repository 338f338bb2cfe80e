//! LL operations over several nodes: which messages travel along the rails, and which kernels run between them.
//!
//! Dispatch: a kernel packs rows and ids, which go to the rail peers; then one kernel sends the rows of all forwarded
//! ranks within the node, and receives. Combine: weights go to the rail peers; a kernel sends the rows of this rank's
//! experts to their home ranks or their forwarders, and sums what arrives for the forwarded ranks; the sums go home,
//! where a last kernel adds them to the home node's. Each exchange takes one message per rank, as every message costs
//! the network's latency.
//!
//! A whole operation runs all of this on the caller's stream. The send phase of a staged operation runs what waits for
//! the network in the background, except the exchange of weights, which expert ranks need for their sums.

use crate::backend::cuda::driver::stream::StreamScope;
use crate::backend::cuda::kernels::{self, LaunchShape, to_u32};
use crate::backend::cuda::ll::chunks::ChunkSize;
use crate::backend::cuda::ll::handle::{Handle, SourceTokens, rows_with_scales};
use crate::backend::cuda::ll::launch::{DispatchGrid, Grid, LaunchPart};
use crate::backend::cuda::ll::network::{ChannelMemory, HEADER_BYTES, LlNetwork, MessageBuffers};
use crate::backend::cuda::order::Turn;
use crate::backend::cuda::params::common::MessageHeader;
use crate::backend::cuda::params::ll::{
    LL_COMBINE_MANY_THREADS, LL_DISPATCH_THREADS, LL_TOPK_WEIGHTS_THREADS, LlCombineNodesParams, LlDispatchNodesParams,
    LlNodes, LlPhase, LlRankDispatchNodesParams, LlRankScaledDispatchNodesParams, LlScaledDispatchNodesParams,
    LlTopkWeightsParams,
};
use crate::backend::cuda::params::ll_pack::{LL_PACK_THREADS, LlPackParams, LlRankPackParams, LlScaledPackParams};
use crate::backend::cuda::scaled_rows::ScalesWord;
use crate::backend::net::two_sided::{Label, Message};
use crate::error::Result;
use crate::model::ids::GroupRank;
use crate::model::ops::{LlCombine, LlDispatch, LlOp, RankMajorTopk, Routing, RowType};
use crate::model::tensor::DevPtr;

const WARP: u32 = 32;
/// Bytes that a thread of `ll_pack` copies with one access.
const PACKED_AT_ONCE: usize = 16;

/// Runs part of one operation over several nodes.
pub struct OverNodes<'a> {
    handle: &'a Handle,
    network: &'a LlNetwork,
    memory: &'a ChannelMemory,
    tokens: &'a SourceTokens,
    part: LaunchPart,
}

impl<'a> OverNodes<'a> {
    /// For `part` of an operation of `handle`. The handle's first operation waits here for other ranks' announcements.
    pub fn new(handle: &'a Handle, network: &'a LlNetwork, part: LaunchPart) -> Result<Self> {
        Ok(Self {
            handle,
            network,
            memory: network.channel(part.channel)?,
            tokens: handle.source_tokens(network)?,
            part,
        })
    }

    /// Enqueues a whole operation.
    pub fn run(&self, op: &LlOp, at: &StreamScope) -> Result<()> {
        let label = self.label(op);
        self.handle.widen_ids(at)?;
        match op {
            LlOp::Dispatch(op) => {
                self.launch_pack(op, at)?;
                self.send_rows(label, op, at)?;
                self.launch_dispatch(op, (LlPhase::All, &self.dispatch_grid(op)), at)
            }
            LlOp::Combine(op) => {
                let grid = &self.combine_grid(op);
                self.launch_topk_weights(op, at)?;
                self.send_weights(label, at)?;
                self.launch_combine(op, (LlPhase::SendRelay, grid), at)?;
                self.send_sums(label, op.row, at)?;
                self.launch_combine(op, (LlPhase::Receive, grid), at)
            }
        }
    }

    /// The grid of a dispatch: for background work a fixed one, otherwise as adjusted by the call.
    fn dispatch_grid(&self, op: &LlDispatch) -> DispatchGrid {
        let own = self.handle.plan.dispatch;
        own.adjusted(op.launch, LL_DISPATCH_THREADS)
    }

    /// The grid of a combine, likewise.
    fn combine_grid(&self, op: &LlCombine) -> Grid {
        let plan = &self.handle.plan;
        plan.adjusted_combine(op.launch, LL_COMBINE_MANY_THREADS)
    }

    /// Enqueues the send phase of a staged operation on `at` and in the background, and ends `turn`. `sent` gets the
    /// stream that the receive phase must follow.
    pub fn send(
        &self,
        op: &LlOp,
        at: &StreamScope,
        turn: Turn<'_>,
        sent: impl FnOnce(&StreamScope) -> Result<()>,
    ) -> Result<()> {
        // All refusals come before the first launch, as half an operation would stay in a captured graph.
        let background = &self.network.background_of(at)?;
        let in_background = self.network.background_order.begin(background)?;
        let label = self.label(op);
        let enqueued = self.handle.widen_ids(at).and_then(|()| match op {
            LlOp::Dispatch(op) => self.send_dispatch(label, op, at, background),
            LlOp::Combine(op) => self.send_combine(label, op, at, background),
        });
        if enqueued.is_err() {
            // No receive phase will join the background stream, and a capture must not end before it is joined.
            let _ = self.join(at, background);
            let _ = self.join(background, at);
        }
        turn.end_after(in_background.end_after(enqueued).and_then(|()| sent(background)))
    }

    fn send_dispatch(&self, label: Label, op: &LlDispatch, at: &StreamScope, background: &StreamScope) -> Result<()> {
        let plan = &self.handle.plan;
        self.launch_pack(op, at)?;
        self.launch_dispatch(op, (LlPhase::Send, &self.dispatch_grid(op)), at)?;
        self.join(at, background)?;
        self.send_rows(label, op, background)?;
        if self.forwards_for_others() {
            self.launch_dispatch(op, (LlPhase::Relay, &plan.relay_dispatch), background)?;
        }
        Ok(())
    }

    fn send_combine(&self, label: Label, op: &LlCombine, at: &StreamScope, background: &StreamScope) -> Result<()> {
        let plan = &self.handle.plan;
        self.launch_topk_weights(op, at)?;
        self.join(at, background)?;
        self.send_weights(label, background)?;
        self.join(background, at)?;
        self.launch_combine(op, (LlPhase::Send, &self.combine_grid(op)), at)?;
        self.join(at, background)?;
        if self.forwards_for_others() {
            self.launch_combine(op, (LlPhase::Relay, &plan.relay_combine), background)?;
        }
        self.send_sums(label, op.row, background)
    }

    /// Makes `to` wait for the work that is now enqueued on `from`.
    fn join(&self, from: &StreamScope, to: &StreamScope) -> Result<()> {
        self.network.join.lock().join(from.stream, to.stream)
    }

    /// Enqueues the receive phase of a staged operation; it does not use the network.
    pub fn receive(&self, op: &LlOp, at: &StreamScope) -> Result<()> {
        let phase = LlPhase::Receive;
        match op {
            LlOp::Dispatch(op) => self.launch_dispatch(op, (phase, &self.dispatch_grid(op)), at),
            LlOp::Combine(op) => self.launch_combine(op, (phase, &self.combine_grid(op)), at),
        }
    }

    /// The label of `op` in the group's sequence of operations; to be taken only once nothing can refuse `op` any more.
    fn label(&self, op: &LlOp) -> Label {
        self.network.exchanges.label(match op {
            LlOp::Dispatch(_) => "LL dispatch",
            LlOp::Combine(_) => "LL combine",
        })
    }

    fn nodes(&self) -> Result<LlNodes> {
        let of_handle = (self.handle.number, self.tokens.most);
        self.network.nodes(self.memory, of_handle)
    }

    /// The operation's part, restricted to `phases`.
    fn part(&self, phases: LlPhase) -> LaunchPart {
        LaunchPart { phases, ..self.part }
    }

    /// Whether this rank forwards for other ranks.
    fn forwards_for_others(&self) -> bool {
        !self.tokens.of.is_empty()
    }

    fn launch_dispatch(
        &self,
        op: &LlDispatch,
        (phases, grid): (LlPhase, &DispatchGrid),
        at: &StreamScope,
    ) -> Result<()> {
        let (part, nodes) = (self.part(phases), self.nodes()?);
        if let Some(topk) = &op.topk {
            return self.launch_rank_dispatch((op, topk), (part, nodes), grid, at);
        }
        let module = &self.handle.context.module;
        let Some(scaled) = &op.scaled else {
            let dispatch = self.handle.dispatch_params((op, op.tokens), grid, part);
            let params = LlDispatchNodesParams { dispatch, nodes };
            return module.launch(kernels::ll_dispatch_nodes(), grid.launch, &params, at);
        };
        let params = LlScaledDispatchNodesParams {
            dispatch: self.handle.dispatch_params((op, self.packed_rows()), grid, part),
            nodes,
            rows: rows_with_scales(op, scaled, ChunkSize::Large)?,
        };
        module.launch(kernels::ll_dispatch_nodes_scaled(), grid.launch, &params, at)
    }

    /// Enqueues `part` of a rank-major dispatch.
    fn launch_rank_dispatch(
        &self,
        (op, topk): (&LlDispatch, &RankMajorTopk),
        (part, nodes): (LaunchPart, LlNodes),
        grid: &DispatchGrid,
        at: &StreamScope,
    ) -> Result<()> {
        let module = &self.handle.context.module;
        let params = |rows| self.handle.rank_dispatch_params((op, topk), rows, grid, part);
        let Some(scaled) = &op.scaled else {
            let dispatch = params(op.tokens);
            let params = LlRankDispatchNodesParams { dispatch, nodes };
            return module.launch(kernels::ll_rank_dispatch_nodes(), grid.launch, &params, at);
        };
        let params = LlRankScaledDispatchNodesParams {
            dispatch: params(self.packed_rows()),
            nodes,
            rows: rows_with_scales(op, scaled, ChunkSize::Large)?,
        };
        let kernel = kernels::ll_rank_dispatch_nodes_scaled();
        module.launch(kernel, grid.launch, &params, at)
    }

    /// The packed rows with scales, as sent over the network and read by kernels.
    fn packed_rows(&self) -> DevPtr {
        DevPtr(self.memory.rows.sends.0 + HEADER_BYTES)
    }

    fn combine_params(&self, op: &LlCombine, grid: &Grid, part: LaunchPart) -> Result<LlCombineNodesParams> {
        Ok(LlCombineNodesParams { combine: self.handle.combine_params(op, grid, part), nodes: self.nodes()? })
    }

    fn launch_combine(&self, op: &LlCombine, (phases, grid): (LlPhase, &Grid), at: &StreamScope) -> Result<()> {
        let params = self.combine_params(op, grid, self.part(phases))?;
        let kernel = match op.layout.is_rank_major() {
            true => kernels::ll_rank_combine_nodes(op.row.dtype)?,
            false => kernels::ll_combine_nodes(op.row.dtype)?,
        };
        self.handle.context.module.launch(kernel, grid.launch_shape(0), &params, at)
    }

    fn launch_topk_weights(&self, op: &LlCombine, at: &StreamScope) -> Result<()> {
        let params = LlTopkWeightsParams {
            combine: self.combine_params(op, &self.handle.plan.combine, self.part)?,
            message: self.memory.weights.sends.0 as *mut u8,
        };
        let shape = LaunchShape::new(
            blocks(self.handle.routing.tokens, LL_TOPK_WEIGHTS_THREADS / WARP)?,
            LL_TOPK_WEIGHTS_THREADS,
        );
        self.handle.context.module.launch(kernels::ll_topk_weights(), shape, &params, at)
    }

    fn launch_pack(&self, op: &LlDispatch, at: &StreamScope) -> Result<()> {
        let (handle, row) = (self.handle, op.wire());
        let Routing { tokens, top_k, .. } = handle.routing;
        let row_bytes = tokens * row.slot_bytes();
        let pack = LlPackParams {
            header: MessageHeader {
                handle: handle.number,
                tokens: to_u32(tokens)?,
                fingerprint: handle.fingerprint_of_dispatch(op).to_word(),
                channel: self.part.channel,
                scales_word: ScalesWord::of(row).0,
                ..Default::default()
            },
            channel_state: handle.context.channel_state(self.part.channel),
            rows: op.tokens.0 as *const u8,
            ids: handle.ids(),
            message: self.memory.rows.sends.0 as *mut u8,
            row_bytes: row_bytes as u64,
            num_ids: (tokens * top_k) as u64,
        };
        let shape = LaunchShape::new(
            blocks(row_bytes / PACKED_AT_ONCE, LL_PACK_THREADS)?.min(handle.context.multiprocessors),
            LL_PACK_THREADS,
        );
        let module = &handle.context.module;
        if let Some(topk) = &op.topk {
            self.pack_weights(op, topk, at)?;
        }
        let Some(scaled) = &op.scaled else {
            return module.launch(kernels::ll_pack(), shape, &pack, at);
        };
        let rows = rows_with_scales(op, scaled, ChunkSize::Large)?;
        let params = LlScaledPackParams { pack, rows, shape: handle.plan.shape(row, ChunkSize::Large) };
        let kernel = match scaled.cast() {
            Some(cast) => kernels::ll_pack_cast(cast.from)?,
            None => kernels::ll_pack_scaled(),
        };
        module.launch(kernel, shape, &params, at)
    }

    /// Appends the weights to the message with rows and ids.
    fn pack_weights(&self, op: &LlDispatch, topk: &RankMajorTopk, at: &StreamScope) -> Result<()> {
        let Routing { tokens, top_k, .. } = self.handle.routing;
        let before = tokens * (op.wire().slot_bytes() + top_k * size_of::<i64>());
        let params = LlRankPackParams {
            weights: topk.weights.0 as *const f32,
            to: (self.memory.rows.sends.0 + HEADER_BYTES + before) as *mut f32,
            num_weights: (tokens * top_k) as u64,
        };
        let shape = LaunchShape::new(blocks(tokens * top_k, LL_PACK_THREADS)?, LL_PACK_THREADS);
        self.handle.context.module.launch(kernels::ll_rank_pack(), shape, &params, at)
    }

    /// Exchanges rows and ids, in rank-major dispatches also weights: sends this rank's, receives the remote sources'.
    fn send_rows(&self, label: Label, op: &LlDispatch, at: &StreamScope) -> Result<()> {
        let entry = size_of::<i64>() + op.topk.map_or(0, |_| size_of::<f32>());
        let bytes = op.wire().slot_bytes() + self.handle.routing.top_k * entry;
        self.send_there(label, &self.memory.rows, bytes, at)
    }

    /// Exchanges weights: sends this rank's to the rail peers, receives the remote sources'.
    fn send_weights(&self, label: Label, at: &StreamScope) -> Result<()> {
        let weights = self.handle.routing.top_k * size_of::<f32>();
        self.send_there(label, &self.memory.weights, weights, at)
    }

    /// Exchanges sums: sends this node's sums to the remote sources, receives those of the rail peers' nodes. A sum
    /// takes the way of its row back.
    fn send_sums(&self, label: Label, row: RowType, at: &StreamScope) -> Result<()> {
        let (buffers, bytes) = (self.memory.rows.back(), row.bytes());
        let own = self.handle.routing.tokens;
        let sends = self.of_remote(buffers.sends, buffers.stride, bytes);
        let peers = self.network.view.rail_peers.iter().enumerate();
        let receives = peers.map(|(node, &peer)| {
            let data = DevPtr(buffers.receives.0 + node * buffers.stride);
            message(peer, data, own, bytes)
        });
        let exchanges = &self.network.exchanges;
        exchanges.enqueue(label, sends, receives, at.stream)
    }

    /// Sends this rank's message in `leg` to the rail peers; receives those of the remote sources.
    fn send_there(&self, label: Label, buffers: &MessageBuffers, bytes: usize, at: &StreamScope) -> Result<()> {
        let own = self.handle.routing.tokens;
        let peers = self.network.view.rail_peers.iter();
        let sends = peers.map(|&peer| message(peer, buffers.sends, own, bytes));
        let receives = self.of_remote(buffers.receives, buffers.stride, bytes);
        let exchanges = &self.network.exchanges;
        exchanges.enqueue(label, sends, receives, at.stream)
    }

    /// Messages to or from the remote sources, at distance `stride`.
    fn of_remote(&self, first: DevPtr, stride: usize, bytes: usize) -> impl Iterator<Item = Message> {
        let ranks = self.network.view.remote().iter().zip(&self.tokens.of);
        ranks
            .enumerate()
            .map(move |(index, (&rank, &tokens))| message(rank, DevPtr(first.0 + index * stride), tokens, bytes))
    }
}

/// Blocks for `units`, each for `per_block` of them; at least one, which writes the header.
fn blocks(units: usize, per_block: u32) -> Result<u32> {
    to_u32(units.div_ceil(per_block as usize).max(1))
}

/// A message to or from `peer`: a header and `bytes` for each of `tokens`.
fn message(peer: GroupRank, data: DevPtr, tokens: usize, bytes: usize) -> Message {
    Message { peer, data, bytes: HEADER_BYTES + tokens * bytes }
}
