//! Creation and destruction of groups.
#![allow(unsafe_code)]

use crate::info;
use crate::objects::{GROUPS, GUARD, Group, check_out, write_out};
use crate::owners::Allocator;
use crate::texts;
use crate::types::{
    cudaStream_t, ncclComm_t, ncclEpAllocFn_t, ncclEpFreeFn_t, ncclEpGroup_t, ncclEpGroupConfig_t, ncclResult_t,
};
use nccl_ep_abi::{process, refuse};
use nccl_ep_core::error::{Error, Result};
use nccl_ep_core::model::group::{GroupSettings, LlCombineMode};
use nccl_ep_core::model::ops::Stream;
use nccl_ep_core::session;
use std::ffi::c_uint;
use std::sync::Arc;

/// What later generations of NCCL EP have behind the size of each of their structures.
const LATER_MAGIC: u32 = 0xC00F_FFEE;

/// Creates a group over all ranks of `comm`. Collective: every rank calls it with the same `config`, and either all
/// ranks get a group or all get an error. Blocks the host.
///
/// @param ep_group  gets the group; written on success only
/// @param comm      communicator whose ranks form the group; must outlive the group
/// @param config    see `ncclEpGroupConfig_t`
/// @param stream    stream for the exchanges of the creation; NULL is the default stream
/// @param alloc_fn  allocates the data of `ncclEpTensorCreate`; NULL means `cudaMalloc`
/// @param free_fn   frees that data; NULL means `cudaFree`, see `ncclEpTensorDestroy`
///
/// Returns `ncclInvalidArgument` for a NULL pointer, or a `config` that breaks a rule or differs between ranks;
/// `ncclInvalidUsage` if `stream` is being captured into a graph (the capture goes on), or if the ranks span several
/// nodes and this process's NCCL cannot connect them; `ncclRemoteError` if another rank refused or did not arrive
/// within NCCL_EP_TIMEOUT_MS; `ncclSystemError` if the process has no NCCL; `ncclUnhandledCudaError` without a usable
/// GPU; or the code of an NCCL call that failed.
///
/// # Safety
/// Pointers are NULL or valid for what they are documented to be.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclEpCreateGroup(
    ep_group: *mut ncclEpGroup_t,
    comm: ncclComm_t,
    config: *const ncclEpGroupConfig_t,
    stream: cudaStream_t,
    alloc_fn: ncclEpAllocFn_t,
    free_fn: ncclEpFreeFn_t,
) -> ncclResult_t {
    GUARD.run("ncclEpCreateGroup", || {
        // SAFETY: this function's contract.
        unsafe { first_generation(config) }?;
        // SAFETY: as above.
        let config = unsafe { group_config(config) };
        let config = check_out("ep_group", ep_group).and(config);
        let claim = process::claim("libnccl_ep.so");
        let config = claim.as_ref().map_err(Error::clone).and(config);
        let stream = Some(Stream(stream as usize));
        let session = session::create::group(comm as usize, config, texts::text, stream)?.keeping(claim?);
        session.log_opening(info::version());
        let allocator = Arc::new(Allocator { alloc: alloc_fn, free: free_fn, device: session.device() });
        let number = Group::register(session, allocator);
        // SAFETY: this function's contract.
        unsafe { write_out("ep_group", ep_group, number as ncclEpGroup_t) }
    })
}

/// Destroys a group. Collective: every rank of the group calls it, before its communicator is destroyed. Blocks the
/// host until the group's operations have ended on all ranks. Launches of graphs that hold operations of the group must
/// have ended, or be on `stream`. NULL is a successful no-op.
///
/// It waits for nothing else, and captures of other streams go on, with one exception: on one node, if graphs hold
/// operations of the group, it waits for its whole device, which ends all captures there.
///
/// Destroy the group's handles first: later calls on them are refused. Tensors of the group stay valid and may be
/// destroyed afterwards. Memory of `ncclEpMemAlloc` that was not freed is freed.
///
/// @param ep_group  the group
/// @param stream    stream for the closing exchange; NULL is the default stream
///
/// Returns `ncclInvalidArgument` for a group that was destroyed already; `ncclInvalidUsage` if `stream` is being
/// captured into a graph: the capture and the group go on; `ncclRemoteError` if other ranks do not arrive within
/// NCCL_EP_TIMEOUT_MS, or if operations do not end within twice that because earlier work on their stream does not end:
/// the group is gone, and its memory stays allocated.
///
/// # Safety
/// `stream` is a live stream.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclEpGroupDestroy(ep_group: ncclEpGroup_t, stream: cudaStream_t) -> ncclResult_t {
    let name = "ncclEpGroupDestroy";
    GUARD.destroy(name, || {
        if ep_group.is_null() {
            return Ok(());
        }
        let stream = Stream(stream as usize);
        GROUPS.resolve(ep_group as usize)?.session.check_not_captured(stream)?;
        Group::end(ep_group as usize)?.session.close(Some(stream), |failure| {
            GUARD.warn(name, failure);
        })
    })
}

/// Refuses the configuration of a later generation, whose calls take other arguments: its program
/// has passed neither a stream nor an allocator.
///
/// # Safety
/// `config` is NULL or points to an `ncclEpGroupConfig_t`, or to a longer structure.
unsafe fn first_generation(config: *const ncclEpGroupConfig_t) -> Result<()> {
    // SAFETY: this function's contract; the second field has four bytes, whatever they mean.
    let second = unsafe { config.as_ref() }.map(|raw| raw.algorithm);
    if second == Some(LATER_MAGIC) {
        return Err(refuse::argument(
            "config",
            "must be of this library's generation, but this program was built for NCCL EP 0.1.0 or newer",
        ));
    }
    Ok(())
}

/// Copies `*config`.
///
/// # Safety
/// `config` is NULL or points to an `ncclEpGroupConfig_t`.
unsafe fn group_config(config: *const ncclEpGroupConfig_t) -> Result<GroupSettings> {
    if config.is_null() {
        return Err(refuse::argument("config", "must not be NULL"));
    }
    // SAFETY: not NULL, so by contract it points to a configuration.
    let raw = unsafe { config.read() };
    let ncclEpGroupConfig_t {
        version,
        algorithm,
        num_experts,
        max_tokens_per_rank,
        token_size_bytes,
        rdma_buffer_size: _,
        num_qp_per_rank: _,
        num_channels,
    } = raw;
    if version != 1 {
        return Err(refuse::argument("config.version", "must be 1").got(version, 1));
    }
    let given = |count: c_uint| (count > 0).then_some(count as usize);
    Ok(GroupSettings {
        algorithm: nccl_ep_abi::algorithm(algorithm)?,
        experts: num_experts as usize,
        max_tokens: given(max_tokens_per_rank),
        row_bytes: token_size_bytes as usize,
        channels: given(num_channels),
        zones: false,
        tensor_rows: 0,
        drops: false,
        timeout: None,
        sms: None,
        ll_combine: LlCombineMode::Reduce,
    })
}
