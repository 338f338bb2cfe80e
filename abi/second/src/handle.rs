//! Creation, routing and destruction of handles.
#![allow(unsafe_code)]

use crate::enums::ncclEpLayout_t;
use crate::objects::{GUARD, Group, HANDLES, Handle, Layout, check_out, on_group, on_handle, write_out};
use crate::read;
use crate::types::{
    cudaStream_t, ncclEpGroup_t, ncclEpHandle_t, ncclEpHandleConfig_t, ncclEpLayoutInfo_t, ncclEpTensor_t,
    ncclResult_t, raw,
};
use crate::{routing, tensor};
use nccl_ep_abi::refuse;
use nccl_ep_core::error::{Code, Error, Result};
use nccl_ep_core::model::group::{Algorithm, MAX_TOP_K};
use nccl_ep_core::model::ops::Stream;
use nccl_ep_core::{rule, session};
use std::ffi::c_int;
use std::sync::Arc;

/// Gets how many bytes of memory `ncclEpInitHandle` needs for a handle. Local.
///
/// @param ep_group  the group
/// @param layout    layout of rows
/// @param config    may be NULL
/// @param size      gets the bytes
/// @param num_topk  K
///
/// Returns as `ncclEpInitHandle`.
///
/// # Safety
/// Pointers are NULL or valid for what they are documented to be.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclEpHandleMemSize(
    ep_group: ncclEpGroup_t,
    layout: raw::ncclEpLayout_t,
    config: *const ncclEpHandleConfig_t,
    size: *mut usize,
    num_topk: c_int,
) -> ncclResult_t {
    on_group("ncclEpHandleMemSize", ep_group, |group| {
        // SAFETY: this function's contract.
        let config = unsafe { read::optional("config", config) }?;
        check_out("size", size)?;
        let layout = check_shape(&group, layout, config.as_ref())?;
        let top_k = top_k(&group, "num_topk", i64::from(num_topk))?;
        let form = layout.form(&group.kept);
        let bytes = group.session.handle_bytes(top_k, form)?;
        // SAFETY: this function's contract.
        unsafe { write_out("size", size, bytes) }
    })
}

/// Creates a handle without a routing; `ncclEpUpdateHandle` gives it one. Local.
///
/// LL serves `NCCL_EP_LAYOUT_EXPERT_MAJOR` and `NCCL_EP_LAYOUT_RANK_MAJOR`, HT `NCCL_EP_LAYOUT_FLAT` and
/// `NCCL_EP_LAYOUT_EXPERT_MAJOR`.
///
/// @param handle      gets the handle; written on success only
/// @param ep_group    the group
/// @param layout      layout of rows
/// @param config      may be NULL
/// @param num_topk    K, 1 to 32; LL: at most E; HT: at most the group's `num_topk`, if that is not 0
/// @param handle_mem  uint8 `[n]`, n from `ncclEpHandleMemSize`, at a multiple of 16 bytes: holds what operations need
///                    of the routing. Not touched before an update or, in LL, a dispatch. HT: on all ranks or on none,
///                    and of one update on all; operations need no update of this handle if the memory holds what an
///                    update of an equal one has left, or a copy of it. HT over several nodes: operations cannot be
///                    captured, and the host waits for the stream. An abandoned staged operation
///                    (`ncclEpHandleDestroy`) may use the memory until the group's end: do not free it before. NULL:
///                    memory of the group's `alloc`, or the library's
///
/// Returns `ncclInvalidArgument` for a NULL or dead argument, a layout that the mode lacks, a bad alignment, memory
/// that is too small or misaligned, or a bad K in LL; `ncclInvalidUsage` for a bad K in HT, and in HT for expert-major
/// rows in a group with neither `max_recv_tokens_per_rank` nor `num_topk`.
///
/// # Safety
/// Pointers are NULL or valid for what they are documented to be.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclEpInitHandle(
    handle: *mut ncclEpHandle_t,
    ep_group: ncclEpGroup_t,
    layout: raw::ncclEpLayout_t,
    config: *const ncclEpHandleConfig_t,
    num_topk: c_int,
    handle_mem: *const ncclEpTensor_t,
) -> ncclResult_t {
    on_group("ncclEpInitHandle", ep_group, |group| {
        check_out("handle", handle)?;
        // SAFETY: this function's contract.
        let (config, memory) = unsafe {
            let config = read::optional("config", config)?;
            (config, tensor::memory(&group, "handle_mem", handle_mem)?)
        };
        let layout = check_shape(&group, layout, config.as_ref())?;
        let top_k = top_k(&group, "num_topk", i64::from(num_topk))?;
        let (session, form) = (Arc::clone(&group.session), layout.form(&group.kept));
        let core = match memory {
            None => session::handle::Handle::new(session, form),
            Some((memory, bytes)) => session::handle::Handle::in_memory(session, memory, bytes, (top_k, form))
                .map_err(|error| error.within("handle_mem"))?,
        };
        let made = Handle { core, group, top_k, layout };
        // SAFETY: this function's contract.
        unsafe { write_out("handle", handle, HANDLES.insert(Arc::new(made)) as ncclEpHandle_t) }
    })
}

