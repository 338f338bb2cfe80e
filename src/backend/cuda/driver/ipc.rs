//! Allocations that other processes map.
#![allow(unsafe_code)]

use crate::backend::cuda::driver::api::{check, functions};
use crate::error::Result;
use crate::model::tensor::DevPtr;
use cudarc::driver::sys;
use std::ffi::{c_char, c_uint};

/// Bytes of a handle that lets another process map an allocation.
pub const IPC_HANDLE_BYTES: usize = 64;

/// An IPC handle for the allocation that begins at `data`.
pub fn export(data: DevPtr) -> Result<[u8; IPC_HANDLE_BYTES]> {
    let mut handle = sys::CUipcMemHandle { reserved: [0; IPC_HANDLE_BYTES] };
    // SAFETY: writes one handle.
    let status = unsafe { (functions()?.cuIpcGetMemHandle)(&mut handle, data.0 as u64) };
    check("cuIpcGetMemHandle", status)?;
    Ok(handle.reserved.map(|byte| byte as u8))
}

/// Maps another process's allocation, to be closed once.
pub fn import(handle: [u8; IPC_HANDLE_BYTES]) -> Result<DevPtr> {
    const LAZY: c_uint = sys::CUipcMem_flags::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as c_uint;
    let handle = sys::CUipcMemHandle { reserved: handle.map(|byte| byte as c_char) };
    let mut address = 0;
    // SAFETY: writes one address; the driver checks the handle.
    let status = unsafe { (functions()?.cuIpcOpenMemHandle_v2)(&mut address, handle, LAZY) };
    check("cuIpcOpenMemHandle", status)?;
    Ok(DevPtr(address as usize))
}

pub fn close_import(data: DevPtr) -> Result<()> {
    // SAFETY: the driver knows its mappings and refuses other addresses.
    check("cuIpcCloseMemHandle", unsafe { (functions()?.cuIpcCloseMemHandle)(data.0 as u64) })
}
