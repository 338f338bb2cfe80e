//! Opening a group on GPUs.
//!
//! After each step the ranks agree whether it succeeded on all of them. So a failure on one rank fails all, and no
//! kernel waits for a rank that has given up.

use crate::backend::bootstrap::Bootstrap;
use crate::backend::cuda::driver;
use crate::backend::cuda::driver::memory::{CudaMemory, HostPage};
use crate::backend::cuda::driver::module::Module;
use crate::backend::cuda::fault::FaultPage;
use crate::backend::cuda::group::{CudaGroup, CudaMapper, Mode};
use crate::backend::cuda::group_context::{DeviceState, GroupContext, LaunchLimits};
use crate::backend::cuda::ht::plan::HtPlan;
use crate::backend::cuda::ht::{self, HtGroup};
use crate::backend::cuda::ll::plan::LlPlan;
use crate::backend::cuda::ll::{self, LlGroup};
use crate::backend::cuda::network::{Network, OnDevice, blocks_beside_network};
use crate::backend::cuda::params::common::{KernelOp, MAX_PEERS, SelftestResult};
use crate::backend::cuda::params::ll::LL_SENTINEL;
use crate::backend::cuda::peer::layout::WindowLayout;
use crate::backend::cuda::peer::selftest;
use crate::backend::cuda::peer::teardown::{Teardown, Windows};
use crate::backend::cuda::peer::windows::{GroupWindows, PeerWindows};
use crate::backend::{OpenGroup, Profile, RankChoices};
use crate::error::refusal::{AmongRanks, Subject};
use crate::error::{Error, Result};
use crate::model::group::{Algorithm, ByMode, GroupFacts};
use crate::model::node_view::NodeView;
use crate::model::ops::Stream;
use crate::model::tensor::DevPtr;
use crate::model::topology::Topology;
use crate::tuning::Shapes;
use parking_lot::Mutex;
use std::sync::Arc;
use std::time::Duration;

/// Each mode's plan of its part of the window.
type Plan = ByMode<Box<LlPlan>, Box<HtPlan>>;

impl Plan {
    fn new(facts: &GroupFacts, view: &NodeView, shapes: &Shapes) -> Result<Self> {
        Ok(match facts.algorithm {
            Algorithm::LowLatency => Self::Ll(Box::new(LlPlan::new(facts, view)?.tuned(shapes))),
            Algorithm::HighThroughput => Self::Ht(Box::new(HtPlan::new(facts, view)?.tuned(shapes))),
        })
    }

    fn bytes(&self) -> usize {
        match self {
            Self::Ll(plan) => plan.bytes,
            Self::Ht(plan) => plan.bytes,
        }
    }

    fn most_message_bytes(&self) -> usize {
        match self {
            Self::Ll(plan) => plan.most_message_bytes(),
            Self::Ht(plan) => plan.most_message_bytes(),
        }
    }

    /// The profile of a new group with windows of this size.
    fn profile(&self, window_bytes: usize) -> Profile {
        Profile {
            backend: "cuda",
            window_bytes: Some(window_bytes),
            most_blocks: None,
            tuned: match self {
                Self::Ll(plan) => !plan.shapes.is_empty(),
                Self::Ht(plan) => !plan.shapes.is_empty(),
            },
            chunk_bytes: match self {
                Self::Ll(_) => None,
                Self::Ht(plan) => plan.nodes.map(|nodes| nodes.stage_bytes),
            },
        }
    }

    /// Fills what must not be zero in the mode's part of a new window, at `start`.
    fn initialise(&self, memory: &CudaMemory, start: usize) -> Result<()> {
        let Self::Ll(plan) = self else { return Ok(()) };
        plan.with_sentinel().try_for_each(|(offset, bytes)| memory.fill(DevPtr(start + offset), LL_SENTINEL, bytes))
    }

