//! The state that the HT handles of a group share, on one node and on several.

use crate::backend::Faults as _;
use crate::backend::cuda::driver;
use crate::backend::cuda::driver::function;
use crate::backend::cuda::driver::memory::{Buffer, CudaMemory};
use crate::backend::cuda::driver::stream::StreamScope;
use crate::backend::cuda::group_context::GroupContext;
use crate::backend::cuda::ht::grid::{DeviceLimits, HtKind};
use crate::backend::cuda::ht::plan::{HtLaunch, HtPlan};
use crate::backend::cuda::ht::rows::MovedRow;
use crate::backend::cuda::kernels::Entry;
use crate::backend::cuda::order::Order;
use crate::backend::cuda::params::ht::{HtLayout, HtSequences};
use crate::error::{Code, Error, Result};
use crate::model::ops::Stream;
use crate::model::tensor::DevPtr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// How long a wait for a routing spins: most take less.
const AWAKE: Duration = Duration::from_micros(500);
/// How long it sleeps between polls after that.
const NAP: Duration = Duration::from_micros(20);

/// Whether rows pass through the shared memory of a kernel.
fn has_staging(entry: Entry) -> bool {
    let name = entry.definition().name;
    name.starts_with("ht_dispatch") || name.starts_with("ht_combine")
}

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
        for &entry in Entry::ALL.iter().filter(|entry| has_staging(**entry)) {
            function::allow_shared_bytes(
                context.module.function(entry)?,
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

    /// How an operation on rows `row` is launched; this rank has so many tokens, with so many ids each.
    pub fn launch(&self, kind: HtKind, row: &MovedRow, sizes: (usize, usize)) -> Result<HtLaunch> {
        let on = (self.device, &*self.context.tuning.read());
        self.plan.launch(kind, row, sizes, on)
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

    /// Polls for what `found` reads of a handle's routing, which a kernel or the network writes. Their own deadlines
    /// come first if they run at all.
    ///
    /// The answer comes soon, so this spins at first, then sleeps between polls. No `sched_yield`: under load the
    /// scheduler may not run a thread that yields again for seconds.
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
