//! Allocation entry points: device memory and pinned host memory.
#![allow(unsafe_code)]

use std::ffi::{c_int, c_uint, c_void};

use super::device;
use super::error::{CudaError, boundary, cudaError_t, store};
use super::heap::{self, Memory, Range};
use super::recording;
use super::stream::{cudaStream_t, resolve};

/// Flags of pinned memory.
const KNOWN_FLAGS: c_uint = 0x7;

/// Allocates device memory: poisoned, 256-byte aligned, guarded. Zero bytes give NULL.
#[unsafe(no_mangle)]
pub extern "C" fn cudaMalloc(out: Option<&mut *mut c_void>, size: usize) -> cudaError_t {
    boundary(|| allocate_into(out, size, Memory::Device))
}

/// Waits for the device, then frees device memory. NULL is accepted.
#[unsafe(no_mangle)]
pub extern "C" fn cudaFree(pointer: *mut c_void) -> cudaError_t {
    boundary(|| release(pointer, |memory| matches!(memory, Memory::Device(_))))
}

/// Frees device memory in stream order, without waiting for anything. Not allowed during capture here.
#[unsafe(no_mangle)]
pub extern "C" fn cudaFreeAsync(pointer: *mut c_void, stream: cudaStream_t) -> cudaError_t {
    boundary(|| {
        let address = pointer as usize;
        let stream = resolve(stream)?;
        recording::refuse(&stream, CudaError::StreamCaptureUnsupported)?;
        let Some(Memory::Device(_)) = heap::starts_at(address) else { return Err(CudaError::InvalidValue) };
        recording::enqueue(&stream, move || heap::release(address)).map(drop)
    })
}

/// Frees `wanted` memory once nothing runs on its device; returns a pending error, once. NULL is accepted.
fn release(pointer: *mut c_void, wanted: impl FnOnce(&Memory) -> bool) -> Result<(), CudaError> {
    let address = pointer as usize;
    if address == 0 {
        return Ok(());
    }
    recording::refuse_unsafe_call()?;
    let memory = heap::starts_at(address).filter(wanted);
    let owner = device::device(memory.ok_or(CudaError::InvalidValue)?.device())?;
    owner.come_to_rest()?;
    let finished = owner.synchronize();
    heap::release(address).and(finished)
}

/// Allocates pinned host memory, which is also valid as device memory. The flags change nothing here,
/// because all memory is mapped and portable.
#[unsafe(no_mangle)]
pub extern "C" fn cudaHostAlloc(out: Option<&mut *mut c_void>, size: usize, flags: c_uint) -> cudaError_t {
    boundary(|| {
        if flags & !KNOWN_FLAGS != 0 {
            return Err(CudaError::InvalidValue);
        }
        allocate_into(out, size, Memory::Pinned)
    })
}

/// Waits for the device, then frees pinned host memory. NULL is accepted.
#[unsafe(no_mangle)]
pub extern "C" fn cudaFreeHost(pointer: *mut c_void) -> cudaError_t {
    boundary(|| release(pointer, |memory| matches!(memory, Memory::Pinned(_))))
}

/// Makes the program's own pages accessible to the device; they stay when it is reset.
#[unsafe(no_mangle)]
pub extern "C" fn cudaHostRegister(pointer: *mut c_void, size: usize, flags: c_uint) -> cudaError_t {
    boundary(|| {
        if pointer.is_null() || flags & !KNOWN_FLAGS != 0 {
            return Err(CudaError::InvalidValue);
        }
        recording::refuse_unsafe_call()?;
        let index = device::current_index();
        device::device(index)?.take_turn()?;
        heap::register(pointer as usize, size, index)
    })
}

/// Waits for the device, then undoes [`cudaHostRegister`].
#[unsafe(no_mangle)]
pub extern "C" fn cudaHostUnregister(pointer: *mut c_void) -> cudaError_t {
    boundary(|| match pointer.is_null() {
        true => Err(CudaError::InvalidValue),
        false => release(pointer, |memory| matches!(memory, Memory::Registered(_))),
    })
}

/// The device's view of pinned host memory: the same address.
#[unsafe(no_mangle)]
pub extern "C" fn cudaHostGetDevicePointer(
    out: Option<&mut *mut c_void>,
    host: *mut c_void,
    flags: c_uint,
) -> cudaError_t {
    boundary(|| match heap::classify(host as usize, 1) {
        Range::Inside(Memory::Pinned(_) | Memory::Registered(_)) if flags == 0 => store(out, host),
        _ => Err(CudaError::InvalidValue),
    })
}

/// An allocation of device memory, and how other processes map it.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct SharedBlock {
    pub begin: *mut c_void,
    pub bytes: usize,
    /// A memory file of sealed length that contains its pages, as long as it lives; -1 if it is not shared.
    pub file: c_int,
    /// Size of the file without its last page, which the stand-ins do not use.
    pub file_bytes: usize,
    /// The allocation's offset in the file.
    pub offset: usize,
}

/// The allocation of device memory that contains an address. If it is to be shared, the pages move into a memory file
/// in place: nobody may write there meanwhile.
#[unsafe(no_mangle)]
pub extern "C" fn ncclEpHostsimBlock(
    pointer: *const c_void,
    shares: c_int,
    out: Option<&mut SharedBlock>,
) -> cudaError_t {
    boundary(|| {
        let (begin, bytes) = heap::block_of(pointer as usize).ok_or(CudaError::InvalidValue)?;
        let mut block = SharedBlock { begin: begin as *mut c_void, bytes, file: -1, file_bytes: 0, offset: 0 };
        if shares != 0 {
            let share = heap::share(begin).ok_or(CudaError::MemoryAllocation)?;
            (block.file, block.file_bytes, block.offset) = (share.file, share.length, share.offset);
        }
        store(out, block)
    })
}

/// Memory available on the current device, and in total: the machine's, less what this process has allocated there.
#[unsafe(no_mangle)]
pub extern "C" fn cudaMemGetInfo(free: Option<&mut usize>, total: Option<&mut usize>) -> cudaError_t {
    boundary(|| {
        let (available, all) = heap::device_info(device::current_index());
        store(free, available).and(store(total, all))
    })
}

/// Allocates on the current device and stores the address.
fn allocate_into(out: Option<&mut *mut c_void>, size: usize, memory: fn(usize) -> Memory) -> Result<(), CudaError> {
    if out.is_none() {
        return Err(CudaError::InvalidValue);
    }
    recording::refuse_unsafe_call()?;
    let index = device::current_index();
    device::device(index)?.take_turn()?;
    let address = heap::allocate(size, memory(index))?;
    store(out, address as *mut c_void)
}
