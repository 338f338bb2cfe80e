//! Creation, destruction and queries of handles.
#![allow(unsafe_code)]

use crate::objects::{GUARD, HANDLES, check_out, on_group, on_handle, write_out};
use crate::read::{self, Tag, TensorSet};
use crate::types::{
    IN_PROGRESS, cudaStream_t, ncclEpGroup_t, ncclEpHandle_t, ncclEpHandleConfig_t, ncclNDTensor_t, ncclResult_t,
};
use nccl_ep_abi::refuse;
use nccl_ep_core::error::{Error, Result};
use nccl_ep_core::model::group::{Algorithm, GroupFacts, MAX_TOP_K};
use nccl_ep_core::model::ops::{HandleForm, RoutingCounters, Stream, Zones};
use nccl_ep_core::rule::{self, handle::HandleTensors};
use nccl_ep_core::session::create;
use nccl_ep_core::session::handle::Handle;
use std::ffi::c_uint;
use std::mem::MaybeUninit;
use std::sync::Arc;
use std::time::Duration;

/// Creates a handle: one routing of this rank's tokens to experts.
///
/// LL on one node: local, enqueues nothing. LL over several nodes: collective, in the same order on all ranks. The
/// ranks exchange T and K on a stream of the library's own, behind the group's earlier operations; the first operation
/// waits on the host if that has not arrived, at most twice NCCL_EP_TIMEOUT_MS. If a rank refuses its handle, ranks
/// that forward for it refuse operations on theirs (`ncclRemoteError`); the group goes on, and all ranks create another
/// handle.
///
/// LL, either way: every dispatch and combine reads the ids again, so they may be updated in place between operations;
/// a combine uses them to find the rows of the last dispatch. The data of the ids must stay valid as long as the handle
/// is used; the descriptor need not.
///
/// HT: collective. The ranks exchange the routing; the ids are read once, when `stream` reaches this call. On the GPUs
/// of one node the host does not wait for that. Over several nodes it does, because message sizes depend on it, and the
/// group fails if earlier work on `stream` takes longer than twice NCCL_EP_TIMEOUT_MS.
///
/// While a stream is being captured, LL handles can be created as usual and are no part of the graph. HT refuses a
/// captured `stream`.
///
/// @param handle             gets the handle; written on success only
/// @param ep_group           the group
/// @param topk_idx           TOPK_IDX, int64 [T, K]: expert ids of this rank's T tokens. T is at most
///                           max_tokens_per_rank, may differ between ranks and may be 0. K is at most 32 and the same
///                           on every rank. Negative ids and ids of E or more are ignored.
/// @param local_tensors      HT: optional RECV_EXPERT_COUNTER_HOST or RECV_EXPERT_COUNTER_DEVICE, int32 `[L]` or
///                           longer: gets the received tokens per local expert, valid once `stream` is synchronised.
///                           LL: none.
/// @param num_local_tensors  number of local tensors
/// @param config             must be NULL
/// @param stream             stream that orders the exchange; NULL is the default stream
/// @param use_fp8            no effect
///
/// Returns `ncclInvalidArgument` for a NULL or dead argument or a tensor that breaks a rule, and the code of the
/// failure if the group has failed. HT: `ncclInvalidUsage` if `stream` is captured; `ncclRemoteError` or
/// `ncclInvalidArgument` if another rank refused or has another K. These two come from this call on the CPU backend and
/// over several nodes; on the GPUs of one node, from calls on the handle once the exchange has run.
///
/// # Safety
/// Pointers are NULL or valid for what they are documented to be.
#[unsafe(no_mangle)]
#[allow(clippy::too_many_arguments)] // The ABI's.
pub unsafe extern "C" fn ncclEpCreateHandle(
    handle: *mut ncclEpHandle_t,
    ep_group: ncclEpGroup_t,
    topk_idx: *const ncclNDTensor_t,
    local_tensors: *const *mut ncclNDTensor_t,
    num_local_tensors: c_uint,
    config: *const ncclEpHandleConfig_t,
    stream: cudaStream_t,
    use_fp8: MaybeUninit<bool>,
) -> ncclResult_t {
    let _ = use_fp8; // Stored and never read by the reference; any bit pattern may arrive.
    on_group("ncclEpCreateHandle", ep_group, |group| {
        // SAFETY: this function's contract.
        let arguments = unsafe { read_arguments(topk_idx, local_tensors, num_local_tensors) };
        let arguments = check_out("handle", handle).and(no_config(config)).and(arguments);
        let group = Arc::clone(&group.session);
        let made = create::handle(group, HandleForm::default(), arguments, Stream(stream as usize))?;
        let number = HANDLES.insert(Arc::new(made));
        // SAFETY: this function's contract.
        unsafe { write_out("handle", handle, number as ncclEpHandle_t) }
    })
}

