//! A routing's inputs, and what it reports.
#![allow(unsafe_code)]

use crate::objects::{Group, Layout};
use crate::tensor;
use crate::types::{ncclEpLayoutInfo_t, ncclEpTensor_t};
use nccl_ep_abi::refuse;
use nccl_ep_core::error::Result;
use nccl_ep_core::model::group::Algorithm;
use nccl_ep_core::model::ops::{IntWidth, Numbers, RoutingCounters};
use nccl_ep_core::model::tensor::Tensor;
use nccl_ep_core::rule::handle::HandleTensors;
use std::ptr::null_mut;

const EXPERTS: &str = "layout_info.expert_counters";
const OFFSETS: &str = "layout_info.expert_offsets";
const TOTAL: &str = "layout_info.recv_total_counter";

/// Reads the arguments of an update.
///
/// # Safety
/// As of `ncclEpUpdateHandle`.
pub unsafe fn read(
    group: &Group,
    layout: Option<Layout>,
    topk_idx: *const ncclEpTensor_t,
    layout_info: *const ncclEpLayoutInfo_t,
) -> Result<HandleTensors> {
    // SAFETY: this function's contract.
    let (info, ids) = unsafe {
        let info = crate::read::optional("layout_info", layout_info)?;
        (info, tensor::required(group, "topk_idx", topk_idx)?)
    };
    let facts = group.session.facts();
    let counters = match info {
        None => RoutingCounters::default(),
        Some(_) if facts.algorithm == Algorithm::LowLatency => {
            let rule = "must be NULL in low latency; ncclEpDispatch takes it";
            return Err(refuse::argument("layout_info", rule));
        }
        // SAFETY: as above.
        Some(info) => unsafe { counters(group, &info, layout) }?,
    };
    Ok(HandleTensors { ids, counter: None, host_counter: None, counters })
}

/// What a routing, or with zones a dispatch, reports to its caller.
///
/// # Safety
/// As of [`read`].
pub unsafe fn counters(group: &Group, info: &ncclEpLayoutInfo_t, layout: Option<Layout>) -> Result<RoutingCounters> {
    let experts = group.session.facts().local_experts();
    let has_zones = matches!(layout, Some(Layout::Zones(_)));
    let offsets = if has_zones { info.expert_offsets } else { null_mut() };
    // SAFETY: this function's contract.
    let (of_experts, offsets, total) = unsafe {
        (
            tensor::optional(group, EXPERTS, info.expert_counters)?,
            tensor::optional(group, OFFSETS, offsets)?,
            tensor::optional(group, TOTAL, info.recv_total_counter)?,
        )
    };
    let all = RoutingCounters {
        experts: numbers(EXPERTS, of_experts, experts)?,
        offsets: numbers(OFFSETS, offsets, experts)?,
        total: numbers(TOTAL, total, 1)?,
    };
    let widths = [all.experts, all.offsets, all.total].map(|it| it.map(|it| it.width));
    let mut given = widths.into_iter().flatten();
    if let (true, Some(first)) = (has_zones, given.next())
        && given.any(|width| width != first)
    {
        let rule = "must have counters of one type";
        return Err(refuse::argument("layout_info", rule));
    }
    Ok(all)
}

/// The counter `name`, if there is one, with at least `least` numbers.
fn numbers(name: &str, tensor: Option<Tensor>, least: usize) -> Result<Option<Numbers>> {
    let Some(tensor) = tensor else { return Ok(None) };
    let width = tensor.dtype.and_then(IntWidth::of);
    let (&[count], Some(width)) = (tensor.sizes(), width) else {
        let rule = "must be int32 or int64 with one dimension";
        return Err(refuse::argument(name, rule));
    };
    if (count as usize) < least {
        let rule = "must have room for all numbers";
        let error = refuse::argument(format_args!("{name}.sizes[0]"), rule);
        return Err(error.got(count, format_args!("{least} or more")));
    }
    let data = tensor.data;
    if !data.0.is_multiple_of(width.bytes()) {
        let rule = "must be a multiple of its type's size";
        return Err(refuse::argument(format_args!("{name}.data"), rule));
    }
    Ok(Some(Numbers { data, width }))
}
