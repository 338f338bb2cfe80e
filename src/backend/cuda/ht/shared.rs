//! A group's HT state that all its handles use, on one node and on several.

use crate::backend::cuda::agreement::next_number;
use crate::backend::cuda::auxiliary;
use crate::backend::cuda::driver::function;
use crate::backend::cuda::driver::memory::{Buffer, CudaMemory};
use crate::backend::cuda::driver::stream::StreamScope;
use crate::backend::cuda::driver::{self};
use crate::backend::cuda::group_context::GroupContext;
use crate::backend::cuda::ht::fingerprint::HtFingerprint;
use crate::backend::cuda::ht::grid::DeviceLimits;
use crate::backend::cuda::ht::plan::{HandleGrids, HtLaunch, HtPlan};
use crate::backend::cuda::kernels::{Line, to_u32};
use crate::backend::cuda::order::Order;
use crate::backend::cuda::params::common::{CallerBlock, Fault, KernelOp, ScaledRows, Scales};
use crate::backend::cuda::params::ht::{
    HtCast, HtCombineParams, HtCommon, HtDispatchParams, HtFinish, HtHandleMemory, HtLayout, HtScaledRows, HtSequences,
    HtShape,
};
use crate::backend::cuda::params::ht_mapped::HtOfferState;
use crate::backend::cuda::scaled_rows::{NO_VIEW, scaled_rows};
use crate::backend::{Faults as _, not_exchanged};
use crate::error::{Error, Result};
use crate::model::ops::{HtCombine, HtDispatch, Routing, Stream};
use crate::model::scales::{Scaled, WireRow};
use crate::model::tensor::{DType, DevPtr, RowType};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// How long the host spins when it waits for a routing; most waits end within this time.
const SPIN_TIME: Duration = Duration::from_micros(500);
/// After that time it sleeps for so long between polls.
const POLL_INTERVAL: Duration = Duration::from_micros(20);

/// Whether the kernels of `line` pass rows through shared memory.
fn have_staging(line: Line) -> bool {
    line.names().iter().all(|name| name.starts_with("ht_dispatch") || name.starts_with("ht_combine"))
}

/// The group's state that operations use.
pub struct HtShared {
    pub context: Arc<GroupContext>,
    pub plan: HtPlan,
    pub layout: HtLayout,
    pub device: DeviceLimits,
    pub order: Order,
    sequences: Buffer,
    offers: Buffer,
    /// Memory in which the blocks of a routing kernel count (`HtPlan::tally`).
    tally: Buffer,
    /// Number of handles created so far, including refused ones.
    handles: AtomicU32,
    /// Number of exchanges so far that use a bank of the window.
    exchanges: AtomicU32,
}

impl HtShared {
    /// The state of a group; `layout` has the offsets of `plan`'s regions in the windows.
    pub fn new(context: Arc<GroupContext>, memory: &Arc<CudaMemory>, plan: HtPlan, layout: HtLayout) -> Result<Self> {
        let driver_context = Arc::clone(&context.module.context);
        let _entered = driver_context.enter()?;
        let device =
            DeviceLimits { multiprocessors: context.multiprocessors, shared_bytes: driver::most_shared_bytes()? };
        let staging = Line::ALL.iter().filter(|line| have_staging(**line));
        for function in staging.flat_map(|line| context.module.functions_of(*line)) {
            function::allow_shared_bytes(*function, device.dynamic_shared_bytes())?;
        }
        Ok(Self {
            layout,
            device,
            order: Order::new(&driver_context)?,
            sequences: Buffer::zeroed(memory, size_of::<HtSequences>())?,
            offers: Buffer::zeroed(memory, size_of::<HtOfferState>())?,
            tally: Buffer::zeroed(memory, plan.tally().bytes)?,
            plan,
            handles: AtomicU32::new(0),
            exchanges: AtomicU32::new(0),
            context,
        })
    }

    /// What a new handle with this routing fixes of its launches.
    pub fn grids(&self, routing: &Routing) -> HandleGrids {
        self.plan.grids(routing, self.device)
    }

    /// Enqueues, after a dispatch, adding the `counts` of a handle to `totals`. Ordered as an operation of the group,
    /// because the next routing may reuse the memory of the counts.
    pub fn add_counts(&self, counts: *const i32, totals: DevPtr, at: &StreamScope) -> Result<()> {
        let experts = self.plan.facts.local_experts();
        let turn = self.order.begin(at)?;
        turn.end_after(auxiliary::add_counts(&self.context, KernelOp::HtDispatch, (counts, totals), experts, at))
    }

