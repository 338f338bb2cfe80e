//! What the handles of a group over several nodes share.
#![forbid(unsafe_code)]

use crate::backend::DeviceMemory;
use crate::backend::cuda::driver::context::Context;
use crate::backend::cuda::driver::event::DriverEvent;
use crate::backend::cuda::driver::memory::{Buffer, CudaMemory, HostPage};
use crate::backend::cuda::ht::nodes::memory::{Banks, NodesMemory};
use crate::backend::cuda::ht::nodes::plan::{NodesPlan, Passes, Tables};
use crate::backend::cuda::ht::shared::HtShared;
use crate::backend::cuda::network::Network;
use crate::backend::cuda::params::ht_nodes::{HtNodes, HtTold};
use crate::backend::cuda::pool::Pool;
use crate::backend::cuda::sizes::{Regions, number};
use crate::backend::transport::{Label, Message};
use crate::error::Result;
use crate::model::ops::Stream;
use crate::model::tensor::DevPtr;
use parking_lot::Mutex;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// What the handles of a group over several nodes share.
pub struct Rails {
    pub plan: NodesPlan,
    pub network: Arc<Network>,
    /// The gateways on the other nodes, in the order of sums.
    pub gateways: Vec<usize>,
    pub memory: Arc<CudaMemory>,
    tables: Buffer,
    table_offsets: [usize; 4],
    pub work: Buffer,
    pub own_counts: usize,
    /// This rank's words about a new handle, then those of its other sources.
    pub headers: HostPage<HtTold>,
    pub pool: Pool<NodesMemory>,
    /// For a rank that refuses its part of a handle.
    pub spare: Arc<NodesMemory>,
    row_bytes: usize,
    ids: Mutex<Option<(Arc<Buffer>, usize)>>,
    banks: Mutex<Option<Arc<Banks>>>,
    pub side: SideStream,
    /// Locked by who enqueues an operation.
    pub turn: Mutex<Turn>,
    operations: AtomicU64,
}

/// What operations need one at a time.
pub struct Turn {
    pub join: DriverEvent,
    /// Of the last two passes on the network.
    pub landed: [DriverEvent; 2],
    pub sends: Vec<Message>,
    pub receives: Vec<Message>,
}

/// The stream for the network.
pub struct SideStream {
    memory: Arc<CudaMemory>,
    pub stream: Stream,
}

impl Drop for SideStream {
    fn drop(&mut self) {
        self.memory.destroy_stream(self.stream);
    }
}

impl Rails {
    /// The rails of a group whose rows have at most `row_bytes`; `max_tokens` is the bound of tokens per rank, if any.
    pub fn new(
        shared: &HtShared,
        network: Arc<Network>,
        memory: &Arc<CudaMemory>,
        plan: NodesPlan,
        (row_bytes, max_tokens): (usize, Option<usize>),
    ) -> Result<Self> {
        let on: &Arc<Context> = shared.context.module.context();
        let (rank, topology) = (network.rank(), network.topology());
        let tables = Tables::new(topology, rank, plan.width)?;
        let (tables, table_offsets) = upload(memory, &tables)?;
        let tally_bytes = (plan.sources * plan.locals * plan.local_experts * size_of::<u32>())
            .next_multiple_of(256);
        let turn = Turn {
            join: DriverEvent::new(on)?,
            landed: [DriverEvent::new(on)?, DriverEvent::new(on)?],
            sends: Vec::new(),
            receives: Vec::new(),
        };
        let spare = NodesMemory::new(on, memory, &plan, ((0, 0), 0))?;
        let rails = Self {
            plan,
            gateways: topology.gateways_by_distance(rank),
            network,
            memory: Arc::clone(memory),
            tables,
            table_offsets,
            work: Buffer::zeroed(memory, tally_bytes + 2 * plan.counts_bytes())?,
            own_counts: tally_bytes,
            headers: HostPage::new(on, 2 * plan.sources)?,
            pool: Pool::default(),
            spare: Arc::new(spare),
            row_bytes,
            ids: Mutex::default(),
            banks: Mutex::default(),
            side: SideStream {
                memory: Arc::clone(memory),
                stream: memory.create_stream()?,
            },
            turn: Mutex::new(turn),
            operations: AtomicU64::new(0),
        };
        if let Some(tokens) = max_tokens {
            rails.banks_for(&rails.plan.passes(tokens))?;
        }
        Ok(rails)
    }

