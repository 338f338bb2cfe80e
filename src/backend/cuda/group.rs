//! One rank's side of an open group on GPUs: creates its handles, maps memory for objects, and closes it.

use crate::backend::bootstrap::Bootstrap;
use crate::backend::cuda::driver::memory::CudaMemory;
use crate::backend::cuda::group_context::GroupContext;
use crate::backend::cuda::ht::HtGroup;
use crate::backend::cuda::ll::LlGroup;
use crate::backend::cuda::network::Network;
use crate::backend::cuda::params::ll::LL_SENTINEL;
use crate::backend::cuda::peer::object_memory::ObjectMemory;
use crate::backend::cuda::peer::teardown::{End, Teardown};
use crate::backend::cuda::peer::windows::{GroupWindows, PeerWindows};
use crate::backend::device::{Blocks, Device};
use crate::backend::objects::group::Objects;
use crate::backend::objects::{GroupObjects, Kind, Mapped, Mapper, Wanted};
use crate::backend::quiescence::Graphs;
use crate::backend::{Faults, GroupBackend, HtGroupBackend, LlGroupBackend, OpenGroup, Profile};
use crate::error::refusal::{InSequence, OfMemory, Subject};
use crate::error::{Code, Error, Result};
use crate::model::group::ByMode;
use crate::model::node_view::NodeView;
use crate::model::ops::Stream;
use crate::model::tensor::DevPtr;
use parking_lot::Mutex;
use std::sync::Arc;
use std::time::{Duration, Instant};

pub(super) type Mode = ByMode<Arc<LlGroup>, Arc<HtGroup>>;

/// A group whose ranks are GPUs that map each other's memory.
pub(super) struct CudaGroup {
    pub(super) memory: Arc<CudaMemory>,
    pub(super) timeout: Duration,
    pub(super) group: Arc<GroupContext>,
    pub(super) objects: Objects<CudaMapper>,
    /// Taken when the group closes.
    pub(super) windows: Mutex<Option<GroupWindows>>,
    /// `None` on one node.
    pub(super) network: Option<Arc<Network>>,
    pub(super) teardown: Teardown,
    pub(super) profile: Profile,
    pub(super) mode: Mode,
}

impl CudaGroup {
    /// The group as `session` sees it.
    pub(super) fn opened(self) -> OpenGroup {
        let mode: ByMode<Arc<dyn LlGroupBackend>, Arc<dyn HtGroupBackend>> = match &self.mode {
            ByMode::Ll(group) => ByMode::Ll(group.clone()),
            ByMode::Ht(group) => ByMode::Ht(group.clone()),
        };
        OpenGroup { common: Arc::new(self), mode }
    }

    fn close_windows(&self, windows: GroupWindows, stream: Stream) -> Result<()> {
        self.objects.bootstrap.begin_call();
        // Over several nodes closing the network checks for graphs.
        let launches = match self.network {
            None => Graphs::Count,
            Some(_) => Graphs::DoNotCount,
        };
        let left = self.leave(self.memory.context.wait_for_operations(self.timeout, stream, launches));
        let mut objects = self.objects.take_all();
        if matches!(left, Ok(End::Together { .. })) {
            // Objects are always unmapped: unlike windows they may be large, and no later group reuses them.
            objects.iter_mut().all(Mapped::unmap);
        }
        let mut objects: Vec<_> = objects.into_iter().map(|it| it.windows).collect();
        if let Some(network) = &self.network {
            network.close();
        }
        match left {
            Ok(End::Together { meet: true }) if self.network.is_none() => {
                objects.push(windows.operations);
                PeerWindows::release(objects, &self.objects.bootstrap, stream)
            }
            // `Together` says that all ranks of this node, not of the group, have met.
            Ok(End::Together { .. }) => windows.part(objects, &self.teardown),
            // Everything stays allocated, as a peer's kernels may still write there.
            left => left.map(drop),
        }
    }

    /// Ends this rank's part in the node: together with its other ranks, or at once if this rank has failed or its
    /// operations have not finished (`rested`).
    fn leave(&self, rested: Result<()>) -> Result<End> {
        // A rank that lost an exchange has already waited for another rank, and takes part in no further exchange.
        if self.group.faults.first().is_some() || self.objects.bootstrap.lost().is_some() {
            return self.teardown.leave().and(rested).map(|()| End::Broken);
        }
        if let Err(error) = rested {
            let _ = self.teardown.leave();
            if let Some(network) = &self.network {
                network.give_up();
            }
            return Err(error);
        }
        if let Some(network) = &self.network {
            network.forget_peers();
        }
        self.teardown.leave_together(self.memory.context.is_hung())
    }
}

