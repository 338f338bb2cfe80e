//! A group's device memory, copies and fills, and host memory that the device maps.
//!
//! Memory is freed when the device is quiescent (`backend::quiescence`). Fills are copies, because a fill kernel would
//! have to wait if another thread's operation occupies every multiprocessor while it waits for peers.
#![allow(unsafe_code)]

use crate::backend::cuda::driver::context::Context;
use crate::backend::cuda::driver::context_handle::{ApartFromCaptures, was_reset};
use crate::backend::cuda::driver::event::Mark;
use crate::backend::cuda::driver::{self, pinned, stream};
use crate::backend::cuda::params::common::{FaultReport, MessageHeader, SelftestResult};
use crate::backend::cuda::params::ht::HtCount;
use crate::backend::cuda::params::ht_nodes::HtForwarded;
use crate::backend::device::{Device, EnteredDevice, Memory, StreamMark, may_run};
use crate::backend::quiescence::{Attempt, Key, UnderWay, Works};
use crate::error::{Code, Error, Result};
use crate::model::ops::Stream;
use crate::model::regions::Regions;
use crate::model::tensor::DevPtr;
use once_cell::sync::OnceCell;
use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::atomic::{Ordering, fence};
use std::sync::{Arc, Weak};

/// Most bytes of a fill that are copied at once.
const FILL_BYTES: usize = 4 << 20;
/// Tables that share a buffer begin at multiples of this.
const TABLE_ALIGN: usize = 256;

/// A group's GPU for the rest of the library: memory, copies, streams and marks, in one context.
///
/// It owns no memory, as it exists as long as tensors need it, possibly longer than the group.
pub struct CudaMemory {
    pub context: Arc<Context>,
}

impl CudaMemory {
    /// Fills `bytes`, a multiple of 4, at `data` with `word`, and waits for the copies.
    pub fn fill(&self, data: DevPtr, word: u32, bytes: usize) -> Result<()> {
        let words = bytes.min(FILL_BYTES) / size_of::<u32>();
        self.repeat(data, &word.to_le_bytes().repeat(words), bytes)
    }

    /// Zeroes `bytes` at `data`, and waits for the copies.
    pub fn zero(&self, data: DevPtr, bytes: usize) -> Result<()> {
        self.repeat(data, &vec![0; bytes.min(FILL_BYTES)], bytes)
    }

    /// Fills `bytes` at `data` with copies of `block`.
    fn repeat(&self, data: DevPtr, block: &[u8], bytes: usize) -> Result<()> {
        (0..bytes).step_by(block.len().max(1)).try_for_each(|offset| {
            let length = block.len().min(bytes - offset);
            self.upload(DevPtr(data.0 + offset), block.get(..length).unwrap_or_default())
        })
    }
}

