//! Exporting memory to other processes, and importing theirs: allocations (CUDA IPC), or pieces mapped by `cuMemMap`.
#![allow(unsafe_code)]

use crate::backend::cuda::driver::allocation_of;
use crate::backend::cuda::driver::api::{call, functions};
use crate::backend::cuda::driver::context_handle::current_device;
use crate::backend::quiescence::IPC_HANDLE_BYTES;
use crate::error::Result;
use crate::model::tensor::DevPtr;
use cudarc::driver::sys;
use std::ffi::{c_char, c_int, c_uint, c_void};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

const DESCRIPTOR: sys::CUmemAllocationHandleType =
    sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;

/// A reference to a piece of physical memory, which keeps it alive.
#[derive(Debug)]
pub struct Piece {
    handle: sys::CUmemGenericAllocationHandle,
    pub bytes: usize,
}

impl Drop for Piece {
    fn drop(&mut self) {
        // SAFETY: this has one reference. A failure to release it cannot be handled.
        let _ = functions().map(|functions| unsafe { (functions.cuMemRelease)(self.handle) });
    }
}

impl Piece {
    /// The piece that is mapped at `data`, and the address where its mapping begins; an error if there is none.
    fn at(data: DevPtr) -> Result<(DevPtr, Self)> {
        let mut handle = 0;
        // SAFETY: writes one handle; the driver knows its mappings and refuses other addresses.
        unsafe { call!(cuMemRetainAllocationHandle(&mut handle, data.0 as *mut c_void))? };
        let mut piece = Self { handle, bytes: 0 };
        let (begin, bytes) = allocation_of(data)?;
        piece.bytes = bytes;
        Ok((begin, piece))
    }

    /// The pieces mapped in the `bytes` from `data` on, and the address where the first begins.
    pub fn all(data: DevPtr, bytes: usize) -> Result<(DevPtr, Vec<Self>)> {
        let (begin, first) = Self::at(data)?;
        let mut end = begin.0 + first.bytes;
        let mut pieces = vec![first];
        while end < data.0 + bytes {
            // After the last piece there may be nothing, or memory of another kind.
            let Ok((next, piece)) = Self::at(DevPtr(end)) else { break };
            if next.0 != end || piece.bytes == 0 {
                break;
            }
            end += piece.bytes;
            pieces.push(piece);
        }
        Ok((begin, pieces))
    }

    /// A file descriptor by which another process can import the piece.
    pub fn export(&self) -> Result<OwnedFd> {
        let mut descriptor: c_int = -1;
        // SAFETY: writes one descriptor, as the kind says.
        unsafe { call!(cuMemExportToShareableHandle((&raw mut descriptor).cast(), self.handle, DESCRIPTOR, 0))? };
        // SAFETY: it is new, and nobody else's.
        Ok(unsafe { OwnedFd::from_raw_fd(descriptor) })
    }

    /// Imports another process's piece of `bytes`.
    pub fn import(descriptor: BorrowedFd<'_>, bytes: usize) -> Result<Self> {
        let mut handle = 0;
        // SAFETY: writes one handle; the driver takes the number itself for the kind's pointer.
        unsafe {
            call!(cuMemImportFromShareableHandle(
                &mut handle,
                descriptor.as_raw_fd() as usize as *mut c_void,
                DESCRIPTOR
            ))?
        };
        Ok(Self { handle, bytes })
    }
}

/// Maps `pieces` contiguously for the current context's device; to be undone by [`unmap`].
pub fn map(pieces: &[Piece]) -> Result<DevPtr> {
    let sizes: Vec<usize> = pieces.iter().map(|piece| piece.bytes).collect();
    let all = sizes.iter().sum();
    let id = current_device()?.0;
    let mut base = 0;
    // SAFETY: writes one address.
    unsafe { call!(cuMemAddressReserve(&mut base, all, 0, 0, 0))? };
    let mut end = base;
    let mut mapped = 0;
    let done = pieces.iter().try_for_each(|piece| {
        // SAFETY: the place was reserved, and nothing is mapped there yet.
        unsafe { call!(cuMemMap(end, piece.bytes, 0, piece.handle, 0))? };
        end += piece.bytes as u64;
        mapped += 1;
        Ok(())
    });
    let access = sys::CUmemAccessDesc {
        location: sys::CUmemLocation { type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id },
        flags: sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
    };
    let done = done.and_then(|()| {
        // SAFETY: reads one description; all of the range is mapped.
        unsafe { call!(cuMemSetAccess(base, all, &access, 1)) }
    });
    done.map(|()| DevPtr(base as usize)).inspect_err(|_| {
        undo(base, sizes.get(..mapped).unwrap_or_default(), all);
    })
}

/// Undoes a [`map`] of pieces with these `sizes`. Waits for the device.
pub fn unmap(base: DevPtr, sizes: &[usize]) {
    undo(base.0 as u64, sizes, sizes.iter().sum());
}

/// Unmaps everything from `base` on and frees the address range; failures cannot be handled.
fn undo(base: u64, mapped: &[usize], reserved: usize) {
    let Ok(functions) = functions() else { return };
    let mut at = base;
    for &bytes in mapped {
        // SAFETY: a whole mapping, which its owner does not use any more.
        let _: c_int = unsafe { (functions.cuMemUnmap)(at, bytes) };
        at += bytes as u64;
    }
    // SAFETY: as it was reserved.
    let _: c_int = unsafe { (functions.cuMemAddressFree)(base, reserved) };
}

/// An IPC handle for the allocation that begins at `data`.
pub fn export(data: DevPtr) -> Result<[u8; IPC_HANDLE_BYTES]> {
    let mut handle = sys::CUipcMemHandle { reserved: [0; IPC_HANDLE_BYTES] };
    // SAFETY: writes one handle.
    unsafe { call!(cuIpcGetMemHandle(&mut handle, data.0 as u64))? };
    Ok(handle.reserved.map(|byte| byte as u8))
}

/// Maps another process's allocation, to be closed once.
pub fn import(handle: [u8; IPC_HANDLE_BYTES]) -> Result<DevPtr> {
    const LAZY: c_uint = sys::CUipcMem_flags::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as c_uint;
    let handle = sys::CUipcMemHandle { reserved: handle.map(|byte| byte as c_char) };
    let mut address = 0;
    // SAFETY: writes one address; the driver checks the handle.
    unsafe { call!(cuIpcOpenMemHandle_v2(&mut address, handle, LAZY))? };
    Ok(DevPtr(address as usize))
}

pub fn close_import(data: DevPtr) -> Result<()> {
    // SAFETY: the driver knows its mappings and refuses other addresses.
    unsafe { call!(cuIpcCloseMemHandle(data.0 as u64)) }
}
