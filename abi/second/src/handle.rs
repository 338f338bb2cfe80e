//! Creation, routing and destruction of handles.
#![allow(unsafe_code)]

use crate::enums::ncclEpLayout_t;
use crate::guard::{GUARD, Subject, check_out, write_out};
use crate::objects::{self, Group, Handle};
use crate::read::{self, number};
use crate::tensor;
use crate::texts::not_served;
use crate::types::{
    cudaStream_t, ncclEpGroup_t, ncclEpHandle_t, ncclEpHandleConfig_t, ncclEpLayoutInfo_t,
    ncclEpTensor_t, ncclResult_t,
};
use nccl_ep_abi::refuse;
use nccl_ep_core::error::refusal::{Extent, OfTensor, Role};
use nccl_ep_core::error::{Code, Error, Result, refusal};
use nccl_ep_core::model::group::{Algorithm, MAX_TOP_K};
use nccl_ep_core::model::ops::Stream;
use nccl_ep_core::model::tensor::{DType, Tensor};
use nccl_ep_core::rule::handle::HandleTensors;
use nccl_ep_core::session;
use parking_lot::Mutex;
use std::ffi::c_int;
use std::mem::MaybeUninit;
use std::sync::Arc;

/// Gets the bytes of memory that `ncclEpInitHandle` takes for such a handle. Local.
///
/// @param ep_group  the group
/// @param layout    how rows lie
/// @param config    may be NULL
/// @param size      gets the bytes
/// @param num_topk  K
///
/// Returns as `ncclEpInitHandle`, and `ncclInvalidUsage` over several nodes.
///
/// # Safety
/// Pointers are NULL or valid for what they are documented to be.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclEpHandleMemSize(
    ep_group: ncclEpGroup_t,
    layout: MaybeUninit<ncclEpLayout_t>,
    config: *const ncclEpHandleConfig_t,
    size: *mut usize,
    num_topk: c_int,
) -> ncclResult_t {
    GUARD.run("ncclEpHandleMemSize", Subject::Nothing, || {
        let group = Group::resolve(ep_group as usize)?;
        // SAFETY: this function's contract.
        let config = unsafe { read::optional("config", config) }?;
        check_out("size", size)?;
        check_shape(&group, number(layout), config.as_ref())?;
        let top_k = top_k(&group, "num_topk", i64::from(num_topk))?;
        let bytes = group.session.handle_bytes(top_k)?;
        // SAFETY: this function's contract.
        unsafe { write_out("size", size, bytes) }
    })
}

/// Creates a handle without a routing, which `ncclEpUpdateHandle` gives it. Local.
///
/// LL serves `NCCL_EP_LAYOUT_EXPERT_MAJOR`, HT `NCCL_EP_LAYOUT_FLAT`.
///
/// @param handle      gets the handle; written on success only
/// @param ep_group    the group
/// @param layout      how rows lie
/// @param config      may be NULL
/// @param num_topk    K, 1 to 32 and at most E; HT: at most the group's `num_topk`
/// @param handle_mem  uint8 `[n]`, n as of `ncclEpHandleMemSize`, at a multiple of 16 bytes: what operations need of the
///                    routing will be there. Not touched before an update, or in LL a dispatch. HT: a combine may be made on
///                    a handle whose memory holds what an update of an equal handle has left, or a copy of it; a forward
///                    dispatch needs an update of its own yet. NULL: memory of the library's. HT: on all ranks or on none,
///                    and of one update on all. A staged operation that is given up (`ncclEpHandleDestroy`) may use it
///                    until the group's end: do not free it before
///
/// Returns `ncclInvalidArgument` for a NULL or dead argument, a layout that the mode has not, or K in LL; `ncclInvalidUsage`
/// for K in HT, and what the library does not serve yet.
///
/// # Safety
/// Pointers are NULL or valid for what they are documented to be.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclEpInitHandle(
    handle: *mut ncclEpHandle_t,
    ep_group: ncclEpGroup_t,
    layout: MaybeUninit<ncclEpLayout_t>,
    config: *const ncclEpHandleConfig_t,
    num_topk: c_int,
    handle_mem: *const ncclEpTensor_t,
) -> ncclResult_t {
    let subject = Subject::Group(ep_group as usize);
    GUARD.run("ncclEpInitHandle", subject, || {
        let group = Group::resolve(ep_group as usize)?;
        check_out("handle", handle)?;
        // SAFETY: this function's contract.
        let (config, memory) = unsafe {
            let config = read::optional("config", config)?;
            (config, tensor::optional("handle_mem", handle_mem)?)
        };
        check_shape(&group, number(layout), config.as_ref())?;
        let top_k = top_k(&group, "num_topk", i64::from(num_topk))?;
        let session = Arc::clone(&group.session);
        let core = match memory {
            None => session::handle::Handle::new(session),
            Some(memory) => in_memory(session, &memory, top_k)?,
        };
        let made = Handle {
            core,
            group,
            top_k,
            ids: Mutex::default(),
        };
        // SAFETY: this function's contract.
        unsafe { write_out("handle", handle, made.register() as ncclEpHandle_t) }
    })
}

