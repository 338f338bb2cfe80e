//! A new handle: rules of its ids and of the counter of received tokens.
#![forbid(unsafe_code)]

use crate::error::Result;
use crate::error::refusal::{Extent, OfTensor, Role};
use crate::model::dtype::DType;
use crate::model::group::{Algorithm, GroupFacts, MAX_TOP_K, most_tokens};
use crate::model::ops::{IdWidth, Routing};
use crate::model::tensor::{DevPtr, Tensor};
use crate::rule::argument::{Argument, expert_counter};

/// The tensors of a new handle.
#[derive(Clone, Copy, Debug)]
pub struct HandleTensors {
    /// The ids.
    pub ids: Tensor,
    /// HT: gets the received tokens per local expert, in device memory.
    pub counter: Option<Tensor>,
    /// The same in mapped pinned host memory.
    pub host_counter: Option<Tensor>,
}

/// Where an HT handle's counter lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Counter {
    /// Device memory.
    Device(DevPtr),
    /// Mapped pinned host memory, by its host address.
    Host(DevPtr),
}

/// Checks the ids `[T, K]`: of 64 bits, as no kernel reads others yet.
pub fn routing(facts: &GroupFacts, ids: &Tensor) -> Result<Routing> {
    let (most, what) = match facts.max_tokens {
        Some(most) => (most, Extent::MaxTokens),
        None => (most_tokens(facts.ranks), Extent::CountableTokens),
    };
    let ids = Argument::new(Role::Ids, ids)
        .dims(2)?
        .dtype_is(DType::Int64)?
        .size_at_most(1, MAX_TOP_K, Extent::MostTopK)?
        .size_at_most(0, most, what)?;
    Ok(Routing {
        ids: ids.data(IdWidth::Bits64.bytes())?,
        width: IdWidth::Bits64,
        tokens: ids.size(0),
        top_k: ids.size(1),
    })
}

/// Checks the counters: an HT handle may have one, an LL handle has none.
pub fn counter(facts: &GroupFacts, tensors: &HandleTensors) -> Result<Option<Counter>> {
    let (host, device) = (tensors.host_counter.as_ref(), tensors.counter.as_ref());
    if facts.algorithm == Algorithm::LowLatency {
        Argument::absent(Role::HostCounter, host, OfTensor::CounterAtDispatch)?;
        Argument::absent(Role::Counter, device, OfTensor::CounterAtDispatch)?;
        return Ok(None);
    }
    let sized = Argument::size_at_least;
    if let Some(data) = expert_counter(Role::HostCounter, host, facts, sized)? {
        return Ok(Some(Counter::Host(data)));
    }
    let data = expert_counter(Role::Counter, device, facts, sized)?;
    Ok(data.map(Counter::Device))
}
