//! One rank's side of a group on GPUs: its kernels, its window, and the windows of its peers.
//!
//! Opening proceeds in steps that all ranks leave together: what fails on one rank fails on all, and no
//! kernel waits for a rank that gave up before.
#![forbid(unsafe_code)]

use crate::backend::bootstrap::Bootstrap;
use crate::backend::cuda::driver;
use crate::backend::cuda::driver::context::Context;
use crate::backend::cuda::driver::memory::{Buffer, CudaMemory};
use crate::backend::cuda::driver::module::Module;
use crate::backend::cuda::fault::FaultPage;
use crate::backend::cuda::group_context::GroupContext;
use crate::backend::cuda::ht::HtGroup;
use crate::backend::cuda::ht::plan::HtPlan;
use crate::backend::cuda::ll::LlGroup;
use crate::backend::cuda::ll::plan::LlPlan;
use crate::backend::cuda::params::common::{MAX_PEERS, OP_PEER_SELFTEST};
use crate::backend::cuda::params::ll::LL_MARK;
use crate::backend::cuda::peer::layout::WindowLayout;
use crate::backend::cuda::peer::selftest::Selftest;
use crate::backend::cuda::peer::teardown::{End, Teardown, Windows};
use crate::backend::cuda::peer::window::{Window, WindowRecord};
use crate::backend::cuda::peer::windows::PeerWindows;
use crate::backend::{
    DeviceMemory, Faults, GroupBackend, HtBackend, HtGroupBackend, HtRouting, LlBackend,
    LlGroupBackend, OpenGroup,
};
use crate::error::refusal::{AmongRanks, Subject};
use crate::error::{Error, Result};
use crate::model::group::{Algorithm, GroupFacts};
use crate::model::ops::{Routing, Stream};
use crate::model::tensor::DevPtr;
use parking_lot::Mutex;
use std::sync::Arc;
use std::time::Duration;

/// A group whose ranks are GPUs that map each other's memory.
struct CudaGroup<M> {
    common: Common,
    mode: Arc<M>,
}

/// What it has in any mode.
struct Common {
    context: Arc<Context>,
    memory: Arc<CudaMemory>,
    bootstrap: Bootstrap,
    timeout: Duration,
    group: Arc<GroupContext>,
    /// Taken when the group closes.
    windows: Mutex<Option<PeerWindows>>,
    teardown: Teardown,
}

/// The modes' side of a new group.
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

    /// The mode's side of `group`; its part of the windows begins at `start`.
    fn open(
        self,
        group: &Arc<GroupContext>,
        memory: &Arc<CudaMemory>,
        start: usize,
    ) -> Result<Mode> {
        let group = Arc::clone(group);
        Ok(match self {
            Self::Ll(plan) => {
                let layout = plan.layout(start);
                Mode::Ll(Arc::new(LlGroup::new(group, memory, *plan, layout)?))
            }
            Self::Ht(plan) => {
                let layout = plan.layout(start);
                Mode::Ht(Arc::new(HtGroup::new(group, memory, *plan, layout)?))
            }
        })
    }
}

/// What one rank decides and makes before it meets the others.
struct Prepared {
    module: Module,
    plan: Plan,
    layout: WindowLayout,
    window: Window,
    record: WindowRecord,
    faults: Arc<FaultPage>,
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
            faults: Arc::new(FaultPage::new(context, facts.rank, timeout)?),
            selftest: Selftest::new(context, facts.ranks)?,
            state: GroupContext::new_state(memory)?,
            multiprocessors: driver::multiprocessors()?,
        })
    }
}