fn in_memory(
    group: Arc<session::group::Group>,
    memory: &Tensor,
    top_k: usize,
) -> Result<session::handle::Handle> {
    let (&[bytes], Some(DType::Uint8)) = (memory.sizes(), memory.dtype) else {
        let rule = "must be uint8 with one dimension";
        return Err(refuse::argument("handle_mem", rule));
    };
    session::handle::Handle::in_memory(group, memory.data, bytes as usize, top_k)
        .map_err(|error| error.within("handle_mem"))
}

/// Routes by `topk_idx` from now on.
///
/// LL: local, enqueues nothing. Every dispatch and combine reads the ids again, so they may be updated in place between
/// operations.
///
/// HT: collective. The ids are read when `stream` reaches this call, and again by each forward dispatch: they must stay as
/// they are until the last. A captured `stream` is refused. With `recv_total_counter` the host waits until all ranks have
/// exchanged their routing.
///
/// @param handle       the handle
/// @param topk_idx     int64 [T, K]: global expert ids of this rank's T tokens; negative ones and those from E on count as
///                     none
/// @param layout_info  HT: may be NULL; `expert_counters` int32 `[L]` or longer, `recv_total_counter` int32 or int64 `[1]`.
///                     LL: must be NULL
/// @param stream       stream that orders the exchange
///
/// Returns `ncclInvalidArgument` for a NULL or dead argument or a tensor that breaks a rule; `ncclInvalidUsage` while a
/// staged operation waits for completion, and for a captured stream in HT; `ncclRemoteError` if another rank refused; or the
/// code of the failure if the group has failed.
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
    let subject = Subject::Handle(handle as usize);
    GUARD.run("ncclEpUpdateHandle", subject, || {
        let handle = objects::handle(handle as usize)?;
        // SAFETY: this function's contract.
        let given = unsafe { Routing::read(&handle.group, topk_idx, layout_info) };
        let given = given.and_then(|given| {
            given.check_top_k(handle.top_k)?;
            Ok(given)
        });
        let stream = Stream(stream as usize);
        handle
            .core
            .update(given.clone().map(|it| it.tensors), stream)?;
        given?.finish(&handle)
    })
}

/// As `ncclEpInitHandle` and `ncclEpUpdateHandle`, with the K of `topk_idx`.
///
/// @param handle       gets the handle; written on success only
/// @param ep_group     the group
/// @param layout       how rows lie
/// @param topk_idx     as of `ncclEpUpdateHandle`
/// @param layout_info  as of `ncclEpUpdateHandle`
/// @param config       may be NULL
/// @param stream       stream that orders the exchange
///
/// # Safety
/// Pointers are NULL or valid for what they are documented to be.
#[unsafe(no_mangle)]
#[allow(clippy::too_many_arguments)] // The ABI's.
pub unsafe extern "C" fn ncclEpCreateHandle(
    handle: *mut ncclEpHandle_t,
    ep_group: ncclEpGroup_t,
    layout: MaybeUninit<ncclEpLayout_t>,
    topk_idx: *const ncclEpTensor_t,
    layout_info: *const ncclEpLayoutInfo_t,
    config: *const ncclEpHandleConfig_t,
    stream: cudaStream_t,
) -> ncclResult_t {
    let subject = Subject::Group(ep_group as usize);
    GUARD.run("ncclEpCreateHandle", subject, || {
        let group = Group::resolve(ep_group as usize)?;
        // SAFETY: this function's contract.
        let config = unsafe { read::optional("config", config) };
        // Other ranks hear of a refusal.
        let given = check_out("handle", handle).and(config).and_then(|config| {
            // SAFETY: as above.
            let given = unsafe { Routing::read(&group, topk_idx, layout_info) }?;
            check_shape(&group, number(layout), config.as_ref())?;
            let columns = given.tensors.ids.sizes().get(1);
            top_k(
                &group,
                "topk_idx.sizes[1]",
                columns.map_or(0, |&columns| columns.into()),
            )?;
            Ok(given)
        });
        let tensors = given.clone().map(|it| it.tensors);
        let session = Arc::clone(&group.session);
        let core = session::create::handle(session, tensors, Stream(stream as usize))?;
        let given = given?;
        let top_k = given
            .tensors
            .ids
            .sizes()
            .get(1)
            .map_or(0, |&columns| columns as usize);
        let made = Handle {
            core,
            group,
            top_k,
            ids: Mutex::default(),
        };
        given.finish(&made)?;
        // SAFETY: this function's contract.
        unsafe { write_out("handle", handle, made.register() as ncclEpHandle_t) }
    })
}

/// What a routing is made from.
#[derive(Clone)]
struct Routing {
    tensors: HandleTensors,
    total: Option<Tensor>,
}

