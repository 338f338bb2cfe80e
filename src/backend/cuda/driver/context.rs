//! The CUDA context that a group uses: if possible the caller's current one.
//!
//! All driver calls are made between `Context::enter`, which pushes the context on the calling thread, and dropping
//! its result, which pops it. So the caller's current context never changes.

use crate::backend::cuda::driver::context_handle::{self, ApartFromCaptures, ContextId, DriverContext};
use crate::backend::cuda::driver::function;
use crate::backend::cuda::driver::{self, pinned};
use crate::backend::cuda::kernels::Functions;
use crate::backend::device::check_patience;
use crate::backend::quiescence::{Allocation, Attempt, Free, Graphs, Key, Quiescence, Works};
use crate::error::Result;
use crate::model::ops::Stream;
use crate::model::tensor::DevPtr;
use once_cell::sync::{Lazy, OnceCell};
use parking_lot::Mutex;
use std::collections::HashMap;
use std::fmt;
use std::ops::Deref;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// The quiescence of each device that this process has used, by context.
static DEVICES: Lazy<Mutex<HashMap<ContextId, Arc<Quiescence>>>> = Lazy::new(Mutex::default);

/// Operations of a group that have been enqueued.
pub trait Enqueued: Works {
    /// Whether all of them have run, except those in graphs.
    fn are_over(&self) -> Result<bool>;
    /// Whether some are in graphs, whose launches the library cannot see.
    fn are_captured(&self) -> bool;
    /// Refuses all further operations.
    fn end(&self);
}

/// A context, as used by one group.
pub struct Context {
    /// The context itself.
    pub held: Arc<DriverContext>,
    /// Knows when the context's device is quiescent.
    pub quiescence: Arc<Quiescence>,
    resources: OnceCell<Arc<ContextResources>>,
    enqueued: Mutex<Vec<Weak<dyn Enqueued>>>,
    /// Whether operations may still run after the group has ended, so that nothing may reuse its memory.
    poisoned: AtomicBool,
}

impl Deref for Context {
    type Target = DriverContext;

    fn deref(&self) -> &DriverContext {
        &self.held
    }
}

impl fmt::Debug for Context {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.held.fmt(to)
    }
}

impl Context {
    /// The calling thread's context if it is of device `ordinal`, else the primary context of that device, which the
    /// CUDA runtime uses.
    pub fn for_device(ordinal: usize) -> Result<Self> {
        let device = context_handle::device(ordinal)?;
        let current = match context_handle::current_context()? {
            Some(handle) if context_handle::current_device()? == device => Some(handle),
            _ => None,
        };
        let held = match current {
            Some(handle) => DriverContext::new(handle, None)?,
            None => DriverContext::new(context_handle::retain_primary(device)?, Some(device))?,
        };
        let quiescence = Arc::clone(DEVICES.lock().entry(held.id()).or_default());
        Ok(Self {
            held: Arc::new(held),
            quiescence,
            resources: OnceCell::new(),
            enqueued: Mutex::default(),
            poisoned: AtomicBool::new(false),
        })
    }

    /// The resources that all groups in the context share.
    pub fn resources(&self) -> Result<&Arc<ContextResources>> {
        self.resources.get_or_try_init(|| ContextResources::of(&self.held))
    }

    /// Whether an exchange that was given up is still on the device.
    pub fn is_hung(&self) -> bool {
        self.quiescence.is_hung()
    }

    /// Frees the allocation at `address` once the device is quiescent. Until then, requests for `key` may reuse it.
    pub fn free_later(&self, key: Option<Key>, address: usize, free: impl FnMut(usize) + Send + 'static) {
        self.quiescence.later(key.filter(|_| !self.is_poisoned()), address, Some(self.inside(free)));
    }

    /// Wraps `free` to run inside the context, and to do nothing once the context is gone.
    fn inside(&self, mut free: impl FnMut(usize) + Send + 'static) -> Free {
        let held = Arc::clone(&self.held);
        Box::new(move |address| {
            if let Some(_entered) = held.enter_if_alive() {
                free(address);
            }
        })
    }

    /// As [`Context::free_later`], for pages from `pinned`, which belong to the process and outlive the context.
    pub fn free_pinned_later(&self, address: usize, bytes: usize) {
        let held = Arc::clone(&self.held);
        let free = move |address| {
            if let Some(_entered) = held.enter_if_alive() {
                pinned::unpin(address);
            }
            pinned::unmap(address, bytes);
        };
        let key = Some(Key::Pinned(bytes)).filter(|_| !self.is_poisoned());
        self.quiescence.later(key, address, Some(Box::new(free)));
    }

    /// Destroys the event or stream `raw`, at once unless an exchange hangs. Then it happens after that exchange, for
    /// which the call would wait if another thread frees memory.
    pub fn destroy(&self, raw: usize, destroy: fn(usize)) {
        if self.is_hung() {
            self.free_later(None, raw, destroy);
        } else if let Some(_entered) = self.enter_if_alive() {
            destroy(raw);
        }
    }

    /// Frees a caller's memory at `data` with `free`: now if possible, otherwise once the device is quiescent,
    /// or in the order of a stream if too much waits for that.
    pub fn free_soon(&self, data: DevPtr, free: impl FnMut(usize) + Send + 'static) {
        let (held, resources) = (Arc::clone(&self.held), self.resources().ok().cloned());
        let free_unawaited = move |address| match (held.enter_if_alive(), &resources) {
            (Some(_entered), Some(resources)) => driver::free_unawaited(DevPtr(address), resources.stream).is_ok(),
            _ => false,
        };
        // If the context is gone, there is no allocation any more.
        let allocation = self.enter_if_alive().and_then(|_entered| driver::allocation_of(data).ok());
        self.quiescence.free_soon(Allocation {
            address: data.0,
            bytes: allocation.map_or(0, |(_, bytes)| bytes),
            free: self.inside(free),
            free_unawaited: Box::new(free_unawaited),
        });
    }

