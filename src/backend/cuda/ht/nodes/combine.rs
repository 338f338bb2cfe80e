//! Combine over several nodes: each pass's kernel sums what the node's ranks return for remote tokens, the sums
//! travel home, and another kernel adds them to what the own node returns.
//!
//! While the sums of a pass are on the network, the kernel of the next one runs. A bank is filled again when the
//! messages, or the kernel, that empty it are through.

use crate::backend::cuda::driver::function::LaunchShape;
use crate::backend::cuda::ht::grid::HtKind;
use crate::backend::cuda::ht::nodes::handle::NodesHt;
use crate::backend::cuda::ht::nodes::messages::{Bank, TokenBytes};
use crate::backend::cuda::ht::nodes::pass::{
    AHEAD, Enqueueing, Handle, Heads, NO_MESSAGES, Tokens, behind, word,
};
use crate::backend::cuda::ht::nodes::rails::Turn;
use crate::backend::cuda::ht::plan::HtLaunch;
use crate::backend::cuda::ht::shared::{addresses, saturated};
use crate::backend::cuda::kernels::{self, Kernel};
use crate::backend::cuda::params::common::{KernelOp, OWN_NODE_FIRST};
use crate::backend::cuda::params::ht::HtCombineParams;
use crate::backend::cuda::params::ht_nodes::{
    HT_HEAD_THREADS, HtCombineNodesParams, HtPartials, HtPass,
};
use crate::backend::cuda::regions::to_u32;
use crate::error::Result;
use crate::model::ops::{HtCombine, Stream};
use std::ops::Range;
use std::ptr::null;

/// A combine and how its kernels are launched.
struct Combine<'a> {
    handle: Handle<'a>,
    op: &'a HtCombine,
    launch: HtLaunch,
    kernel: Kernel<HtCombineNodesParams>,
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
        launch: group.launch(kind, &op.row.into(), sizes)?,
        kernel: kernels::ht_combine_nodes(op.row.dtype)?,
        columns,
    };
    let at = &group.enter(stream)?;
    let order = group.order.begin(at)?;
    let mut turn = handle.rails.turn.lock();
    let mut enqueueing = Enqueueing::new(&handle.rails, &mut turn, at, "HT combine")?;
    let enqueued = combine.enqueue(&mut enqueueing);
    enqueueing.end(group, order, enqueued)
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

    /// Of a row, and of its gradients.
    fn bytes(&self) -> TokenBytes {
        TokenBytes::new(self.op.row, self.columns * size_of::<f32>())
    }

    /// The sums of this node, to the sources.
    fn departing(&self, pass: usize) -> Bank {
        self.handle.banks.of_sources(pass, self.bytes())
    }

    /// Those of other nodes, from the gateways.
    fn arriving(&self, pass: usize) -> Bank {
        self.handle.banks.own(pass, self.bytes())
    }

    /// Sums a pass of remote tokens, and sends the sums home.
    fn sum_remote(
        &self,
        at: &mut Enqueueing<'_>,
        pass: usize,
        chunks: &Range<usize>,
    ) -> Result<()> {
        let counts = &self.handle.counts;
        let tokens = self.handle.remote_tokens(chunks);
        let bank = self.departing(pass);
        let rows = self.handle.pass(chunks, Some(bank), None)?;
        self.launch(at, rows, &tokens, (bank.rows, 0), self.no_partials()?)?;
        at.fork()?;
        self.launch_heads(at, bank)?;
        at.clear();
        let Turn {
            sends, receives, ..
        } = &mut *at.turn;
        for (index, &peer) in at.rails.remote_sources().iter().enumerate() {
            let tokens = counts.coming_in(1 + index, chunks);
            sends.push(bank.parcel(index, tokens, true).with_rows(peer));
        }
        let bank = self.arriving(pass);
        for (other, &peer) in at.rails.gateways.iter().enumerate() {
            let tokens = counts.departing_in(other, chunks);
            receives.push(bank.parcel(other, tokens, true).with_rows(peer));
        }
        at.exchange(pass)
    }

    /// The side stream writes the heads, which say whether the sums are sums.
    fn launch_heads(&self, at: &Enqueueing<'_>, bank: Bank) -> Result<()> {
        let messages = (bank, self.handle.plan().sources - 1);
        if messages.1 == 0 {
            return Ok(());
        }
        let params = self
            .handle
            .heads((KernelOp::HtCombine, &self.launch), messages)?;
        let shape = LaunchShape {
            blocks: 1,
            threads: HT_HEAD_THREADS,
            shared_bytes: 0,
        };
        let module = &self.handle.group.context.module;
        module.launch_on(kernels::ht_head(), shape, &params, at.side)
    }

    /// Sums a pass of this rank's own tokens.
    fn launch_own(&self, at: &Enqueueing<'_>, pass: usize, chunks: &Range<usize>) -> Result<()> {
        let (handle, op) = (&self.handle, self.op);
        let tokens = handle.own_tokens(chunks);
        let bank = self.arriving(pass);
        let (device, plan) = (&handle.device, handle.plan());
        let partials = HtPartials {
            messages: bank.messages()?,
            spots: word(device.spots, tokens.first),
            departing: word(device.departing, chunks.start),
            homes: word(device.homes, tokens.first * handle.routing.top_k),
            tokens: device.tokens,
            chunk_ends: to_u32(plan.chunks + 1)?,
            others: to_u32(plan.others)?,
            own_place: handle.rails.own_place()?,
        };
        let (row, gradients) = (bank.bytes.row, self.columns * size_of::<f32>());
        let (_, out_gradients) = addresses(op.gradients.map(|it| (it.input, it.output)));
        let out = (
            behind(op.out.0, tokens.first * row),
            behind(out_gradients, tokens.first * gradients),
        );
        let heads = Heads {
            of: bank,
            from_gateways: true,
            scales_word: 0,
        };
        let rows = handle.pass(chunks, None, Some(heads))?;
        self.launch(at, rows, &tokens, out, partials)
    }

    fn no_partials(&self) -> Result<HtPartials> {
        Ok(HtPartials {
            messages: NO_MESSAGES,
            spots: null(),
            departing: null(),
            homes: null(),
            tokens: 0,
            chunk_ends: to_u32(self.handle.plan().chunks + 1)?,
            others: 0,
            own_place: OWN_NODE_FIRST,
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
                common: handle.common(KernelOp::HtCombine, &self.launch, tokens)?,
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
