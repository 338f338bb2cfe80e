//! One rank's side of a group on GPUs: its kernels, its window, and the windows of its peers.
//!
//! Opening proceeds in steps that all ranks leave together: what fails on one rank fails on all, and no
//! kernel waits for a rank that gave up before.
#![forbid(unsafe_code)]

use crate::backend::bootstrap::Bootstrap;
use crate::backend::cuda::context::Context;
use crate::backend::cuda::driver;
use crate::backend::cuda::fault::FaultPage;
use crate::backend::cuda::ht::HtGroup;
use crate::backend::cuda::ht_plan::HtPlan;
use crate::backend::cuda::layout::WindowLayout;
use crate::backend::cuda::ll::LlGroup;
use crate::backend::cuda::ll_plan::LlPlan;
use crate::backend::cuda::memory::{Buffer, CudaMemory};
use crate::backend::cuda::module::Module;
use crate::backend::cuda::open::Open;
use crate::backend::cuda::params::{LL_MARK, MAX_PEERS, OP_PEER_SELFTEST};
use crate::backend::cuda::parting::{End, Parting, Windows};
use crate::backend::cuda::selftest::Selftest;
use crate::backend::cuda::window::{PeerMapping, Window, WindowRecord};
use crate::backend::{DeviceMemory, GroupBackend, HtBackend, HtRouting, LlBackend};
use crate::error::refusal::{AmongRanks, Subject};
use crate::error::{Error, Result};
use crate::model::group::{Algorithm, GroupFacts};
use crate::model::ops::{Routing, Stream};
use crate::model::tensor::DevPtr;
use parking_lot::Mutex;
use std::sync::Arc;
use std::time::Duration;

/// A group whose ranks are GPUs that map each other's memory.
pub(super) struct CudaGroup {
    context: Arc<Context>,
    memory: Arc<CudaMemory>,
    bootstrap: Bootstrap,
    timeout: Duration,
    open: Arc<Open>,
    mode: Mode,
    /// Taken when the group closes.
    shared: Mutex<Option<Shared>>,
    parting: Parting,
}

/// What a group's mode needs beside that.
enum Mode {
    Ll(Arc<LlGroup>),
    Ht(Arc<HtGroup>),
}

/// What a mode decides about its part of the window.
enum Plan {
    Ll(Box<LlPlan>),
    Ht(Box<HtPlan>),
}

impl Plan {
    fn new(facts: &GroupFacts) -> Result<Self> {
        Ok(match facts.algorithm {
            Algorithm::LowLatency => Self::Ll(Box::new(LlPlan::new(facts)?)),
            Algorithm::HighThroughput => Self::Ht(Box::new(HtPlan::new(facts)?)),
        })
    }

    fn bytes(&self) -> usize {
        match self {
            Self::Ll(plan) => plan.bytes(),
            Self::Ht(plan) => plan.bytes(),
        }
    }

    /// Writes what must be in a new window, whose part begins at `start`; the rest is zero.
    fn initialise(&self, memory: &CudaMemory, start: usize) -> Result<()> {
        let Self::Ll(plan) = self else {
            return Ok(());
        };
        plan.marked()
            .try_for_each(|(offset, bytes)| memory.fill(DevPtr(start + offset), LL_MARK, bytes))
    }

    /// The mode's side of `open`; its part of the windows begins at `start`.
    fn open(self, open: &Arc<Open>, memory: &Arc<CudaMemory>, start: usize) -> Result<Mode> {
        let open = Arc::clone(open);
        Ok(match self {
            Self::Ll(plan) => {
                let layout = plan.layout(start);
                Mode::Ll(Arc::new(LlGroup::new(open, memory, *plan, layout)?))
            }
            Self::Ht(plan) => {
                let layout = plan.layout(start);
                Mode::Ht(Arc::new(HtGroup::new(open, memory, *plan, layout)?))
            }
        })
    }
}

/// What the ranks of a group hold of each other.
struct Shared {
    mappings: Vec<PeerMapping>,
    window: Window,
}

/// What one rank decides and makes before it meets the others.
struct Prepared {
    module: Module,
    plan: Plan,
    layout: WindowLayout,
    window: Window,
    record: WindowRecord,
    faults: FaultPage,
    selftest: Selftest,
    state: Buffer,
    multiprocessors: u32,
}