    /// The tables as a kernel parameter.
    pub fn nodes(&self) -> Result<HtNodes> {
        let table = |offset: usize| (self.tables.data().0 + offset) as *const u32;
        let [places, carried, carriers, _] = self.table_offsets.map(table);
        let plan = &self.plan;
        Ok(HtNodes {
            places,
            carried,
            carriers,
            ranks: number(plan.ranks)?,
            others: number(plan.others)?,
            width: number(plan.width)?,
            sources: number(plan.sources)?,
            chunks: number(plan.chunks)?,
        })
    }

    /// The ranks of what other nodes send, as kernels read them: those of `remote_sources`, or of `gateways`.
    pub fn head_ranks(&self, from_gateways: bool) -> *const u32 {
        let [_, carried, _, gateways] = self.table_offsets;
        let own = self.network.topology().local_index(self.network.rank());
        let sources = carried + (own * (1 + self.plan.width) + 1) * size_of::<u32>();
        let offset = if from_gateways { gateways } else { sources };
        (self.tables.data().0 + offset) as *const u32
    }

    /// The remote ranks that this one carries.
    pub fn remote_sources(&self) -> &[usize] {
        self.network.sources().get(1..).unwrap_or_default()
    }

    /// Banks with room for `passes`. Larger ones replace those there are, which go when no handle has them any more.
    pub fn banks_for(&self, passes: &Passes) -> Result<Arc<Banks>> {
        let mut banks = self.banks.lock();
        if let Some(present) = banks.as_ref().filter(|it| it.room >= passes.room) {
            return Ok(Arc::clone(present));
        }
        let larger = Banks::new(&self.memory, &self.plan, passes.room, self.row_bytes)?;
        let larger = Arc::new(larger);
        *banks = Some(Arc::clone(&larger));
        Ok(larger)
    }

    /// Memory for `bytes` of other ranks' ids, until the next handle is made.
    pub fn ids_for(&self, bytes: usize) -> Result<Arc<Buffer>> {
        let mut ids = self.ids.lock();
        if let Some((present, _)) = ids.as_ref().filter(|(_, there)| *there >= bytes) {
            return Ok(Arc::clone(present));
        }
        let bytes = bytes.next_power_of_two();
        let larger = Arc::new(Buffer::new(&self.memory, bytes)?);
        *ids = Some((Arc::clone(&larger), bytes));
        Ok(larger)
    }

    pub fn label(&self, what: &'static str) -> Label {
        let number = self.operations.fetch_add(1, Ordering::Relaxed) + 1;
        Label { what, number }
    }
}

/// The tables in device memory, and where each begins.
fn upload(memory: &Arc<CudaMemory>, tables: &Tables) -> Result<(Buffer, [usize; 4])> {
    let all = [
        &tables.places,
        &tables.carried,
        &tables.carriers,
        &tables.gateways,
    ];
    let mut regions = Regions::new(256);
    let offsets = all.map(|table| regions.take(table.len() * size_of::<u32>()));
    let buffer = Buffer::new(memory, regions.bytes())?;
    for (table, offset) in all.iter().zip(offsets) {
        let bytes: Vec<u8> = table.iter().flat_map(|word| word.to_ne_bytes()).collect();
        memory.upload(DevPtr(buffer.data().0 + offset), &bytes)?;
    }
    Ok((buffer, offsets))
}