    /// The mode's state in `group`; its part of the windows begins at `start`.
    fn open(
        self,
        group: &Arc<GroupContext>,
        memory: &Arc<CudaMemory>,
        network: Option<&Arc<Network>>,
        start: usize,
    ) -> Result<Mode> {
        let group = Arc::clone(group);
        Ok(match self {
            Self::Ll(plan) => Mode::Ll(Arc::new(LlGroup::new(group, network, memory, *plan, start)?)),
            Self::Ht(plan) => {
                let layout = plan.layout(start);
                Mode::Ht(Arc::new(HtGroup::new(group, network.map(Arc::clone), memory, *plan, layout)?))
            }
        })
    }
}

/// What a rank decides and allocates before the first exchange with other ranks.
struct Prepared {
    module: Module,
    plan: Plan,
    layout: WindowLayout,
    windows: GroupWindows,
    record: Vec<u8>,
    faults: Arc<FaultPage>,
    verdicts: HostPage<SelftestResult>,
    state: DeviceState,
    launches: LaunchLimits,
}

impl Prepared {
    fn new(memory: &Arc<CudaMemory>, facts: &GroupFacts, view: &Arc<NodeView>, choices: &RankChoices) -> Result<Self> {
        let ranks = view.locals.len();
        if ranks > MAX_PEERS {
            return Err(Error::usage(Subject::Communicator, AmongRanks::FewerRanks)
                .got(ranks, format_args!("at most {MAX_PEERS}")));
        }
        let context = &memory.context;
        let _entered = context.enter()?;
        let plan = Plan::new(facts, view, &choices.shapes)?;
        let of_mode = match &plan {
            Plan::Ll(_) => ll::fingerprint::of_report,
            Plan::Ht(_) => ht::fingerprint::of_report,
        };
        let layout = WindowLayout::new(ranks, plan.bytes());
        let (module, all) = (Module::load(context)?, driver::multiprocessors()?);
        let programmatic = choices.programmatic && view.others() == 0 && module.launches_early()?;
        let windows = GroupWindows::new(memory, layout.bytes, view.others() > 0 && ranks > 1)?;
        plan.initialise(memory, windows.operations.window.base().0 + layout.operations)?;
        Ok(Self {
            module,
            plan,
            layout,
            record: windows.record()?,
            windows,
            verdicts: HostPage::new(context, ranks)?,
            state: DeviceState::new(memory, ranks)?,
            launches: LaunchLimits {
                multiprocessors: match view.others() {
                    0 => all,
                    _ => blocks_beside_network(all),
                },
                programmatic,
            },
            faults: Arc::new(FaultPage::new(context, Arc::clone(view), choices.timeout, of_mode, facts.tensor_rows)?),
        })
    }
}

/// Opens a group. Collective: either every rank gets a group, or every rank an error.
pub(super) fn open(
    on: Arc<CudaMemory>,
    facts: &GroupFacts,
    topology: Topology,
    bootstrap: Bootstrap,
    choices: &RankChoices,
    stream: Stream,
) -> Result<OpenGroup> {
    let view = &Arc::new(NodeView::new(topology, facts.rank));
    let (own, records) = meet(Prepared::new(&on, facts, view, choices), &bootstrap, stream)?;
    let mut windows = own.windows;
    let outcome = windows.map_peers(view, &records, own.layout.bytes);
    if let Err(error) = agree_on(&bootstrap, &outcome, stream) {
        return Err(windows.abandon(&bootstrap, stream, error));
    }
    let start = own.layout.operations;
    let profile = own.plan.profile(own.layout.bytes);
    let mapped = Mapped { bases: windows.operations.bases(view.own), layout: own.layout, view: Arc::clone(view) };
    let group = Arc::new(GroupContext::new(
        own.module,
        own.faults,
        own.launches,
        own.state,
        DevPtr(windows.operations.window.base().0 + own.layout.peer_failed),
        &mapped.bases,
        view.own,
    ));
    let tested = mapped.test(&own.verdicts, &group, &bootstrap, stream);
    let network = connect(&on, view, own.plan.most_message_bytes(), tested, &group, &bootstrap, stream);
    let mode = network.as_ref().map_err(Error::clone);
    let mode = mode.and_then(|network| own.plan.open(&group, &on, network.as_ref(), start));
    if let Err(error) = agree_on(&bootstrap, &mode, stream) {
        // All ranks do this, as NCCL makes the ranks of a node wait for each other here.
        if let Ok(Some(network)) = &network {
            network.close();
        }
        return Err(windows.abandon(&bootstrap, stream, error));
    }
    let (mode, network) = (mode?, network?);
    let objects = CudaMapper::objects(bootstrap, &on, &group, view);
    let group = CudaGroup {
        teardown: mapped.teardown(windows.words.as_ref(), &on, choices.timeout),
        memory: on,
        timeout: choices.timeout,
        group,
        objects,
        windows: Mutex::new(Some(windows)),
        network,
        profile,
        mode,
    };
    Ok(group.opened())
}

