//! The device side of a process, before a group is open.
#![forbid(unsafe_code)]

use crate::backend::bootstrap::Bootstrap;
use crate::backend::{DeviceMemory, OpenGroup};
use crate::error::Result;
use crate::model::group::{GroupFacts, RankChoices};
use crate::model::ops::Stream;
use crate::model::topology::Topology;
use std::sync::Arc;

/// A device that groups can be opened on.
pub trait Platform {
    /// The memory of the device that the communicator uses.
    fn memory(&self) -> Arc<dyn DeviceMemory>;
    /// Opens a group in the mode of the facts, for ranks on these nodes. Collective: every rank
    /// gets a group, or every rank an error.
    fn open(
        &self,
        group: (GroupFacts, Topology),
        bootstrap: Bootstrap,
        choices: &RankChoices,
        stream: Stream,
    ) -> Result<OpenGroup>;
}