/// # Safety
/// As of [`ncclEpCreateHandle`].
unsafe fn read_arguments(
    topk_idx: *const ncclNDTensor_t,
    local_tensors: *const *mut ncclNDTensor_t,
    num_local_tensors: c_uint,
) -> Result<HandleTensors> {
    let mut locals = TensorSet::default();
    // SAFETY: this function's contract.
    let (tag, ids) = unsafe {
        let topk_idx = read::tensor("topk_idx", topk_idx)?;
        read::tensor_set(&mut locals, "local_tensors", local_tensors.cast(), num_local_tensors)?;
        topk_idx
    };
    if Tag::from_raw(tag) != Some(Tag::TopkIdx) {
        return Err(
            refuse::argument("topk_idx.tag", "must be NCCL_EP_TENSOR_TAG_TOPK_IDX").got(tag, Tag::TopkIdx as u32)
        );
    }
    Ok(HandleTensors {
        ids,
        counter: locals.get(Tag::RecvExpertCounterDevice).copied(),
        host_counter: locals.get(Tag::RecvExpertCounterHost).copied(),
        counters: RoutingCounters::default(),
    })
}

fn no_config(config: *const ncclEpHandleConfig_t) -> Result<()> {
    if config.is_null() { Ok(()) } else { Err(refuse::argument("config", "must be NULL")) }
}

/// Opens a handle without a routing; `ncclEpHandleUpdate` gives it one. Local, enqueues nothing.
///
/// HT: the handle keeps the ids of its update. A dispatch is a forward one if its inputs include TOPK_WEIGHTS; it does
/// not read TOPK_IDX. A combine returns gradients of weights [T, K] by k: for each id that of the expert it names, or 0
/// if it names none.
///
/// HT with `expert_alignment`: rows lie by expert, one for each expert that a token names. A forward dispatch has
/// outputs TOKENS [n, H] and TOPK_WEIGHTS float32 `[n]`, and no TOPK_IDX. Rows are ordered by expert, source rank and
/// token. Each expert's rows begin at a multiple of the alignment, and zeros fill up the space behind them. Behind the
/// last expert, TOKENS and SCALES `[n, S]` keep their content, and weights are 0. Scales are forwarded; a cast is
/// refused. A combine has inputs TOKENS [n, H], to which the caller has applied the weights: each rank sums a token's
/// rows by ascending expert and rounds that sum. Gradients are TOPK_WEIGHTS `[n]`. `ncclEpHandleGetNumRecvTokens` gets
/// the most rows that an update may bring.
///
/// @param handle            gets the handle; written on success only
/// @param ep_group          the group
/// @param expert_alignment  0, or a power of two: HT, in a group with max_tokens_per_rank and at most 1,048,576 tokens
///                          on all ranks together; small enough that the rows that may come to a rank, by expert and
///                          filled up, number less than 2^31
///
/// Returns `ncclInvalidArgument` for a NULL or dead argument or another alignment.
///
/// # Safety
/// `handle` is NULL or points to a writable handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclEpHandleOpen(
    handle: *mut ncclEpHandle_t,
    ep_group: ncclEpGroup_t,
    expert_alignment: c_uint,
) -> ncclResult_t {
    // SAFETY: this function's contract.
    unsafe { open("ncclEpHandleOpen", handle, ep_group, expert_alignment, None) }
}