/// Opens this rank's side. Collective: every rank gets a group, or every rank an error.
pub(super) fn open(
    (context, memory): (Arc<Context>, Arc<CudaMemory>),
    facts: &GroupFacts,
    bootstrap: Bootstrap,
    timeout: Duration,
    stream: Stream,
) -> Result<OpenGroup> {
    let rank = facts.rank;
    let prepared = Prepared::new(&context, &memory, facts, timeout);
    let record = prepared.as_ref().map(|own| own.record.to_bytes());
    let record = record.map_err(Error::clone);
    let records = bootstrap.agree(record, WindowRecord::BYTES, stream);
    let mut own = prepared?;
    // Where a rank is known to have refused, none maps a window.
    if records.is_ok() || bootstrap.lost().is_some() {
        own.window.publish();
    }
    let records = records?;

    let mut windows = PeerWindows::new(own.window);
    let mapped = windows.map_peers(rank, &records, own.layout.bytes);
    if let Err(error) = agree_on(&bootstrap, &mapped, stream) {
        return Err(windows.abandon(&bootstrap, stream, error));
    }

    let bases = windows.bases(rank);
    let peer_failed = DevPtr(windows.base().0 + own.layout.peer_failed);
    let group = Arc::new(GroupContext::new(
        own.module,
        own.faults,
        own.multiprocessors,
        (own.state, peer_failed),
        (&bases, rank),
    )?);
    let tested = bootstrap.within_deadline(|left| {
        let (peers, wait) = (group.peers(), group.wait_at_most(left, OP_PEER_SELFTEST));
        let test = &own.selftest;
        test.run(&group.module, &peers, &own.layout, wait, stream)
    });
    let mode = tested.and_then(|()| own.plan.open(&group, &memory, own.layout.operations));
    if let Err(error) = agree_on(&bootstrap, &mode, stream) {
        return Err(windows.abandon(&bootstrap, stream, error));
    }
    let words = bases
        .iter()
        .map(|base| DevPtr(base.0 + own.layout.teardown));
    let words = Windows::new(&memory, words.collect(), rank);
    let common = Common {
        context,
        memory,
        bootstrap,
        timeout,
        group,
        windows: Mutex::new(Some(windows)),
        teardown: Teardown::new(words, (rank, facts.ranks), timeout),
    };
    Ok(match mode? {
        Mode::Ll(mode) => OpenGroup::Ll(Arc::new(CudaGroup { common, mode })),
        Mode::Ht(mode) => OpenGroup::Ht(Arc::new(CudaGroup { common, mode })),
    })
}

/// Leaves a step together: an error if any rank has one.
fn agree_on<T>(bootstrap: &Bootstrap, mine: &Result<T>, stream: Stream) -> Result<()> {
    let mine = mine.as_ref().map(|_| Vec::new()).map_err(Error::clone);
    bootstrap.agree(mine, 0, stream).map(drop)
}

impl Common {
    fn close(&self, windows: PeerWindows, stream: Stream) -> Result<()> {
        self.bootstrap.begin_call();
        let rested = self.context.wait_for_operations(self.timeout, stream);
        let parted = match self.group.faults.first() {
            None => rested.and_then(|()| {
                let stays = self.context.is_stranded();
                self.teardown.leave_together(stays)
            }),
            Some(_) => self.teardown.leave().and(rested).map(|()| End::Broken),
        };
        let closed = match parted {
            Ok(End::Together { meet: true }) => windows.release(&self.bootstrap, stream),
            Ok(End::Together { meet: false }) => {
                windows.keep();
                Ok(())
            }
            Ok(End::Broken) => {
                windows.leave();
                Ok(())
            }
            Err(error) => {
                windows.leave();
                Err(error)
            }
        };
        self.context.close();
        closed
    }
}

/// What a mode does when its group closes.
trait Close: Send + Sync {
    /// No operation will follow.
    fn close(&self);
}

impl Close for LlGroup {
    fn close(&self) {
        self.forget_staged();
    }
}

impl Close for HtGroup {
    fn close(&self) {}
}

impl<M: Close> GroupBackend for CudaGroup<M> {
    fn memory(&self) -> Arc<dyn DeviceMemory> {
        Arc::clone(&self.common.memory) as Arc<dyn DeviceMemory>
    }

    fn faults(&self) -> Arc<dyn Faults> {
        Arc::clone(&self.common.group.faults) as Arc<dyn Faults>
    }

    fn close(&self, stream: Stream) -> Result<()> {
        let Some(windows) = self.common.windows.lock().take() else {
            return Ok(());
        };
        self.mode.close();
        self.common.close(windows, stream)
    }
}

impl LlGroupBackend for CudaGroup<LlGroup> {
    fn open_handle(&self, routing: Routing) -> Result<Box<dyn LlBackend>> {
        Ok(Box::new(self.mode.open_handle(routing)?))
    }
}

impl HtGroupBackend for CudaGroup<HtGroup> {
    fn open_handle(
        &self,
        routing: Result<HtRouting>,
        stream: Stream,
    ) -> Result<Box<dyn HtBackend>> {
        Ok(Box::new(self.mode.open_handle(routing, stream)?))
    }
}
