//! The CUDA driver: one safe function per driver call, and on top of them the owners of contexts,
//! memory, events and kernels. The only place of this backend with `unsafe`.
//!
//! The owning types of the submodules keep handles alive. A caller of a function here holds the
//! owner of each handle and is inside its context. A stale device address is refused by the driver
//! or faults on the device: it cannot harm this process's memory.
#![allow(unsafe_code)]

mod api;
pub mod context;
pub mod device_name;
pub mod event;
pub mod function;
mod graph_marks;
pub mod held;
mod kernel_image;
pub mod mapped;
pub mod memory;
pub mod module;
mod resources;
pub mod stream;

use crate::backend::cuda::driver::api::{Status, check, functions};
use crate::error::{Error, Result};
use crate::model::ops::Stream;
use crate::model::tensor::DevPtr;
use cudarc::driver::sys;
use std::ffi::{c_char, c_int, c_uint, c_void};
use std::ptr::null_mut;

// Results with a meaning other than failure.
const INVALID_VALUE: Status = sys::CUresult::CUDA_ERROR_INVALID_VALUE as Status;
pub const NOT_READY: Status = sys::CUresult::CUDA_ERROR_NOT_READY as Status;
const ALREADY_ENABLED: Status = sys::CUresult::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED as Status;

/// A context by its address, which ranks of one process exchange.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ContextHandle(usize);

impl ContextHandle {
    fn raw(self) -> sys::CUcontext {
        self.0 as sys::CUcontext
    }

    /// The address.
    pub fn to_bits(self) -> u64 {
        self.0 as u64
    }

    /// The context whose address another rank of this process sent.
    pub fn from_bits(bits: u64) -> Self {
        Self(bits as usize)
    }
}

/// A device, as the driver names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Device(sys::CUdevice);

/// The device that this process numbers `ordinal`.
pub fn device(ordinal: usize) -> Result<Device> {
    let wanted = c_int::try_from(ordinal)
        .map_err(|_| Error::internal(format!("device number {ordinal} is out of range")))?;
    let mut device = 0;
    // SAFETY: writes one number.
    check("cuDeviceGet", unsafe {
        (functions()?.cuDeviceGet)(&mut device, wanted)
    })?;
    Ok(Device(device))
}

/// The primary context of `device`, to be released once.
pub fn retain_primary(device: Device) -> Result<ContextHandle> {
    let mut context = null_mut();
    // SAFETY: writes one handle.
    let status = unsafe { (functions()?.cuDevicePrimaryCtxRetain)(&mut context, device.0) };
    check("cuDevicePrimaryCtxRetain", status)?;
    Ok(ContextHandle(context as usize))
}

/// Undoes one [`retain_primary`].
pub fn release_primary(device: Device) -> Result<()> {
    // SAFETY: no pointers are passed; the device came from the driver.
    let status = unsafe { (functions()?.cuDevicePrimaryCtxRelease_v2)(device.0) };
    check("cuDevicePrimaryCtxRelease", status)
}

/// The calling thread's context, if it has one.
pub fn current_context() -> Result<Option<ContextHandle>> {
    let mut context = null_mut();
    // SAFETY: writes one handle.
    check("cuCtxGetCurrent", unsafe {
        (functions()?.cuCtxGetCurrent)(&mut context)
    })?;
    Ok((!context.is_null()).then_some(ContextHandle(context as usize)))
}

/// The number of the calling thread's context, which no other of the process ever has. Handles are
/// reused: a reset device has another context under the same handle. 0 with a driver before 12.0,
/// which has no numbers.
pub fn current_context_id() -> Result<u64> {
    let Some(get) = functions()?.cuCtxGetId else {
        return Ok(0);
    };
    let mut id = 0;
    // SAFETY: writes one number; NULL stands for the current context.
    check("cuCtxGetId", unsafe { get(null_mut(), &mut id) })?;
    Ok(id)
}

/// The device of the calling thread's context.
pub fn current_device() -> Result<Device> {
    let mut device = 0;
    // SAFETY: writes one number.
    check("cuCtxGetDevice", unsafe {
        (functions()?.cuCtxGetDevice)(&mut device)
    })?;
    Ok(Device(device))
}

/// How many multiprocessors the current context's device has.
pub fn multiprocessors() -> Result<u32> {
    const COUNT: sys::CUdevice_attribute =
        sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT;
    device_number(COUNT)
}

