//! High-throughput operations: from checked operations to kernel launches. This file has the group's HT state, and the
//! creation of handles.

pub mod fingerprint;
mod grid;
mod handle;
mod kept;
mod mapped;
mod nodes;
mod offer_regions;
pub mod plan;
mod rows;
mod shared;
mod zones;

use crate::backend::cuda::agreement::{verdict_refusing, verdict_with};
use crate::backend::cuda::auxiliary::{CallerHeader, LIBRARY_BLOCK};
use crate::backend::cuda::driver::memory::CudaMemory;
use crate::backend::cuda::driver::stream::StreamScope;
use crate::backend::cuda::group_context::GroupContext;
use crate::backend::cuda::ht::handle::{CudaHt, HandleMemory};
use crate::backend::cuda::ht::nodes::{CallerHt, Rails};
use crate::backend::cuda::ht::plan::HtPlan;
use crate::backend::cuda::ht::shared::{HtShared, saturated};
use crate::backend::cuda::kernels::{self, to_u32};
use crate::backend::cuda::network::Network;
use crate::backend::cuda::params::common::KernelOp;
use crate::backend::cuda::params::ht::{HtHandleMemory, HtLayout, HtRouteParams};
use crate::backend::cuda::pool::{MemoryRequest, Pool, Pooled};
use crate::backend::{HtBackend, HtGroupBackend, HtRouting};
use crate::error::refusal::{InSequence, Subject};
use crate::error::{Error, Result};
use crate::log;
use crate::model::handle_state::{CallerBlock, HandleStorage, block_bytes};
use crate::model::ops::{HandleForm, IntWidth, Numbers, Routing, RoutingCounters, Stream};
use crate::model::tensor::DevPtr;
use once_cell::sync::OnceCell;
use std::ptr::{null, null_mut};
use std::sync::Arc;

/// A group's HT state.
pub struct HtGroup {
    shared: Arc<HtShared>,
    memory: Arc<CudaMemory>,
    pool: Pool<HandleMemory>,
    /// `None` on one node.
    rails: Option<Arc<Rails>>,
}

impl HtGroup {
    /// The HT state of a group; `layout` has the offsets of `plan`'s regions in the windows.
    pub fn new(
        context: Arc<GroupContext>,
        network: Option<Arc<Network>>,
        memory: &Arc<CudaMemory>,
        plan: HtPlan,
        layout: HtLayout,
    ) -> Result<Self> {
        let shared = Arc::new(HtShared::new(context, memory, plan, layout)?);
        let rails = match (network, shared.plan.nodes) {
            (Some(network), Some(nodes)) => Some(Arc::new(Rails::new(&shared, network, memory, nodes)?)),
            _ => None,
        };
        Ok(Self { shared, memory: Arc::clone(memory), pool: Pool::default(), rails })
    }

    /// Creates a handle on one node. Collective, but no rank waits for another here: even a rank that refuses announces
    /// that with a kernel.
    fn open_on_one_node(self: &Arc<Self>, wanted: Result<HtRouting>, stream: Stream) -> Result<CudaHt> {
        let at = &self.shared.enter(stream)?;
        // A captured exchange, and also a captured refusal, would run too late for other ranks, and repeatedly.
        if at.is_captured() && !wanted.as_ref().map_err(Error::clone)?.routing.form.keeps_ids {
            return Err(Error::usage(Subject::Stream, InSequence::NoCaptureOfRouting));
        }
        let epoch = self.shared.next_handle();
        let prepared = wanted.and_then(|wanted| {
            let handle = self.prepare(wanted, epoch, at)?;
            Ok((self.params_of(&handle)?, handle))
        });
        match prepared {
            Ok((params, handle)) => {
                if let Some(memory) = &handle.memory {
                    memory.use_at(at);
                }
                self.launch_route(Some(&handle), &params, at)?;
                Ok(handle)
            }
            Err(error) => {
                let params = self.route_params(epoch, verdict_refusing(&error));
                // If even this launch fails, the other ranks' waits time out.
                self.launch_route(None, &params, at).unwrap_or_else(|cause| log::warn(&cause.text()));
                Err(error)
            }
        }
    }

    /// Handle number `epoch` of the group, not announced to other ranks yet.
    fn prepare(self: &Arc<Self>, wanted: HtRouting, epoch: u32, at: &StreamScope) -> Result<CudaHt> {
        let bytes = match wanted.storage.caller_block {
            None => self.shared.plan.handle(&wanted.routing).bytes,
            Some(_) => 0,
        };
        let waste = |memory: &HandleMemory| memory.waste(bytes);
        let make = || HandleMemory::new(&self.shared.context, &self.memory, bytes);
        let request = MemoryRequest { handle: &wanted.storage.life, capture: at.capture, shares: false };
        let memory = self.pool.take(&request, waste, make)?;
        self.handle(wanted, Some(memory), epoch)
    }

