//! A second ABI over the core, for tests alone (`c_tests/suites/two_abis`); never installed.
//!
//! It differs from the others in what the core must not depend on: other symbols and SONAME, objects behind addresses
//! instead of numbers, tensors as addresses with 64-bit extents, no stream when a group is opened, and no words for
//! refusals but the data that they are.
//!
//! # Safety
//! The headers `probe.h` of those tests say what functions and fields mean. Callers vouch for pointers: they are NULL
//! where a text refuses that, or valid; objects are alive, and none is used once it has ended; memory outlives the
//! operations that use it.
#![allow(unsafe_code, missing_docs, clippy::missing_safety_doc)]

mod rail;

use nccl_ep_core::error::{Code, Error, Result};
use nccl_ep_core::model::group::{Algorithm, GroupSettings, LlCombineMode};
use nccl_ep_core::model::ops::{HandleForm, RoutingCounters, Stream};
use nccl_ep_core::model::tensor::{DType, DevPtr, Tensor};
use nccl_ep_core::rule::handle::HandleTensors;
use nccl_ep_core::rule::{CombineTensors, DispatchTensors};
use nccl_ep_core::session::create;
use nccl_ep_core::session::group::Group;
use nccl_ep_core::session::handle::Handle;
use std::cell::RefCell;
use std::ffi::{CString, c_char, c_int, c_void};
use std::sync::Arc;