/// A property of the current context's device.
fn device_number(attribute: sys::CUdevice_attribute) -> Result<u32> {
    let device = current_device()?;
    let mut number = 0;
    // SAFETY: writes one number.
    check("cuDeviceGetAttribute", unsafe {
        (functions()?.cuDeviceGetAttribute)(&mut number, attribute, device.0)
    })?;
    u32::try_from(number).map_err(|_| Error::internal(format!("device attribute {number}")))
}

/// The most shared memory that a block may have on the current context's device.
pub fn most_shared_bytes() -> Result<u32> {
    const MOST: sys::CUdevice_attribute =
        sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN;
    device_number(MOST)
}

/// Pushes `context` on the calling thread's stack of contexts.
pub fn push_context(context: ContextHandle) -> Result<()> {
    // SAFETY: the handle came from the driver and its owner is alive.
    check("cuCtxPushCurrent", unsafe {
        (functions()?.cuCtxPushCurrent_v2)(context.raw())
    })
}

/// Undoes one [`push_context`].
pub fn pop_context() -> Result<()> {
    let mut context = null_mut();
    // SAFETY: writes one handle.
    check("cuCtxPopCurrent", unsafe {
        (functions()?.cuCtxPopCurrent_v2)(&mut context)
    })
}

/// Waits until everything enqueued in the current context has run.
pub fn synchronize_context() -> Result<()> {
    // SAFETY: no arguments.
    check("cuCtxSynchronize", unsafe {
        (functions()?.cuCtxSynchronize)()
    })
}

/// Lets the current context reach the memory of `peer`, a context of this process.
pub fn enable_peer_access(peer: ContextHandle) -> Result<()> {
    // SAFETY: the peer's rank, which sent its handle, is inside the same collective call.
    let status = unsafe { (functions()?.cuCtxEnablePeerAccess)(peer.raw(), 0) };
    if status == ALREADY_ENABLED {
        return Ok(());
    }
    check("cuCtxEnablePeerAccess", status)
}

/// The driver's handle of the stream.
pub fn raw_stream(stream: Stream) -> sys::CUstream {
    stream.0 as sys::CUstream
}

/// A stream that is not ordered with the legacy default one; to be destroyed once.
pub fn create_stream() -> Result<Stream> {
    const FLAGS: c_uint = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as c_uint;
    let mut stream = null_mut();
    // SAFETY: writes one handle.
    check("cuStreamCreate", unsafe {
        (functions()?.cuStreamCreate)(&mut stream, FLAGS)
    })?;
    Ok(Stream(stream as usize))
}

/// Undoes one [`create_stream`].
pub fn destroy_stream(stream: Stream) -> Result<()> {
    // SAFETY: its owner destroys it once.
    check("cuStreamDestroy", unsafe {
        (functions()?.cuStreamDestroy_v2)(raw_stream(stream))
    })
}

/// Waits until everything enqueued on `stream` has run.
pub fn synchronize_stream(stream: Stream) -> Result<()> {
    // SAFETY: our own stream or one that the caller of the library vouches for.
    check("cuStreamSynchronize", unsafe {
        (functions()?.cuStreamSynchronize)(raw_stream(stream))
    })
}

/// Whether everything enqueued on `stream` has run.
pub fn is_idle(stream: Stream) -> Result<bool> {
    // SAFETY: as for `synchronize_stream`.
    let status = unsafe { (functions()?.cuStreamQuery)(raw_stream(stream)) };
    if status == NOT_READY {
        return Ok(false);
    }
    check("cuStreamQuery", status).map(|()| true)
}

/// Device memory; `bytes` is not zero.
pub fn alloc(bytes: usize) -> Result<DevPtr> {
    let mut address = 0;
    // SAFETY: writes one address.
    check("cuMemAlloc", unsafe {
        (functions()?.cuMemAlloc_v2)(&mut address, bytes)
    })
    .map_err(|error| error.within(format_args!("{bytes} bytes of device memory")))?;
    Ok(DevPtr(address as usize))
}

/// Frees device memory.
pub fn free(data: DevPtr) -> Result<()> {
    // SAFETY: the driver knows its allocations and refuses other addresses.
    check("cuMemFree", unsafe {
        (functions()?.cuMemFree_v2)(data.0 as u64)
    })
}

