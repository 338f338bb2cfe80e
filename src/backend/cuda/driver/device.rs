//! What the rest of the library asks of a group's GPU: memory, copies, streams and marks.

use crate::backend::cuda::driver::context_handle::{ApartFromCaptures, Key, was_reset};
use crate::backend::cuda::driver::event::Mark;
use crate::backend::cuda::driver::memory::{self, CudaMemory};
use crate::backend::cuda::driver::{self, stream};
use crate::backend::device::{Device, EnteredDevice, Marks, Memory, StreamMark, may_run};
use crate::backend::quiescence::{Attempt, UnderWay, Works};
use crate::error::{Code, Error, Result};
use crate::model::ops::Stream;
use crate::model::tensor::DevPtr;
use once_cell::sync::OnceCell;
use std::ffi::c_void;
use std::sync::{Arc, Weak};

impl Memory for CudaMemory {
    fn alloc(&self, bytes: usize) -> Result<DevPtr> {
        if bytes == 0 {
            return Ok(DevPtr::default());
        }
        let _entered = self.context.enter()?;
        let _apart = ApartFromCaptures::enter()?;
        driver::alloc(bytes)
    }

    fn free(&self, data: DevPtr) -> Result<()> {
        if data.is_null() {
            return Ok(());
        }
        let freed = Arc::new(OnceCell::new());
        let outcome = Arc::clone(&freed);
        let free = move |address| drop(outcome.set(driver::free(DevPtr(address))));
        self.context.free_soon(data, free);
        // An allocation that is to be freed later counts as freed.
        freed.get().cloned().unwrap_or(Ok(()))
    }

    fn alloc_own(&self, bytes: usize) -> Result<DevPtr> {
        let left = self.context.quiescence.take(&Key::Memory(bytes));
        left.map_or_else(|| self.alloc(bytes), |it| Ok(DevPtr(it.address)))
    }

    fn free_own(&self, data: DevPtr, bytes: usize) {
        if !data.is_null() {
            let key = Some(Key::Memory(bytes));
            self.context.free_later(key, data.0, memory::free);
        }
    }

    fn device_alias(&self, host: DevPtr) -> Result<DevPtr> {
        let _entered = self.context.enter()?;
        driver::device_alias(host.0 as *mut c_void)?.ok_or_else(|| {
            Error::new(Code::InvalidArgument, "data: must be mapped pinned host memory, as cudaHostAlloc gives")
        })
    }

    fn upload(&self, to: DevPtr, from: &[u8]) -> Result<()> {
        let resources = self.context.resources()?;
        let _entered = self.context.enter_alive()?;
        driver::upload(to, from, resources.stream)
    }

    fn download(&self, to: &mut [u8], from: DevPtr) -> Result<()> {
        let resources = self.context.resources()?;
        let _entered = self.context.enter_alive()?;
        driver::download(to, from, resources.stream)
    }
}

impl Marks for CudaMemory {
    fn new_mark(&self) -> Result<Box<dyn StreamMark>> {
        Ok(Box::new(Mark::new(&self.context)?))
    }
}

impl Device for CudaMemory {
    fn enter(&self) -> Result<EnteredDevice> {
        let entered = (self.context.enter()?, ApartFromCaptures::enter()?);
        Ok(EnteredDevice::new(entered))
    }

    fn create_stream(&self) -> Result<Stream> {
        let _entered = self.context.enter()?;
        driver::create_stream()
    }

    fn destroy_stream(&self, stream: Stream) {
        self.context.destroy(stream.0, |raw| drop(driver::destroy_stream(Stream(raw))));
    }

    fn is_idle(&self, stream: Stream) -> Result<bool> {
        let _entered = self.context.enter_alive()?;
        let _apart = ApartFromCaptures::enter()?;
        driver::is_idle(stream)
    }

    fn begin(&self) -> UnderWay {
        self.context.quiescence.begin()
    }

    fn watch_works(&self, works: Weak<dyn Works>) {
        self.context.quiescence.watch(works);
    }

    fn mark_hung(&self, mark: Option<Box<dyn StreamMark>>) {
        let is_hung = Box::new(move || may_run(&mark));
        self.context.quiescence.mark_hung(is_hung);
    }

    fn attempt(&self, work: &mut dyn FnMut()) -> Attempt {
        self.context.attempt(work)
    }

    fn lost(&self) -> Option<Error> {
        (self.context.enter_if_alive().is_none()).then(was_reset)
    }

    fn name(&self) -> Result<String> {
        let _entered = self.context.enter()?;
        driver::device_name()
    }

    fn multiprocessors(&self) -> Option<u32> {
        let _entered = self.context.enter().ok()?;
        driver::multiprocessors().ok()
    }

    fn context_number(&self) -> u64 {
        self.context.held.id().1
    }

    fn is_captured(&self, stream: Stream) -> Result<bool> {
        let _entered = self.context.enter()?;
        stream::is_in_the_way(stream)
    }

    fn apart_from_captures(&self, work: &mut dyn FnMut()) -> Result<()> {
        let _apart = ApartFromCaptures::enter()?;
        work();
        Ok(())
    }
}
