//! LL operations over several nodes: messages along the rails, and launches between them.
//!
//! A dispatch sends its rows and ids to the gateways; then one kernel sends the rows of all sources within the
//! node, and receives. A combine sends its weights to the gateways; a kernel sends the rows of this rank's experts
//! to their homes, or those that carry these, and sums what came for the sources; the sums go home, where a last
//! kernel adds them to what the own node gives.
//!
//! A whole operation does all this on the caller's stream. The send phase of a staged one leaves to the background
//! what waits for the network, except for the weights, without which expert ranks cannot sum.
#![forbid(unsafe_code)]

use crate::backend::cuda::driver::copy::copy;
use crate::backend::cuda::driver::function::LaunchShape;
use crate::backend::cuda::driver::stream::StreamScope;
use crate::backend::cuda::kernels::{self, Kernel};
use crate::backend::cuda::ll::grid::Grid;
use crate::backend::cuda::ll::hello::{BYTES as HELLO_BYTES, SourceTokens};
use crate::backend::cuda::ll::network::{ChannelMemory, LlNetwork};
use crate::backend::cuda::ll::{Handle, Part};
use crate::backend::cuda::params::common::{OP_LL_COMBINE, OP_LL_DISPATCH};
use crate::backend::cuda::params::ll::{
    LL_GATES_THREADS, LL_PHASE_RECEIVE, LL_PHASE_RELAY, LL_PHASE_SEND, LlCombineNodesParams,
    LlDispatchNodesParams, LlGatesParams, LlNodes,
};
use crate::backend::transport::{Label, Message};
use crate::error::{Error, Result};
use crate::model::ops::{LlCombine, LlDispatch, LlOp, RowType};
use crate::model::tensor::DevPtr;

/// The network as an operation of one handle uses it.
pub struct OverNodes<'a> {
    handle: &'a Handle,
    network: &'a LlNetwork,
    memory: &'a ChannelMemory,
    tokens: &'a SourceTokens,
    part: Part,
    /// For texts.
    number: u64,
}

impl<'a> OverNodes<'a> {
    /// `part` of an operation of `handle`. Its first operation waits for what other ranks say about the handle.
    pub fn new(handle: &'a Handle, network: &'a LlNetwork, part: Part) -> Result<Self> {
        Ok(Self {
            handle,
            network,
            memory: network.channel(part.channel)?,
            tokens: handle.source_tokens(network)?,
            part,
            number: network.count(),
        })
    }

    /// Enqueues a whole operation.
    pub fn run(&self, op: &LlOp, at: &StreamScope) -> Result<()> {
        match op {
            LlOp::Dispatch(op) => {
                self.send_rows(op, (self.ids(), op.tokens), at)?;
                let all = LL_PHASE_SEND | LL_PHASE_RELAY | LL_PHASE_RECEIVE;
                self.launch_dispatch(op, all, at)?;
            }
            LlOp::Combine(op) => {
                self.launch_gates(op, at)?;
                self.send_weights(op.row, at)?;
                self.launch_combine(op, LL_PHASE_SEND | LL_PHASE_RELAY, at)?;
                self.send_sums(op.row, at)?;
                self.launch_combine(op, LL_PHASE_RECEIVE, at)?;
            }
        }
        self.end(at)
    }

    /// The operation was enqueued, the last of it on `at`.
    fn end(&self, at: &StreamScope) -> Result<()> {
        let hello = self.handle.memory.hello()?;
        hello.is_used(self.part.channel, at.stream)
    }

    /// Enqueues the send phase of a staged operation, on `at` and in the background. `sent` is told what the receive
    /// phase has to follow.
    pub fn send(
        &self,
        op: &LlOp,
        at: &StreamScope,
        sent: impl FnOnce(&StreamScope) -> Result<()>,
    ) -> Result<()> {
        match op {
            LlOp::Dispatch(op) => {
                self.keep_own(op, at)?;
                self.launch_dispatch(op, LL_PHASE_SEND, at)?;
                let background = self.network.fork(at)?;
                let turn = self.network.background_order.begin(&background.scope)?;
                let kept = (self.memory.own_ids, self.memory.sums_of_nodes);
                self.send_rows(op, kept, &background.scope)?;
                self.launch_dispatch(op, LL_PHASE_RELAY, &background.scope)?;
                turn.end()?;
                sent(&background.scope)
            }
            LlOp::Combine(op) => {
                self.launch_gates(op, at)?;
                let mut background = self.network.fork(at)?;
                let turn = self.network.background_order.begin(&background.scope)?;
                self.send_weights(op.row, &background.scope)?;
                turn.end()?;
                background.join(at)?;
                self.launch_combine(op, LL_PHASE_SEND, at)?;
                background.follow(at)?;
                let turn = self.network.background_order.begin(&background.scope)?;
                self.launch_combine(op, LL_PHASE_RELAY, &background.scope)?;
                self.send_sums(op.row, &background.scope)?;
                turn.end()?;
                sent(&background.scope)
            }
        }
    }

