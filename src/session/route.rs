//! The routing of a handle: turns its tensors into the backend's side.

use crate::backend::{HtBackend, HtGroupBackend, HtRouting, LlBackend, LlGroupBackend};
use crate::error::refusal::{OfTensor, Role, Subject};
use crate::error::{Error, Result, Value};
use crate::model::ops::{Routing, Stream};
use crate::model::tensor::DevPtr;
use crate::rule;
use crate::rule::handle::{Counter, HandleTensors};
use crate::session::group::Group;
use std::sync::{Arc, OnceLock};

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
) -> Result<Routed<dyn LlBackend>> {
    let (routing, _) = checked(group, tensors)?;
    Ok(Routed::new(
        routing,
        Arc::clone(backend).open_handle(routing)?,
    ))
}

/// Routes by `tensors` in high throughput; collective. A rank that refuses its tensors takes part,
/// too.
pub(super) fn ht(
    group: &Group,
    backend: &Arc<dyn HtGroupBackend>,
    tensors: Result<HandleTensors>,
    stream: Stream,
) -> Result<Routed<dyn HtBackend>> {
    let checked = checked(group, tensors);
    let routing = checked
        .as_ref()
        .map(|(routing, _)| *routing)
        .map_err(Error::clone);
    if let (Some(checks), Ok(routing)) = (group.checks(), &routing) {
        checks.ht_handle(routing, stream);
    }
    let wanted = checked.and_then(|checked| ht_routing(group, checked));
    let backend = Arc::clone(backend).open_handle(wanted, stream)?;
    Ok(Routed::new(routing?, backend))
}

fn checked(group: &Group, tensors: Result<HandleTensors>) -> Result<(Routing, Option<Counter>)> {
    let tensors = tensors?;
    let routing = rule::handle::routing(group.facts(), &tensors.ids)?;
    Ok((routing, rule::handle::counter(group.facts(), &tensors)?))
}

fn ht_routing(group: &Group, (routing, counter): (Routing, Option<Counter>)) -> Result<HtRouting> {
    let counter = match counter {
        None => None,
        Some(Counter::Device(data)) => Some(data),
        Some(Counter::Host(host)) => Some(device_alias(group, host)?),
    };
    Ok(HtRouting { routing, counter })
}

/// The device address of the counter at host address `host`.
fn device_alias(group: &Group, host: DevPtr) -> Result<DevPtr> {
    group.device().device_alias(host).map_err(|cause| {
        let expected = "an address that the device can reach".to_owned();
        Error::argument(Subject::Data(Role::HostCounter), OfTensor::MappedHostMemory)
            .found(Value::Error(cause), Value::Text(expected))
    })
}
