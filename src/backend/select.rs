//! Which backend serves this process: the only place that knows both siblings.
//!
//! The host backend is taken only where the CPU stand-ins are loaded; their marker symbol says so.
//! No environment variable can turn a process with a GPU into one without.
#![forbid(unsafe_code)]

use crate::backend::bootstrap::Bootstrap;
use crate::backend::cuda::CudaPlatform;
use crate::backend::host::HostPlatform;
use crate::backend::nccl::Communicator;
use crate::backend::{DeviceMemory, GroupBackend};
use crate::error::Result;
use crate::model::group::GroupFacts;
use crate::model::ops::Stream;
use std::sync::Arc;
use std::time::Duration;

/// The device side of a process, before a group is open.
pub trait Platform {
    /// The memory of the device that the communicator uses.
    fn memory(&self) -> Arc<dyn DeviceMemory>;
    /// Opens a group. Collective: every rank gets a group, or every rank an error.
    fn open(
        &self,
        facts: GroupFacts,
        bootstrap: Bootstrap,
        timeout: Duration,
        stream: Stream,
    ) -> Result<Box<dyn GroupBackend>>;
}

/// The platform that `comm` runs on.
pub fn platform(comm: &Communicator) -> Result<Box<dyn Platform>> {
    match HostPlatform::detect()? {
        Some(host) => Ok(Box::new(host)),
        None => Ok(Box::new(CudaPlatform::new(comm.device)?)),
    }
}
