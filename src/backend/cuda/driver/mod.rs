//! The CUDA driver: a safe function per driver call, and types that own contexts, memory, events and kernels. Only this
//! module of the backend has `unsafe`.
//!
//! The functions are safe if the caller holds the owner of each handle, which keeps it alive, and is inside its
//! context. A stale device address cannot harm this process's memory: the driver refuses it, or the device faults.
#![allow(unsafe_code)]

mod api;
pub mod context;
pub mod context_handle;
pub mod event;
pub mod exports;
pub mod function;
pub mod graph_marks;
pub mod memory;
pub mod module;
mod pinned;
pub mod stream;

use crate::backend::cuda::driver::api::{NOT_READY, Status, call, check, functions, raw_stream};
use crate::backend::cuda::driver::context_handle::{ApartFromCaptures, current_device};
use crate::error::{Error, Result};
use crate::model::ops::Stream;
use crate::model::tensor::DevPtr;
use cudarc::driver::sys;
use std::ffi::{c_int, c_uint, c_void};
use std::ptr::null_mut;

const INVALID_VALUE: Status = sys::CUresult::CUDA_ERROR_INVALID_VALUE as Status;

pub fn multiprocessors() -> Result<u32> {
    device_number(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)
}

/// An attribute of the current context's device.
fn device_number(attribute: sys::CUdevice_attribute) -> Result<u32> {
    let device = current_device()?;
    let mut number = 0;
    // SAFETY: writes one number.
    unsafe { call!(cuDeviceGetAttribute(&mut number, attribute, device.0))? };
    u32::try_from(number).map_err(|_| Error::internal(format!("device attribute {number}")))
}

/// The name of the current context's device, such as "NVIDIA H200"; tuning files are for one.
pub fn device_name() -> Result<String> {
    let device = current_device()?;
    let mut name = [0_u8; 256];
    // SAFETY: writes at most the number of bytes that it is given.
    unsafe { call!(cuDeviceGetName(name.as_mut_ptr().cast(), name.len() as c_int, device.0))? };
    Ok(String::from_utf8_lossy(name.split(|&byte| byte == 0).next().unwrap_or_default()).into_owned())
}

/// The most shared memory that a block may have on the current context's device.
pub fn most_shared_bytes() -> Result<u32> {
    device_number(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)
}

/// A stream that is not ordered with the legacy default stream; to be destroyed once. It has the greatest priority, as
/// work between nodes would begin 5 ms late behind waiting blocks of a caller's matrix product
/// (`docs/development/host-time.md`).
pub fn create_stream() -> Result<Stream> {
    const FLAGS: c_uint = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as c_uint;
    let (mut least, mut greatest) = (0, 0);
    // SAFETY: writes two numbers.
    unsafe { call!(cuCtxGetStreamPriorityRange(&mut least, &mut greatest))? };
    let mut stream = null_mut();
    // SAFETY: writes one handle.
    unsafe { call!(cuStreamCreateWithPriority(&mut stream, FLAGS, greatest))? };
    Ok(Stream(stream as usize))
}

pub fn destroy_stream(stream: Stream) -> Result<()> {
    // SAFETY: its owner destroys it once.
    unsafe { call!(cuStreamDestroy_v2(raw_stream(stream))) }
}

pub fn synchronize_stream(stream: Stream) -> Result<()> {
    let _apart = ApartFromCaptures::enter()?;
    // SAFETY: our own stream or one that the caller of the library vouches for.
    unsafe { call!(cuStreamSynchronize(raw_stream(stream))) }
}

/// Whether everything enqueued on `stream` has run.
pub fn is_idle(stream: Stream) -> Result<bool> {
    // SAFETY: as for `synchronize_stream`.
    let status = unsafe { (functions()?.cuStreamQuery)(raw_stream(stream)) };
    if status == NOT_READY { Ok(false) } else { check("cuStreamQuery", status).map(|()| true) }
}

/// Allocates device memory; `bytes` must not be zero.
pub fn alloc(bytes: usize) -> Result<DevPtr> {
    let mut address = 0;
    // SAFETY: writes one address.
    unsafe { call!(cuMemAlloc_v2(&mut address, bytes)) }
        .map_err(|error| error.within(format_args!("{bytes} bytes of device memory")))?;
    Ok(DevPtr(address as usize))
}

/// The begin and size of the allocation that contains the byte at `data`.
pub fn allocation_of(data: DevPtr) -> Result<(DevPtr, usize)> {
    let (mut begin, mut bytes) = (0, 0);
    // SAFETY: writes an address and a number; the driver knows its allocations and refuses other addresses.
    unsafe { call!(cuMemGetAddressRange_v2(&mut begin, &mut bytes, data.0 as u64))? };
    Ok((DevPtr(begin as usize), bytes))
}

/// Frees device memory in stream order. Unlike [`free`] the call waits for nothing, not even for work of other streams
/// on the memory (`bench/blocking_calls.cu`).
pub fn free_unawaited(data: DevPtr, stream: Stream) -> Result<()> {
    // SAFETY: the driver knows its allocations and refuses other addresses.
    unsafe { call!(cuMemFreeAsync(data.0 as u64, raw_stream(stream))) }
}

/// Frees device memory, after waiting for everything that runs on the device.
pub fn free(data: DevPtr) -> Result<()> {
    // SAFETY: the driver knows its allocations and refuses other addresses.
    unsafe { call!(cuMemFree_v2(data.0 as u64)) }
}

/// The device's address of pinned, mapped host memory; `None` for other memory.
pub fn device_alias(host: *mut c_void) -> Result<Option<DevPtr>> {
    let mut address = 0;
    // SAFETY: writes one address; the driver looks `host` up among its allocations.
    let status = unsafe { (functions()?.cuMemHostGetDevicePointer_v2)(&mut address, host, 0) };
    if status == INVALID_VALUE {
        return Ok(None);
    }
    check("cuMemHostGetDevicePointer", status)?;
    Ok(Some(DevPtr(address as usize)))
}

/// Enqueues a copy of `from` to the device and waits for it.
pub fn upload(to: DevPtr, from: &[u8], stream: Stream) -> Result<()> {
    // SAFETY: `from` outlives the copy, which the next line waits for.
    unsafe { call!(cuMemcpyHtoDAsync_v2(to.0 as u64, from.as_ptr().cast(), from.len(), raw_stream(stream)))? };
    synchronize_stream(stream)
}

/// Enqueues a copy from the device into `to` and waits for it.
pub fn download(to: &mut [u8], from: DevPtr, stream: Stream) -> Result<()> {
    // SAFETY: `to` outlives the copy, which the next line waits for.
    unsafe { call!(cuMemcpyDtoHAsync_v2(to.as_mut_ptr().cast(), from.0 as u64, to.len(), raw_stream(stream)))? };
    synchronize_stream(stream)
}

/// Downloads `count` words, as [`download`].
pub fn download_words(count: usize, from: DevPtr, stream: Stream) -> Result<Vec<u32>> {
    let mut bytes = vec![0; count * size_of::<u32>()];
    download(&mut bytes, from, stream)?;
    Ok(bytes.chunks_exact(size_of::<u32>()).map(|it| u32::from_ne_bytes(it.try_into().unwrap_or_default())).collect())
}
