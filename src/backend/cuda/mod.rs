//! The backend for GPUs that map each other's memory; sibling of `host`.
//!
//! It is always compiled and loads without any part of CUDA. Without a driver, or without the
//! kernels that `build.rs` embeds where it finds nvcc, only opening a group fails.

mod driver;
mod failure_marks;
mod fault;
#[cfg(test)]
mod gpu_tests;
mod group;
mod group_context;
mod ht;
pub mod kernels;
mod ll;
mod network;
mod open;
mod order;
pub mod params;
mod peer;
mod pool;
mod scaled_rows;
mod side_streams;
mod sizes;

use crate::backend::bootstrap::Bootstrap;
use crate::backend::platform::Platform;
use crate::backend::{DeviceMemory, OpenGroup};
use crate::error::Result;
use crate::model::group::{GroupFacts, RankChoices};
use crate::model::ops::Stream;
use crate::model::topology::Topology;
use driver::context::Context;
use driver::memory::CudaMemory;
use open::Device;
use std::sync::Arc;

/// One GPU of this process, before a group is open on it.
pub struct CudaPlatform(Device);

impl CudaPlatform {
    /// The GPU with the number `device` in this process.
    pub fn new(device: usize) -> Result<Self> {
        let context = Arc::new(Context::for_device(device)?);
        context.resources()?;
        let memory = Arc::new(CudaMemory::new(Arc::clone(&context)));
        Ok(Self(Device {
            number: device,
            context,
            memory,
        }))
    }
}

impl Platform for CudaPlatform {
    fn memory(&self) -> Arc<dyn DeviceMemory> {
        Arc::clone(&self.0.memory) as Arc<dyn DeviceMemory>
    }

    fn open(
        &self,
        (facts, topology): (GroupFacts, Topology),
        bootstrap: Bootstrap,
        choices: &RankChoices,
        stream: Stream,
    ) -> Result<OpenGroup> {
        open::open(
            self.0.clone(),
            (&facts, &topology),
            bootstrap,
            choices,
            stream,
        )
    }
}
