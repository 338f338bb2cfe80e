//! Dispatch over several nodes: rows travel pass by pass, and each pass's kernel sends them on in the node.
//!
//! The first two passes are on the network while the kernel of the own node runs. A bank is filled again when the
//! kernel that empties it has run.

use crate::backend::cuda::driver::function::LaunchShape;
use crate::backend::cuda::ht::grid::HtKind;
use crate::backend::cuda::ht::nodes::handle::NodesHt;
use crate::backend::cuda::ht::nodes::messages::{Bank, TokenBytes};
use crate::backend::cuda::ht::nodes::pass::{AHEAD, Enqueueing, Handle, Heads, Tokens};
use crate::backend::cuda::ht::nodes::rails::Turn;
use crate::backend::cuda::ht::plan::HtLaunch;
use crate::backend::cuda::ht::rows::MovedRow;
use crate::backend::cuda::ht::scaled;
use crate::backend::cuda::ht::shared::{addresses, saturated};
use crate::backend::cuda::kernels;
use crate::backend::cuda::params::common::KernelOp;
use crate::backend::cuda::params::ht::{HtDispatchParams, HtScaledDispatchParams, HtScaledRows};
use crate::backend::cuda::params::ht_nodes::{
    HT_PACK_THREADS, HtDispatchNodesParams, HtPackParams, HtPass, HtScaledDispatchNodesParams,
    HtScaledPackParams,
};
use crate::backend::cuda::regions::to_u32;
use crate::backend::cuda::scaled_rows::scaled_rows;
use crate::error::Result;
use crate::model::ops::{HtDispatch, Stream};
use crate::model::scales::Cast;
use std::ops::Range;

/// Blocks of `ht_pack`: as many as keep up with a fast network.
const PACK_BLOCKS: u32 = 16;

const ID_BYTES: usize = size_of::<i64>();
const WEIGHT_BYTES: usize = size_of::<f32>();

/// A dispatch and how its kernels are launched.
struct Dispatch<'a> {
    handle: Handle<'a>,
    op: &'a HtDispatch,
    /// For own tokens, and for those that came as they travel.
    launch: HtLaunch,
    remote_launch: HtLaunch,
    /// Ids and weights, as the caller gives them.
    ids: usize,
    weights: usize,
}

/// Addresses of what a launch reads, and of the counter that it fills; zero for none.
#[derive(Default)]
struct Inputs {
    rows: usize,
    ids: usize,
    weights: usize,
    counter: usize,
}

pub fn run(handle: &NodesHt, op: &HtDispatch, stream: Stream) -> Result<()> {
    let group = &handle.group;
    let kind = HtKind::Dispatch {
        forward: op.routing_in.is_some(),
    };
    let sizes = (handle.routing.tokens, handle.routing.top_k);
    let row = MovedRow::from(op);
    let launch = group.launch(kind, &row, sizes)?;
    let remote_launch = match row.cast {
        None => launch,
        Some(_) => group.launch(kind, &row.wire.into(), sizes)?,
    };
    let (ids, weights) = addresses(op.routing_in.map(|it| (it.ids, it.weights)));
    let dispatch = Dispatch {
        handle: Handle::new(handle)?,
        op,
        launch,
        remote_launch,
        ids,
        weights,
    };
    let at = &group.enter(stream)?;
    let order = group.order.begin(at)?;
    let mut turn = handle.rails.turn.lock();
    let mut enqueueing = Enqueueing::new(&handle.rails, &mut turn, at, "HT dispatch")?;
    let enqueued = dispatch.enqueue(&mut enqueueing);
    enqueueing.end(group, order, enqueued)
}

/// Whether the messages of pass number `pass` have heads that count: one for each operation is enough, as each rank
/// sends its rows whether it has failed or not.
fn has_head(pass: usize) -> bool {
    pass == 0
}

