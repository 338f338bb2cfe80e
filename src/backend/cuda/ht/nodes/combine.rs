//! Combine over several nodes: each pass's kernel sums what the node's ranks return for remote tokens, the sums
//! travel home, and another kernel adds them to what the own node returns.
//!
//! While the sums of a pass are on the network, the kernel of the next one runs. A bank is filled again when the
//! messages, or the kernel, that empty it are through.
#![forbid(unsafe_code)]

use crate::backend::cuda::ht::grid::HtKind;
use crate::backend::cuda::ht::nodes::handle::NodesHt;
use crate::backend::cuda::ht::nodes::memory::Bank;
use crate::backend::cuda::ht::nodes::pass::{Enqueueing, Handle, Heads, Tokens, behind, word};
use crate::backend::cuda::ht::plan::HtLaunch;
use crate::backend::cuda::ht::shared::{addresses, saturated};
use crate::backend::cuda::kernels::{self, Kernel};
use crate::backend::cuda::params::common::OP_HT_COMBINE;
use crate::backend::cuda::params::ht::HtCombineParams;
use crate::backend::cuda::params::ht_nodes::{HtCombineNodesParams, HtPartials, HtPass};
use crate::backend::cuda::sizes::number;
use crate::error::Result;
use crate::model::ops::{HtCombine, Stream};
use std::ops::Range;
use std::ptr::null;

const AHEAD: usize = 2;

/// A combine and how its kernels are launched.
struct Combine<'a> {
    handle: Handle<'a>,
    op: &'a HtCombine,
    launch: HtLaunch,
    kernel: Kernel,
    columns: usize,
}

pub fn run(handle: &NodesHt, op: &HtCombine, stream: Stream) -> Result<()> {
    let group = &handle.group;
    let columns = op.gradients.map_or(0, |gradients| gradients.top_k);
    let kind = HtKind::Combine { columns };
    let sizes = (handle.routing.tokens, handle.routing.top_k);
    let combine = Combine {
        handle: Handle::new(handle)?,
        op,
        launch: group
            .plan
            .launch(kind, &op.row.into(), sizes, group.device)?,
        kernel: kernels::for_rows::<HtCombineNodesParams>(op.row.dtype)?,
        columns,
    };
    let at = &group.enter(stream)?;
    let order = group.order.begin(at)?;
    let mut turn = handle.rails.turn.lock();
    let mut enqueueing = Enqueueing::new(&handle.rails, &mut turn, at, "HT combine")?;
    let enqueued = combine.enqueue(&mut enqueueing);
    enqueueing.end(group, order, enqueued)
}

/// The heads in front of pass number `pass`: they say whether the sums are sums.
fn heads(pass: usize) -> Heads {
    Heads {
        pass,
        from_gateways: true,
    }
}

