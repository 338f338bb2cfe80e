//! Which backend serves this process: the only place that knows both siblings.
//!
//! The host backend is taken only where the CPU stand-ins are loaded; their marker symbol says so.
//! No environment variable can turn a process with a GPU into one without.
#![forbid(unsafe_code)]

use crate::backend::cuda::CudaPlatform;
use crate::backend::host::HostPlatform;
use crate::backend::nccl::Communicator;
use crate::backend::platform::Platform;
use crate::error::Result;

/// The platform that `comm` runs on.
pub fn platform(comm: &Communicator) -> Result<Box<dyn Platform>> {
    match HostPlatform::detect()? {
        Some(host) => Ok(Box::new(host)),
        None => Ok(Box::new(CudaPlatform::new(comm.device)?)),
    }
}