impl Dispatch<'_> {
    fn enqueue(&self, at: &mut Enqueueing<'_>) -> Result<()> {
        let chunks = &self.handle.passes.chunks;
        at.fork()?;
        for (pass, chunks) in chunks.iter().enumerate().take(AHEAD) {
            self.send(at, pass, chunks)?;
        }
        self.launch_own(at)?;
        for (pass, chunks_of_pass) in chunks.iter().enumerate() {
            at.wait_for(pass)?;
            self.launch_remote(at, pass, chunks_of_pass)?;
            if let Some(later) = chunks.get(pass + AHEAD) {
                at.fork()?;
                self.send(at, pass + AHEAD, later)?;
            }
        }
        Ok(())
    }

    fn bytes(&self) -> TokenBytes {
        // A rank without tokens may have no address of its ids.
        let columns = match self.op.routing_in {
            None => 0,
            Some(_) => self.handle.routing.top_k,
        };
        TokenBytes::new(self.op.wire(), columns * (ID_BYTES + WEIGHT_BYTES))
    }

    /// The messages from the sources.
    fn arriving(&self, pass: usize) -> Bank {
        self.handle.banks.of_sources(pass, self.bytes())
    }

    /// The messages to the gateways.
    fn departing(&self, pass: usize) -> Bank {
        self.handle.banks.own(pass, self.bytes())
    }

    /// Puts a pass on the network.
    fn send(&self, at: &mut Enqueueing<'_>, pass: usize, chunks: &Range<usize>) -> Result<()> {
        let counts = &self.handle.counts;
        at.clear();
        if self.needs_packing(pass, chunks) {
            self.launch_pack(at, pass, chunks)?;
        }
        let Turn {
            sends, receives, ..
        } = &mut *at.turn;
        let bank = self.departing(pass);
        for (other, &peer) in at.rails.gateways.iter().enumerate() {
            let first = counts.departing(other, chunks.start);
            let tokens = counts.departing_in(other, chunks);
            let parcel = bank.parcel(other, tokens, has_head(pass));
            if self.are_apart(counts.all_depart(other), tokens) {
                let rows = self.op.tokens.0 + first * bank.bytes.row;
                sends.extend([parcel.front(peer), parcel.rows(peer, Some(rows))]);
            } else {
                sends.push(parcel.with_rows(peer));
            }
        }
        let bank = self.arriving(pass);
        for (index, &peer) in at.rails.remote_sources().iter().enumerate() {
            let source = 1 + index;
            let tokens = counts.coming_in(source, chunks);
            let parcel = bank.parcel(index, tokens, has_head(pass));
            if self.are_apart(counts.all_come(source), tokens) {
                receives.extend([parcel.front(peer), parcel.rows(peer, None)]);
            } else {
                receives.push(parcel.with_rows(peer));
            }
        }
        at.exchange(pass)
    }

    /// Whether rows travel as a second message, in place from the caller's tensor: sender and receiver decide alike.
    /// Rows with scales never do, because the packed form exists only in the message.
    fn are_apart(&self, all_travel: bool, tokens: usize) -> bool {
        let may_be = all_travel && self.op.scaled.is_none();
        may_be && tokens * self.bytes().row > self.handle.plan().packed_bytes
    }

    fn needs_packing(&self, pass: usize, chunks: &Range<usize>) -> bool {
        let counts = &self.handle.counts;
        let is_packed = |other: usize| {
            let tokens = counts.departing_in(other, chunks);
            tokens > 0 && !self.are_apart(counts.all_depart(other), tokens)
        };
        has_head(pass) || self.bytes().tail > 0 || (0..self.handle.plan().others).any(is_packed)
    }

    /// The side stream packs what travels.
    fn launch_pack(&self, at: &Enqueueing<'_>, pass: usize, chunks: &Range<usize>) -> Result<()> {
        let (handle, op) = (&self.handle, self.op);
        let plan = handle.plan();
        let messages = (self.departing(pass), plan.others);
        let params = HtPackParams {
            heads: handle.heads((KernelOp::HtDispatch, &self.launch), messages)?,
            handle: handle.device,
            tokens: op.tokens.0 as *const u8,
            topk_idx: self.ids as *const i64,
            weights: self.weights as *const f32,
            packed_bytes: match &op.scaled {
                None => plan.packed_bytes as u64,
                Some(_) => u64::MAX,
            },
            chunks: to_u32(plan.chunks)?,
            first_chunk: to_u32(chunks.start)?,
            end_chunk: to_u32(chunks.end)?,
        };
        let shape = LaunchShape {
            blocks: PACK_BLOCKS.min(handle.group.device.multiprocessors),
            threads: HT_PACK_THREADS,
            shared_bytes: 0,
        };
        let module = &handle.group.context.module;
        match &op.scaled {
            None => module.launch_on(kernels::ht_pack(), shape, &params, at.side),
            Some(scaled) => {
                let kernel = match scaled.cast() {
                    Some(cast) => kernels::ht_pack_cast(cast.from)?,
                    None => kernels::ht_pack_scaled(),
                };
                let params = HtScaledPackParams {
                    pack: params,
                    rows: scaled_rows(op.row, scaled)?,
                };
                module.launch_on(kernel, shape, &params, at.side)
            }
        }
    }

    fn launch_own(&self, at: &Enqueueing<'_>) -> Result<()> {
        let op = self.op;
        let chunks = 0..self.handle.plan().chunks;
        let tokens = self.handle.own_tokens(&chunks);
        let inputs = Inputs {
            rows: op.tokens.0,
            ids: self.ids,
            weights: self.weights,
            counter: op.counter.unwrap_or_default().0,
        };
        let pass = self.handle.pass(&chunks, None, None)?;
        let params = self.params(&self.launch, pass, &tokens, &inputs)?;
        match &op.scaled {
            None => self.launch_plain(at, &params),
            Some(scaled) => {
                let rows = scaled::from_caller(op.row, scaled, &self.launch)?;
                self.launch_scaled(at, &self.launch, scaled.cast(), params, rows)
            }
        }
    }

    fn launch_remote(&self, at: &Enqueueing<'_>, pass: usize, chunks: &Range<usize>) -> Result<()> {
        let bank = self.arriving(pass);
        let tokens = self.handle.remote_tokens(chunks);
        let heads = has_head(pass).then_some(Heads {
            of: bank,
            from_gateways: false,
            scales_word: self.launch.scales_word,
        });
        let rows = self.handle.pass(chunks, Some(bank), heads)?;
        // Ids and weights come with the rows.
        let inputs = Inputs {
            rows: bank.rows,
            ..Inputs::default()
        };
        let launch = &self.remote_launch;
        let params = self.params(launch, rows, &tokens, &inputs)?;
        match &self.op.scaled {
            None => self.launch_plain(at, &params),
            Some(scaled) => {
                let rows = scaled::as_they_travel(self.op.row, scaled, launch)?;
                self.launch_scaled(at, launch, None, params, rows)
            }
        }
    }

    /// The parameters for tokens with these inputs.
    fn params(
        &self,
        launch: &HtLaunch,
        pass: HtPass,
        tokens: &Tokens,
        inputs: &Inputs,
    ) -> Result<HtDispatchNodesParams> {
        let (handle, op) = (&self.handle, self.op);
        let (out_ids, out_weights) = addresses(op.routing_out.map(|it| (it.ids, it.weights)));
        Ok(HtDispatchNodesParams {
            of_node: HtDispatchParams {
                common: handle.common(KernelOp::HtDispatch, launch, tokens)?,
                tokens: inputs.rows as *const u8,
                topk_idx: inputs.ids as *const i64,
                weights: inputs.weights as *const f32,
                out: op.out.map_or(0, |out| out.data.0) as *mut u8,
                out_idx: out_ids as *mut i64,
                out_weights: out_weights as *mut f32,
                counter: inputs.counter as *mut i32,
                out_rows: op.out.map_or(u32::MAX, |out| saturated(out.rows)),
                routing_rows: op.routing_out.map_or(u32::MAX, |out| saturated(out.rows)),
            },
            pass,
        })
    }

    fn launch_plain(&self, at: &Enqueueing<'_>, params: &HtDispatchNodesParams) -> Result<()> {
        let module = &self.handle.group.context.module;
        module.launch(
            kernels::ht_dispatch_nodes(),
            self.launch.launch,
            params,
            at.at,
        )
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
        let rows = params.of_node;
        let params = HtScaledDispatchNodesParams {
            of_node: HtScaledDispatchParams { rows, scaled },
            pass: params.pass,
        };
        let kernel = match cast {
            Some(_) => kernels::ht_dispatch_nodes_cast(),
            None => kernels::ht_dispatch_nodes_scaled(),
        };
        let module = &self.handle.group.context.module;
        module.launch(kernel, launch.launch, &params, at.at)
    }
}