impl Prepared {
    fn new(
        context: &Arc<Context>,
        memory: &Arc<CudaMemory>,
        facts: &GroupFacts,
        timeout: Duration,
    ) -> Result<Self> {
        if facts.ranks > MAX_PEERS {
            return Err(Error::usage(Subject::Communicator, AmongRanks::FewerRanks)
                .got(facts.ranks, format_args!("at most {MAX_PEERS}")));
        }
        let plan = Plan::new(facts)?;
        let layout = WindowLayout::new(facts.ranks, plan.bytes());
        let window = Window::new(memory, layout.bytes)?;
        plan.initialise(memory, window.base().0 + layout.operations)?;
        let _entered = context.enter()?;
        Ok(Self {
            module: Module::load(context)?,
            plan,
            layout,
            record: WindowRecord::new(&window)?,
            window,
            faults: FaultPage::new(context, facts.rank, timeout)?,
            selftest: Selftest::new(context, facts.ranks)?,
            state: Open::new_state(memory)?,
            multiprocessors: driver::multiprocessors()?,
        })
    }
}

impl CudaGroup {
    /// Opens this rank's side. Collective: every rank gets a group, or every rank an error.
    pub(super) fn open(
        (context, memory): (Arc<Context>, Arc<CudaMemory>),
        facts: &GroupFacts,
        bootstrap: Bootstrap,
        timeout: Duration,
        stream: Stream,
    ) -> Result<Self> {
        let rank = facts.rank;
        let prepared = Prepared::new(&context, &memory, facts, timeout);
        let record = prepared
            .as_ref()
            .map(|own| own.record.to_bytes())
            .map_err(Error::clone);
        let records = bootstrap.agree(record, WindowRecord::BYTES, stream);
        let mut own = prepared?;
        // Where a rank is known to have refused, none maps a window.
        if records.is_ok() || bootstrap.lost().is_some() {
            own.window.tell();
        }
        let records = records?;

        let mut shared = Shared {
            mappings: Vec::new(),
            window: own.window,
        };
        let mapped = shared.map_peers(rank, &records, own.layout.bytes);
        let agreed = agree_on(&bootstrap, &mapped, stream);
        if let Err(error) = agreed {
            return Err(shared.abandon(&bootstrap, stream, error));
        }

        let told = DevPtr(shared.window.base().0 + own.layout.told);
        let windows = shared.windows(rank);
        let words = windows
            .iter()
            .map(|base| DevPtr(base.0 + own.layout.parting));
        let words = Windows::new(&memory, words.collect(), rank);
        let parting = Parting::new(words, (rank, facts.ranks), timeout);
        let open = Open::new(
            own.module,
            own.faults,
            own.multiprocessors,
            (own.state, told),
            (&windows, rank),
        )?;
        let tested = bootstrap.within_deadline(|left| {
            let (peers, wait) = (open.peers(), open.wait_at_most(left, OP_PEER_SELFTEST));
            let test = &own.selftest;
            test.run(&open.module, &peers, &own.layout, wait, stream)
        });
        let open = Arc::new(open);
        let mode = tested.and_then(|()| own.plan.open(&open, &memory, own.layout.operations));
        if let Err(error) = agree_on(&bootstrap, &mode, stream) {
            return Err(shared.abandon(&bootstrap, stream, error));
        }
        Ok(Self {
            context,
            memory,
            bootstrap,
            timeout,
            open,
            mode: mode?,
            shared: Mutex::new(Some(shared)),
            parting,
        })
    }
}

/// Leaves a step together: an error if any rank has one.
fn agree_on<T>(bootstrap: &Bootstrap, mine: &Result<T>, stream: Stream) -> Result<()> {
    let mine = mine.as_ref().map(|_| Vec::new()).map_err(Error::clone);
    bootstrap.agree(mine, 0, stream).map(drop)
}

/// What a rank tells the others about their windows at the end.
const UNMAPPED: u8 = 1;
const STILL_MAPPED: u8 = 2;

