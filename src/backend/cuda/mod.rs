//! The backend for GPUs that map each other's memory; sibling of `host`.
//!
//! It is always compiled and needs nothing of CUDA to load: without a driver, or without the kernels
//! that `build.rs` embeds where it finds nvcc, opening a group is an error and nothing else is.

mod context;
mod device_name;
mod driver;
mod event;
mod fault;
mod function;
#[cfg(test)]
mod gpu_tests;
mod group;
mod host_page;
mod ht;
mod ht_agreement;
mod ht_grid;
mod ht_piece;
mod ht_plan;
mod ht_shape_word;
pub mod kernels;
mod launch;
mod layout;
mod ll;
mod ll_grid;
mod ll_piece;
mod ll_plan;
mod ll_signature;
mod memory;
mod module;
mod open;
mod order;
pub mod params;
pub mod params_ht;
mod parting;
mod pool;
mod process;
mod selftest;
mod sizes;
mod streams;
mod table;
mod tools;
mod tracks;
mod window;

use crate::backend::bootstrap::Bootstrap;
use crate::backend::select::Platform;
use crate::backend::{DeviceMemory, GroupBackend};
use crate::error::Result;
use crate::model::group::GroupFacts;
use crate::model::ops::Stream;
use context::Context;
use group::CudaGroup;
use memory::CudaMemory;
use std::sync::Arc;
use std::time::Duration;

/// One GPU of this process, before a group is open on it.
pub struct CudaPlatform {
    context: Arc<Context>,
    memory: Arc<CudaMemory>,
}

impl CudaPlatform {
    /// The GPU that this process numbers `device`.
    pub fn new(device: usize) -> Result<Self> {
        let context = Arc::new(Context::for_device(device)?);
        context.tools()?;
        let memory = Arc::new(CudaMemory::new(Arc::clone(&context)));
        Ok(Self { context, memory })
    }
}

impl Platform for CudaPlatform {
    fn memory(&self) -> Arc<dyn DeviceMemory> {
        Arc::clone(&self.memory) as Arc<dyn DeviceMemory>
    }

    fn open(
        &self,
        facts: GroupFacts,
        bootstrap: Bootstrap,
        timeout: Duration,
        stream: Stream,
    ) -> Result<Box<dyn GroupBackend>> {
        let device = (Arc::clone(&self.context), Arc::clone(&self.memory));
        Ok(Box::new(CudaGroup::open(
            device, &facts, bootstrap, timeout, stream,
        )?))
    }
}