    /// Runs `work` inside the context if the device is quiescent and the context exists.
    pub fn attempt(&self, work: &mut dyn FnMut()) -> Attempt {
        match self.held.enter_if_alive() {
            None => Attempt::Gone,
            Some(_entered) => self.quiescence.attempt(work),
        }
    }

    /// Keeps the allocation at `address`, for reuse as `key`, until the process ends.
    pub fn keep(&self, key: Key, address: usize) {
        if !self.is_poisoned() {
            self.quiescence.later(Some(key), address, None);
        }
    }

    /// Calls `then` inside the context if the device is quiescent; returns whether it did.
    pub fn if_quiescent(&self, then: impl FnOnce()) -> bool {
        self.enter().is_ok_and(|_entered| self.quiescence.attempt(then) == Attempt::Done)
    }

    fn is_poisoned(&self) -> bool {
        self.poisoned.load(Ordering::Relaxed)
    }

    /// Registers `enqueued` as operations of the group.
    pub fn watch<E: Enqueued + 'static>(&self, enqueued: &Arc<E>) {
        let as_works: Weak<E> = Arc::downgrade(enqueued);
        self.quiescence.watch(as_works);
        let own: Weak<E> = Arc::downgrade(enqueued);
        self.enqueued.lock().push(own);
    }

    /// Whether operations of the group are in graphs.
    pub fn has_captured(&self) -> bool {
        self.operations().iter().any(|it| it.are_captured())
    }

    /// Whether the group's operations outside graphs have run.
    pub fn has_rested(&self) -> Result<bool> {
        let _entered = self.enter()?;
        are_over(&self.operations(), None)
    }

    fn operations(&self) -> Vec<Arc<dyn Enqueued>> {
        let enqueued = self.enqueued.lock();
        enqueued.iter().filter_map(Weak::upgrade).collect()
    }

    /// Refuses further operations of this group, and waits until those before have run; if `launches` says so and the
    /// device is quiescent, also for launches of graphs.
    pub fn wait_for_operations(&self, timeout: Duration, stream: Stream, launches: Graphs) -> Result<()> {
        let enqueued = self.operations();
        let _entered = self.enter()?;
        enqueued.iter().for_each(|it| it.end());
        let captured = enqueued.iter().any(|it| it.are_captured());
        let start = Instant::now();
        let mut pause = Duration::from_micros(5);
        let waited = loop {
            match are_over(&enqueued, captured.then_some(stream)) {
                Ok(true) => break Ok(()),
                Ok(false) => {}
                Err(error) => break Err(error),
            }
            if let Err(error) = check_patience(start.elapsed(), 2 * timeout, || self.is_hung()) {
                break Err(error);
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(Duration::from_millis(1));
        };
        if waited.is_err() {
            self.poisoned.store(true, Ordering::Relaxed);
            // The device is not quiescent while these operations may run.
            let are_stuck = move || enqueued.iter().any(|it| it.are_over() == Ok(false));
            self.quiescence.mark_hung(Box::new(are_stuck));
        }
        if captured && launches == Graphs::Count {
            // The whole context, as graphs may have been launched on any stream.
            self.if_quiescent(|| drop(context_handle::synchronize_context()));
        }
        waited
    }
}

fn are_over(enqueued: &[Arc<dyn Enqueued>], stream: Option<Stream>) -> Result<bool> {
    for it in enqueued {
        if !it.are_over()? {
            return Ok(false);
        }
    }
    stream.map_or(Ok(true), driver::is_idle)
}

/// The resources of one context. Each context has its own lock, as it is held during creation, which waits for the
/// context's device.
type ResourceCell = Arc<Mutex<Option<Arc<ContextResources>>>>;

static RESOURCES: Lazy<Mutex<HashMap<ContextId, ResourceCell>>> = Lazy::new(Mutex::default);

/// The resources that all groups in one context share. They stay when no group is left, because unloading kernels does
/// not return most of their memory (docs/development/host-time.md): a process that repeatedly opens groups would grow.
pub struct ContextResources {
    /// A stream for copies that the host waits for. It is not ordered with any other, not even the legacy default
    /// stream.
    pub stream: Stream,
    kernels: Result<Functions>,
}

impl ContextResources {
    /// The resources of the context `held`, created if necessary. If the kernels cannot be loaded, the rest is created,
    /// which this rank needs to report the failure to other ranks; the next group tries again.
    pub fn of(held: &DriverContext) -> Result<Arc<Self>> {
        let cell = Arc::clone(RESOURCES.lock().entry(held.id()).or_default());
        let mut cell = cell.lock();
        let stream = match &*cell {
            Some(known) if known.kernels.is_ok() => return Ok(Arc::clone(known)),
            Some(known) => Some(known.stream),
            None => None,
        };
        // Loading kernels would end a capture of this thread, and be refused beside one of another.
        let (_entered, _apart) = (held.enter()?, ApartFromCaptures::enter()?);
        let resources =
            Arc::new(Self { stream: stream.map_or_else(driver::create_stream, Ok)?, kernels: function::load() });
        *cell = Some(Arc::clone(&resources));
        Ok(resources)
    }

    pub fn functions(&self) -> Result<Functions> {
        self.kernels.clone()
    }
}
