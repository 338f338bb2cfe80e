//! One rank's side of a group on GPUs: its kernels, its window, and the windows of its peers.
#![forbid(unsafe_code)]

use crate::backend::bootstrap::Bootstrap;
use crate::backend::cuda::driver::context::Context;
use crate::backend::cuda::driver::memory::CudaMemory;
use crate::backend::cuda::group_context::GroupContext;
use crate::backend::cuda::ht::HtGroup;
use crate::backend::cuda::ll::LlGroup;
use crate::backend::cuda::network::Network;
use crate::backend::cuda::peer::teardown::{End, Teardown};
use crate::backend::cuda::peer::windows::PeerWindows;
use crate::backend::quiet::Graphs;
use crate::backend::{
    DeviceMemory, Faults, GroupBackend, HtBackend, HtGroupBackend, HtRouting, LlBackend,
    LlGroupBackend, Profile,
};
use crate::error::Result;
use crate::model::ops::{Routing, Stream};
use crate::tuning::Tuning;
use parking_lot::Mutex;
use std::sync::Arc;
use std::time::Duration;

/// A group whose ranks are GPUs that map each other's memory.
pub(super) struct CudaGroup<M> {
    pub(super) common: Common,
    pub(super) mode: Arc<M>,
}

/// What it has in any mode.
pub(super) struct Common {
    pub(super) context: Arc<Context>,
    pub(super) memory: Arc<CudaMemory>,
    pub(super) bootstrap: Bootstrap,
    pub(super) timeout: Duration,
    pub(super) group: Arc<GroupContext>,
    /// The size of each rank's window.
    pub(super) window_bytes: usize,
    /// The windows of operations and, over nodes, those for words, if any. Taken when the group closes.
    pub(super) windows: Mutex<Option<(PeerWindows, Option<PeerWindows>)>>,
    /// `None` on one node.
    pub(super) network: Option<Arc<Network>>,
    pub(super) teardown: Teardown,
}

impl Common {
    fn close(
        &self,
        (windows, words): (PeerWindows, Option<PeerWindows>),
        stream: Stream,
    ) -> Result<()> {
        self.bootstrap.begin_call();
        // Over nodes the end of the network asks for the graphs themselves.
        let launches = match self.network {
            None => Graphs::Count,
            Some(_) => Graphs::DoNotCount,
        };
        let rested = (self.context).wait_for_operations(self.timeout, stream, launches);
        let left = self.leave(rested);
        if let Some(network) = &self.network {
            network.close();
        }
        match left {
            Ok(End::Together { meet: true }) if self.network.is_none() => {
                windows.release(&self.bootstrap, stream)
            }
            // Only the ranks of a node know whether they meet.
            Ok(End::Together { .. }) => windows.part(words, &self.teardown),
            Ok(End::Broken) => {
                windows.leave();
                Ok(())
            }
            Err(error) => {
                windows.leave();
                Err(error)
            }
        }
    }

    /// Leaves the other ranks of the node: together with them, or at once if this rank has failed, or if its
    /// operations have not `rested`.
    fn leave(&self, rested: Result<()>) -> Result<End> {
        if self.group.faults.first().is_some() {
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
        self.teardown.leave_together(self.context.is_stranded())
    }
}

/// What groups of both modes need of their mode.
trait Mode: Send + Sync {
    /// No operation will follow.
    fn close(&self);
    /// Whether operations take launch shapes that somebody sets.
    fn takes_shapes(&self) -> bool;
    /// About how many bytes a rank sends to other nodes in one pass; `None` where no operation runs in passes.
    fn pass_bytes(&self) -> Option<usize> {
        None
    }
}

impl Mode for LlGroup {
    fn close(&self) {
        self.forget_staged();
    }

    fn takes_shapes(&self) -> bool {
        self.plan().takes_shapes()
    }
}

impl Mode for HtGroup {
    fn close(&self) {}

    fn takes_shapes(&self) -> bool {
        true
    }

    fn pass_bytes(&self) -> Option<usize> {
        self.plan().nodes().map(|nodes| nodes.pass_bytes)
    }
}

impl<M: Mode> GroupBackend for CudaGroup<M> {
    fn memory(&self) -> Arc<dyn DeviceMemory> {
        Arc::clone(&self.common.memory) as Arc<dyn DeviceMemory>
    }

    fn faults(&self) -> Arc<dyn Faults> {
        Arc::clone(&self.common.group.faults) as Arc<dyn Faults>
    }

    fn profile(&self) -> Profile {
        Profile {
            backend: "cuda",
            window_bytes: Some(self.common.window_bytes),
            tuned: self.mode.takes_shapes() && !self.common.group.tuning.read().is_empty(),
            chunk_bytes: self.mode.pass_bytes(),
        }
    }

    fn tune(&self, tuning: Tuning) {
        *self.common.group.tuning.write() = tuning;
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
        self.mode.open_handle(routing, stream)
    }
}