/// As `ncclEpHandleOpen` for rows by expert, of which there are at most `max_rows`. An update drops those beyond, the
/// last experts' first. Its counters, and those of `ncclEpGroupCountRows`, count all. What is dropped adds nothing to a
/// combine, and its gradient is 0. Operations need rows for all that `ncclEpHandleGetNumRecvTokens` gets, which is the
/// bound or fewer; further rows of larger tensors are undefined.
///
/// @param handle            gets the handle; written on success only
/// @param ep_group          the group
/// @param expert_alignment  as in `ncclEpHandleOpen`, but 0 means 1 (there it means: no rows by expert)
/// @param max_rows          rows that this rank has room for; ranks may differ
///
/// Returns as `ncclEpHandleOpen`, and `ncclInvalidArgument` for a group that has no rows by expert.
///
/// # Safety
/// `handle` is NULL or points to a writable handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclEpHandleOpenBounded(
    handle: *mut ncclEpHandle_t,
    ep_group: ncclEpGroup_t,
    expert_alignment: c_uint,
    max_rows: c_uint,
) -> ncclResult_t {
    let max_rows = max_rows.min(i32::MAX as c_uint) as usize;
    // SAFETY: this function's contract.
    unsafe { open("ncclEpHandleOpenBounded", handle, ep_group, expert_alignment, Some(max_rows)) }
}

/// # Safety
/// As of [`ncclEpHandleOpen`].
unsafe fn open(
    name: &'static str,
    handle: *mut ncclEpHandle_t,
    ep_group: ncclEpGroup_t,
    expert_alignment: c_uint,
    max_rows: Option<usize>,
) -> ncclResult_t {
    on_group(name, ep_group, |group| {
        check_out("handle", handle)?;
        let zones = zones(group.session.facts(), expert_alignment, max_rows)?;
        let made =
            Handle::new(Arc::clone(&group.session), HandleForm { keeps_ids: true, zones, ..HandleForm::default() });
        let number = HANDLES.insert(Arc::new(made));
        // SAFETY: this function's contract.
        unsafe { write_out("handle", handle, number as ncclEpHandle_t) }
    })
}

fn zones(facts: &GroupFacts, alignment: c_uint, max_rows: Option<usize>) -> Result<Option<Zones>> {
    let has_room = facts.algorithm == Algorithm::HighThroughput && facts.has_zones();
    let alignment = match (alignment, max_rows) {
        (0, None) => return Ok(None),
        (_, Some(_)) if !has_room => {
            return Err(refuse::argument("ep_group", "must be high throughput with few enough max_tokens_per_rank"));
        }
        (_, None) if !has_room => {
            let rule = "must be 0 but in high throughput with few enough max_tokens_per_rank";
            return Err(refuse::argument("expert_alignment", rule).got(alignment, "0"));
        }
        _ => alignment.max(1) as usize,
    };
    rule::handle::alignment(facts, alignment, MAX_TOP_K).map_err(|error| error.within("expert_alignment"))?;
    Ok(Some(Zones { alignment, most_slots: max_rows }))
}

/// Gives a handle a routing, in place of any that it has. What it reads, writes and waits for, and where it is
/// collective, is as for `ncclEpCreateHandle`.
///
/// HT on the GPUs of one node: `stream` may be captured into a graph, with a handle of `ncclEpHandleOpen`. Each replay
/// then routes by the ids that it finds in memory, and writes the counter. Operations on the handle belong in the same
/// graph and need room for the rows of any routing, as the host does not wait for their number.
///
/// @param handle             the handle
/// @param topk_idx           as for `ncclEpCreateHandle`; with a handle of `ncclEpHandleOpen` also int32
/// @param local_tensors      as for `ncclEpCreateHandle`; where rows lie by expert, the counter does not include
///                           padding
/// @param num_local_tensors  number of local tensors
/// @param stream             stream that orders the exchange; NULL is the default stream
///
/// Returns as `ncclEpCreateHandle`, and `ncclInvalidUsage` while a staged operation waits for completion. After a
/// refusal this rank's routing is what it was.
///
/// # Safety
/// Pointers are NULL or valid for what they are documented to be.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclEpHandleUpdate(
    handle: ncclEpHandle_t,
    topk_idx: *const ncclNDTensor_t,
    local_tensors: *const *mut ncclNDTensor_t,
    num_local_tensors: c_uint,
    stream: cudaStream_t,
) -> ncclResult_t {
    on_handle("ncclEpHandleUpdate", handle, |handle| {
        // SAFETY: this function's contract.
        let arguments = unsafe { read_arguments(topk_idx, local_tensors, num_local_tensors) };
        handle.update(arguments, Stream(stream as usize))
    })
}

