//! Dispatch over several nodes: rows travel pass by pass, and each pass's kernel sends them on in the node.
//!
//! The first two passes are on the network while the kernel of the own node runs. A bank is filled again when the
//! kernel that empties it has run.
#![forbid(unsafe_code)]

use crate::backend::cuda::driver::function::LaunchShape;
use crate::backend::cuda::ht::grid::HtKind;
use crate::backend::cuda::ht::nodes::handle::NodesHt;
use crate::backend::cuda::ht::nodes::memory::Bank;
use crate::backend::cuda::ht::nodes::pass::{Enqueueing, Handle, Heads, Tokens};
use crate::backend::cuda::ht::plan::HtLaunch;
use crate::backend::cuda::ht::shared::{addresses, saturated};
use crate::backend::cuda::kernels::Kernel;
use crate::backend::cuda::params::common::OP_HT_DISPATCH;
use crate::backend::cuda::params::ht::HtDispatchParams;
use crate::backend::cuda::params::ht_nodes::{
    HT_PACK_THREADS, HtDispatchNodesParams, HtPackParams, HtPass,
};
use crate::backend::cuda::sizes::number;
use crate::error::Result;
use crate::model::ops::{HtDispatch, Stream};
use std::ops::Range;

/// Blocks of `ht_pack`: as many as keep up with a fast network.
const PACK_BLOCKS: u32 = 16;
/// Passes that are on the network at a time.
const AHEAD: usize = 2;

const ID_BYTES: usize = size_of::<i64>();
const WEIGHT_BYTES: usize = size_of::<f32>();

/// A dispatch and how its kernels are launched.
struct Dispatch<'a> {
    handle: Handle<'a>,
    op: &'a HtDispatch,
    launch: HtLaunch,
    /// Ids and weights, as the caller gives them.
    ids: usize,
    weights: usize,
}

