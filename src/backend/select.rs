//! Chooses the backend of this process: the only module that knows both siblings.
//!
//! The host backend is used only with the NCCL of the CPU stand-ins, recognised by their marker symbol. No environment
//! variable can make a communicator of a real NCCL use it.

use crate::backend::Platform;
use crate::backend::cuda::CudaPlatform;
use crate::backend::host::HostRuntime;
use crate::backend::nccl::Communicator;
use crate::error::Result;

pub fn platform(comm: &Communicator) -> Result<Box<dyn Platform>> {
    match HostRuntime::detect(comm.device)? {
        Some(host) => Ok(Box::new(host)),
        None => Ok(Box::new(CudaPlatform::new(comm.device)?)),
    }
}