    /// Enqueues the receive phase of a staged operation.
    pub fn receive(&self, op: &LlOp, at: &StreamScope) -> Result<()> {
        match op {
            LlOp::Dispatch(op) => self.launch_dispatch(op, LL_PHASE_RECEIVE, at)?,
            LlOp::Combine(op) => self.launch_combine(op, LL_PHASE_RECEIVE, at)?,
        }
        self.end(at)
    }

    // ---- Messages --------------------------------------------------------------------------------

    fn ids(&self) -> DevPtr {
        self.handle.routing.ids
    }

    /// Sizes of this rank's: tokens, and ids per token.
    fn own_tokens(&self) -> (usize, usize) {
        (self.handle.routing.tokens, self.handle.routing.top_k)
    }

    /// Copies what the background is to send: the caller may write to it as soon as the stream has come past this.
    fn keep_own(&self, op: &LlDispatch, at: &StreamScope) -> Result<()> {
        let (tokens, top_k) = self.own_tokens();
        let id_bytes = tokens * top_k * size_of::<i64>();
        copy(self.memory.own_ids, self.ids(), id_bytes, at)?;
        let row_bytes = tokens * op.row.bytes();
        copy(self.memory.sums_of_nodes, op.tokens, row_bytes, at)
    }

    /// Sources from 1 on: index, rank, tokens.
    fn sources(&self) -> impl Iterator<Item = (usize, usize, usize)> + '_ {
        let ranks = self.network.sources().iter().skip(1);
        let sources = ranks.zip(&self.tokens.of).enumerate();
        sources.map(|(index, (&rank, &tokens))| (index, rank, tokens))
    }

    /// Where the part of source `index` is, if each token has `bytes`.
    fn of_source(&self, all: DevPtr, index: usize, bytes: usize) -> DevPtr {
        DevPtr(all.0 + index * self.network.max_tokens() * bytes)
    }

    /// In front of an operation: which it is.
    fn head(&self, op: u32, row: RowType, at: &StreamScope) -> Result<DevPtr> {
        let signature = self.handle.signature(op, row);
        let hello = self.handle.memory.hello()?;
        hello.head(signature, self.part.channel, at)
    }

    /// This rank's `ids` and `rows` go to the gateways, those of its sources come here.
    fn send_rows(
        &self,
        op: &LlDispatch,
        (ids, rows): (DevPtr, DevPtr),
        at: &StreamScope,
    ) -> Result<()> {
        let (tokens, top_k) = self.own_tokens();
        let of_token = [top_k * size_of::<i64>(), op.row.bytes()];
        let here = [self.memory.ids, self.memory.rows];
        let head = self.head(OP_LL_DISPATCH, op.row, at)?;
        let fill = |gateways: &[usize], sends: &mut Vec<Message>, receives: &mut Vec<Message>| {
            self.heads(head, (gateways, sends, receives));
            for (data, bytes) in [ids, rows].into_iter().zip(of_token) {
                sends.extend(gateways.iter().map(|&peer| Message {
                    peer,
                    data,
                    bytes: tokens * bytes,
                }));
            }
            for (all, bytes) in here.into_iter().zip(of_token) {
                receives.extend(self.sources().map(|(index, peer, tokens)| Message {
                    peer,
                    data: self.of_source(all, index, bytes),
                    bytes: tokens * bytes,
                }));
            }
        };
        self.exchange("LL dispatch", fill, at)
    }

    /// This rank's weights go to the gateways, those of its sources come here.
    fn send_weights(&self, row: RowType, at: &StreamScope) -> Result<()> {
        let (tokens, top_k) = self.own_tokens();
        let of_token = top_k * size_of::<f32>();
        let head = self.head(OP_LL_COMBINE, row, at)?;
        let fill = |gateways: &[usize], sends: &mut Vec<Message>, receives: &mut Vec<Message>| {
            self.heads(head, (gateways, sends, receives));
            sends.extend(gateways.iter().map(|&peer| Message {
                peer,
                data: self.memory.gates,
                bytes: tokens * of_token,
            }));
            receives.extend(self.sources().map(|(index, peer, tokens)| Message {
                peer,
                data: self.of_source(self.memory.weights, index, of_token),
                bytes: tokens * of_token,
            }));
        };
        self.exchange("LL combine", fill, at)
    }

    /// The sums of this node go to the sources, those of the gateways' nodes come here; and whether the ranks that
    /// send them have failed, as then they are none.
    fn send_sums(&self, row: RowType, at: &StreamScope) -> Result<()> {
        let (tokens, _) = self.own_tokens();
        let row_bytes = row.bytes();
        let failed = self.handle.group.context.failed();
        let bytes = size_of::<u32>();
        let fill = |gateways: &[usize], sends: &mut Vec<Message>, receives: &mut Vec<Message>| {
            sends.extend(self.sources().map(|(_, peer, _)| Message {
                peer,
                data: failed,
                bytes,
            }));
            receives.extend(gateways.iter().map(|&peer| {
                let node = self.network.distance(peer).saturating_sub(1);
                let data = DevPtr(self.memory.failures.0 + node * bytes);
                Message { peer, data, bytes }
            }));
            sends.extend(self.sources().map(|(index, peer, tokens)| Message {
                peer,
                data: self.of_source(self.memory.rows, index, row_bytes),
                bytes: tokens * row_bytes,
            }));
            receives.extend(gateways.iter().map(|&peer| {
                let node = self.network.distance(peer).saturating_sub(1);
                Message {
                    peer,
                    data: self.of_source(self.memory.sums_of_nodes, node, row_bytes),
                    bytes: tokens * row_bytes,
                }
            }));
        };
        self.exchange("LL combine", fill, at)
    }

    /// This rank's `head` goes to the gateways, those of its sources come here.
    fn heads(
        &self,
        head: DevPtr,
        (gateways, sends, receives): (&[usize], &mut Vec<Message>, &mut Vec<Message>),
    ) {
        let message = |peer, data| Message {
            peer,
            data,
            bytes: HELLO_BYTES,
        };
        sends.extend(gateways.iter().map(|&peer| message(peer, head)));
        receives.extend(self.sources().map(|(index, peer, _)| {
            message(peer, DevPtr(self.memory.heads.0 + index * HELLO_BYTES))
        }));
    }

    fn exchange(
        &self,
        what: &'static str,
        fill: impl FnOnce(&[usize], &mut Vec<Message>, &mut Vec<Message>),
        at: &StreamScope,
    ) -> Result<()> {
        let label = Label {
            what,
            number: self.number,
        };
        self.network.exchange(
            label,
            |transport, sends, receives| fill(transport.gateways(), sends, receives),
            at.stream,
        )
    }

    // ---- Launches --------------------------------------------------------------------------------

    fn nodes(&self) -> Result<LlNodes> {
        Ok(LlNodes {
            hellos: self.handle.hellos()?,
            most_tokens: self.tokens.most,
            handle: self.handle.number,
            ..self.network.nodes(self.memory)?
        })
    }

    /// The part of the operation that a launch of `phases` runs, and its grid among `whole` and `relay`: what runs in
    /// the background takes few blocks.
    fn part(&self, phases: u32, (whole, relay): (&Grid, &Grid)) -> (Part, Grid) {
        let part = Part {
            phases,
            ..self.part
        };
        match phases == LL_PHASE_RELAY {
            true => (part, *relay),
            false => (part, *whole),
        }
    }

    /// Whether this rank carries no other, and so has nothing to relay.
    fn is_relay_empty(&self, phases: u32) -> bool {
        phases == LL_PHASE_RELAY && self.tokens.of.is_empty()
    }

    fn launch_dispatch(&self, op: &LlDispatch, phases: u32, at: &StreamScope) -> Result<()> {
        if self.is_relay_empty(phases) {
            return Ok(());
        }
        let plan = &self.handle.plan;
        let (part, grid) = self.part(phases, (&plan.dispatch, &plan.relay_dispatch));
        let mut dispatch = self.handle.dispatch_params(op, &grid, part);
        dispatch.notify_blocks = grid.receive_blocks;
        let params = LlDispatchNodesParams {
            dispatch,
            nodes: self.nodes()?,
        };
        let module = &self.handle.group.context.module;
        let shape = grid.launch_shape(plan.dispatch_launch.shared_bytes);
        module.launch(Kernel::LlDispatchNodes, shape, &params, at)
    }

    fn combine_params(
        &self,
        op: &LlCombine,
        grid: &Grid,
        part: Part,
    ) -> Result<LlCombineNodesParams> {
        Ok(LlCombineNodesParams {
            combine: self.handle.combine_params(op, grid, part),
            nodes: self.nodes()?,
        })
    }

    fn launch_combine(&self, op: &LlCombine, phases: u32, at: &StreamScope) -> Result<()> {
        if self.is_relay_empty(phases) {
            return Ok(());
        }
        let plan = &self.handle.plan;
        let (part, grid) = self.part(phases, (&plan.combine, &plan.relay_combine));
        let params = self.combine_params(op, &grid, part)?;
        let kernel = kernels::for_rows::<LlCombineNodesParams>(op.row.dtype)?;
        let module = &self.handle.group.context.module;
        module.launch(kernel, grid.launch_shape(0), &params, at)
    }

    fn launch_gates(&self, op: &LlCombine, at: &StreamScope) -> Result<()> {
        let (tokens, _) = self.own_tokens();
        if tokens == 0 {
            return Ok(());
        }
        let params = LlGatesParams {
            combine: self.combine_params(op, &self.handle.plan.combine, self.part)?,
            gates: self.memory.gates.0 as *mut f32,
        };
        let warps = LL_GATES_THREADS as usize / 32;
        let blocks = u32::try_from(tokens.div_ceil(warps));
        let shape = LaunchShape {
            blocks: blocks.map_err(|_| Error::internal("too many tokens"))?,
            threads: LL_GATES_THREADS,
            shared_bytes: 0,
        };
        let module = &self.handle.group.context.module;
        module.launch(Kernel::LlGates, shape, &params, at)
    }
}
