//! What the handles of a group over several nodes share.

use crate::backend::cuda::driver::context::Context;
use crate::backend::cuda::driver::event::DriverEvent;
use crate::backend::cuda::driver::memory::{Buffer, CudaMemory, HostPage};
use crate::backend::cuda::ht::nodes::memory::{Banks, NodesMemory};
use crate::backend::cuda::ht::nodes::plan::{HandleSize, NodesPlan, Tables};
use crate::backend::cuda::ht::shared::HtShared;
use crate::backend::cuda::network::Network;
use crate::backend::cuda::params::ht_nodes::{HtNodes, HtTold};
use crate::backend::cuda::pool::Pool;
use crate::backend::cuda::regions::{own_place, to_u32};
use crate::backend::cuda::side_streams::SideStreams;
use crate::backend::device::{Marks as _, StreamMark};
use crate::backend::net::two_sided::{Label, Message};
use crate::error::Result;
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
    _tables: Buffer,
    places: DevPtr,
    carried: DevPtr,
    carriers: DevPtr,
    gateway_ranks: DevPtr,
    pub work: Buffer,
    pub own_counts: usize,
    /// This rank's header of a new handle, then those of its other sources.
    pub headers: HostPage<HtTold>,
    pub pool: Pool<NodesMemory>,
    /// For a rank that refuses its part of a handle.
    pub spare: Arc<NodesMemory>,
    row_bytes: usize,
    ids: Mutex<Option<(Arc<Buffer>, usize)>>,
    /// The last serve new handles. Earlier ones stay, as operations that use them may outlive their handles.
    banks: Mutex<Vec<Arc<Banks>>>,
    /// Over when the other ranks' headers of a new handle are in `headers`.
    pub headers_arrived: Mutex<Box<dyn StreamMark>>,
    /// For what an operation does on the network.
    pub side: SideStreams,
    /// Locked while an operation is enqueued.
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
        let (tables, [places, carried, carriers, gateway_ranks]) = Buffer::of_tables(
            memory,
            [
                &tables.places,
                &tables.carried,
                &tables.carriers,
                &tables.gateways,
            ],
        )?;
        let tally_bytes = (plan.sources * plan.locals * plan.local_experts * size_of::<u32>())
            .next_multiple_of(256);
        let turn = Turn {
            join: DriverEvent::new(on)?,
            landed: [DriverEvent::new(on)?, DriverEvent::new(on)?],
            sends: Vec::new(),
            receives: Vec::new(),
        };
        let spare = NodesMemory::new(on, memory, &plan, HandleSize::default())?;
        let rails = Self {
            plan,
            gateways: topology.gateways_by_distance(rank),
            network,
            memory: Arc::clone(memory),
            _tables: tables,
            places,
            carried,
            carriers,
            gateway_ranks,
            work: Buffer::zeroed(memory, tally_bytes + 2 * plan.counts_bytes())?,
            own_counts: tally_bytes,
            headers: HostPage::new(on, 2 * plan.sources)?,
            headers_arrived: Mutex::new(memory.new_mark()?),
            pool: Pool::default(),
            spare: Arc::new(spare),
            row_bytes,
            ids: Mutex::default(),
            banks: Mutex::default(),
            side: SideStreams::new(memory)?,
            turn: Mutex::new(turn),
            operations: AtomicU64::new(0),
        };
        if let Some(tokens) = max_tokens {
            rails.banks_for(rails.plan.room(tokens))?;
        }
        Ok(rails)
    }

    /// Where this node comes in the sums of own tokens, as a kernel parameter.
    pub fn own_place(&self) -> Result<u32> {
        own_place(self.network.topology(), self.network.rank())
    }

    /// The tables as a kernel parameter.
    pub fn nodes(&self) -> Result<HtNodes> {
        let plan = &self.plan;
        Ok(HtNodes {
            places: self.places.0 as *const u32,
            carried: self.carried.0 as *const u32,
            carriers: self.carriers.0 as *const u32,
            ranks: to_u32(plan.ranks)?,
            others: to_u32(plan.others)?,
            width: to_u32(plan.width)?,
            sources: to_u32(plan.sources)?,
            chunks: to_u32(plan.chunks)?,
        })
    }

    /// The ranks of what other nodes send, as kernels read them: those of `remote_sources`, or of `gateways`.
    pub fn head_ranks(&self, from_gateways: bool) -> *const u32 {
        let own = self.network.topology().local_index(self.network.rank());
        let sources = own * (1 + self.plan.width) + 1;
        if from_gateways {
            self.gateway_ranks.0 as *const u32
        } else {
            (self.carried.0 + sources * size_of::<u32>()) as *const u32
        }
    }

    /// The remote ranks that this one carries.
    pub fn remote_sources(&self) -> &[usize] {
        self.network.sources().get(1..).unwrap_or_default()
    }

    /// Banks with room for so many tokens of a source in a pass. Grows geometrically: total <= 2 * largest.
    pub fn banks_for(&self, room: usize) -> Result<Arc<Banks>> {
        let mut banks = self.banks.lock();
        let present = banks.last();
        if let Some(present) = present.filter(|it| it.room >= room) {
            return Ok(Arc::clone(present));
        }
        let room = room.max(present.map_or(0, |it| 2 * it.room));
        let larger = Arc::new(Banks::new(&self.memory, &self.plan, room, self.row_bytes)?);
        banks.push(Arc::clone(&larger));
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
