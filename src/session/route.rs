//! The routing of a handle: turns its tensors into the backend's side.

use crate::backend::{HtBackend, HtGroupBackend, HtRouting, LlBackend, LlGroupBackend};
use crate::error::refusal::{OfTensor, Role, Subject};
use crate::error::{Error, Result, Value};
use crate::model::handle_state::{GivenBlock, HandleHome};
use crate::model::ops::{Routing, Stream};
use crate::model::tensor::DevPtr;
use crate::rule;
use crate::rule::handle::{Counter, HandleTensors};
use crate::session::group::Group;
use std::sync::{Arc, OnceLock};

/// A block in a caller's memory, for routings with so many ids per token.
pub(super) struct Given {
    pub(super) block: GivenBlock,
    pub(super) top_k: usize,
}

/// A routing, and its backend.
pub(super) struct Routed<B: ?Sized> {
    /// The ids.
    pub(super) routing: Routing,
    /// The backend's side.
    pub(super) backend: Box<B>,
    /// The rows that a dispatch delivers here, once the caller has asked for them.
    pub(super) told: OnceLock<usize>,
}

impl<B: ?Sized> Routed<B> {
    fn new(routing: Routing, backend: Box<B>) -> Self {
        let told = OnceLock::new();
        Self {
            routing,
            backend,
            told,
        }
    }
}

/// Routes by `tensors` in low latency; local.
pub(super) fn ll(
    group: &Group,
    backend: &Arc<dyn LlGroupBackend>,
    tensors: Result<HandleTensors>,
    given: Option<&Given>,
) -> Result<Routed<dyn LlBackend>> {
    let (routing, _) = checked(group, tensors, given)?;
    let backend = Arc::clone(backend).open_handle(routing, home(given))?;
    Ok(Routed::new(routing, backend))
}

/// Routes by `tensors` in high throughput; collective. A rank that refuses its tensors takes part,
/// too.
pub(super) fn ht(
    group: &Group,
    backend: &Arc<dyn HtGroupBackend>,
    tensors: Result<HandleTensors>,
    given: Option<&Given>,
    stream: Stream,
) -> Result<Routed<dyn HtBackend>> {
    let checked = checked(group, tensors, given);
    let routing = checked
        .as_ref()
        .map(|(routing, _)| *routing)
        .map_err(Error::clone);
    if let (Some(checks), Ok(routing)) = (group.checks(), &routing) {
        checks.ht_handle(routing, stream);
    }
    let wanted = checked.and_then(|(routing, counter)| {
        Ok(HtRouting {
            routing,
            counter: counter.map(|it| device_counter(group, it)).transpose()?,
            home: home(given),
        })
    });
    let backend = Arc::clone(backend).open_handle(wanted, stream)?;
    Ok(Routed::new(routing?, backend))
}

/// The `routing` that an equal handle has stored in `given` memory, in high throughput; local.
pub(super) fn ht_before(
    backend: &Arc<dyn HtGroupBackend>,
    routing: Routing,
    given: &Given,
) -> Result<Routed<dyn HtBackend>> {
    let backend = Arc::clone(backend).reopen_handle(routing, given.block)?;
    Ok(Routed::new(routing, backend))
}

fn home(given: Option<&Given>) -> HandleHome {
    given.map_or(HandleHome::Own, |given| HandleHome::Given(given.block))
}

fn checked(
    group: &Group,
    tensors: Result<HandleTensors>,
    given: Option<&Given>,
) -> Result<(Routing, Option<Counter>)> {
    let tensors = tensors?;
    given.map_or(Ok(()), |it| rule::handle::has_top_k(&tensors, it.top_k))?;
    let routing = rule::handle::routing(group.facts(), &tensors.ids)?;
    Ok((routing, rule::handle::counter(group.facts(), &tensors)?))
}

fn device_counter(group: &Group, counter: Counter) -> Result<DevPtr> {
    match counter {
        Counter::Device(data) => Ok(data),
        Counter::Host(host) => device_alias(group, host),
    }
}

/// The device address of the counter at host address `host`.
fn device_alias(group: &Group, host: DevPtr) -> Result<DevPtr> {
    group.device().device_alias(host).map_err(|cause| {
        let expected = "an address that the device can reach".to_owned();
        Error::argument(Subject::Data(Role::HostCounter), OfTensor::MappedHostMemory)
            .found(Value::Error(cause), Value::Text(expected))
    })
}
