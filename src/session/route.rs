//! Routes a handle: checks its tensors, and creates the routing's state in the backend.

use crate::backend::{HtBackend, HtGroupBackend, HtRouting, LlBackend, LlGroupBackend};
use crate::error::refusal::{OfTensor, Role, Subject};
use crate::error::{Error, Result, Value};
use crate::model::group::GroupFacts;
use crate::model::handle_state::{CallerBlock, HandleLife, HandleStorage};
use crate::model::ops::{HandleForm, Routing, Stream, Zones};
use crate::model::tensor::DevPtr;
use crate::rule;
use crate::rule::handle::{Counter, HandleTensors};
use crate::session::group::Group;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// A handle's block in a caller's memory, sized for routings with `top_k` ids per token.
pub(super) struct SizedBlock {
    pub(super) block: CallerBlock,
    pub(super) top_k: usize,
}

/// The properties of a handle that do not depend on its routing.
#[derive(Clone, Copy)]
pub(super) struct HandleFacts<'a> {
    pub(super) caller_block: Option<&'a SizedBlock>,
    pub(super) form: HandleForm,
    pub(super) life: &'a HandleLife,
}

impl HandleFacts<'_> {
    fn storage(self) -> HandleStorage {
        HandleStorage { caller_block: self.caller_block.map(|it| it.block), life: self.life.clone() }
    }
}

/// A routing and its state in the backend.
pub(super) struct Routed<B: ?Sized> {
    pub(super) routing: Routing,
    pub(super) backend: Box<B>,
    /// The rows that a dispatch delivers here, as last returned to the caller; at first 0. Replayed updates change it.
    pub(super) reported: AtomicUsize,
}

impl<B: ?Sized> Routed<B> {
    fn new(routing: Routing, backend: Box<B>) -> Self {
        Self { routing, backend, reported: AtomicUsize::new(0) }
    }
}

impl Routed<dyn HtBackend> {
    /// In a group with a bound: the most rows that a routing of this form may deliver here.
    pub(super) fn most_rows(&self, facts: &GroupFacts) -> Option<usize> {
        let rows = facts.recv_rows()?;
        let slots = |zones: Zones| zones.most(rows, self.routing.top_k, facts.local_experts());
        Some(self.routing.form.zones.map_or(rows, slots))
    }

    /// The rows that tensors of operations must hold: the most that may come if more would be dropped silently,
    /// otherwise as many as were reported to the caller.
    pub(super) fn rows_to_hold(&self, facts: &GroupFacts) -> usize {
        let drops = self.routing.form.zones.is_some_and(|zones| zones.most_slots.is_some());
        let most = drops.then(|| self.most_rows(facts)).flatten();
        most.unwrap_or_else(|| self.reported.load(Ordering::Relaxed))
    }
}

/// Routes in LL by `tensors`; local. The backend also learns that a rank refuses its tensors.
pub(super) fn ll(
    group: &Group,
    backend: &Arc<dyn LlGroupBackend>,
    tensors: Result<HandleTensors>,
    own: HandleFacts<'_>,
    stream: Stream,
) -> Result<Routed<dyn LlBackend>> {
    let routing = checked(group, tensors, own).map(|(routing, _)| routing);
    let backend = Arc::clone(backend).open_handle(routing.clone(), own.storage(), stream)?;
    Ok(Routed::new(routing?, backend))
}

/// Routes in HT by `tensors`; collective. A rank that refuses its tensors still takes part.
pub(super) fn ht(
    group: &Group,
    backend: &Arc<dyn HtGroupBackend>,
    tensors: Result<HandleTensors>,
    own: HandleFacts<'_>,
    stream: Stream,
) -> Result<Routed<dyn HtBackend>> {
    let counters = tensors.as_ref().map(|it| it.counters).unwrap_or_default();
    let checked = checked(group, tensors, own);
    let routing = checked.as_ref().map(|(routing, _)| *routing).map_err(Error::clone);
    if let (Some(checks), Ok(routing)) = (group.checks(), &routing) {
        checks.ht_handle(routing, stream);
    }
    let wanted = checked.and_then(|(routing, counter)| {
        let counter = counter.map(|it| device_counter(group, it)).transpose()?;
        Ok(HtRouting { routing, counter, counters, storage: own.storage() })
    });
    let backend = Arc::clone(backend).open_handle(wanted, stream)?;
    Ok(Routed::new(routing?, backend))
}

/// HT: the `routing` that an equal handle has stored in the caller's memory; local.
pub(super) fn ht_before(
    backend: &Arc<dyn HtGroupBackend>,
    routing: Routing,
    caller_block: &SizedBlock,
) -> Result<Routed<dyn HtBackend>> {
    Ok(Routed::new(routing, Arc::clone(backend).reopen_handle(routing, caller_block.block)?))
}

fn checked(group: &Group, tensors: Result<HandleTensors>, own: HandleFacts<'_>) -> Result<(Routing, Option<Counter>)> {
    let tensors = tensors?;
    (own.caller_block).map_or(Ok(()), |it| rule::handle::has_top_k(&tensors, it.top_k))?;
    let routing = rule::handle::routing(group.facts(), &tensors.ids, own.form)?;
    Ok((routing, rule::handle::counter(group.facts(), &tensors)?))
}

/// The device's address of a counter.
fn device_counter(group: &Group, counter: Counter) -> Result<DevPtr> {
    match counter {
        Counter::Device(data) => Ok(data),
        Counter::Host(host) => group.device().device_alias(host).map_err(|cause| {
            let expected = "an address that the device can reach".to_owned();
            Error::argument(Subject::Data(Role::HostCounter), OfTensor::MappedHostMemory)
                .found(Value::Error(cause), Value::Text(expected))
        }),
    }
}