/// Destroys a handle. Local. Abandons a staged operation that was not completed. Does not touch the tensor of the ids.
/// NULL is a successful no-op.
///
/// Returns `ncclInvalidArgument` for a handle that was destroyed already.
///
/// # Safety
/// None: a dead or foreign handle is recognised.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclEpHandleDestroy(handle: ncclEpHandle_t) -> ncclResult_t {
    GUARD.destroy("ncclEpHandleDestroy", || {
        if !handle.is_null() {
            HANDLES.remove(handle as usize)?.close();
        }
        Ok(())
    })
}

/// Gets the number of rows that an HT dispatch of this handle can deliver to this rank. Local.
///
/// That is R * max_tokens_per_rank, or the real count if the group's max_tokens_per_rank is NCCL_EP_AUTO. Where rows
/// lie by expert, it is the most that any update with the handle's K may bring, filled up. The real count is known once
/// the stream of the handle's creation has reached that call; this call waits for it.
///
/// @param handle           an HT handle
/// @param num_recv_tokens  gets the number of rows
///
/// Returns `ncclInvalidArgument` for a NULL or dead argument, `ncclInvalidUsage` for an LL handle; with NCCL_EP_AUTO
/// also the error of an exchange for which the creation did not wait.
///
/// # Safety
/// `num_recv_tokens` is NULL or points to a writable unsigned int.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclEpHandleGetNumRecvTokens(
    handle: ncclEpHandle_t,
    num_recv_tokens: *mut c_uint,
) -> ncclResult_t {
    // SAFETY: this function's contract.
    unsafe { write_num_recv_tokens("ncclEpHandleGetNumRecvTokens", handle, Duration::MAX, num_recv_tokens) }
}

/// As `ncclEpHandleGetNumRecvTokens`, but waits at most `timeout_ms`, so that a program can look at other things, such
/// as signals, and call again. The deadline of the exchange counts from the first of these calls.
///
/// @param handle           an HT handle
/// @param timeout_ms       milliseconds; 0 looks without waiting
/// @param num_recv_tokens  gets the number of rows
///
/// Returns `ncclInProgress`, which is no failure, if the number is not known yet: `num_recv_tokens` is not written. All
/// else as `ncclEpHandleGetNumRecvTokens`.
///
/// # Safety
/// As of `ncclEpHandleGetNumRecvTokens`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclEpHandleWaitNumRecvTokens(
    handle: ncclEpHandle_t,
    timeout_ms: c_uint,
    num_recv_tokens: *mut c_uint,
) -> ncclResult_t {
    let within = Duration::from_millis(timeout_ms.into());
    // SAFETY: this function's contract.
    unsafe { write_num_recv_tokens("ncclEpHandleWaitNumRecvTokens", handle, within, num_recv_tokens) }
}

/// The body of both: `name`.
///
/// # Safety
/// As theirs.
unsafe fn write_num_recv_tokens(
    name: &'static str,
    handle: ncclEpHandle_t,
    within: Duration,
    num_recv_tokens: *mut c_uint,
) -> ncclResult_t {
    let mut is_known = true;
    let code = on_handle(name, handle, |handle| {
        check_out("num_recv_tokens", num_recv_tokens)?;
        let Some(count) = handle.num_recv_tokens(within)? else {
            is_known = false;
            return Ok(());
        };
        let count = c_uint::try_from(count).map_err(|_| Error::internal("more received tokens than fit 32 bits"))?;
        // SAFETY: this function's contract.
        unsafe { write_out("num_recv_tokens", num_recv_tokens, count) }
    });
    if code == 0 && !is_known { IN_PROGRESS } else { code }
}
