//! What a routing is made from, and what it tells.
#![allow(unsafe_code)]

use crate::objects::Group;
use crate::tensor;
use crate::types::{ncclEpLayoutInfo_t, ncclEpTensor_t};
use nccl_ep_abi::refuse;
use nccl_ep_core::error::refusal::{Extent, OfTensor, Role, Subject};
use nccl_ep_core::error::{Error, Result};
use nccl_ep_core::model::group::Algorithm;
use nccl_ep_core::model::ops::{IntWidth, Numbers, RoutingCounters};
use nccl_ep_core::model::tensor::Tensor;
use nccl_ep_core::rule::handle::HandleTensors;

const EXPERTS: &str = "layout_info.expert_counters";
const TOTAL: &str = "layout_info.recv_total_counter";

/// Reads the arguments of an update.
///
/// # Safety
/// As of `ncclEpUpdateHandle`.
pub unsafe fn read(
    group: &Group,
    topk_idx: *const ncclEpTensor_t,
    layout_info: *const ncclEpLayoutInfo_t,
) -> Result<HandleTensors> {
    // SAFETY: this function's contract.
    let (info, ids) = unsafe {
        let info = crate::read::optional("layout_info", layout_info)?;
        (info, tensor::required("topk_idx", topk_idx)?)
    };
    let facts = group.session.facts();
    let counters = match info {
        None => RoutingCounters::default(),
        Some(_) if facts.algorithm == Algorithm::LowLatency => {
            let rule = "must be NULL in low latency; ncclEpDispatch takes it";
            return Err(refuse::argument("layout_info", rule));
        }
        // SAFETY: as above.
        Some(info) => unsafe { counters(&info, facts.local_experts()) }?,
    };
    Ok(HandleTensors {
        ids,
        counter: None,
        host_counter: None,
        counters,
    })
}

/// # Safety
/// As of [`read`].
unsafe fn counters(info: &ncclEpLayoutInfo_t, experts: usize) -> Result<RoutingCounters> {
    // SAFETY: this function's contract.
    let (of_experts, total) = unsafe {
        (
            tensor::optional(EXPERTS, info.expert_counters)?,
            tensor::optional(TOTAL, info.recv_total_counter)?,
        )
    };
    Ok(RoutingCounters {
        experts: of_experts
            .map(|it| numbers(EXPERTS, &it, experts))
            .transpose()?,
        total: total.map(|it| numbers(TOTAL, &it, 1)).transpose()?,
    })
}

/// The counter `name` with `least` numbers or more.
fn numbers(name: &str, tensor: &Tensor, least: usize) -> Result<Numbers> {
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
    Ok(Numbers { data, width })
}

/// Checks that ids are so many per token as the handle was made for.
pub fn check_top_k(given: &HandleTensors, expected: usize) -> Result<()> {
    match given.ids.sizes().get(1) {
        Some(&columns) if columns as usize != expected => {
            let subject = Subject::Size(Role::Ids, 1);
            let error = Error::argument(subject, OfTensor::Exactly(Extent::HandleTopK));
            Err(error.got(columns, expected))
        }
        // The core wants two dimensions.
        _ => Ok(()),
    }
}