/// Pinned host memory that every context of the process maps; `bytes` is not zero.
pub fn alloc_host(bytes: usize) -> Result<*mut c_void> {
    const FLAGS: c_uint = sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP;
    let mut address = null_mut();
    // SAFETY: writes one address.
    check("cuMemHostAlloc", unsafe {
        (functions()?.cuMemHostAlloc)(&mut address, bytes, FLAGS)
    })?;
    Ok(address)
}

/// Frees the result of [`alloc_host`].
pub fn free_host(data: *mut c_void) -> Result<()> {
    // SAFETY: the driver knows its allocations and refuses other addresses.
    check("cuMemFreeHost", unsafe {
        (functions()?.cuMemFreeHost)(data)
    })
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
    check("cuMemcpyHtoDAsync", unsafe {
        let copy = functions()?.cuMemcpyHtoDAsync_v2;
        copy(
            to.0 as u64,
            from.as_ptr().cast(),
            from.len(),
            raw_stream(stream),
        )
    })?;
    synchronize_stream(stream)
}

/// Enqueues a copy from the device into `to` and waits for it.
pub fn download(to: &mut [u8], from: DevPtr, stream: Stream) -> Result<()> {
    // SAFETY: `to` outlives the copy, which the next line waits for.
    check("cuMemcpyDtoHAsync", unsafe {
        let copy = functions()?.cuMemcpyDtoHAsync_v2;
        copy(
            to.as_mut_ptr().cast(),
            from.0 as u64,
            to.len(),
            raw_stream(stream),
        )
    })?;
    synchronize_stream(stream)
}

/// Bytes of a handle that lets another process map an allocation.
pub const IPC_HANDLE_BYTES: usize = 64;

/// An IPC handle for the allocation that begins at `data`.
pub fn export(data: DevPtr) -> Result<[u8; IPC_HANDLE_BYTES]> {
    let mut handle = sys::CUipcMemHandle {
        reserved: [0; IPC_HANDLE_BYTES],
    };
    // SAFETY: writes one handle.
    let status = unsafe { (functions()?.cuIpcGetMemHandle)(&mut handle, data.0 as u64) };
    check("cuIpcGetMemHandle", status)?;
    Ok(handle.reserved.map(|byte| byte as u8))
}

/// Maps another process's allocation, to be closed once.
pub fn import(handle: [u8; IPC_HANDLE_BYTES]) -> Result<DevPtr> {
    const LAZY: c_uint = sys::CUipcMem_flags::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as c_uint;
    let handle = sys::CUipcMemHandle {
        reserved: handle.map(|byte| byte as c_char),
    };
    let mut address = 0;
    // SAFETY: writes one address; the driver checks the handle.
    let status = unsafe { (functions()?.cuIpcOpenMemHandle_v2)(&mut address, handle, LAZY) };
    check("cuIpcOpenMemHandle", status)?;
    Ok(DevPtr(address as usize))
}

/// Undoes one [`import`].
pub fn close_import(data: DevPtr) -> Result<()> {
    // SAFETY: the driver knows its mappings and refuses other addresses.
    check("cuIpcCloseMemHandle", unsafe {
        (functions()?.cuIpcCloseMemHandle)(data.0 as u64)
    })
}

/// Kernels loaded into a context.
#[derive(Clone, Copy, Debug)]
pub struct ModuleHandle(usize);

impl ModuleHandle {
    /// The driver's handle.
    pub fn raw(self) -> sys::CUmodule {
        self.0 as sys::CUmodule
    }
}

/// Loads `image`, an aligned fatbin, into the current context; to be unloaded once.
pub fn load_module(image: &'static [u8]) -> Result<ModuleHandle> {
    let mut module = null_mut();
    // SAFETY: writes one handle; a fatbin carries its own length, and this one is complete.
    let status = unsafe { (functions()?.cuModuleLoadData)(&mut module, image.as_ptr().cast()) };
    check("cuModuleLoadData", status)?;
    Ok(ModuleHandle(module as usize))
}

/// Unloads the result of [`load_module`].
pub fn unload_module(module: ModuleHandle) -> Result<()> {
    // SAFETY: its owner unloads it once.
    check("cuModuleUnload", unsafe {
        (functions()?.cuModuleUnload)(module.0 as sys::CUmodule)
    })
}
