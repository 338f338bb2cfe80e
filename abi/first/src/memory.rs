//! Memory that peers map.
#![allow(unsafe_code)]

use crate::objects::{GROUPS, GUARD, check_out, on_group, write_out};
use crate::types::{ncclEpGroup_t, ncclEpMemInfo_t, ncclResult_t};
use nccl_ep_abi::refuse;
use nccl_ep_core::error::Result;
use nccl_ep_core::model::tensor::DevPtr;
use std::ffi::{c_uint, c_void};
use std::mem::offset_of;

/// Allocates `bytes` of device memory that all ranks of the same node map: an object of the group. Collective, in the
/// same order as the group's other memory calls on all ranks; either all ranks get memory or all get an error. `bytes`
/// may differ between ranks. Blocks the host, and enqueues nothing on the caller's streams.
///
/// Operations recognise a tensor whose rows lie wholly in such memory, at a multiple of 16 bytes, by its address,
/// whatever the other ranks pass. Its rows then need not be copied where both ends can avoid it. Offsets may differ
/// between ranks. Results are the same as with any other memory.
///
/// The content is arbitrary at first. Memory that is not freed before ends with the group.
///
/// @param ep_group  the group
/// @param ptr       gets the address on this rank; written on success only
/// @param bytes     bytes on this rank, not 0
///
/// Returns `ncclInvalidArgument` for a NULL or dead argument or 0 bytes; `ncclInvalidUsage` if the group has 64
/// objects, if the default stream is captured into a graph or waits for a stream that is, or if another rank makes
/// another call; `ncclUnhandledCudaError` without memory; `ncclRemoteError` if another rank refused, or did not arrive
/// within NCCL_EP_TIMEOUT_MS: then the group has failed; and the code of the failure if the group had failed before.
///
/// # Safety
/// `ptr` is NULL or points to a writable pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclEpMemAlloc(ep_group: ncclEpGroup_t, ptr: *mut *mut c_void, bytes: usize) -> ncclResult_t {
    on_group("ncclEpMemAlloc", ep_group, |group| {
        let data = group.session.allocate_memory(check_out("ptr", ptr).map(|()| bytes))?;
        // SAFETY: this function's contract.
        unsafe { write_out("ptr", ptr, data.0 as *mut c_void) }
    })
}

/// Frees memory of `ncclEpMemAlloc`. Collective: all ranks free the same object. Blocks the host until the group's
/// operations have run; the caller's other work must not use the memory any more. If a rank fails or does not arrive,
/// the memory stays allocated, because that rank might still write there.
///
/// @param ep_group  the group
/// @param ptr       what `ncclEpMemAlloc` gave on this rank
///
/// Returns `ncclInvalidArgument` for a dead group or another address; `ncclInvalidUsage` if the ranks free different
/// objects, or if an operation of the group was ever captured into a graph, which may use the memory: it then stays
/// until the group ends; otherwise as `ncclEpMemAlloc`.
///
/// # Safety
/// None: a foreign address is recognised.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclEpMemFree(ep_group: ncclEpGroup_t, ptr: *mut c_void) -> ncclResult_t {
    GUARD.destroy("ncclEpMemFree", || GROUPS.resolve(ep_group as usize)?.session.free_memory(DevPtr(ptr as usize)))
}

/// Makes an object of the caller's memory, as `ncclEpMemAlloc` does of new memory. Collective; `bytes` may differ
/// between ranks. Nobody may write to the memory during the call. It remains the caller's, and must live until
/// `ncclEpMemDeregister` or the group's end; after a failure of the group, until the other ranks' processes have ended
/// or destroyed the group.
///
/// The memory must lie in one allocation of `cudaMalloc`, or in at most 100 neighbouring ones of `cuMemCreate` that
/// have POSIX file descriptors, such as those of `ncclMemAlloc` and of torch's symmetric memory; the other ranks map
/// all of these allocations. Descriptors pass between processes over a socket, so the processes must share a network
/// namespace. Other kinds of memory (`cudaMallocAsync`, `cudaMallocManaged`) are refused on all ranks.
///
/// @param ep_group     the group
/// @param ptr          first byte on this rank, a multiple of 16
/// @param bytes        bytes on this rank, not 0
/// @param nccl_window  must be NULL
///
/// Returns `ncclInvalidArgument` for memory that breaks a rule or overlaps another object of the group; otherwise as
/// `ncclEpMemAlloc`.
///
/// # Safety
/// `ptr` is NULL or the caller's memory.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclEpMemRegister(
    ep_group: ncclEpGroup_t,
    ptr: *mut c_void,
    bytes: usize,
    nccl_window: *mut c_void,
) -> ncclResult_t {
    on_group("ncclEpMemRegister", ep_group, |group| {
        group.session.register_memory(no_window(nccl_window).map(|()| (DevPtr(ptr as usize), bytes)))
    })
}

fn no_window(window: *mut c_void) -> Result<()> {
    if window.is_null() { Ok(()) } else { Err(refuse::argument("nccl_window", "must be NULL")) }
}

/// Ends an object of `ncclEpMemRegister`. Collective, and otherwise as `ncclEpMemFree`; the memory remains the
/// caller's, and no rank uses it any more. A rank may unmap it later: once its device has no other operations, and no
/// graph holds any.
///
/// @param ep_group  the group
/// @param ptr       what `ncclEpMemRegister` got on this rank
///
/// Returns as `ncclEpMemFree`.
///
/// # Safety
/// None: a foreign address is recognised.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclEpMemDeregister(ep_group: ncclEpGroup_t, ptr: *mut c_void) -> ncclResult_t {
    GUARD.destroy("ncclEpMemDeregister", || {
        GROUPS.resolve(ep_group as usize)?.session.forget_memory(DevPtr(ptr as usize))
    })
}

/// Of the structure's first version, which ended with `plain_tensors`.
const LEAST_INFO_BYTES: usize = offset_of!(ncclEpMemInfo_t, fallbacks);

/// Reports which object of the group the byte at `ptr` is in. Local, enqueues nothing.
///
/// @param ep_group  the group
/// @param ptr       an address
/// @param info      the caller sets its `size`; gets the rest
///
/// Returns `ncclInvalidArgument` for a NULL or dead argument, an `info->size` that is too small, or an address in no
/// object.
///
/// # Safety
/// `info` is NULL or points to a structure of `info->size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclEpMemInfo(
    ep_group: ncclEpGroup_t,
    ptr: *const c_void,
    info: *mut ncclEpMemInfo_t,
) -> ncclResult_t {
    on_group("ncclEpMemInfo", ep_group, |group| {
        check_out("info", info)?;
        // SAFETY: not NULL, so by contract there is a size.
        let size = unsafe { (&raw const (*info).size).read() };
        if size < LEAST_INFO_BYTES {
            let rule = "must be the size of the structure";
            return Err(refuse::argument("info.size", rule).got(size, format_args!("{LEAST_INFO_BYTES} or more")));
        }
        let found = group.session.memory_at(DevPtr(ptr as usize))?;
        let known = ncclEpMemInfo_t {
            size,
            object: found.range.object as c_uint,
            peers: found.peers as c_uint,
            offset: ptr as usize - found.range.begin as usize,
            bytes: found.range.bytes as usize,
            tensors: found.tensors,
            plain_tensors: found.plain,
            fallbacks: found.fallbacks,
            peer_data: found.bases.0 as *const *mut c_void,
        };
        // SAFETY: the caller's structure has `size` bytes, ours its own; neither is read as anything but bytes.
        unsafe { (&raw const known).cast::<u8>().copy_to(info.cast(), size.min(size_of_val(&known))) };
        Ok(())
    })
}