impl GroupBackend for CudaGroup {
    fn device(&self) -> Arc<dyn Device> {
        self.memory.clone()
    }

    fn faults(&self) -> Arc<dyn Faults> {
        self.group.faults.clone()
    }

    fn profile(&self) -> Profile {
        Profile { most_blocks: Some(self.group.multiprocessors), ..self.profile }
    }

    fn objects(&self) -> &dyn GroupObjects {
        &self.objects
    }

    fn take_blocks_from(&self, blocks: Arc<dyn Blocks>) {
        // Only the first call has an effect.
        let _ = self.group.blocks.set(blocks);
    }

    fn make_views(&self, stream: Stream) -> Result<()> {
        let ByMode::Ll(group) = &self.mode else {
            return Ok(());
        };
        group.make_views(|bytes| {
            let bases = self.objects.make_of_all(Ok(Wanted::New(bytes)), Kind::Views, stream)?;
            let own = bases.get(self.objects.bootstrap.rank().index()).copied().unwrap_or_default();
            let filled = self.memory.fill(DevPtr(own), LL_SENTINEL, bytes);
            // No rank may send rows to a bank before its owner has filled it.
            self.objects.bootstrap.agree(filled.map(|()| Vec::new()), 0, stream)?;
            Ok(bases)
        })
    }

    fn close(&self, stream: Stream) -> Result<()> {
        let Some(windows) = self.windows.lock().take() else { return Ok(()) };
        if let ByMode::Ll(group) = &self.mode {
            group.forget_staged();
        }
        self.close_windows(windows, stream)
    }
}

const PAUSE: Duration = Duration::from_micros(50);

/// Maps memory of this node's ranks.
pub(super) struct CudaMapper {
    memory: Arc<CudaMemory>,
    group: Arc<GroupContext>,
    view: Arc<NodeView>,
}

impl CudaMapper {
    pub(super) fn objects(
        bootstrap: Bootstrap,
        memory: &Arc<CudaMemory>,
        group: &Arc<GroupContext>,
        view: &Arc<NodeView>,
    ) -> Objects<Self> {
        let (memory, view) = (Arc::clone(memory), Arc::clone(view));
        let mapper = Self { memory, group: Arc::clone(group), view };
        Objects::new(bootstrap, mapper, Arc::clone(&group.objects.recognised))
    }
}

impl Mapper for CudaMapper {
    type Mapped = ObjectMemory;

    fn check(&self) -> Result<()> {
        let captured = |stream| self.memory.is_captured(stream);
        if captured(Stream::DEFAULT)? || captured(Stream::PER_THREAD)? {
            return Err(Error::usage(Subject::Group, InSequence::NoCaptureOfMemory));
        }
        Ok(())
    }

    fn take(&self, wanted: Wanted) -> Result<(ObjectMemory, Vec<u8>)> {
        match wanted {
            Wanted::New(bytes) => ObjectMemory::new(&self.memory, bytes),
            Wanted::Given(data, bytes) => ObjectMemory::of_caller(&self.memory.context, data, bytes),
        }
    }

    fn map(&self, mapped: &mut ObjectMemory, records: &[&[u8]], left: Duration) -> Result<Vec<usize>> {
        mapped.map(&self.view, records, left)
    }

    fn show(&self, object: u32, bases: &[usize]) -> Result<()> {
        let bases = self.view.locals.iter().map(|rank| bases.get(rank.index()).copied().unwrap_or_default());
        self.group.objects.write(object, &bases.collect::<Vec<_>>())
    }

    fn check_graphs(&self) -> Result<()> {
        if self.memory.context.has_captured() {
            return Err(Error::usage(Subject::Memory, OfMemory::NotInGraphs));
        }
        Ok(())
    }

    fn rest(&self, left: Duration) -> Result<()> {
        let start = Instant::now();
        while !self.memory.context.has_rested()? {
            if start.elapsed() > left {
                let text = format!("its operations have not ended within {} ms", left.as_millis());
                return Err(Error::new(Code::RemoteError, text));
            }
            std::thread::sleep(PAUSE);
        }
        Ok(())
    }

    fn fallbacks(&self) -> u64 {
        self.group.objects.fallbacks()
    }
}
