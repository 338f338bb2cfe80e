//! Rules for the tensors of a new routing: its ids, and its counter of received tokens.

use crate::error::refusal::{Extent, OfTensor, Role};
use crate::error::{Code, Error, Result};
use crate::model::group::{Algorithm, GroupFacts, MAX_TOP_K, most_tokens};
use crate::model::handle_state::{BLOCK_ALIGN, CallerBlock};
use crate::model::ops::{HandleForm, IntWidth, Routing, RoutingCounters};
use crate::model::tensor::{DType, DevPtr, Tensor};
use crate::rule::argument::{Argument, expert_counter};

#[derive(Clone, Copy, Debug)]
pub struct HandleTensors {
    pub ids: Tensor,
    /// HT: gets the received tokens per local expert, in device memory.
    pub counter: Option<Tensor>,
    /// HT: as `counter`, in mapped pinned host memory.
    pub host_counter: Option<Tensor>,
    /// HT: other counters, which the ABI has checked.
    pub counters: RoutingCounters,
}

/// The address of an HT handle's counter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Counter {
    Device(DevPtr),
    /// Mapped pinned host memory, by its host address.
    Host(DevPtr),
}

/// The width of `ids`. Kernels read only 64 bits, so others are allowed only if the handle keeps its ids.
pub fn width_of(ids: &Argument<'_>, form: HandleForm) -> Result<IntWidth> {
    match (ids.width(), form.keeps_ids) {
        (Some(width), true) => Ok(width),
        (Some(IntWidth::Bits64), false) => Ok(IntWidth::Bits64),
        (_, true) => Err(ids.wrong_dtype("int32 or int64")),
        (_, false) => Err(ids.wrong_dtype(DType::Int64)),
    }
}

/// Checks a routing's ids `[T, K]`.
pub fn routing(facts: &GroupFacts, ids: &Tensor, form: HandleForm) -> Result<Routing> {
    let (most, what) = match facts.max_tokens {
        Some(most) => (most, Extent::MaxTokens),
        None => (most_tokens(facts.ranks), Extent::CountableTokens),
    };
    let ids = Argument::new(Role::Ids, ids).dims(2)?;
    let width = width_of(&ids, form)?;
    let ids = ids.size_at_most(1, MAX_TOP_K, Extent::MostTopK)?.size_at_most(0, most, what)?;
    let ids = match facts.algorithm {
        Algorithm::LowLatency => ids.size_at_least(1, 1, Extent::LeastTopK)?,
        Algorithm::HighThroughput => ids,
    };
    Ok(Routing { ids: ids.data(width.bytes())?, width, tokens: ids.size(0), top_k: ids.size(1), form })
}

/// The routing that a caller's memory must already have, for as many tokens as `rows` has; its ids are unknown.
pub fn routed_before(
    facts: &GroupFacts,
    (role, rows): (Role, Option<&Tensor>),
    (top_k, form): (usize, HandleForm),
) -> Result<Routing> {
    let most = facts.max_tokens.unwrap_or(most_tokens(facts.ranks));
    let rows = Argument::required(role, rows)?.dims(2)?.size_at_most(0, most, Extent::MaxTokens)?;
    Ok(Routing { ids: DevPtr::default(), width: IntWidth::Bits64, tokens: rows.size(0), top_k, form })
}

/// Checks that there are as many ids per token as the size of the handle's memory requires.
pub fn has_top_k(tensors: &HandleTensors, top_k: usize) -> Result<()> {
    Argument::new(Role::Ids, &tensors.ids).dims(2)?.size_is(1, top_k, Extent::HandleTopK).map(drop)
}

/// Checks the alignment of zones in handles with at most `top_k` ids per token: all slots that a rank may need must fit
/// in 31 bits.
pub fn alignment(facts: &GroupFacts, alignment: usize, top_k: usize) -> Result<()> {
    let fail = |text| Error::new(Code::InvalidArgument, text);
    if !alignment.is_power_of_two() {
        return Err(fail("must be 0 or a power of two").got(alignment, "a power of two"));
    }
    let experts = facts.local_experts();
    let rows = facts.max_tokens.unwrap_or(most_tokens(facts.ranks)) * facts.ranks * top_k.min(experts);
    let most = (i32::MAX as usize).checked_sub(rows).map_or(0, |left| left / experts + 1);
    if alignment > most {
        let text = "rows by expert, filled up to it, must be countable in 31 bits";
        return Err(fail(text).got(alignment, format_args!("{most} or less")));
    }
    Ok(())
}

/// Checks that a caller's memory of `bytes` suits a handle's block of `needed` bytes.
pub fn memory(memory: DevPtr, bytes: usize, needed: usize) -> Result<CallerBlock> {
    let fail = |text| Error::new(Code::InvalidArgument, text);
    if memory.0 == 0 || !memory.0.is_multiple_of(BLOCK_ALIGN) {
        let text = "a handle's memory must begin at an address";
        let of = format!("a multiple of {BLOCK_ALIGN}");
        return Err(fail(text).got(format_args!("{:#x}", memory.0), of));
    }
    if bytes < needed {
        let least = format!("{needed} or more");
        return Err(fail("a handle's memory is too small").got(format_args!("{bytes} bytes"), least));
    }
    Ok(CallerBlock(memory))
}

/// Checks the counters: an HT handle may have one, an LL handle none.
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
    Ok(expert_counter(Role::Counter, device, facts, sized)?.map(Counter::Device))
}
