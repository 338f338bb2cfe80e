//! The state that the HT handles of a group share, on one node and on several.
#![forbid(unsafe_code)]

use crate::backend::Faults as _;
use crate::backend::cuda::driver;
use crate::backend::cuda::driver::function;
use crate::backend::cuda::driver::memory::{Buffer, CudaMemory};
use crate::backend::cuda::driver::stream::StreamScope;
use crate::backend::cuda::group_context::GroupContext;
use crate::backend::cuda::ht::grid::DeviceLimits;
use crate::backend::cuda::ht::plan::HtPlan;
use crate::backend::cuda::kernels::KernelParams;
use crate::backend::cuda::order::Order;
use crate::backend::cuda::params::ht::{
    HtCombineParams, HtDispatchParams, HtLayout, HtScaledDispatchParams, HtSequences,
};
use crate::backend::cuda::params::ht_nodes::{
    HtCombineNodesParams, HtDispatchNodesParams, HtScaledDispatchNodesParams,
};
use crate::error::{Code, Error, Result};
use crate::model::ops::Stream;
use crate::model::tensor::DevPtr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// How long a wait for a routing keeps its processor: most take less.
const AWAKE: Duration = Duration::from_micros(500);
/// And how long it sleeps between two looks then.
const NAP: Duration = Duration::from_micros(20);

/// What operations need of their group.
pub struct HtShared {
    pub context: Arc<GroupContext>,
    pub plan: HtPlan,
    pub layout: HtLayout,
    pub device: DeviceLimits,
    pub order: Order,
    sequences: Buffer,
    /// Number of handles so far, including refused ones.
    handles: AtomicU32,
    /// Number of exchanges so far that a kernel carries out.
    exchanges: AtomicU32,
}

impl HtShared {
    /// For a group whose `layout` has the offsets of `plan`'s regions in the windows.
    pub fn new(
        context: Arc<GroupContext>,
        memory: &Arc<CudaMemory>,
        plan: HtPlan,
        layout: HtLayout,
    ) -> Result<Self> {
        let driver_context = Arc::clone(context.module.context());
        let _entered = driver_context.enter()?;
        let device = DeviceLimits {
            multiprocessors: context.multiprocessors,
            shared_bytes: driver::most_shared_bytes()?,
        };
        let kernels = [
            HtDispatchParams::KERNELS,
            HtScaledDispatchParams::KERNELS,
            HtCombineParams::KERNELS,
            HtDispatchNodesParams::KERNELS,
            HtScaledDispatchNodesParams::KERNELS,
            HtCombineNodesParams::KERNELS,
        ];
        for kernel in kernels.concat() {
            function::allow_shared_bytes(
                context.module.function(kernel)?,
                device.dynamic_shared_bytes(),
            )?;
        }
        Ok(Self {
            plan,
            layout,
            device,
            order: Order::new(&driver_context)?,
            sequences: Buffer::zeroed(memory, size_of::<HtSequences>())?,
            handles: AtomicU32::new(0),
            exchanges: AtomicU32::new(0),
            context,
        })
    }

    /// The number of a new handle. Counted on every rank, even for a handle that fails.
    pub fn next_handle(&self) -> u32 {
        let before = self.handles.fetch_add(1, Ordering::Relaxed);
        before.wrapping_add(1)
    }

    /// The bank of the next exchange.
    pub fn next_bank(&self) -> u32 {
        self.exchanges.fetch_add(1, Ordering::Relaxed) % 2
    }

    pub fn sequences(&self) -> *mut HtSequences {
        self.sequences.data().0 as *mut HtSequences
    }

    /// Waits for what is `found` of a handle's routing, which a kernel or the network writes; they have deadlines
    /// of their own, which come first if they run at all.
    ///
    /// That is soon, so at first it looks all the time, and then it sleeps in between. It never yields: Linux lets a
    /// thread that often does wait for seconds where other threads have work.
    pub fn wait_for_routing<T>(&self, mut found: impl FnMut() -> Result<Option<T>>) -> Result<T> {
        let faults = &self.context.faults;
        let start = Instant::now();
        loop {
            if let Some(found) = found()? {
                return Ok(found);
            }
            if let Some(fault) = faults.first() {
                return Err(fault);
            }
            let waited = start.elapsed();
            if waited > 2 * faults.timeout() {
                let text = "the handle's routing was not exchanged in time";
                return Err(Error::new(Code::RemoteError, text));
            }
            if waited < AWAKE {
                std::hint::spin_loop()
            } else {
                std::thread::sleep(NAP)
            }
        }
    }

    pub fn enter(&self, stream: Stream) -> Result<StreamScope> {
        self.context.module.enter(stream)
    }
}

/// `count` in the kernels' integer type; larger counts are cut to its largest value, which no
/// kernel exceeds.
pub fn saturated(count: usize) -> u32 {
    u32::try_from(count).unwrap_or(u32::MAX)
}

/// Both addresses, or NULL for `None`.
pub fn addresses(given: Option<(DevPtr, DevPtr)>) -> (usize, usize) {
    given.map_or((0, 0), |(first, second)| (first.0, second.0))
}
