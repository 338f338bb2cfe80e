//! The plan of LL kernels: regions of the window, chunks of rows, and grids (in `plan/grids.rs`).
//!
//! Computed on the host, by pure functions of the group's facts and of an operation's shape.

mod grids;

use crate::backend::cuda::kernels::to_u32;
use crate::backend::cuda::ll::chunks::{ChunkSize, most_flags, slot_bytes};
use crate::backend::cuda::ll::fingerprint;
use crate::backend::cuda::ll::launch::{DispatchGrid, Grid, HandlePlan, ViewGrid, at_most};
use crate::backend::cuda::ll::network::{HEADER_BYTES, most_rows_bytes};
use crate::backend::cuda::params::ll::{
    LL_BANKS, LL_CHANNELS, LL_COMBINE_MANY_THREADS, LL_COUNTS_BESIDE_EXPERTS, LL_DISPATCH_THREADS, LL_INDEX_BITS,
    LL_MAX_RANKS, LL_MAX_TOP_K, LL_PLAIN_DISPATCH_THREADS, LL_STATIC_SHARED_BYTES, LlLayout, LlShape, reciprocal,
};
use crate::backend::cuda::params::ll_view::LlViewState;
use crate::error::refusal::{AmongRanks, OfSettings, Setting, Subject};
use crate::error::{Error, Result};
use crate::model::group::{GroupFacts, LlCombineMode};
use crate::model::handle_state::{LlSections, StateShape};
use crate::model::node_view::NodeView;
use crate::model::ops::{HandleForm, Routing};
use crate::model::regions::Regions;
use crate::tuning::Shapes;

const PACKET_BYTES: usize = 8;
const REGION_ALIGN: usize = 256;

/// Most blocks of a staged operation's background work.
const RELAY_BLOCKS: usize = 32;
/// One block in this many sends rows in a dispatch: a quarter of the multiprocessors already saturates NVLink.
const MULTIPROCESSORS_PER_SENDER: u32 = 4;
/// The same for dispatches that cast, between two ranks: these do not saturate NVLink so soon.
const MULTIPROCESSORS_PER_CASTING_SENDER: u32 = 3;

// Whole operations' channel has two banks, each other channel one.
const _: () = assert!(LL_BANKS == LL_CHANNELS + 1);

/// The plan of one group.
#[derive(Clone, Debug)]
pub struct LlPlan {
    /// The group's facts.
    pub facts: GroupFacts,
    forwarders: Forwarders,
    max_tokens: usize,
    /// Offsets from the start of the LL region.
    layout: LlLayout,
    /// Bytes of rows, with which each bank begins.
    rows_bytes: usize,
    /// Offset of the views' state; `None` over several nodes.
    view_state: Option<usize>,
    /// Bytes of the LL region of a window.
    pub bytes: usize,
    /// Grids from a tuning file, which take precedence over the library's own.
    pub shapes: Shapes,
}

/// The sizes of the forwarding within this node.
#[derive(Clone, Copy, Debug)]
struct Forwarders {
    /// Ranks of this node.
    peers: usize,
    /// The most ranks that a rank of this node forwards for, including itself.
    sources: usize,
    nodes: usize,
}