pub fn run(handle: &NodesHt, op: &HtDispatch, stream: Stream) -> Result<()> {
    let group = &handle.group;
    let kind = HtKind::Dispatch {
        forward: op.routing_in.is_some(),
    };
    let sizes = (handle.routing.tokens, handle.routing.top_k);
    let launch = group.plan.launch(kind, &op.into(), sizes, group.device)?;
    let (ids, weights) = addresses(op.routing_in.map(|it| (it.ids, it.weights)));
    let dispatch = Dispatch {
        handle: Handle::new(handle)?,
        op,
        launch,
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

/// The heads in front of pass number `pass`: one for each operation is enough, as each rank sends its rows whether it
/// has failed or not.
fn heads(pass: usize) -> Option<Heads> {
    let from_gateways = false;
    (pass == 0).then_some(Heads {
        pass,
        from_gateways,
    })
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

    /// Bytes of a token's row, ids and weights.
    fn bytes(&self) -> (usize, usize, usize) {
        // A rank without tokens may have no address of its ids.
        let columns = match self.op.routing_in {
            None => 0,
            Some(_) => self.handle.routing.top_k,
        };
        let row = self.op.row.bytes();
        (row, columns * ID_BYTES, columns * WEIGHT_BYTES)
    }

    fn bank(&self, is_own: bool, pass: usize) -> Bank {
        let (handle, (row, ids, _)) = (&self.handle, self.bytes());
        let (banks, room) = (&handle.banks, handle.passes.room);
        match is_own {
            true => banks.own(pass, room * handle.plan().others, (row, ids)),
            false => banks.of_sources(pass, room * (handle.plan().sources - 1), (row, ids)),
        }
    }

    /// Puts a pass on the network.
    fn send(&self, at: &mut Enqueueing<'_>, pass: usize, chunks: &Range<usize>) -> Result<()> {
        let handle = &self.handle;
        let plan = handle.plan();
        at.clear();
        if let Some(heads) = heads(pass) {
            at.add_heads(handle, (OP_HT_DISPATCH, &self.launch), heads)?;
        }
        if (0..plan.others).any(|other| !self.is_whole(other)) {
            self.launch_pack(at, pass, chunks)?;
        }
        for other in 0..plan.others {
            for chunk in chunks.clone() {
                let before = handle.counts.departing(other, chunk);
                let rows = handle.counts.departing(other, chunk + 1) - before;
                let first = handle.counts.departing(other, chunks.start);
                self.add_sends(at, (other, pass), (before, first), rows);
            }
        }
        let mut index = 0;
        for chunk in chunks.clone() {
            for (source, &peer) in (1..plan.sources).zip(at.rails.remote_sources()) {
                let before = handle.counts.coming(source, chunk);
                let rows = handle.counts.coming(source, chunk + 1) - before;
                let (row, ids, weights) = self.bytes();
                let bank = self.bank(false, pass);
                at.receive(peer, bank.rows.0 + index * row, rows, row);
                at.receive(peer, bank.first_tail.0 + index * ids, rows, ids);
                at.receive(peer, bank.second_tail.0 + index * weights, rows, weights);
                index += rows;
            }
        }
        at.exchange(pass)
    }

    /// Whether all own tokens go to node `other`, from where they lie.
    fn is_whole(&self, other: usize) -> bool {
        let handle = &self.handle;
        handle.counts.departing(other, handle.plan().chunks) == handle.routing.tokens
    }

    /// Adds a chunk's messages to node `other`: `rows` after number `before` of all that go there, of which number
    /// `first` is the first of the pass.
    fn add_sends(
        &self,
        at: &mut Enqueueing<'_>,
        (other, pass): (usize, usize),
        (before, first): (usize, usize),
        rows: usize,
    ) {
        let Some(&peer) = at.rails.gateways.get(other) else {
            return;
        };
        let (row, ids, weights) = self.bytes();
        let (from, index) = match self.is_whole(other) {
            true => ([self.op.tokens.0, self.ids, self.weights], before),
            false => {
                let bank = self.bank(true, pass);
                let index = other * self.handle.passes.room + before - first;
                ([bank.rows.0, bank.first_tail.0, bank.second_tail.0], index)
            }
        };
        for (from, bytes) in from.into_iter().zip([row, ids, weights]) {
            at.send(peer, from + index * bytes, rows, bytes);
        }
    }

    /// The side stream packs what travels.
    fn launch_pack(&self, at: &Enqueueing<'_>, pass: usize, chunks: &Range<usize>) -> Result<()> {
        let handle = &self.handle;
        let bank = self.bank(true, pass);
        let params = HtPackParams {
            handle: handle.device,
            tokens: self.op.tokens.0 as *const u8,
            topk_idx: self.ids as *const i64,
            weights: self.weights as *const f32,
            out: bank.rows.0 as *mut u8,
            out_idx: bank.first_tail.0 as *mut i64,
            out_weights: bank.second_tail.0 as *mut f32,
            row_bytes: number(self.op.row.bytes())?,
            room: number(handle.passes.room)?,
            others: number(handle.plan().others)?,
            chunks: number(handle.plan().chunks)?,
            first_chunk: number(chunks.start)?,
            end_chunk: number(chunks.end)?,
        };
        let shape = LaunchShape {
            blocks: PACK_BLOCKS.min(handle.group.device.multiprocessors),
            threads: HT_PACK_THREADS,
            shared_bytes: 0,
        };
        let module = &handle.group.context.module;
        module.launch_on(Kernel::HtPack, shape, &params, at.rails.side.stream())
    }

    fn launch_own(&self, at: &Enqueueing<'_>) -> Result<()> {
        let op = self.op;
        let chunks = 0..self.handle.plan().chunks;
        let tokens = self.handle.own_tokens(&chunks);
        let inputs = [op.tokens.0, self.ids, self.weights];
        let counter = op.counter.unwrap_or_default().0;
        let pass = self.handle.pass(&chunks, true, None)?;
        self.launch(at, pass, &tokens, (inputs, counter))
    }

    fn launch_remote(&self, at: &Enqueueing<'_>, pass: usize, chunks: &Range<usize>) -> Result<()> {
        let bank = self.bank(false, pass);
        let tokens = self.handle.remote_tokens(chunks);
        let ids = self.op.routing_in.map_or(0, |_| bank.first_tail.0);
        let inputs = [bank.rows.0, ids, bank.second_tail.0];
        let rows = self.handle.pass(chunks, false, heads(pass))?;
        self.launch(at, rows, &tokens, (inputs, 0))
    }

    /// Launches the kernel for tokens with these rows, ids and weights.
    fn launch(
        &self,
        at: &Enqueueing<'_>,
        pass: HtPass,
        tokens: &Tokens,
        ([rows, ids, weights], counter): ([usize; 3], usize),
    ) -> Result<()> {
        let (handle, op) = (&self.handle, self.op);
        let (out_ids, out_weights) = addresses(op.routing_out.map(|it| (it.ids, it.weights)));
        let params = HtDispatchNodesParams {
            of_node: HtDispatchParams {
                common: handle.common(OP_HT_DISPATCH, &self.launch, tokens)?,
                tokens: rows as *const u8,
                topk_idx: ids as *const i64,
                weights: weights as *const f32,
                out: op.out.map_or(0, |out| out.data.0) as *mut u8,
                out_idx: out_ids as *mut i64,
                out_weights: out_weights as *mut f32,
                counter: counter as *mut i32,
                out_rows: op.out.map_or(u32::MAX, |out| saturated(out.rows)),
                routing_rows: op.routing_out.map_or(u32::MAX, |out| saturated(out.rows)),
            },
            pass,
        };
        let module = &handle.group.context.module;
        module.launch(Kernel::HtDispatchNodes, self.launch.launch, &params, at.at)
    }
}