/// Gives a handle a routing, that of `topk_idx`, in place of any that it has.
///
/// LL: local, enqueues nothing. Every dispatch and combine reads the ids again, so they may be updated in place between
/// operations.
///
/// HT: collective. The ids are read and the counters written when `stream` reaches this call; the ids are not read
/// later. If `stream` is captured, each replay does so. Over several nodes a captured `stream` is refused, and the host
/// waits until all ranks have exchanged their routing.
///
/// @param handle       the handle
/// @param topk_idx     int32 or int64 [T, K]: global expert ids of this rank's T tokens; negative ids and ids of E or
///                     more are ignored
/// @param layout_info  LL: must be NULL. HT: may be NULL; `expert_counters` `[L]` or longer, `recv_total_counter` `[1]`
///                     and, expert-major, `expert_offsets` like the first; each int32 or int64 (expert-major: all of
///                     one type), in memory that the device reaches
/// @param stream       stream that orders the exchange
///
/// Returns `ncclInvalidArgument` for a NULL or dead argument or a tensor that breaks a rule; `ncclInvalidUsage` while a
/// staged operation waits for completion, and for a captured stream over several nodes; `ncclSystemError` if the
/// group's `alloc_fn` fails; `ncclRemoteError` if another rank refused; or the code of the failure if the group has
/// failed.
///
/// # Safety
/// Pointers are NULL or valid for what they are documented to be.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclEpUpdateHandle(
    handle: ncclEpHandle_t,
    topk_idx: *const ncclEpTensor_t,
    layout_info: *const ncclEpLayoutInfo_t,
    stream: cudaStream_t,
) -> ncclResult_t {
    on_handle("ncclEpUpdateHandle", handle, |handle| {
        // SAFETY: this function's contract.
        let given = unsafe { routing::read(&handle.group, Some(handle.layout), topk_idx, layout_info) };
        let given = given.and_then(|given| rule::handle::has_top_k(&given, handle.top_k).map(|()| given));
        handle.core.update(given, Stream(stream as usize))
    })
}

/// Creates a handle with a routing: as `ncclEpInitHandle` and `ncclEpUpdateHandle`, with the K of `topk_idx`.
///
/// @param handle       gets the handle; written on success only
/// @param ep_group     the group
/// @param layout       layout of rows
/// @param topk_idx     as for `ncclEpUpdateHandle`
/// @param layout_info  as for `ncclEpUpdateHandle`
/// @param config       may be NULL
/// @param stream       stream that orders the exchange
///
/// # Safety
/// Pointers are NULL or valid for what they are documented to be.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclEpCreateHandle(
    handle: *mut ncclEpHandle_t,
    ep_group: ncclEpGroup_t,
    layout: raw::ncclEpLayout_t,
    topk_idx: *const ncclEpTensor_t,
    layout_info: *const ncclEpLayoutInfo_t,
    config: *const ncclEpHandleConfig_t,
    stream: cudaStream_t,
) -> ncclResult_t {
    on_group("ncclEpCreateHandle", ep_group, |group| {
        // SAFETY: this function's contract.
        let config = unsafe { read::optional("config", config) };
        // The other ranks must learn of a refusal.
        let given = check_out("handle", handle).and(config).and_then(|config| {
            let layout = check_shape(&group, layout, config.as_ref());
            // A bad struct prefix is refused before the layout.
            let of = layout.as_ref().ok().copied();
            // SAFETY: as above.
            let given = unsafe { routing::read(&group, of, topk_idx, layout_info) }?;
            let layout = layout?;
            let top_k = match given.ids.sizes() {
                &[_, columns] => top_k(&group, "topk_idx.sizes[1]", columns.into())?,
                // The core refuses such ids.
                _ => 0,
            };
            Ok((given, layout, top_k))
        });
        let tensors = given.as_ref().map(|(tensors, ..)| *tensors);
        let tensors = tensors.map_err(Error::clone);
        // Irrelevant if the handle is refused.
        let layout = given.as_ref().map_or(Layout::Flat, |(_, layout, _)| *layout);
        let (session, form) = (Arc::clone(&group.session), layout.form(&group.kept));
        let core = session::create::handle(session, form, tensors, Stream(stream as usize))?;
        let (_, layout, top_k) = given?;
        let made = Handle { core, group, top_k, layout };
        // SAFETY: this function's contract.
        unsafe { write_out("handle", handle, HANDLES.insert(Arc::new(made)) as ncclEpHandle_t) }
    })
}

