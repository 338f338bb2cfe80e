//! Rules for the ids of a new handle and for its counter of received tokens.

use crate::error::Result;
use crate::error::refusal::{Extent, OfTensor, Role};
use crate::model::group::{Algorithm, GroupFacts, MAX_TOP_K, most_tokens};
use crate::model::ops::{IdWidth, Routing};
use crate::model::tensor::{DType, DevPtr, Tensor};
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

/// Checks the ids `[T, K]`; they have 64 bits, as no kernel reads others yet.
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::refusal::Subject;
    use crate::model::group::LlCombineMode;
    use crate::model::ids::GroupRank;

    fn facts(algorithm: Algorithm) -> GroupFacts {
        GroupFacts {
            algorithm,
            ranks: 2,
            rank: GroupRank::new(0),
            experts: 8,
            max_tokens: Some(4),
            max_recv_rows: Some(8),
            row_bytes: 16,
            ll_combine: LlCombineMode::Exact,
            ht_chunk_bytes: None,
            channels: None,
        }
    }

    fn tensor(dtype: DType, sizes: &[u32]) -> Tensor {
        Tensor::new(DevPtr(64), Some(dtype), sizes)
    }

    #[test]
    fn ids_of_64_bits_route_and_others_do_not() {
        let facts = facts(Algorithm::LowLatency);
        let routed = routing(&facts, &tensor(DType::Int64, &[4, 2])).unwrap();
        assert_eq!((routed.tokens, routed.top_k), (4, 2));
        assert_eq!(routed.width.bytes(), 8);
        let refused = |dtype, sizes| {
            let error = routing(&facts, &tensor(dtype, sizes)).unwrap_err();
            error.refused().unwrap()
        };
        let narrow = (
            Subject::ElementType(Role::Ids),
            OfTensor::ElementType.into(),
        );
        assert_eq!(refused(DType::Int32, &[4, 2]), narrow);
        let many = OfTensor::AtMost(Extent::MaxTokens).into();
        let subject = Subject::Size(Role::Ids, 0);
        assert_eq!(refused(DType::Int64, &[5, 2]), (subject, many));
    }

    #[test]
    fn counters_are_those_of_high_throughput() {
        let host_counter = Some(tensor(DType::Int32, &[4]));
        let tensors = HandleTensors {
            ids: tensor(DType::Int64, &[4, 2]),
            counter: None,
            host_counter,
        };
        let found = counter(&facts(Algorithm::HighThroughput), &tensors);
        assert_eq!(found, Ok(Some(Counter::Host(DevPtr(64)))));
        let refused = counter(&facts(Algorithm::LowLatency), &tensors).unwrap_err();
        let expected = (
            Subject::Tensor(Role::HostCounter),
            OfTensor::CounterAtDispatch.into(),
        );
        assert_eq!(refused.refused(), Some(expected));
    }
}
