//! A rank's part of a handle over several nodes before routing: its ids and its memory.

use crate::backend::HtRouting;
use crate::backend::cuda::agreement::{verdict_refusing, verdict_with};
use crate::backend::cuda::auxiliary::IdCopy;
use crate::backend::cuda::ht::nodes::caller_block;
use crate::backend::cuda::ht::nodes::plan::{HandleSize, NodesPlan};
use crate::backend::cuda::ht::nodes::rails::{NodesMemory, Rails};
use crate::backend::cuda::ht::shared::HtShared;
use crate::backend::cuda::kernels::to_u32;
use crate::backend::cuda::network::two_sided::handshake::Announced;
use crate::backend::cuda::params::ht_nodes::HtNodesMemory;
use crate::backend::cuda::pool::{MemoryRequest, Pooled};
use crate::error::{Error, Result};
use crate::model::handle_state::HandleLife;
use crate::model::ops::{HandleForm, IntWidth, Numbers, Routing, RoutingCounters};
use crate::model::tensor::DevPtr;

/// This rank's part of a handle that is being created.
pub struct Part {
    pub memory: Pooled<NodesMemory>,
    /// The start of its device memory.
    pub base: DevPtr,
    /// With the ids that kernels read: the caller's, or the handle's copy.
    pub routing: Routing,
    /// The copy of the ids that is still to be made.
    pub ids: Option<IdCopy>,
    pub counter: Option<DevPtr>,
    pub counters: RoutingCounters,
    pub verdict: u32,
    pub size: HandleSize,
}

impl Part {
    /// Takes memory for the handle.
    pub fn of(group: &HtShared, rails: &Rails, wanted: HtRouting, announced: &[Announced]) -> Result<Self> {
        let mut routing = wanted.routing;
        let verdict = verdict_with(to_u32(routing.top_k)?);
        let agreeing = announced.iter().skip(1).filter(|it| it.verdict == verdict);
        let remote = agreeing.map(|it| it.tokens).sum();
        let (own, top_k) = (routing.tokens, routing.top_k);
        let keeps_ids = routing.form.keeps_ids;
        let slots = rails.slots(group.plan.max_tokens, top_k, routing.form);
        let needed = HandleSize { own, remote, tokens: own, top_k, keeps_ids, slots };
        let caller_block = wanted.storage.caller_block;
        let size = caller_block.map_or(needed, |_| caller_block::size(group, rails, &routing));
        let bytes = rails.plan.memory(0, if caller_block.is_none() { needed } else { HandleSize::default() })?.bytes;
        // With a bound on tokens all handles get the same size, so that later ones can reuse the memory.
        let room = match group.plan.facts.max_tokens {
            _ if caller_block.is_some() => HandleSize::default(),
            Some(most) => caller_block::size_of_any(rails, most, (top_k, routing.form)),
            None => HandleSize { own: own.next_power_of_two(), ..needed },
        };
        let memory = memory((group, rails), &wanted.storage.life, bytes, room)?;
        let base = caller_block.map_or(memory.data(), |block| caller_block::memory_of(rails, block));
        let mut ids = None;
        if keeps_ids {
            let from = Numbers { data: routing.ids, width: routing.width };
            (routing.ids, routing.width) = (rails.plan.memory(base.0, size)?.ids, IntWidth::Bits64);
            ids = Some(IdCopy { from, to: routing.ids, count: own * top_k, offset: 0 });
        }
        Ok(Self { memory, base, routing, ids, counter: wanted.counter, counters: wanted.counters, verdict, size })
    }

    pub fn refusing(rails: &Rails, error: &Error) -> Self {
        Self {
            memory: rails.spare.clone(),
            base: rails.spare.data(),
            routing: Routing {
                tokens: 0,
                top_k: 0,
                ids: DevPtr::default(),
                width: IntWidth::Bits64,
                form: HandleForm::default(),
            },
            ids: None,
            counter: None,
            counters: RoutingCounters::default(),
            verdict: verdict_refusing(error),
            size: HandleSize::default(),
        }
    }

    pub fn device(&self, plan: &NodesPlan) -> Result<HtNodesMemory> {
        Ok(plan.memory(self.base.0, self.size)?.memory)
    }
}

/// Ensures that there is memory for a handle before other ranks depend on this one.
pub fn reserve(group: &HtShared, rails: &Rails, wanted: HtRouting) -> Result<HtRouting> {
    let Routing { top_k, form, .. } = wanted.routing;
    if let (None, Some(most)) = (wanted.storage.caller_block, group.plan.facts.max_tokens) {
        let room = caller_block::size_of_any(rails, most, (top_k, form));
        memory((group, rails), &wanted.storage.life, rails.plan.memory(0, room)?.bytes, room)?;
    }
    Ok(wanted)
}

/// Memory of at least `bytes`; new memory is allocated for `room`.
fn memory(
    (group, rails): (&HtShared, &Rails),
    handle: &HandleLife,
    bytes: usize,
    room: HandleSize,
) -> Result<Pooled<NodesMemory>> {
    let make = || NodesMemory::new(&group.context, &rails.memory, &rails.plan, room);
    rails.pool.take(&MemoryRequest { handle, capture: None, shares: false }, |memory| memory.waste(bytes), make)
}