impl Routing {
    /// # Safety
    /// As of [`ncclEpUpdateHandle`].
    unsafe fn read(
        group: &Group,
        topk_idx: *const ncclEpTensor_t,
        layout_info: *const ncclEpLayoutInfo_t,
    ) -> Result<Self> {
        // SAFETY: this function's contract.
        let (info, ids) = unsafe {
            let info = read::optional("layout_info", layout_info)?;
            (info, tensor::required("topk_idx", topk_idx)?)
        };
        let tensors = HandleTensors {
            ids,
            counter: None,
            host_counter: None,
        };
        let Some(info) = info else {
            return Ok(Self {
                tensors,
                total: None,
            });
        };
        if group.session.facts().algorithm == Algorithm::LowLatency {
            let rule = "must be NULL in low latency; ncclEpDispatch takes it";
            return Err(refuse::argument("layout_info", rule));
        }
        // SAFETY: as above.
        let (counter, total) = unsafe {
            let counter = tensor::optional("layout_info.expert_counters", info.expert_counters)?;
            let total =
                tensor::optional("layout_info.recv_total_counter", info.recv_total_counter)?;
            (counter, total)
        };
        total.as_ref().map_or(Ok(()), check_total)?;
        let tensors = HandleTensors { counter, ..tensors };
        Ok(Self { tensors, total })
    }

    fn check_top_k(&self, expected: usize) -> Result<()> {
        let ids = &self.tensors.ids;
        match ids.sizes().get(1) {
            Some(&columns) if columns as usize != expected => {
                let subject = refusal::Subject::Size(Role::Ids, 1);
                let error = Error::argument(subject, OfTensor::Exactly(Extent::HandleTopK));
                Err(error.got(columns, expected))
            }
            // The core wants two dimensions.
            _ => Ok(()),
        }
    }

    /// What follows the core's update: the ids are kept for dispatches, and the number of rows is written.
    fn finish(&self, handle: &Handle) -> Result<()> {
        *handle.ids.lock() = Some(self.tensors.ids);
        let Some(total) = &self.total else {
            return Ok(());
        };
        // The routing has been exchanged when its number is known, so all that the stream had to do before is done.
        let rows = handle.core.received_rows()? as u64;
        let bytes = rows.to_le_bytes();
        let width = total.dtype.map_or(0, DType::size);
        let device = handle.group.session.device();
        device.upload(total.data, bytes.get(..width).unwrap_or(&bytes))
    }
}

fn check_total(total: &Tensor) -> Result<()> {
    let name = "layout_info.recv_total_counter";
    match (total.sizes(), total.dtype) {
        (&[rows], Some(dtype @ (DType::Int32 | DType::Int64))) if rows > 0 => {
            if total.data.0.is_multiple_of(dtype.size()) {
                return Ok(());
            }
            let rule = "must be a multiple of its type's size";
            Err(refuse::argument(format_args!("{name}.data"), rule))
        }
        _ => {
            let rule = "must be int32 or int64 with one dimension and an element";
            Err(refuse::argument(name, rule))
        }
    }
}

/// Checks the layout of a handle, and its options.
fn check_shape(group: &Group, layout: u32, config: Option<&ncclEpHandleConfig_t>) -> Result<()> {
    const EXPERT_MAJOR: u32 = ncclEpLayout_t::NCCL_EP_LAYOUT_EXPERT_MAJOR as u32;
    const RANK_MAJOR: u32 = ncclEpLayout_t::NCCL_EP_LAYOUT_RANK_MAJOR as u32;
    const FLAT: u32 = ncclEpLayout_t::NCCL_EP_LAYOUT_FLAT as u32;
    match (group.session.facts().algorithm, layout) {
        (Algorithm::LowLatency, EXPERT_MAJOR) | (Algorithm::HighThroughput, FLAT) => Ok(()),
        (Algorithm::LowLatency, RANK_MAJOR) => {
            Err(not_served("layout", "NCCL_EP_LAYOUT_RANK_MAJOR"))
        }
        (Algorithm::HighThroughput, EXPERT_MAJOR) => {
            let alignment = config.map_or(0, |it| it.dispatch_output_per_expert_alignment);
            if alignment > 1 && !alignment.is_power_of_two() {
                let name = "config.dispatch_output_per_expert_alignment";
                return Err(refuse::argument(name, "must be 0, 1 or a power of two")
                    .got(alignment, "a power of two"));
            }
            Err(not_served(
                "layout",
                "NCCL_EP_LAYOUT_EXPERT_MAJOR in high throughput",
            ))
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

/// Destroys a handle. Local. Gives up a staged operation that was not completed. NULL is a successful no-op.
///
/// Returns `ncclInvalidArgument` for a handle that was destroyed already.
///
/// # Safety
/// None: a dead or foreign handle is recognised.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclEpHandleDestroy(handle: ncclEpHandle_t) -> ncclResult_t {
    GUARD.destroy("ncclEpHandleDestroy", || {
        if !handle.is_null() {
            objects::take_handle(handle as usize)?.core.close();
        }
        Ok(())
    })
}