impl Combine<'_> {
    fn enqueue(&self, at: &mut Enqueueing<'_>) -> Result<()> {
        let chunks = &self.handle.passes.chunks;
        for (pass, chunks) in chunks.iter().enumerate().take(AHEAD) {
            self.sum_remote(at, pass, chunks)?;
        }
        for (pass, chunks_of_pass) in chunks.iter().enumerate() {
            at.wait_for(pass)?;
            self.launch_own(at, pass, chunks_of_pass)?;
            if let Some(later) = chunks.get(pass + AHEAD) {
                self.sum_remote(at, pass + AHEAD, later)?;
            }
        }
        Ok(())
    }

    /// Bytes of a row, and of its gradients.
    fn bytes(&self) -> (usize, usize) {
        (self.op.row.bytes(), self.columns * size_of::<f32>())
    }

    fn bank(&self, is_own: bool, pass: usize) -> Bank {
        let (banks, room) = (&self.handle.banks, self.handle.passes.room);
        let plan = self.handle.plan();
        match is_own {
            true => banks.own(pass, room * plan.others, self.bytes()),
            false => banks.of_sources(pass, room * (plan.sources - 1), self.bytes()),
        }
    }

    /// Sums a pass of remote tokens, and sends the sums home.
    fn sum_remote(
        &self,
        at: &mut Enqueueing<'_>,
        pass: usize,
        chunks: &Range<usize>,
    ) -> Result<()> {
        let handle = &self.handle;
        let tokens = handle.remote_tokens(chunks);
        let bank = self.bank(false, pass);
        let out = (bank.rows.0, bank.first_tail.0);
        let rows = handle.pass(chunks, false, None)?;
        self.launch(at, rows, &tokens, out, self.no_partials()?)?;
        at.fork()?;
        at.clear();
        at.add_heads(handle, (OP_HT_COMBINE, &self.launch), heads(pass))?;
        let (row, gradients) = self.bytes();
        let mut index = 0;
        for chunk in chunks.clone() {
            for (source, &peer) in (1..handle.plan().sources).zip(at.rails.remote_sources()) {
                let before = handle.counts.coming(source, chunk);
                let rows = handle.counts.coming(source, chunk + 1) - before;
                at.send(peer, bank.rows.0 + index * row, rows, row);
                at.send(peer, bank.first_tail.0 + index * gradients, rows, gradients);
                index += rows;
            }
        }
        let bank = self.bank(true, pass);
        for (other, &peer) in at.rails.gateways.iter().enumerate() {
            for chunk in chunks.clone() {
                let before = handle.counts.departing(other, chunk);
                let rows = handle.counts.departing(other, chunk + 1) - before;
                let first = handle.counts.departing(other, chunks.start);
                let index = other * handle.passes.room + before - first;
                at.receive(peer, bank.rows.0 + index * row, rows, row);
                at.receive(peer, bank.first_tail.0 + index * gradients, rows, gradients);
            }
        }
        at.exchange(pass)
    }

    /// Sums a pass of this rank's own tokens.
    fn launch_own(&self, at: &Enqueueing<'_>, pass: usize, chunks: &Range<usize>) -> Result<()> {
        let (handle, op) = (&self.handle, self.op);
        let tokens = handle.own_tokens(chunks);
        let bank = self.bank(true, pass);
        let (device, plan) = (&handle.device, handle.plan());
        let partials = HtPartials {
            rows: bank.rows.0 as *const u8,
            gradients: bank.first_tail.0 as *const f32,
            spots: word(device.spots, tokens.first),
            departing: word(device.departing, chunks.start),
            homes: word(device.homes, tokens.first * handle.routing.top_k),
            tokens: device.tokens,
            chunk_ends: number(plan.chunks + 1)?,
            room: number(handle.passes.room)?,
            others: number(plan.others)?,
        };
        let (row, gradients) = self.bytes();
        let (_, out_gradients) = addresses(op.gradients.map(|it| (it.input, it.output)));
        let out = (
            behind(op.out.0, tokens.first * row),
            behind(out_gradients, tokens.first * gradients),
        );
        let rows = handle.pass(chunks, true, Some(heads(pass)))?;
        self.launch(at, rows, &tokens, out, partials)
    }

    fn no_partials(&self) -> Result<HtPartials> {
        Ok(HtPartials {
            rows: null(),
            gradients: null(),
            spots: null(),
            departing: null(),
            homes: null(),
            tokens: 0,
            chunk_ends: number(self.handle.plan().chunks + 1)?,
            room: 0,
            others: 0,
        })
    }

    /// Launches the kernel for tokens whose sums and gradients go to `out`.
    fn launch(
        &self,
        at: &Enqueueing<'_>,
        pass: HtPass,
        tokens: &Tokens,
        out: (usize, usize),
        partials: HtPartials,
    ) -> Result<()> {
        let (handle, op) = (&self.handle, self.op);
        let (gradients, _) = addresses(op.gradients.map(|it| (it.input, it.output)));
        let params = HtCombineNodesParams {
            of_node: HtCombineParams {
                common: handle.common(OP_HT_COMBINE, &self.launch, tokens)?,
                rows: op.expert_rows.data.0 as *const u8,
                gradients: gradients as *const f32,
                out: out.0 as *mut u8,
                out_gradients: out.1 as *mut f32,
                in_rows: saturated(op.expert_rows.rows),
                columns: saturated(self.columns),
            },
            pass,
            partials,
        };
        let module = &handle.group.context.module;
        module.launch(self.kernel, self.launch.launch, &params, at.at)
    }
}
