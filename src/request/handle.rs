//! `ncclEpCreateHandle`: rules of the top-k ids and of the received-token counter.
#![forbid(unsafe_code)]

use crate::error::{Error, Result};
use crate::model::dtype::DType;
use crate::model::group::{Algorithm, GroupFacts, MAX_TOP_K, most_tokens};
use crate::model::ops::Routing;
use crate::model::tensor::{DevPtr, Tag, Tensor, TensorSet};
use crate::request::argument::{Argument, expert_counter};

/// Where an HT handle's counter lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Counter {
    /// Device memory.
    Device(DevPtr),
    /// Mapped pinned host memory, by its host address.
    Host(DevPtr),
}

/// Checks the ids `[T, K]` of a new handle, tagged `tag`.
pub fn routing(facts: &GroupFacts, tag: u32, topk_idx: &Tensor) -> Result<Routing> {
    if Tag::from_raw(tag) != Some(Tag::TopkIdx) {
        return Err(
            Error::argument("topk_idx.tag", "must be NCCL_EP_TENSOR_TAG_TOPK_IDX")
                .got(tag, Tag::TopkIdx as u32),
        );
    }
    let (most, whose) = match facts.max_tokens {
        Some(most) => (most, "the group's max_tokens_per_rank"),
        None => (most_tokens(facts.ranks), "what all ranks can send to one"),
    };
    let ids = Argument::plain("topk_idx", topk_idx)
        .dims(2)?
        .dtype_is(DType::Int64)?
        .size_at_most(1, MAX_TOP_K, "the largest top-k")?
        .size_at_most(0, most, whose)?;
    Ok(Routing {
        ids: ids.data(8)?,
        tokens: ids.size(0),
        top_k: ids.size(1),
    })
}

/// Checks the local tensors of a new handle: an HT handle may have a counter, an LL handle nothing.
pub fn counter(facts: &GroupFacts, locals: &TensorSet) -> Result<Option<Counter>> {
    let (host, device) = (Tag::RecvExpertCounterHost, Tag::RecvExpertCounterDevice);
    if facts.algorithm == Algorithm::LowLatency {
        for tag in [host, device] {
            let why = "a low-latency handle has no counter; pass it to ncclEpDispatch";
            Argument::absent("local_tensors", locals, tag, why)?;
        }
        return Ok(None);
    }
    if let Some(data) = expert_counter(locals, host, facts, Argument::size_at_least)? {
        return Ok(Some(Counter::Host(data)));
    }
    let data = expert_counter(locals, device, facts, Argument::size_at_least)?;
    Ok(data.map(Counter::Device))
}
