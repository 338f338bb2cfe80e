//! Device memory of a group's GPU, as the rest of the library asks for it.
#![forbid(unsafe_code)]

use crate::backend::DeviceMemory;
use crate::backend::cuda::context::Context;
use crate::backend::cuda::driver::{self, THREAD_STREAM};
use crate::error::{Error, Result};
use crate::model::ops::Stream;
use crate::model::tensor::DevPtr;
use std::ffi::c_void;
use std::sync::Arc;

/// Plain allocations and copies in one context. Copies run on [`THREAD_STREAM`].
///
/// Holds nothing that costs memory: it outlives its group, for the sake of tensors that do.
#[derive(Debug)]
pub(super) struct CudaMemory {
    context: Arc<Context>,
}

impl CudaMemory {
    /// The memory of `context`'s device.
    pub(super) fn new(context: Arc<Context>) -> Self {
        Self { context }
    }

    /// Sets `bytes` at `data`, a multiple of 4, to words `word`; returns when that is done.
    pub(super) fn fill(&self, data: DevPtr, word: u32, bytes: usize) -> Result<()> {
        let _entered = self.context.enter()?;
        driver::fill(data, word, bytes / size_of::<u32>(), THREAD_STREAM)
    }

    /// Zeroes `bytes` at `data`; returns when that is done.
    pub(super) fn zero(&self, data: DevPtr, bytes: usize) -> Result<()> {
        let _entered = self.context.enter()?;
        driver::zero(data, bytes, THREAD_STREAM)
    }
}

impl DeviceMemory for CudaMemory {
    fn alloc(&self, bytes: usize) -> Result<DevPtr> {
        if bytes == 0 {
            return Ok(DevPtr::default());
        }
        let _entered = self.context.enter()?;
        driver::alloc(bytes)
    }

    fn free(&self, data: DevPtr) -> Result<()> {
        if data.is_null() {
            return Ok(());
        }
        let _entered = self.context.enter()?;
        driver::free(data)
    }

    fn device_alias(&self, host: DevPtr) -> Result<DevPtr> {
        let _entered = self.context.enter()?;
        driver::device_alias(host.0 as *mut c_void)?.ok_or_else(|| {
            Error::argument(
                "data",
                "must be mapped pinned host memory, as cudaHostAlloc gives",
            )
        })
    }

    fn upload(&self, to: DevPtr, from: &[u8]) -> Result<()> {
        let _entered = self.context.enter()?;
        driver::upload(to, from, THREAD_STREAM)
    }

    fn download(&self, to: &mut [u8], from: DevPtr) -> Result<()> {
        let _entered = self.context.enter()?;
        driver::download(to, from, THREAD_STREAM)
    }

    fn is_idle(&self, stream: Stream) -> Result<bool> {
        let _entered = self.context.enter()?;
        driver::is_idle(stream)
    }

    fn strand(&self) {
        self.context.strand();
    }
}

/// Device memory that is freed when this is dropped.
#[derive(Debug)]
pub(super) struct Buffer {
    memory: Arc<CudaMemory>,
    data: DevPtr,
}

impl Buffer {
    /// `bytes` of memory with any content.
    pub(super) fn new(memory: &Arc<CudaMemory>, bytes: usize) -> Result<Self> {
        Ok(Self {
            memory: Arc::clone(memory),
            data: memory.alloc(bytes)?,
        })
    }

    /// `bytes` of zeros.
    pub(super) fn zeroed(memory: &Arc<CudaMemory>, bytes: usize) -> Result<Self> {
        let buffer = Self::new(memory, bytes)?;
        memory.zero(buffer.data, bytes)?;
        Ok(buffer)
    }

    /// First byte.
    pub(super) fn data(&self) -> DevPtr {
        self.data
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // A context that is gone has freed its memory.
        let _ = self.memory.free(self.data);
    }
}