    /// Handle number `epoch`, with `memory` as the library's part of its memory.
    fn handle(self: &Arc<Self>, wanted: HtRouting, memory: Option<Pooled<HandleMemory>>, epoch: u32) -> Result<CudaHt> {
        let (plan, mut routing) = (&self.shared.plan, wanted.routing);
        let caller_block = wanted.storage.caller_block.map(|CallerBlock(block)| block);
        let own = memory.as_ref().and_then(|memory| memory.block());
        let (block, sections) = (caller_block.or(own).unwrap_or_default(), plan.handle(&routing));
        let caller_ids = Numbers { data: routing.ids, width: routing.width };
        if routing.form.keeps_ids {
            routing.ids = DevPtr(block.0 + sections.ids);
            routing.width = IntWidth::Bits64;
        }
        Ok(CudaHt {
            group: Arc::clone(&self.shared),
            memory,
            block,
            sections,
            caller_ids,
            header: caller_block.map(|block| CallerHeader::new(block, plan.header(&routing, epoch))),
            grids: self.shared.grids(&routing),
            routing,
            top_k: to_u32(routing.top_k)?,
            counter: wanted.counter,
            counters: wanted.counters,
            epoch,
            first_query: OnceCell::new(),
        })
    }

    /// Parameters of a handle's routing kernel.
    fn params_of(&self, handle: &CudaHt) -> Result<HtRouteParams> {
        let page = handle.memory.as_ref().map(|memory| &memory.received);
        let form = &handle.routing.form;
        Ok(HtRouteParams {
            handle: handle.handle_memory()?,
            topk_idx: handle.caller_ids.data.0 as *const _,
            kept_ids: if form.keeps_ids { handle.routing.ids.0 as *mut i64 } else { null_mut() },
            is_narrow: u32::from(handle.caller_ids.width == IntWidth::Bits32),
            has_zones: u32::from(form.zones.is_some()),
            report: handle.reported_at_once(),
            finish: handle.finish_after_routing(),
            received: page.map_or(null_mut(), |page| page.device()),
            ..self.route_params(handle.epoch, verdict_with(handle.top_k))
        })
    }

    /// Parameters of the routing kernel for handle number `epoch` that only announces `verdict`.
    fn route_params(&self, epoch: u32, verdict: u32) -> HtRouteParams {
        let (tally, layout) = (self.shared.tally(), self.shared.plan.tally());
        HtRouteParams {
            peers: *self.shared.context.peers(),
            wait: self.shared.context.wait(KernelOp::HtRoute),
            layout: self.shared.layout,
            handle: HtHandleMemory {
                entries: null_mut(),
                begins: null_mut(),
                departures: null_mut(),
                counts: null_mut(),
                tokens: 0,
                top_k: 0,
            },
            topk_idx: null(),
            kept_ids: null_mut(),
            is_narrow: 0,
            has_zones: 0,
            packets: self.shared.plan.packets(&self.shared.layout),
            report: kept::report_params(&RoutingCounters::default(), None),
            finish: self.shared.finish(LIBRARY_BLOCK),
            received: null_mut(),
            tally: (tally + layout.tally) as *mut u32,
            counted: (tally + layout.counted) as *mut u64,
            own_counts: (tally + layout.own_counts) as *mut u64,
            max_tokens: saturated(self.shared.plan.max_tokens),
            epochs: self.shared.epochs(),
            number: epoch,
            block_tokens: 0,
            verdict,
        }
    }

    /// Launches the routing kernel; without a handle if this rank refuses.
    fn launch_route(&self, handle: Option<&CudaHt>, params: &HtRouteParams, at: &StreamScope) -> Result<()> {
        let (tokens, zones) = handle.map_or((0, false), |it| (it.routing.tokens, it.routing.form.zones.is_some()));
        let (shape, block_tokens) = self.shared.plan.route_grid(tokens, zones, self.shared.device)?;
        let params = HtRouteParams { block_tokens, ..*params };
        let turn = self.shared.order.begin(at)?;
        let routed = self.shared.context.launch_following(kernels::ht_route(), shape, &params, false, at);
        turn.end_after(routed.and_then(|()| handle.map_or(Ok(()), |handle| handle.finish_block(&params.handle, at))))
    }
}

impl HtGroupBackend for HtGroup {
    fn open_handle(self: Arc<Self>, wanted: Result<HtRouting>, stream: Stream) -> Result<Box<dyn HtBackend>> {
        Ok(match &self.rails {
            Some(rails) => nodes::open_handle(&self.shared, rails, wanted, stream)?,
            None => Box::new(self.open_on_one_node(wanted, stream)?),
        })
    }

    fn block_bytes(&self, top_k: usize, form: HandleForm) -> Result<Option<usize>> {
        match &self.rails {
            Some(rails) => nodes::block_bytes(&self.shared, rails, top_k, form),
            None => Ok(block_bytes(&self.shared.plan.facts, top_k, form)),
        }
    }

    fn reopen_handle(self: Arc<Self>, routing: Routing, block: CallerBlock) -> Result<Box<dyn HtBackend>> {
        if let Some(rails) = &self.rails {
            let (group, rails) = (Arc::clone(&self.shared), Arc::clone(rails));
            return Ok(Box::new(CallerHt { group, rails, routing, block, received: None }));
        }
        let storage = HandleStorage { caller_block: Some(block), ..HandleStorage::default() };
        let wanted = HtRouting { routing, counter: None, counters: RoutingCounters::default(), storage };
        Ok(Box::new(self.handle(wanted, None, 0)?))
    }
}