thread_local! {
    static LAST: RefCell<CString> = RefCell::default();
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct EpProbeSettings {
    pub experts: usize,
    pub tokens: usize,
    pub hidden: usize,
    pub high_throughput: usize,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct EpProbeRows {
    pub home: *mut c_void,
    pub away: *mut c_void,
    pub weights: *mut c_void,
    pub hidden: usize,
}

pub struct EpProbeGroup(Arc<Group>);

pub struct EpProbeRoute {
    core: Handle,
    tokens: usize,
    top_k: usize,
}

fn answer(outcome: Result<()>) -> c_int {
    let Err(error) = outcome else { return 0 };
    let text = CString::new(error.text()).unwrap_or_default();
    LAST.with_borrow_mut(|last| *last = text);
    error.code() as c_int
}

/// A dense tensor; extents beyond 32 bits are refused.
fn tensor(data: *const c_void, dtype: DType, sizes: &[usize]) -> Result<Tensor> {
    let beyond = |_| Error::new(Code::InvalidArgument, "an extent is beyond 32 bits");
    let kept: Vec<u32> = sizes.iter().map(|&size| u32::try_from(size).map_err(beyond)).collect::<Result<_>>()?;
    Ok(Tensor::new(DevPtr(data as usize), Some(dtype), &kept))
}

fn null(what: &str) -> Error {
    Error::new(Code::InvalidArgument, format!("no {what}"))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn epProbeOpen(
    group: *mut *mut EpProbeGroup,
    comm: *mut c_void,
    settings: *const EpProbeSettings,
) -> c_int {
    // SAFETY: the caller's promise.
    let (group, settings) = unsafe { (group.as_mut(), settings.as_ref()) };
    let settings = settings.ok_or_else(|| null("settings")).map(|settings| GroupSettings {
        algorithm: match settings.high_throughput {
            0 => Algorithm::LowLatency,
            _ => Algorithm::HighThroughput,
        },
        experts: settings.experts,
        max_tokens: Some(settings.tokens),
        max_recv_rows: None,
        row_bytes: settings.hidden * DType::Bfloat16.size(),
        channels: None,
        zones: false,
        tensor_rows: 0,
        drops: false,
        timeout: None,
        sms: None,
        ll_combine: LlCombineMode::Reduce,
    });
    answer(create::group(comm as usize, settings, Error::text, None).and_then(|opened| {
        *group.ok_or_else(|| null("place for a group"))? = Box::into_raw(Box::new(EpProbeGroup(Arc::new(opened))));
        Ok(())
    }))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn epProbeClose(group: *mut EpProbeGroup) -> c_int {
    // SAFETY: the caller's promise.
    let group = unsafe { Box::from_raw(group) };
    answer(group.0.close(None))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn epProbeRoute(route: *mut *mut EpProbeRoute, group: *const EpProbeGroup) -> c_int {
    // SAFETY: the caller's promise.
    let (route, group) = unsafe { (route.as_mut(), Arc::clone(&(*group).0)) };
    answer(route.ok_or_else(|| null("place for a route")).map(|route| {
        *route = Box::into_raw(Box::new(EpProbeRoute {
            core: Handle::new(group, HandleForm::default()),
            tokens: 0,
            top_k: 0,
        }));
    }))
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct EpProbeMemory {
    pub data: *mut c_void,
    pub bytes: usize,
    pub tokens: usize,
    pub top_k: usize,
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn epProbeBytes(group: *const EpProbeGroup, top_k: usize) -> usize {
    // SAFETY: the caller's promise.
    let bytes = unsafe { &*group }.0.handle_bytes(top_k, HandleForm::default());
    answer(bytes.as_ref().map(|_| ()).map_err(Error::clone));
    bytes.unwrap_or_default()
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn epProbeRouteIn(
    route: *mut *mut EpProbeRoute,
    group: *const EpProbeGroup,
    memory: *const EpProbeMemory,
) -> c_int {
    // SAFETY: the caller's promise.
    let (route, group, memory) = unsafe { (route.as_mut(), Arc::clone(&(*group).0), *memory) };
    let EpProbeMemory { data, bytes, tokens, top_k } = memory;
    let made = Handle::in_memory(group, DevPtr(data as usize), bytes, (top_k, HandleForm::default()));
    answer(made.and_then(|core| {
        *route.ok_or_else(|| null("place for a route"))? =
            Box::into_raw(Box::new(EpProbeRoute { core, tokens, top_k }));
        Ok(())
    }))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn epProbeUpdate(
    route: *mut EpProbeRoute,
    ids: *const c_void,
    tokens: usize,
    top_k: usize,
) -> c_int {
    // SAFETY: the caller's promise.
    let route = unsafe { &mut *route };
    let tensors = tensor(ids, DType::Int64, &[tokens, top_k]).map(|ids| HandleTensors {
        ids,
        counter: None,
        host_counter: None,
        counters: RoutingCounters::default(),
    });
    answer(route.core.update(tensors, Stream::DEFAULT).map(|()| {
        route.tokens = tokens;
        route.top_k = top_k;
    }))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn epProbeForget(route: *mut EpProbeRoute) {
    // SAFETY: the caller's promise.
    let route = unsafe { Box::from_raw(route) };
    route.core.close();
}

fn shapes(route: &EpProbeRoute, rows: &EpProbeRows) -> Result<[Tensor; 3]> {
    let facts = route.core.group().facts();
    let (received, hidden) = (facts.max_recv_rows.unwrap_or_default(), rows.hidden);
    let away = match facts.algorithm {
        Algorithm::LowLatency => &[facts.local_experts(), received, hidden][..],
        Algorithm::HighThroughput => &[received, hidden],
    };
    Ok([
        tensor(rows.home, DType::Bfloat16, &[route.tokens, rows.hidden])?,
        tensor(rows.away, DType::Bfloat16, away)?,
        tensor(rows.weights, DType::Float32, &[route.tokens, route.top_k])?,
    ])
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn epProbeAway(
    route: *const EpProbeRoute,
    rows: *const EpProbeRows,
    stream: *mut c_void,
) -> c_int {
    // SAFETY: the caller's promise.
    let (route, rows) = unsafe { (&*route, &*rows) };
    answer(shapes(route, rows).and_then(|[home, away, _]| {
        let tensors = DispatchTensors { tokens: Some(&home), out_tokens: Some(&away), ..DispatchTensors::default() };
        route.core.dispatch(&tensors, false, Stream(stream as usize)).map(drop)
    }))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn epProbeHome(
    route: *const EpProbeRoute,
    rows: *const EpProbeRows,
    stream: *mut c_void,
) -> c_int {
    // SAFETY: the caller's promise.
    let (route, rows) = unsafe { (&*route, &*rows) };
    answer(shapes(route, rows).and_then(|[home, away, weights]| {
        let tensors = CombineTensors {
            tokens: Some(&away),
            // High throughput takes none and looks at none.
            token_weights: Some(&weights),
            out_tokens: Some(&home),
            ..CombineTensors::default()
        };
        route.core.combine(&tensors, false, Stream(stream as usize))
    }))
}

#[unsafe(no_mangle)]
pub extern "C" fn epProbeText() -> *const c_char {
    LAST.with_borrow(|last| last.as_ptr())
}