    /// The number of a new handle, the same on all ranks, as handles that fail count, too.
    pub fn next_handle(&self) -> u32 {
        next_number(&self.handles)
    }

    /// The bank of the next exchange.
    pub fn next_bank(&self) -> u32 {
        self.exchanges.fetch_add(1, Ordering::Relaxed) % 2
    }

    /// The fingerprint of an operation with this launch, on handle number `handle`.
    pub fn fingerprint(launch: &HtLaunch, handle: u32) -> u32 {
        let fingerprint = HtFingerprint(launch.shape.fingerprint);
        fingerprint.of_handle(handle).0
    }

    /// The common parameters of kernel `op`, on handle number `number` with the memory `handle`.
    // Inlined, so that the parameters, nearly a kilobyte, are written in place.
    #[inline]
    pub fn common(
        &self,
        op: KernelOp,
        launch: &HtLaunch,
        number: u32,
        handle: HtHandleMemory,
        caller_block: CallerBlock,
    ) -> HtCommon {
        HtCommon {
            peers: *self.context.peers(),
            wait: self.context.wait(op),
            layout: self.layout,
            handle,
            caller_block,
            sequences: self.sequences(),
            shape: HtShape { fingerprint: Self::fingerprint(launch, number), ..launch.shape },
        }
    }

    /// What the last kernel that fills `block` does.
    pub fn finish(&self, block: CallerBlock) -> HtFinish {
        HtFinish { block, ended: (self.tally() + self.plan.tally().ended) as *mut u32 }
    }

    /// The address of the memory in which routing kernels count.
    pub fn tally(&self) -> usize {
        self.tally.data().0
    }

    /// The device's counter of routing kernels on one node.
    pub fn epochs(&self) -> *mut u32 {
        (self.tally() + self.plan.tally().epochs) as *mut u32
    }

    pub fn sequences(&self) -> *mut HtSequences {
        self.sequences.data().0 as *mut HtSequences
    }

    /// The device's state of operations with offers.
    pub fn offers(&self) -> *mut HtOfferState {
        self.offers.data().0 as *mut HtOfferState
    }

    /// Polls `found` for the result of a routing, which a kernel or the network writes. The deadline only matters if
    /// these do not even run, as their own deadlines are earlier.
    pub fn wait_for_routing<T>(&self, found: impl FnMut() -> Result<Option<T>>) -> Result<T> {
        let found = self.wait_within(Duration::MAX, Instant::now(), found)?;
        found.ok_or_else(|| Error::internal("a wait that ended early"))
    }

    /// As [`Self::wait_for_routing`], but `None` after `within`. The deadline counts from `since`.
    ///
    /// Spins first, as most results come soon, then sleeps between polls. No `sched_yield`: under load, a thread that
    /// yields often may not be scheduled again for seconds.
    pub fn wait_within<T>(
        &self,
        within: Duration,
        since: Instant,
        mut found: impl FnMut() -> Result<Option<T>>,
    ) -> Result<Option<T>> {
        let faults = &self.context.faults;
        let start = Instant::now();
        loop {
            if let Some(found) = found()? {
                return Ok(Some(found));
            }
            if let Some(fault) = faults.first() {
                return Err(fault);
            }
            let patience = 2 * faults.timeout;
            if since.elapsed() > patience {
                return Err(not_exchanged(patience, &[]));
            }
            let waited = start.elapsed();
            if waited >= within {
                return Ok(None);
            }
            if waited < SPIN_TIME { std::hint::spin_loop() } else { std::thread::sleep(POLL_INTERVAL) }
        }
    }

    pub fn enter(&self, stream: Stream) -> Result<StreamScope> {
        self.context.module.enter(stream)
    }
}

/// The addresses of what a dispatch reads, and of the counter that it fills; zero if there is none.
#[derive(Default)]
pub struct Inputs {
    pub rows: usize,
    pub ids: usize,
    pub weights: usize,
    pub counter: usize,
}

impl Inputs {
    /// The inputs for this rank's own tokens, with the ids of `routing` if the handle keeps them.
    pub fn of(op: &HtDispatch, routing: &Routing) -> Self {
        let kept = routing.form.keeps_ids.then_some(routing.ids);
        let (ids, weights) = addresses(op.routing_in.map(|it| (kept.unwrap_or(it.ids), it.weights)));
        Self { rows: op.tokens.0, ids, weights, counter: op.counter.unwrap_or_default().0 }
    }
}

