//! Allocation entry points: device memory, pinned host memory, registered host memory.
#![allow(unsafe_code)]

use std::ffi::{c_int, c_uint, c_void};

use super::error::{CudaError, cudaError_t};
use super::heap::{self, Memory, Range};
use super::queue::refuse_on_worker;
use super::stream::{cudaStream_t, resolve};
use super::{boundary, device, store};

/// Allocates device memory: poisoned, 256-byte aligned, guarded. Zero bytes give NULL.
///
/// # Safety
/// `out` is null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaMalloc(out: *mut *mut c_void, size: usize) -> cudaError_t {
    // SAFETY: passed on under this function's contract.
    boundary(|| unsafe { allocate_into(out, size, Memory::Device) })
}

/// As `cudaMalloc`. The memory is usable at once, which is earlier than stream order demands.
///
/// # Safety
/// `out` is null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaMallocAsync(
    out: *mut *mut c_void,
    size: usize,
    stream: cudaStream_t,
) -> cudaError_t {
    boundary(|| {
        resolve(stream)?;
        // SAFETY: passed on under this function's contract.
        unsafe { allocate_into(out, size, Memory::Device) }
    })
}

/// Waits for the device, then frees device memory. NULL is accepted.
#[unsafe(no_mangle)]
pub extern "C" fn cudaFree(pointer: *mut c_void) -> cudaError_t {
    boundary(|| {
        let address = pointer as usize;
        if address == 0 {
            return Ok(());
        }
        let Some(Memory::Device(owner)) = heap::starts_at(address) else {
            return Err(CudaError::InvalidValue);
        };
        let finished = device::device(owner)?.synchronize();
        heap::release(address).and(finished)
    })
}

/// Frees device memory when the stream gets there.
#[unsafe(no_mangle)]
pub extern "C" fn cudaFreeAsync(pointer: *mut c_void, stream: cudaStream_t) -> cudaError_t {
    boundary(|| {
        let stream = resolve(stream)?;
        let address = pointer as usize;
        if address == 0 {
            return Ok(());
        }
        let Some(Memory::Device(_)) = heap::starts_at(address) else {
            return Err(CudaError::InvalidValue);
        };
        refuse_on_worker()?;
        heap::begin_release(address);
        device::submit(
            &stream,
            Vec::new(),
            Box::new(move || heap::release(address)),
        )
        .map(|_| ())
    })
}

/// Allocates pinned host memory, which is also valid as device memory.
///
/// # Safety
/// `out` is null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaMallocHost(out: *mut *mut c_void, size: usize) -> cudaError_t {
    // SAFETY: passed on under this function's contract.
    boundary(|| unsafe { allocate_into(out, size, Memory::Pinned) })
}

/// As `cudaMallocHost`; the flags change nothing here, because all memory is mapped and portable.
///
/// # Safety
/// `out` is null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaHostAlloc(
    out: *mut *mut c_void,
    size: usize,
    flags: c_uint,
) -> cudaError_t {
    const KNOWN_FLAGS: c_uint = 0x7;
    boundary(|| {
        if flags & !KNOWN_FLAGS != 0 {
            return Err(CudaError::InvalidValue);
        }
        // SAFETY: passed on under this function's contract.
        unsafe { allocate_into(out, size, Memory::Pinned) }
    })
}

/// Waits for the device, then frees pinned host memory. NULL is accepted.
#[unsafe(no_mangle)]
pub extern "C" fn cudaFreeHost(pointer: *mut c_void) -> cudaError_t {
    boundary(|| {
        let address = pointer as usize;
        if address == 0 {
            return Ok(());
        }
        let Some(Memory::Pinned(owner)) = heap::starts_at(address) else {
            return Err(CudaError::InvalidValue);
        };
        let finished = device::device(owner)?.synchronize();
        heap::release(address).and(finished)
    })
}

/// The device's view of pinned host memory: the same address.
///
/// # Safety
/// `out` is null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaHostGetDevicePointer(
    out: *mut *mut c_void,
    host: *mut c_void,
    flags: c_uint,
) -> cudaError_t {
    boundary(|| match heap::classify(host as usize, 1) {
        // SAFETY: passed on under this function's contract.
        Range::Inside(Memory::Pinned(_) | Memory::Registered(_)) if flags == 0 => unsafe {
            store(out, host)
        },
        _ => Err(CudaError::InvalidValue),
    })
}

/// Makes the caller's host memory known as pinned.
#[unsafe(no_mangle)]
pub extern "C" fn cudaHostRegister(host: *mut c_void, size: usize, _flags: c_uint) -> cudaError_t {
    boundary(|| {
        if host.is_null() || size == 0 {
            return Err(CudaError::InvalidValue);
        }
        heap::register(host as usize, size, device::current_index())
    })
}

/// Takes back `cudaHostRegister`.
#[unsafe(no_mangle)]
pub extern "C" fn cudaHostUnregister(host: *mut c_void) -> cudaError_t {
    boundary(|| match heap::starts_at(host as usize) {
        Some(Memory::Registered(_)) => heap::release(host as usize),
        _ => Err(CudaError::HostMemoryNotRegistered),
    })
}

/// Memory that the machine has left, and in total; all devices share it.
///
/// # Safety
/// Both pointers are null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaMemGetInfo(free: *mut usize, total: *mut usize) -> cudaError_t {
    boundary(|| {
        let (available, all) = heap::memory_info();
        // SAFETY: passed on under this function's contract.
        unsafe { store(free, available).and(store(total, all)) }
    })
}

/// C's `struct cudaPointerAttributes` of CUDA 13.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct cudaPointerAttributes {
    /// 0 unregistered, 1 host, 2 device.
    pub kind: c_int,
    /// Device the memory belongs to.
    pub device: c_int,
    /// Address for the device, or NULL.
    pub device_pointer: *mut c_void,
    /// Address for the host, or NULL.
    pub host_pointer: *mut c_void,
    /// Must be zero.
    pub reserved: [std::ffi::c_long; 8],
}

/// What a pointer is.
///
/// # Safety
/// `attributes` is null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaPointerGetAttributes(
    attributes: *mut cudaPointerAttributes,
    pointer: *const c_void,
) -> cudaError_t {
    boundary(|| {
        let address = pointer.cast_mut();
        let null = std::ptr::null_mut();
        let (kind, owner, device_pointer, host_pointer) = match heap::classify(address as usize, 1)
        {
            Range::Inside(Memory::Device(owner)) => (2, owner as c_int, address, null),
            Range::Inside(Memory::Pinned(owner) | Memory::Registered(owner)) => {
                (1, owner as c_int, address, address)
            }
            Range::Pageable => (0, -2, null, address),
            Range::Invalid => return Err(CudaError::InvalidValue),
        };
        let answer = cudaPointerAttributes {
            kind,
            device: owner,
            device_pointer,
            host_pointer,
            reserved: [0; 8],
        };
        // SAFETY: passed on under this function's contract.
        unsafe { store(attributes, answer) }
    })
}

/// Allocates on the current device and stores the address.
///
/// # Safety
/// `out` is null or valid for a write.
unsafe fn allocate_into(
    out: *mut *mut c_void,
    size: usize,
    memory: fn(usize) -> Memory,
) -> Result<(), CudaError> {
    if out.is_null() {
        return Err(CudaError::InvalidValue);
    }
    let address = heap::allocate(size, memory(device::current_index()))?;
    // SAFETY: passed on under this function's contract.
    unsafe { store(out, address as *mut c_void) }
}
