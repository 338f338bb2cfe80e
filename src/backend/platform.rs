//! The device side of a process, before a group is open.

use crate::backend::OpenGroup;
use crate::backend::bootstrap::Bootstrap;
use crate::backend::device::Device;
use crate::backend::net::two_sided::replays::ReplayMarks;
use crate::error::Result;
use crate::model::group::{GroupFacts, RankChoices};
use crate::model::ops::Stream;
use crate::model::topology::Topology;
use std::sync::Arc;

/// A device that groups can be opened on.
pub trait Platform {
    fn device(&self) -> Arc<dyn Device>;
    /// Marks with so many places for operations of NCCL's two-sided network in graphs; `None` on a device without graphs.
    fn new_replay_marks(&self, _places: usize) -> Result<Option<Arc<dyn ReplayMarks>>> {
        Ok(None)
    }
    /// Opens a group in the mode of the facts, for ranks on these nodes. Collective: every rank
    /// gets a group, or every rank an error.
    fn open(
        &self,
        facts: GroupFacts,
        topology: Topology,
        bootstrap: Bootstrap,
        choices: &RankChoices,
        stream: Stream,
    ) -> Result<OpenGroup>;
}