// Inlined for the same reason as `HtShared::common`.
#[inline]
pub fn dispatch_params(op: &HtDispatch, common: HtCommon, inputs: &Inputs) -> HtDispatchParams {
    let (out_ids, out_weights) = addresses(op.routing_out.map(|it| (it.ids, it.weights)));
    HtDispatchParams {
        common,
        tokens: inputs.rows as *const u8,
        topk_idx: inputs.ids as *const i64,
        weights: inputs.weights as *const f32,
        out: op.out.map_or(0, |out| out.data.0) as *mut u8,
        out_idx: out_ids as *mut i64,
        out_weights: out_weights as *mut f32,
        counter: inputs.counter as *mut i32,
        out_rows: op.out.map_or(u32::MAX, |out| saturated(out.rows)),
        routing_rows: op.routing_out.map_or(u32::MAX, |out| saturated(out.rows)),
        fills_rest: u32::from(!op.keeps_rest),
    }
}

/// The addresses of a combine's sums and gradients.
pub struct Outputs {
    pub rows: usize,
    pub gradients: usize,
}

impl Outputs {
    /// The outputs for this rank's own tokens.
    pub fn of(op: &HtCombine) -> Self {
        Self { rows: op.out.0, gradients: op.gradients.map_or(0, |it| it.output.0) }
    }
}

// Inlined for the same reason.
#[inline]
pub fn combine_params(op: &HtCombine, common: HtCommon, out: &Outputs) -> HtCombineParams {
    let (in_rows, rows_fault) = given_rows(op);
    HtCombineParams {
        common,
        rows: op.expert_rows.data.0 as *const u8,
        gradients: op.gradients.map_or(0, |it| it.input.0) as *const f32,
        out: out.rows as *mut u8,
        out_gradients: out.gradients as *mut f32,
        waits: op.waits.unwrap_or_default().0 as *mut u64,
        in_rows,
        rows_fault,
        columns: saturated(op.gradients.map_or(0, |it| it.top_k)),
    }
}

/// The rows of a combine that have gradients, if it has those, and what kernels report if they are too few.
fn given_rows(op: &HtCombine) -> (u32, Fault) {
    let rows = op.expert_rows.rows;
    match op.gradients {
        Some(gradients) if gradients.rows < rows => (saturated(gradients.rows), Fault::GradientRows),
        _ => (saturated(rows), Fault::InputRows),
    }
}

/// `count` as a kernel parameter, capped at the largest `u32`, which exceeds what any kernel counts.
pub fn saturated(count: usize) -> u32 {
    u32::try_from(count).unwrap_or(u32::MAX)
}

/// Both addresses; zeros for `None`.
fn addresses(given: Option<(DevPtr, DevPtr)>) -> (usize, usize) {
    given.map_or((0, 0), |(first, second)| (first.0, second.0))
}

/// The kernel parameters for the caller's `scaled` rows.
pub fn scaled_rows_of_caller(row: RowType, scaled: &Scaled, launch: &HtLaunch) -> Result<HtScaledRows> {
    let width = scaled.cast().map_or(row.dtype.size(), |cast| cast.from.size());
    Ok(HtScaledRows {
        rows: scaled_rows(row, scaled)?,
        word: launch.scales_word,
        out_rows: saturated(scaled.out.rows),
        token_bytes: to_u32(row.hidden * width)?,
        cast_chunk: launch.cast_chunk,
        cast_from: match scaled.cast().map(|cast| cast.from) {
            Some(DType::Float16) => HtCast::F16,
            Some(DType::Float32) => HtCast::F32,
            Some(DType::Bfloat16) | None => HtCast::Bf16,
            Some(other) => return Err(Error::internal(format!("no cast of rows of {other}"))),
        },
    })
}

/// The kernel parameters for rows received from another node, each followed by its scales.
pub fn scaled_rows_of_message(row: RowType, scaled: &Scaled, launch: &HtLaunch) -> Result<HtScaledRows> {
    let wire = WireRow { payload: row, scales: Some(scaled.scales) };
    let rows = ScaledRows { form: Scales::Forwarded, from: NO_VIEW, ..scaled_rows(row, scaled)? };
    Ok(HtScaledRows { rows, token_bytes: to_u32(wire.slot_bytes())?, ..scaled_rows_of_caller(row, scaled, launch)? })
}
