//! Opening a group on this backend, and running its operations on the caller's streams.

use crate::backend::bootstrap::Bootstrap;
use crate::backend::device::Device;
use crate::backend::host::group_state::GroupState;
use crate::backend::host::ht::HostHt;
use crate::backend::host::ll::HostLl;
use crate::backend::host::mailboxes::Mailboxes;
use crate::backend::host::objects::HostMapper;
use crate::backend::host::runtime::HostRuntime;
use crate::backend::host::shared_file::Address;
use crate::backend::host::window::Window;
use crate::backend::objects::group::Objects;
use crate::backend::objects::{GroupObjects, Mapped};
use crate::backend::{
    Faults, GroupBackend, HtBackend, HtGroupBackend, HtRouting, LlBackend, LlGroupBackend, OpenGroup, Platform,
    Profile, RankChoices,
};
use crate::error::{Error, Result};
use crate::model::group::{Algorithm, ByMode, GroupFacts};
use crate::model::handle_state::{CallerBlock, HandleStorage, block_bytes};
use crate::model::node_view::NodeView;
use crate::model::ops::{HandleForm, Routing, Stream};
use crate::model::topology::Topology;
use std::sync::Arc;

impl Platform for HostRuntime {
    fn device(&self) -> Arc<dyn Device> {
        Arc::new(*self)
    }

    fn open(
        &self,
        facts: GroupFacts,
        topology: Topology,
        bootstrap: Bootstrap,
        choices: &RankChoices,
        stream: Stream,
    ) -> Result<OpenGroup> {
        let windows = open_windows(&bootstrap, stream)?;
        let view = NodeView::new(topology.clone(), facts.rank);
        let mailboxes = Mailboxes::new(facts.rank.index(), windows, choices.timeout);
        let shared = Arc::new(GroupState::new(facts, topology, mailboxes, bootstrap.formatter, *self));
        let mapper = HostMapper { runtime: *self, shared: Arc::clone(&shared), view };
        let recognised = Arc::clone(&shared.recognised);
        let group = Arc::new(HostGroup { shared, objects: Objects::new(bootstrap, mapper, recognised) });
        let mode: ByMode<Arc<dyn LlGroupBackend>, Arc<dyn HtGroupBackend>> = match facts.algorithm {
            Algorithm::LowLatency => ByMode::Ll(group.clone()),
            Algorithm::HighThroughput => ByMode::Ht(group.clone()),
        };
        Ok(OpenGroup { common: group, mode })
    }
}

/// Creates this rank's window and opens the others'. No rank continues before all have opened all, so every window
/// exists while it is opened.
fn open_windows(bootstrap: &Bootstrap, stream: Stream) -> Result<Vec<Window>> {
    let own = Window::create(bootstrap.ranks());
    let mine = own.as_ref().map_err(Error::clone);
    let addresses = bootstrap.agree(mine.map(|own| own.address().to_bytes()), Address::BYTES, stream)?;
    let (rank, ranks) = (bootstrap.rank(), bootstrap.ranks());
    let windows: Result<Vec<Window>> = addresses
        .iter()
        .enumerate()
        .map(|(owner, record)| {
            let window = Address::from_bytes(record).and_then(|it| Window::open(it, ranks));
            window.map_err(|error| {
                error.within(format_args!("rank {rank} of {ranks} waited for the window of rank {owner}"))
            })
        })
        .collect();
    bootstrap.agree(windows.as_ref().map(|_| Vec::new()).map_err(Error::clone), 0, stream)?;
    windows
}

struct HostGroup {
    shared: Arc<GroupState>,
    objects: Objects<HostMapper>,
}

impl GroupBackend for HostGroup {
    fn device(&self) -> Arc<dyn Device> {
        Arc::clone(self.objects.bootstrap.device())
    }

    fn faults(&self) -> Arc<dyn Faults> {
        Arc::clone(&self.shared) as Arc<dyn Faults>
    }

    fn profile(&self) -> Profile {
        Profile { backend: "host", window_bytes: None, most_blocks: None, tuned: false, chunk_bytes: None }
    }

    fn objects(&self) -> &dyn GroupObjects {
        &self.objects
    }

    /// Windows stay mapped until the last operation has released them, here and on the peers, and peers do not write to
    /// the objects that they map: so closing needs no agreement.
    fn close(&self, _stream: Stream) -> Result<()> {
        self.shared.close(2 * self.shared.mailboxes.timeout())?;
        self.objects.take_all().into_iter().for_each(|it| it.give_back(true));
        Ok(())
    }
}

impl LlGroupBackend for HostGroup {
    fn open_handle(
        self: Arc<Self>,
        routing: Result<Routing>,
        storage: HandleStorage,
        _stream: Stream,
    ) -> Result<Box<dyn LlBackend>> {
        Ok(Box::new(HostLl::new(Arc::clone(&self.shared), routing?, storage)))
    }
}

impl HtGroupBackend for HostGroup {
    fn open_handle(self: Arc<Self>, routing: Result<HtRouting>, stream: Stream) -> Result<Box<dyn HtBackend>> {
        Ok(Box::new(HostHt::open(Arc::clone(&self.shared), routing, stream)?))
    }

    fn block_bytes(&self, top_k: usize, form: HandleForm) -> Result<Option<usize>> {
        Ok(block_bytes(&self.shared.facts, top_k, form))
    }

    fn reopen_handle(self: Arc<Self>, routing: Routing, block: CallerBlock) -> Result<Box<dyn HtBackend>> {
        Ok(Box::new(HostHt::reopen(Arc::clone(&self.shared), routing, block)))
    }
}