/// Exchanges the records of the ranks' windows if all have `prepared`.
fn meet(prepared: Result<Prepared>, bootstrap: &Bootstrap, stream: Stream) -> Result<(Prepared, Vec<Vec<u8>>)> {
    let record = prepared.as_ref().map(|own| own.record.clone());
    let records = bootstrap.agree(record.map_err(Error::clone), GroupWindows::RECORD_BYTES, stream);
    let mut own = prepared?;
    // If a rank has refused, all know it, and none maps a window.
    if records.is_ok() || bootstrap.lost().is_some() {
        own.windows.publish();
    }
    Ok((own, records?))
}

/// Connects the nodes, if there are several, for messages of up to `most_bytes`, once the windows are `tested`.
fn connect(
    memory: &Arc<CudaMemory>,
    view: &Arc<NodeView>,
    most_bytes: usize,
    tested: Result<()>,
    group: &GroupContext,
    bootstrap: &Bootstrap,
    stream: Stream,
) -> Result<Option<Arc<Network>>> {
    if view.others() == 0 {
        return tested.map(|()| None);
    }
    let on_device = tested.and_then(|()| OnDevice::new(memory, view));
    agree_on(bootstrap, &on_device, stream)?;
    let network = Network::open(bootstrap, (view, on_device?), most_bytes, group, memory, stream)?;
    Ok(Some(Arc::new(network)))
}

/// The windows of this node's ranks, mapped.
struct Mapped {
    bases: Vec<DevPtr>,
    layout: WindowLayout,
    view: Arc<NodeView>,
}

impl Mapped {
    /// Tests that ranks can write to each other's windows.
    fn test(
        &self,
        verdicts: &HostPage<SelftestResult>,
        group: &GroupContext,
        bootstrap: &Bootstrap,
        stream: Stream,
    ) -> Result<()> {
        bootstrap.within_most(|left| {
            let wait = group.wait_at_most(left, KernelOp::PeerSelftest);
            selftest::run(verdicts, &group.module, group.peers(), &self.view, &self.layout, wait, stream)
        })
    }

    /// The teardown, whose words travel through the windows `words`, or without these through those of operations.
    fn teardown(self, words: Option<&PeerWindows>, memory: &Arc<CudaMemory>, timeout: Duration) -> Teardown {
        let own = self.view.own;
        let (bases, offset) = match words {
            Some(words) => (words.bases(own), 0),
            None => (self.bases, self.layout.teardown),
        };
        let words = Windows::new(memory, bases.iter().map(|base| DevPtr(base.0 + offset)).collect(), own);
        Teardown::new(words, self.view, timeout)
    }
}

/// Ends a step on all ranks: an error if any rank has one.
fn agree_on<T>(bootstrap: &Bootstrap, mine: &Result<T>, stream: Stream) -> Result<()> {
    bootstrap.agree(mine.as_ref().map(|_| Vec::new()).map_err(Error::clone), 0, stream).map(drop)
}
