//! The network between the nodes of a group: who forwards for whom, and what a failure of the network does to
//! the group.
//!
//! On each node every rank of the group has a *carrier* (forwarder): itself on its own node, elsewhere its
//! gateway (rail peer). A carrier does on its node what the rank itself does on its own: it sends the rank's
//! rows to the ranks there, and collects what they return. The ranks that a rank carries are its *sources*,
//! itself first.

use crate::backend::Faults;
use crate::backend::bootstrap::Bootstrap;
use crate::backend::cuda::driver::capture_mode::ApartFromCaptures;
use crate::backend::cuda::driver::graph_marks;
use crate::backend::cuda::driver::memory::CudaMemory;
use crate::backend::cuda::failure_marks::FailureMarks;
use crate::backend::cuda::fault::FaultPage;
use crate::backend::cuda::group_context::GroupContext;
use crate::backend::net::two_sided::open::{Wanted, over_nccl};
use crate::backend::net::two_sided::{OnFault, Transport};
use crate::error::{Error, Result};
use crate::model::ops::Stream;
use crate::model::topology::Topology;
use parking_lot::RwLock;
use std::sync::Arc;

/// Most blocks of a kernel of the network; each fills a multiprocessor.
pub const NETWORK_BLOCKS: u32 = 4;
/// Multiprocessors that kernels which wait for other ranks leave free: for the network's kernels, and for the
/// caller's own collectives on other streams, which wait for other ranks, too.
const RESERVED: u32 = NETWORK_BLOCKS + 32;
/// The blocks that may wait for other ranks at the same time on a device with `multiprocessors`.
pub fn blocks_beside_network(multiprocessors: u32) -> u32 {
    multiprocessors
        .checked_sub(RESERVED)
        .filter(|&left| left > multiprocessors / 2)
        .unwrap_or(multiprocessors / 2)
        .max(1)
}

/// The network of a group on several nodes.
pub struct Network {
    topology: Topology,
    rank: usize,
    /// This rank first, then the others that it carries, in the order of nodes, then ranks.
    sources: Vec<usize>,
    /// `None` once the group has closed.
    transport: RwLock<Option<Arc<dyn Transport>>>,
    failure: Arc<Failure>,
}

impl Network {
    /// Connects the nodes for messages of up to `most_bytes`. Collective: every rank gets a network, or every rank an
    /// error.
    pub fn open(
        bootstrap: &Bootstrap,
        topology: &Topology,
        most_bytes: usize,
        group: &GroupContext,
        memory: &Arc<CudaMemory>,
        stream: Stream,
    ) -> Result<Self> {
        let rank = bootstrap.rank();
        let failure = Arc::new(Failure {
            faults: Arc::clone(&group.faults),
            marks: FailureMarks::new(memory.clone(), group.failure_marks()),
        });
        let on_fault: Arc<dyn OnFault> = failure.clone();
        let wanted = Wanted {
            topology,
            timeout: group.faults.timeout(),
            most_blocks: NETWORK_BLOCKS as usize,
            most_bytes,
            on_fault,
            new_replay_marks: &|places| graph_marks::new_replay_marks(memory.context(), places),
        };
        let transport: Arc<dyn Transport> = Arc::from(over_nccl(bootstrap, wanted, stream)?);
        Ok(Self {
            topology: topology.clone(),
            rank,
            sources: topology.carried_by(rank),
            transport: RwLock::new(Some(transport)),
            failure,
        })
    }

    /// The ranks of the group on their nodes.
    pub fn topology(&self) -> &Topology {
        &self.topology
    }

    /// This rank.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// The ranks that this rank carries: itself first, then others in the order of nodes, then ranks.
    pub fn sources(&self) -> &[usize] {
        &self.sources
    }

    /// What carries rows to the gateways.
    pub fn transport(&self) -> Result<Arc<dyn Transport>> {
        let transport = self.transport.read();
        let transport = transport.as_ref().map(Arc::clone);
        transport.ok_or_else(|| Error::internal("the network has ended"))
    }

    /// Ends the network for `error`, which this rank has found on the host: the ranks no longer run the same
    /// operations.
    pub fn fail(&self, error: &Error) {
        match self.transport() {
            Ok(transport) => transport.fail(error),
            Err(_) => self.failure.failed(error),
        }
    }

    /// Aborts the network's operations: nothing waits for their end any more.
    pub fn give_up(&self) {
        if let Ok(transport) = self.transport() {
            transport.abort();
        }
    }

    /// No operation of this group runs any more, and no later failure is told to the peers: once they hear of the
    /// end, their windows may have new owners.
    pub fn forget_peers(&self) {
        // The first is this rank's own.
        self.failure.marks.forget_all_but(1);
    }

    /// No operation will follow, and the peers' windows go.
    pub fn close(&self) {
        self.failure.marks.forget_all_but(0);
        drop(self.transport.write().take());
    }
}

/// What a failure of the network is told to.
struct Failure {
    faults: Arc<FaultPage>,
    marks: FailureMarks,
}

impl OnFault for Failure {
    fn failed(&self, error: &Error) {
        self.faults.network_failed(error);
    }

    /// Waits of the ranks of this node end, too.
    fn mark(&self) {
        if let Ok(_apart) = ApartFromCaptures::enter() {
            self.marks.write();
        }
    }

    fn has_failed(&self) -> bool {
        self.faults.first().is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn some_multiprocessors_are_left() {
        assert_eq!(blocks_beside_network(132), 96);
        assert_eq!(blocks_beside_network(40), 20);
        assert_eq!(blocks_beside_network(1), 1);
    }
}