impl LlPlan {
    /// The plan of an LL group, which always has a bound on tokens.
    pub fn new(facts: &GroupFacts, view: &NodeView) -> Result<Self> {
        let max_tokens = facts.max_tokens.ok_or_else(|| Error::internal("an LL group without a bound"))?;
        check_limits(facts, max_tokens, view.topology.nodes())?;
        let forwarders =
            Forwarders { peers: view.locals.len(), sources: 1 + view.width(), nodes: view.topology.nodes() };
        let rows_per_token = match facts.ll_combine {
            LlCombineMode::Reduce => facts.ranks.max(forwarders.peers * forwarders.sources),
            LlCombineMode::Exact => facts.ranks.max(LL_MAX_TOP_K as usize),
        };
        let rows = rows_per_token * max_tokens;
        let mut bank = Regions::new(REGION_ALIGN);
        let rows_bytes = rows * slot_bytes(facts.row_bytes);
        bank.take(rows_bytes);
        let flags = bank.take(rows * most_flags(facts.row_bytes) * PACKET_BYTES);
        let per_rank = facts.local_experts() + LL_COUNTS_BESIDE_EXPERTS as usize;
        let counts = bank.take(facts.ranks * per_rank * PACKET_BYTES);
        // Twice, as rank-major dispatches send weights, too.
        let most_entries = 2 * facts.ranks * max_tokens * LL_MAX_TOP_K as usize;
        let entries = bank.take(most_entries * PACKET_BYTES);
        let mut window = Regions::new(REGION_ALIGN);
        let acks = window.take(LL_CHANNELS as usize * forwarders.peers * PACKET_BYTES);
        let banks = window.take(LL_BANKS as usize * bank.bytes());
        let view_state = (forwarders.nodes == 1).then(|| window.take(size_of::<LlViewState>()));
        let layout = LlLayout {
            acks: acks as u64,
            banks: banks as u64,
            bank_bytes: bank.bytes() as u64,
            flags: flags as u64,
            counts: counts as u64,
            entries: entries as u64,
        };
        Ok(Self {
            facts: *facts,
            forwarders,
            max_tokens,
            layout,
            rows_bytes,
            view_state,
            bytes: window.bytes(),
            shapes: Shapes::default(),
        })
    }

    /// This plan with the grids `shapes` in place of the library's own, unless the caller bounds the channels.
    pub fn tuned(self, shapes: &Shapes) -> Self {
        if self.facts.channels.is_none() { Self { shapes: shapes.clone(), ..self } } else { self }
    }

    /// Most bytes of a message between nodes.
    pub fn most_message_bytes(&self) -> usize {
        HEADER_BYTES + most_rows_bytes(&self.facts)
    }

    /// The kernels' offsets if the LL region begins at `start` of the window.
    pub fn layout(&self, start: usize) -> LlLayout {
        let start = start as u64;
        LlLayout { acks: start + self.layout.acks, banks: start + self.layout.banks, ..self.layout }
    }

    /// Offset within the LL region and length of each bank's rows, which must hold `LL_SENTINEL` before the first
    /// operation.
    pub fn with_sentinel(&self) -> impl Iterator<Item = (usize, usize)> {
        let (banks, bank_bytes) = (self.layout.banks as usize, self.layout.bank_bytes as usize);
        let rows_bytes = self.rows_bytes;
        (0..LL_BANKS as usize).map(move |bank| (banks + bank * bank_bytes, rows_bytes))
    }

    /// The offset of the views' state if the LL region begins at `start` of the window; `None` over several nodes.
    pub fn view_state(&self, start: usize) -> Option<usize> {
        self.view_state.map(|state| start + state)
    }

    /// Bytes of a view of the longest rows.
    pub fn view_bytes(&self) -> usize {
        let bytes = self.facts.ranks * self.max_tokens * self.facts.row_bytes;
        bytes.next_multiple_of(REGION_ALIGN)
    }

    /// The sections of a handle's block.
    pub fn handle_memory(&self, top_k: usize, form: HandleForm) -> LlSections {
        let shape = StateShape {
            ranks: self.facts.ranks,
            local_experts: self.facts.local_experts(),
            most_tokens: self.max_tokens,
            top_k,
            form,
        };
        LlSections::new(shape, self.forwarders.sources)
    }

