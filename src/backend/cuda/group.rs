//! One rank's side of a group on GPUs: its kernels, its window, and the windows of its peers.
//!
//! Opening proceeds in steps that all ranks leave together: what fails on one rank fails on all, and no
//! kernel waits for a rank that gave up before.
#![forbid(unsafe_code)]

use crate::backend::bootstrap::Bootstrap;
use crate::backend::cuda::context::Context;
use crate::backend::cuda::driver;
use crate::backend::cuda::fault::FaultPage;
use crate::backend::cuda::layout::WindowLayout;
use crate::backend::cuda::memory::CudaMemory;
use crate::backend::cuda::module::Module;
use crate::backend::cuda::params::{MAX_PEERS, OP_PEER_SELFTEST, PeerTable};
use crate::backend::cuda::selftest::Selftest;
use crate::backend::cuda::window::{PeerMapping, Window, WindowRecord};
use crate::backend::{DeviceMemory, GroupBackend, HtBackend, HtRouting, LlBackend};
use crate::error::{Error, Result};
use crate::model::ops::{Routing, Stream};
use crate::model::tensor::DevPtr;
use parking_lot::Mutex;
use std::ptr::null_mut;
use std::sync::Arc;
use std::time::Duration;

/// A group whose ranks are GPUs that map each other's memory.
pub(super) struct CudaGroup {
    context: Arc<Context>,
    memory: Arc<CudaMemory>,
    bootstrap: Bootstrap,
    faults: FaultPage,
    /// Taken when the group closes.
    shared: Mutex<Option<Shared>>,
}

/// What the ranks of a group hold of each other. Dropped in this order: mappings first.
struct Shared {
    mappings: Vec<PeerMapping>,
    window: Window,
}

/// What one rank makes before it meets the others.
struct Prepared {
    module: Module,
    window: Window,
    record: WindowRecord,
    faults: FaultPage,
    selftest: Selftest,
}

impl Prepared {
    fn new(
        context: &Arc<Context>,
        memory: &Arc<CudaMemory>,
        layout: &WindowLayout,
        (rank, ranks): (usize, usize),
        timeout: Duration,
    ) -> Result<Self> {
        if ranks > MAX_PEERS {
            return Err(Error::usage("comm", "has more ranks than an NVLink domain")
                .got(ranks, format_args!("at most {MAX_PEERS}")));
        }
        let window = Window::new(memory, layout.bytes)?;
        Ok(Self {
            module: Module::load(context)?,
            record: WindowRecord::new(context, &window)?,
            window,
            faults: FaultPage::new(context, rank, timeout)?,
            selftest: Selftest::new(context, ranks)?,
        })
    }
}

impl CudaGroup {
    /// Opens this rank's side. Collective: every rank gets a group, or every rank an error.
    pub(super) fn open(
        context: Arc<Context>,
        memory: Arc<CudaMemory>,
        bootstrap: Bootstrap,
        timeout: Duration,
        stream: Stream,
    ) -> Result<Self> {
        let ranks = (bootstrap.rank(), bootstrap.ranks());
        let layout = WindowLayout::new(bootstrap.ranks());
        let prepared = Prepared::new(&context, &memory, &layout, ranks, timeout);

        let record = prepared
            .as_ref()
            .map(|own| own.record.to_bytes())
            .map_err(Error::clone);
        let records = bootstrap.agree(record, WindowRecord::BYTES, stream)?;
        let Prepared {
            module,
            window,
            faults,
            selftest,
            ..
        } = prepared?;

        let mappings = map_peers(&context, bootstrap.rank(), &records);
        agree_on(&bootstrap, &mappings, stream)?;
        let shared = Shared {
            mappings: mappings?,
            window,
        };

        let wait = faults.wait_params(OP_PEER_SELFTEST, shared.own(layout.failed));
        let peers = shared.table(bootstrap.rank())?;
        let tested = selftest.run(&module, &peers, &layout, wait, stream);
        agree_on(&bootstrap, &tested, stream)?;

        let shared = Mutex::new(Some(shared));
        Ok(Self {
            context,
            memory,
            bootstrap,
            faults,
            shared,
        })
    }
}

/// Leaves a step together: an error if any rank has one.
fn agree_on<T>(bootstrap: &Bootstrap, mine: &Result<T>, stream: Stream) -> Result<()> {
    let mine = mine.as_ref().map(|_| Vec::new()).map_err(Error::clone);
    bootstrap.agree(mine, 0, stream).map(drop)
}

/// Maps the windows of all ranks but `rank`, which is this one; in rank order.
fn map_peers(context: &Arc<Context>, rank: usize, records: &[Vec<u8>]) -> Result<Vec<PeerMapping>> {
    let others = records.iter().enumerate().filter(|&(peer, _)| peer != rank);
    others
        .map(|(peer, bytes)| {
            WindowRecord::from_bytes(bytes)
                .and_then(|record| PeerMapping::new(context, &record))
                .map_err(|error| {
                    error.within(format_args!("rank {rank} cannot map rank {peer}'s window"))
                })
        })
        .collect()
}

impl Shared {
    /// An address in this rank's own window.
    fn own(&self, offset: usize) -> DevPtr {
        DevPtr(self.window.base().0 + offset)
    }

    /// The windows of all ranks, as kernels take them; `rank` is this one.
    fn table(&self, rank: usize) -> Result<PeerTable> {
        let number = |count: usize| {
            u32::try_from(count).map_err(|_| Error::internal(format!("{count} is no rank")))
        };
        let mut bases: Vec<DevPtr> = self.mappings.iter().map(PeerMapping::base).collect();
        bases.insert(rank, self.window.base());
        let mut window = [null_mut(); MAX_PEERS];
        for (to, base) in window.iter_mut().zip(&bases) {
            *to = base.0 as *mut u8;
        }
        Ok(PeerTable {
            window,
            ranks: number(bases.len())?,
            rank: number(rank)?,
        })
    }
}

/// The answer to every handle until the kernels for it exist.
fn no_kernels<T>() -> Result<T> {
    Err(Error::usage(
        "group",
        "the CUDA backend has no dispatch and combine kernels yet",
    ))
}

impl GroupBackend for CudaGroup {
    fn memory(&self) -> Arc<dyn DeviceMemory> {
        Arc::clone(&self.memory) as Arc<dyn DeviceMemory>
    }

    fn open_ll(&self, _routing: Routing) -> Result<Box<dyn LlBackend>> {
        no_kernels()
    }

    fn open_ht(&self, routing: Result<HtRouting>, _stream: Stream) -> Result<Box<dyn HtBackend>> {
        routing.and_then(|_| no_kernels())
    }

    fn fault(&self) -> Option<Error> {
        self.faults.error()
    }

    fn close(&self, stream: Stream) -> Result<()> {
        let Some(Shared { mappings, window }) = self.shared.lock().take() else {
            return Ok(());
        };
        let idle = self
            .context
            .enter()
            .and_then(|_entered| driver::synchronize_context());
        // A peer that is known to be lost is not waited for again.
        let meet = || match self.fault() {
            None => self.bootstrap.all_gather(&[0], stream).map(drop),
            Some(_) => Ok(()),
        };
        // Nobody unmaps a window that a peer's kernel may still use, and nobody frees one that a peer
        // still maps.
        let finished = idle.and_then(|()| meet());
        drop(mappings);
        let unmapped = finished.and_then(|()| meet());
        drop(window);
        unmapped
    }
}