impl Shared {
    /// Maps the windows of all ranks but `rank`, which is this one; in rank order. Each has `bytes`. Those that
    /// were mapped before one that cannot be stay, to be unmapped as all are.
    fn map_peers(&mut self, rank: usize, records: &[Vec<u8>], bytes: usize) -> Result<()> {
        let others = records.iter().enumerate().filter(|&(peer, _)| peer != rank);
        for (peer, record) in others {
            let mapping = WindowRecord::from_bytes(record)
                .and_then(|record| PeerMapping::new(self.window.context(), &record, bytes))
                .map_err(|error| {
                    error.within(format_args!("rank {rank} cannot map rank {peer}'s window"))
                })?;
            self.mappings.push(mapping);
        }
        Ok(())
    }

    /// The windows of all ranks; `rank` is this one.
    fn windows(&self, rank: usize) -> Vec<DevPtr> {
        let mut bases: Vec<DevPtr> = self.mappings.iter().map(PeerMapping::base).collect();
        bases.insert(rank, self.window.base());
        bases
    }

    /// Unmaps the peers' windows if the device is quiet; gives the own one back once all ranks have done that, or
    /// leaves it to the next group if one could not. No kernel of any rank uses a window any more. Collective.
    ///
    /// To wait here for a quiet device would not do: another thread may be in an exchange, whose peers wait at
    /// this place for an exchange of this rank.
    fn release(self, bootstrap: &Bootstrap, stream: Stream) -> Result<()> {
        let Self { mappings, window } = self;
        let mine = match PeerMapping::unmap(mappings) {
            true => UNMAPPED,
            false => STILL_MAPPED,
        };
        let told = bootstrap.all_gather(&[mine], stream);
        match &told {
            Ok(told) if told.iter().all(|it| *it == [UNMAPPED]) => window.free(),
            _ => window.keep(),
        }
        told.map(drop)
    }

    /// Gives up the peers' windows, and leaves the own one to the next group: a peer may still map it, though no
    /// kernel uses it.
    fn keep(self) {
        drop(self.mappings);
        self.window.keep();
    }

    /// Gives up the peers' windows. The own one stays allocated: kernels of a peer may write to it.
    fn leave(self) {
        drop(self);
    }

    /// Ends an opening that failed with `error` on all ranks, and gives that back.
    fn abandon(self, bootstrap: &Bootstrap, stream: Stream, error: Error) -> Error {
        match bootstrap.lost() {
            // The error is what matters; a window that cannot be freed stays.
            None => drop(self.release(bootstrap, stream)),
            Some(_) => self.leave(),
        }
        error
    }
}

impl GroupBackend for CudaGroup {
    fn memory(&self) -> Arc<dyn DeviceMemory> {
        Arc::clone(&self.memory) as Arc<dyn DeviceMemory>
    }

    fn open_ll(&self, routing: Routing) -> Result<Box<dyn LlBackend>> {
        match &self.mode {
            Mode::Ll(ll) => Ok(Box::new(ll.open_handle(routing)?)),
            Mode::Ht(_) => Err(Error::internal("an LL handle of an HT group")),
        }
    }

    fn open_ht(&self, routing: Result<HtRouting>, stream: Stream) -> Result<Box<dyn HtBackend>> {
        let Mode::Ht(ht) = &self.mode else {
            return Err(Error::internal("an HT handle of an LL group"));
        };
        Ok(Box::new(ht.open_handle(routing, stream)?))
    }

    fn fault(&self) -> Option<Error> {
        self.open.faults.error().or_else(|| self.bootstrap.lost())
    }

    fn close(&self, stream: Stream) -> Result<()> {
        let Some(shared) = self.shared.lock().take() else {
            return Ok(());
        };
        if let Mode::Ll(ll) = &self.mode {
            ll.close();
        }
        self.bootstrap.begin_call();
        let rested = self.context.wait_for_operations(self.timeout, stream);
        let parted = match self.fault() {
            None => rested.and_then(|()| {
                let stays = self.context.is_stranded();
                self.parting.leave_together(stays)
            }),
            Some(_) => self.parting.leave().and(rested).map(|()| End::Broken),
        };
        let closed = match parted {
            Ok(End::Together { meet: true }) => shared.release(&self.bootstrap, stream),
            Ok(End::Together { meet: false }) => {
                shared.keep();
                Ok(())
            }
            Ok(End::Broken) => {
                shared.leave();
                Ok(())
            }
            Err(error) => {
                shared.leave();
                Err(error)
            }
        };
        self.context.close();
        closed
    }
}
