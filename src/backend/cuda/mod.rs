//! The backend for GPUs that map each other's memory; sibling of `host`.
//!
//! It is always compiled, and the library loads on machines without CUDA. Only opening a group needs a driver, and the
//! kernels that `build.rs` embeds if it finds nvcc.

mod agreement;
mod auxiliary;
mod driver;
mod fault;
#[cfg(test)]
mod gpu_tests;
mod group;
mod group_context;
mod group_creation;
mod ht;
mod kernels;
mod ll;
mod network;
mod order;
mod peer;
mod pool;
mod scaled_rows;

use crate::backend::bootstrap::Bootstrap;
use crate::backend::device::Device;
use crate::backend::{OpenGroup, Platform, RankChoices};
use crate::error::Result;
use crate::model::group::GroupFacts;
use crate::model::ops::Stream;
use crate::model::topology::Topology;
use driver::context::Context;
use driver::memory::CudaMemory;
use nccl_ep_params as params;
use std::sync::Arc;

/// One GPU of this process, before a group is open on it.
pub struct CudaPlatform(Arc<CudaMemory>);

impl CudaPlatform {
    /// The GPU with the number `device` in this process.
    pub fn new(device: usize) -> Result<Self> {
        let context = Arc::new(Context::for_device(device)?);
        context.resources()?;
        Ok(Self(Arc::new(CudaMemory { context })))
    }
}

impl Platform for CudaPlatform {
    fn device(&self) -> Arc<dyn Device> {
        self.0.clone()
    }

    fn open(
        &self,
        facts: GroupFacts,
        topology: Topology,
        bootstrap: Bootstrap,
        choices: &RankChoices,
        stream: Stream,
    ) -> Result<OpenGroup> {
        group_creation::open(Arc::clone(&self.0), &facts, topology, bootstrap, choices, stream)
    }
}