/// Checks a handle's layout and options.
fn check_shape(group: &Group, layout: u32, config: Option<&ncclEpHandleConfig_t>) -> Result<Layout> {
    const EXPERT_MAJOR: u32 = ncclEpLayout_t::NCCL_EP_LAYOUT_EXPERT_MAJOR as u32;
    const RANK_MAJOR: u32 = ncclEpLayout_t::NCCL_EP_LAYOUT_RANK_MAJOR as u32;
    const FLAT: u32 = ncclEpLayout_t::NCCL_EP_LAYOUT_FLAT as u32;
    match (group.session.facts().algorithm, layout) {
        (Algorithm::LowLatency, EXPERT_MAJOR) => Ok(Layout::ExpertMajor),
        (Algorithm::LowLatency, RANK_MAJOR) => Ok(Layout::RankMajor),
        (Algorithm::HighThroughput, FLAT) => Ok(Layout::Flat),
        (Algorithm::HighThroughput, EXPERT_MAJOR) => {
            let alignment = config.map_or(0, |it| it.dispatch_output_per_expert_alignment).max(1);
            rule::handle::alignment(group.session.facts(), alignment, group.kept.top_k.unwrap_or(MAX_TOP_K))
                .map_err(|error| error.within("config.dispatch_output_per_expert_alignment"))?;
            if group.kept.recv_rows.is_none() && group.kept.top_k.is_none() {
                let text =
                    "layout: must be NCCL_EP_LAYOUT_FLAT in a group without max_recv_tokens_per_rank and num_topk";
                return Err(Error::new(Code::InvalidUsage, text));
            }
            Ok(Layout::Zones(alignment))
        }
        (algorithm, _) => {
            let expected = match algorithm {
                Algorithm::LowLatency => "1 (expert-major) or 2 (rank-major)",
                Algorithm::HighThroughput => "1 (expert-major) or 3 (flat)",
            };
            let name = algorithm.name();
            let rule = format_args!("must be a layout of {name}");
            Err(refuse::argument("layout", rule).got(layout, expected))
        }
    }
}

/// Checks the K of a handle.
fn top_k(group: &Group, argument: &str, given: i64) -> Result<usize> {
    let facts = group.session.facts();
    let (code, bound) = match facts.algorithm {
        Algorithm::LowLatency => (Code::InvalidArgument, Some(facts.experts)),
        Algorithm::HighThroughput => (Code::InvalidUsage, group.kept.top_k),
    };
    let most = bound.unwrap_or(MAX_TOP_K).min(MAX_TOP_K);
    match usize::try_from(given) {
        Ok(top_k) if (1..=most).contains(&top_k) => Ok(top_k),
        _ => {
            let rule = format!("{argument}: must be a top-k that the group has");
            Err(Error::new(code, rule).got(given, format_args!("1 to {most}")))
        }
    }
}

/// Destroys a handle. Local. Abandons a staged operation that was not completed. NULL is a successful no-op.
///
/// Returns `ncclInvalidArgument` for a handle that was destroyed already.
///
/// # Safety
/// None: a dead or foreign handle is recognised.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclEpHandleDestroy(handle: ncclEpHandle_t) -> ncclResult_t {
    GUARD.destroy("ncclEpHandleDestroy", || {
        if !handle.is_null() {
            HANDLES.remove(handle as usize)?.core.close();
        }
        Ok(())
    })
}