    /// The launches of a handle with the ids `routing`, on a device with `multiprocessors`.
    pub fn of_handle(&self, routing: &Routing, multiprocessors: u32) -> Result<HandlePlan> {
        let multiprocessors = self.most_blocks(multiprocessors);
        let per_casting_sender = match self.facts.ranks {
            ..=2 => MULTIPROCESSORS_PER_CASTING_SENDER,
            _ => MULTIPROCESSORS_PER_SENDER,
        };
        let relay = at_most(RELAY_BLOCKS, multiprocessors);
        let relay_dispatch = Grid::shared(relay, LL_DISPATCH_THREADS);
        let shared_bytes = to_u32(self.facts.experts * SHARED_BYTES_PER_EXPERT)?;
        let dispatch = |(grid, notify_blocks): (Grid, u32)| DispatchGrid {
            grid,
            notify_blocks,
            serve_blocks: 0,
            chunk_size: ChunkSize::Large,
            launch: grid.launch_shape(shared_bytes),
        };
        let senders = |one_in, threads| dispatch(self.dispatch_grid(routing.tokens, multiprocessors, one_in, threads));
        let plain_threads = match self.forwarders.nodes {
            1 => LL_PLAIN_DISPATCH_THREADS,
            _ => LL_DISPATCH_THREADS,
        };
        Ok(HandlePlan {
            dispatch: senders(MULTIPROCESSORS_PER_SENDER, plain_threads),
            scaled_dispatch: senders(MULTIPROCESSORS_PER_SENDER, LL_DISPATCH_THREADS),
            cast_dispatch: senders(per_casting_sender, LL_DISPATCH_THREADS),
            combine: self.combine_grid(routing.tokens, multiprocessors),
            relay_dispatch: dispatch((relay_dispatch, relay_dispatch.receive_blocks)),
            relay_combine: Grid::shared(relay, LL_COMBINE_MANY_THREADS),
            view: ViewGrid {
                tokens: routing.tokens,
                most_tokens: self.max_tokens,
                multiprocessors,
                ranks: self.facts.ranks,
            },
            combine_kernel: self.combine_kernel(routing.tokens),
            few: self.few(routing, multiprocessors, shared_bytes),
            shape_of_handle: LlShape {
                local_experts: to_u32(self.facts.local_experts())?,
                max_tokens: to_u32(self.max_tokens)?,
                tokens: to_u32(routing.tokens)?,
                top_k: to_u32(routing.top_k)?,
                row_bytes: 0,
                slot_bytes: 0,
                chunk_bytes: 0,
                chunks: 0,
                flags: 0,
                ranks_reciprocal: reciprocal(to_u32(self.facts.ranks)?),
                local_experts_reciprocal: reciprocal(to_u32(self.facts.local_experts())?),
                counts_reciprocal: reciprocal(to_u32(self.facts.local_experts())? + LL_COUNTS_BESIDE_EXPERTS),
                top_k_reciprocal: reciprocal(to_u32(routing.top_k)?),
                chunks_reciprocal: 0,
            },
        })
    }
}

/// Dynamic shared memory that a block may have without opt-in: 48 KiB minus its static variables.
const MAX_SHARED_BYTES: usize = (48 << 10) - LL_STATIC_SHARED_BYTES as usize;
/// Shared memory of a dispatch block per expert of the group.
pub const SHARED_BYTES_PER_EXPERT: usize = 8;

/// Refuses facts that exceed the kernels' shared memory or the bits of their packets' fields.
pub fn check_limits(facts: &GroupFacts, max_tokens: usize, nodes: usize) -> Result<()> {
    let local = (1 << (32 - LL_INDEX_BITS)) - 1;
    if nodes > 1 && facts.ranks > LL_MAX_RANKS {
        return Err(Error::usage(Subject::Communicator, AmongRanks::FewerRanks)
            .got(facts.ranks, format_args!("at most {LL_MAX_RANKS}")));
    }
    let of_ranks = match nodes {
        1 => 0,
        _ => LL_MAX_RANKS * size_of::<u32>(),
    };
    let experts = ((MAX_SHARED_BYTES - of_ranks) / SHARED_BYTES_PER_EXPERT).min(local * facts.ranks);
    let rows = ((1 << LL_INDEX_BITS) - 1).min(i32::MAX as usize / facts.local_experts());
    let row_bytes = fingerprint::MOST_ROW_BYTES;
    let limits = [
        (Setting::Experts, facts.experts, experts),
        (Setting::RowBytes, facts.row_bytes, row_bytes),
        (Setting::MaxTokens, max_tokens, rows / facts.ranks),
    ];
    let Some((setting, got, most)) = limits.into_iter().find(|(_, got, most)| got > most) else {
        return Ok(());
    };
    let rule = OfSettings::LlKernelsCount;
    Err(Error::usage(Subject::Setting(setting), rule).got(got, format_args!("at most {most}")))
}

#[cfg(test)]
#[path = "plan_tests.rs"]
mod tests;