/// Frees device memory of the current context.
pub fn free(address: usize) {
    // Fails only if the context was destroyed, and with it the memory.
    let _ = driver::free(DevPtr(address));
}

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
        // An allocation that will be freed later counts as freed.
        freed.get().cloned().unwrap_or(Ok(()))
    }

    fn alloc_own(&self, bytes: usize) -> Result<DevPtr> {
        let left = self.context.quiescence.take(&Key::Memory(bytes));
        left.map_or_else(|| self.alloc(bytes), |it| Ok(DevPtr(it.address)))
    }

    fn free_own(&self, data: DevPtr, bytes: usize) {
        if !data.is_null() {
            let key = Some(Key::Memory(bytes));
            self.context.free_later(key, data.0, free);
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

impl Device for CudaMemory {
    fn new_mark(&self) -> Result<Box<dyn StreamMark>> {
        Ok(Box::new(Mark::new(&self.context)?))
    }

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

/// Device memory. After this is dropped, it is freed once the device is quiescent, unless it is a caller's.
pub struct Buffer {
    memory: Arc<CudaMemory>,
    data: DevPtr,
    /// `None` if it is a caller's.
    bytes: Option<usize>,
}

impl Buffer {
    /// `bytes` of memory with arbitrary content.
    pub fn new(memory: &Arc<CudaMemory>, bytes: usize) -> Result<Self> {
        Ok(Self { memory: Arc::clone(memory), data: memory.alloc_own(bytes)?, bytes: Some(bytes) })
    }

    /// A caller's memory, which is not freed.
    pub fn of_caller(memory: &Arc<CudaMemory>, data: DevPtr) -> Self {
        Self { memory: Arc::clone(memory), data, bytes: None }
    }

    pub fn zeroed(memory: &Arc<CudaMemory>, bytes: usize) -> Result<Self> {
        let buffer = Self::new(memory, bytes)?;
        memory.zero(buffer.data, bytes)?;
        Ok(buffer)
    }

    /// A buffer with these tables, and the address of each.
    pub fn of_tables<const N: usize>(memory: &Arc<CudaMemory>, tables: [&[u32]; N]) -> Result<(Self, [DevPtr; N])> {
        let mut regions = Regions::new(TABLE_ALIGN);
        let offsets = tables.map(|table| regions.take(size_of_val(table)));
        let buffer = Self::new(memory, regions.bytes())?;
        let begins = offsets.map(|offset| DevPtr(buffer.data.0 + offset));
        for (table, begin) in tables.into_iter().zip(begins) {
            let bytes: Vec<u8> = table.iter().flat_map(|word| word.to_ne_bytes()).collect();
            memory.upload(begin, &bytes)?;
        }
        Ok((buffer, begins))
    }

    pub fn data(&self) -> DevPtr {
        self.data
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if let Some(bytes) = self.bytes {
            self.memory.free_own(self.data, bytes);
        }
    }
}

/// Plain data.
///
/// # Safety
/// Every pattern of bits is a value, and all zeros mean "nothing written yet".
pub unsafe trait Record: Copy {}
// SAFETY: numbers only; Fault::None is 0.
unsafe impl Record for FaultReport {}
// SAFETY: numbers only; SELFTEST_MISSING is 0.
unsafe impl Record for SelftestResult {}
// SAFETY: numbers only; epochs begin at 1.
unsafe impl Record for HtCount {}
// SAFETY: numbers and an address of the device, which the host does not follow.
unsafe impl Record for HtForwarded {}
// SAFETY: a number.
unsafe impl Record for u64 {}
// SAFETY: numbers only; handles are numbered from 1.
unsafe impl Record for MessageHeader {}

/// Records in pinned host memory, initially zero, usually written by kernels and read by the host. The host can read
/// them whatever happens to the device.
#[derive(Debug)]
pub struct HostPage<T: Record> {
    context: Arc<Context>,
    host: NonNull<T>,
    device: DevPtr,
    count: usize,
}

// SAFETY: owns plain memory; every access from the host is volatile.
unsafe impl<T: Record> Send for HostPage<T> {}
// SAFETY: as for Send.
unsafe impl<T: Record> Sync for HostPage<T> {}

impl<T: Record> HostPage<T> {
    /// `count` records, at least one.
    pub fn new(context: &Arc<Context>, count: usize) -> Result<Self> {
        let bytes = count * size_of::<T>();
        let _entered = context.enter()?;
        let left = context.quiescence.take(&Key::Pinned(bytes));
        let left = left.and_then(|it| NonNull::new(it.address as *mut c_void));
        let memory = left.map_or_else(|| pinned::allocate(bytes), Ok)?;
        let mut page = Self { context: Arc::clone(context), host: memory.cast(), device: DevPtr::default(), count };
        // SAFETY: `bytes` are allocated there, and nobody else uses them.
        unsafe { memory.cast::<u8>().write_bytes(0, bytes) };
        page.device =
            driver::device_alias(memory.as_ptr())?.ok_or_else(|| Error::internal("registered memory is not mapped"))?;
        Ok(page)
    }

    /// The records' address on the device.
    pub fn device(&self) -> *mut T {
        self.device.0 as *mut T
    }

    /// Writes record `index`, for the device to read; does nothing past the end.
    pub fn write(&self, index: usize, record: T) {
        if index < self.count {
            // SAFETY: inside the allocation; volatile, as the device reads.
            unsafe { self.host.add(index).write_volatile(record) };
        }
    }

    /// Record `index` once it is complete, `None` before. The device or the network must write the field that
    /// `is_complete` checks last, or all fields at once.
    ///
    /// Fields are read one by one, in any order, so the record is read again after it was found complete.
    pub fn complete(&self, index: usize, is_complete: impl Fn(&T) -> bool) -> Option<T> {
        self.read(index).filter(is_complete)?;
        fence(Ordering::Acquire);
        self.read(index)
    }

    /// The current content of record `index`; `None` past the end. During a write some fields may be old and others
    /// new: see `complete`.
    pub fn read(&self, index: usize) -> Option<T> {
        if index >= self.count {
            return None;
        }
        // SAFETY: inside the allocation; volatile, as the device writes; any bits are a value.
        Some(unsafe { self.host.add(index).read_volatile() })
    }
}

impl<T: Record> Drop for HostPage<T> {
    fn drop(&mut self) {
        let bytes = self.count * size_of::<T>();
        self.context.free_pinned_later(self.host.as_ptr() as usize, bytes);
    }
}
