//! Communicators of the library's own: made from an id of their own, never split off the caller's, because a
//! split one may share the caller's abort flag.
#![allow(unsafe_code)]

use crate::backend::nccl::{Config, Functions, ID_BYTES, UINT8, UniqueId, check, functions};
use crate::error::refusal::{AmongRanks, Subject};
use crate::error::{Error, Result};
use crate::model::ops::Stream;
use crate::model::tensor::DevPtr;
use std::any::Any;
use std::ffi::{c_int, c_uint, c_void};
use std::ptr::{null, null_mut};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// The oldest NCCL that takes a configuration of this form, as `ncclGetVersion` counts.
const OLDEST: c_int = 21800;
/// The variable that gives NCCL's ids, if it is set.
const FIXED_ID: &str = "NCCL_COMM_ID";
/// `NCCL_CONFIG_UNDEF_INT`.
const UNDEFINED: c_int = c_int::MIN;
const CONFIG_MAGIC: c_uint = 0xcafe_beef;
/// How long an abort lets calls of other threads come back before it begins.
const PATIENCE: Duration = Duration::from_millis(100);

/// Makes the communicator's device the calling thread's until the result is dropped. NCCL gives a thread back the
/// device that it found there, and for one that had none yet, that would be a context on the first device.
pub type EnterDevice = Arc<dyn Fn() -> Result<Box<dyn Any>> + Send + Sync>;

type Call<A> = unsafe extern "C" fn(A) -> c_int;

/// The functions that such communicators need.
#[derive(Clone, Copy)]
pub struct Network {
    functions: &'static Functions,
    get_unique_id: Call<*mut UniqueId>,
    init: unsafe extern "C" fn(*mut *mut c_void, c_int, UniqueId, c_int, *mut Config) -> c_int,
    async_error: unsafe extern "C" fn(*mut c_void, *mut c_int) -> c_int,
    abort: Call<*mut c_void>,
    destroy: Call<*mut c_void>,
    group_start: unsafe extern "C" fn() -> c_int,
    group_end: unsafe extern "C" fn() -> c_int,
    send:
        unsafe extern "C" fn(*const c_void, usize, c_int, c_int, *mut c_void, *mut c_void) -> c_int,
    receive:
        unsafe extern "C" fn(*mut c_void, usize, c_int, c_int, *mut c_void, *mut c_void) -> c_int,
}

impl Network {
    /// Those of this process's NCCL, or the refusal of one that lacks them.
    pub fn of_process() -> Result<Self> {
        check_ids(std::env::var(FIXED_ID).ok())?;
        Self::of(functions()?)
    }

    fn of(functions: &'static Functions) -> Result<Self> {
        let version = version(functions)?;
        if version < OLDEST {
            let refusal = Error::usage(Subject::Nccl, AmongRanks::NewEnoughForNetwork);
            return Err(refusal.got(dotted(version), "2.18 or newer"));
        }
        Ok(Self {
            functions,
            get_unique_id: needed(functions.ncclGetUniqueId, "ncclGetUniqueId")?,
            init: needed(functions.ncclCommInitRankConfig, "ncclCommInitRankConfig")?,
            async_error: needed(functions.ncclCommGetAsyncError, "ncclCommGetAsyncError")?,
            abort: needed(functions.ncclCommAbort, "ncclCommAbort")?,
            destroy: needed(functions.ncclCommDestroy, "ncclCommDestroy")?,
            group_start: needed(functions.ncclGroupStart, "ncclGroupStart")?,
            group_end: needed(functions.ncclGroupEnd, "ncclGroupEnd")?,
            send: needed(functions.ncclSend, "ncclSend")?,
            receive: needed(functions.ncclRecv, "ncclRecv")?,
        })
    }

    /// What the ranks of one new communicator find each other by; this process lives until they have.
    pub fn new_id(&self) -> Result<[u8; ID_BYTES]> {
        let mut id = UniqueId([0; ID_BYTES]);
        // SAFETY: writes one id.
        let code = unsafe { (self.get_unique_id)(&mut id) };
        self.check("ncclGetUniqueId", code).map(|()| id.0)
    }

    fn check(&self, name: &str, code: c_int) -> Result<()> {
        check(self.functions, name, code)
    }
}

/// Refuses an id that the environment fixes: it is one address for all communicators, and the rails of
/// several gateways are made at the same time.
fn check_ids(fixed: Option<String>) -> Result<()> {
    match fixed.filter(|id| !id.is_empty()) {
        None => Ok(()),
        Some(id) => {
            let refusal = Error::usage(Subject::Nccl, AmongRanks::OwnIdsForNetwork);
            Err(refusal.got(format!("{FIXED_ID}={id}"), "it unset"))
        }
    }
}

fn version(functions: &Functions) -> Result<c_int> {
    let get = needed(functions.ncclGetVersion, "ncclGetVersion")?;
    let mut version = 0;
    // SAFETY: writes one number.
    let code = unsafe { get(&mut version) };
    check(functions, "ncclGetVersion", code).map(|()| version)
}

fn needed<F>(function: Option<F>, name: &'static str) -> Result<F> {
    function.ok_or_else(|| Error::usage(Subject::Nccl, AmongRanks::HasForNetwork { name }))
}

/// A version as people write it. Up to 2.8 NCCL counted it in another way.
fn dotted(version: c_int) -> String {
    let (major, minor) = match version {
        ..10_000 => (version / 1000, version / 100 % 10),
        _ => (version / 10_000, version / 100 % 100),
    };
    format!("{major}.{minor}.{}", version % 100)
}

/// One message of a group of them, which the caller keeps in order.
#[derive(Clone, Copy, Debug)]
pub struct Part {
    /// The other rank, as the communicator numbers it.
    pub peer: usize,
    /// First byte.
    pub data: DevPtr,
    /// The same number on both sides, not zero.
    pub bytes: usize,
}

/// A communicator. One thread at a time may enqueue; ending it is any thread's.
pub struct OwnCommunicator {
    network: Network,
    raw: *mut c_void,
    enter_device: EnterDevice,
    /// Threads that are inside NCCL with it.
    calls: AtomicUsize,
    ended: AtomicBool,
    /// NCCL has freed what it had for it.
    freed: AtomicBool,
}

// SAFETY: an `ncclComm_t` may be used from any thread.
unsafe impl Send for OwnCommunicator {}
// SAFETY: callers see to it that one thread at a time enqueues (this type's documentation); NCCL allows the
// other calls beside that.
unsafe impl Sync for OwnCommunicator {}

impl OwnCommunicator {
    /// Joins the communicator of `ranks` ranks that has this id, with the device of `enter_device`. Blocks
    /// until all have joined, without a deadline. NCCL's kernels have at most `most_blocks` blocks.
    pub fn join(
        network: Network,
        id: &[u8; ID_BYTES],
        (ranks, rank): (usize, usize),
        most_blocks: usize,
        enter_device: EnterDevice,
    ) -> Result<Self> {
        let _entered = enter_device()?;
        let mut config = Config {
            size: size_of::<Config>(),
            magic: CONFIG_MAGIC,
            version: OLDEST as c_uint,
            // With calls that return early, no kernel could follow on the stream before NCCL is ready.
            blocking: 1,
            // Clusters would need several free multiprocessors of one part of the chip at once.
            cga_cluster_size: 0,
            min_ctas: UNDEFINED,
            max_ctas: number(most_blocks)?,
            net_name: null(),
            split_share: 0,
        };
        let mut raw = null_mut();
        let (ranks, rank) = (number(ranks)?, number(rank)?);
        // SAFETY: writes one handle; the configuration is of the size that it says.
        let code = unsafe { (network.init)(&mut raw, ranks, UniqueId(*id), rank, &mut config) };
        network.check("ncclCommInitRankConfig", code)?;
        Ok(Self {
            network,
            raw,
            enter_device,
            calls: AtomicUsize::new(0),
            ended: AtomicBool::new(false),
            freed: AtomicBool::new(false),
        })
    }

    /// Enqueues messages as one operation, in which all progress together. Between two ranks they arrive
    /// in the order of sending. The memory stays allocated until `stream` has run them.
    pub fn exchange(&self, sends: &[Part], receives: &[Part], stream: Stream) -> Result<()> {
        let _inside = self.enter()?;
        let network = &self.network;
        let stream = stream.0 as *mut c_void;
        // SAFETY: no arguments.
        network.check("ncclGroupStart", unsafe { (network.group_start)() })?;
        let send = |part: &Part| {
            let data = part.data.0 as *const c_void;
            let peer = number(part.peer)?;
            // SAFETY: the communicator is alive (`enter`); the addresses are the device's.
            let code = unsafe { (network.send)(data, part.bytes, UINT8, peer, self.raw, stream) };
            network.check("ncclSend", code)
        };
        let receive = |part: &Part| {
            let data = part.data.0 as *mut c_void;
            let peer = number(part.peer)?;
            // SAFETY: as for sending.
            let code =
                unsafe { (network.receive)(data, part.bytes, UINT8, peer, self.raw, stream) };
            network.check("ncclRecv", code)
        };
        let called = sends
            .iter()
            .try_for_each(send)
            .and_then(|()| receives.iter().try_for_each(receive));
        // A group is open until it is closed, whatever came of its calls.
        // SAFETY: no arguments.
        let closed = network.check("ncclGroupEnd", unsafe { (network.group_end)() });
        called.and(closed)
    }

    /// Enqueues an all-gather: `bytes` of each rank's `data` to `out`, in rank order.
    pub fn all_gather(
        &self,
        data: DevPtr,
        out: DevPtr,
        bytes: usize,
        stream: Stream,
    ) -> Result<()> {
        let _inside = self.enter()?;
        let (data, out) = (data.0 as *const c_void, out.0 as *mut c_void);
        let stream = stream.0 as *mut c_void;
        // SAFETY: the communicator is alive (`enter`); the addresses are the device's.
        let code = unsafe {
            (self.network.functions.ncclAllGather)(data, out, bytes, UINT8, self.raw, stream)
        };
        self.network.check("ncclAllGather", code)
    }

    /// An error that NCCL met after the calls had returned; none any more when this has ended.
    pub fn asynchronous_error(&self) -> Option<Error> {
        let _inside = self.enter().ok()?;
        let mut state = 0;
        // SAFETY: the communicator is alive (`enter`); writes one number.
        let code = unsafe { (self.network.async_error)(self.raw, &mut state) };
        let asked = self.network.check("ncclCommGetAsyncError", code);
        asked
            .and_then(|()| self.network.check("an operation of NCCL", state))
            .err()
    }

    /// Frees the communicator after its operations. Blocks until they have run, and as long as a graph has
    /// any of them. Nothing if it has ended already.
    pub fn destroy(&self) {
        if self.end_calls(None) {
            let _entered = (self.enter_device)();
            // SAFETY: nobody is inside, nobody enters any more, and this is the only end.
            let code = unsafe { (self.network.destroy)(self.raw) };
            drop(self.network.check("ncclCommDestroy", code));
            self.freed.store(true, Ordering::Release);
        }
    }

    /// Ends the operations wherever they are. What they were to receive is undefined. Then frees the communicator, if
    /// `may_free`, which may wait for the right moment, gives true. May block, as [`OwnCommunicator::destroy`].
    /// Nothing if it has ended already.
    ///
    /// NCCL does the first in the call, and the second when the group around it is closed (`bench/abort_calls.cu`, with
    /// 2.28; one that frees at once is as good but for the moment). The group is the thread's, so the thread is one of
    /// the library's own.
    pub fn abort(&self, may_free: impl FnOnce() -> bool) {
        if !self.end_calls(Some(PATIENCE)) {
            return;
        }
        let _entered = (self.enter_device)();
        let network = &self.network;
        // SAFETY: no arguments.
        drop(network.check("ncclGroupStart", unsafe { (network.group_start)() }));
        // SAFETY: nobody enters any more, and this is the only end. A thread that is still inside waits for
        // other ranks; NCCL ends its wait by this call, which it lets any thread make.
        let code = unsafe { (network.abort)(self.raw) };
        drop(network.check("ncclCommAbort", code));
        if may_free() {
            // SAFETY: no arguments.
            drop(network.check("ncclGroupEnd", unsafe { (network.group_end)() }));
            self.freed.store(true, Ordering::Release);
        }
    }

    /// Leaves the communicator to NCCL: its device was reset, and nothing can be freed there.
    pub fn abandon(&self) {
        self.ended.store(true, Ordering::SeqCst);
    }

    /// Waits, at most as long as `limit`, for the end that some thread begins, and says whether it has come.
    pub fn wait_for_end(&self, limit: Duration) -> bool {
        let start = Instant::now();
        while !self.freed.load(Ordering::Acquire) && start.elapsed() < limit {
            std::thread::sleep(Duration::from_micros(50));
        }
        self.freed.load(Ordering::Acquire)
    }

    /// Counts a call, until the result is dropped.
    fn enter(&self) -> Result<Inside<'_>> {
        self.calls.fetch_add(1, Ordering::SeqCst);
        let inside = Inside(self);
        match self.ended.load(Ordering::SeqCst) {
            true => Err(Error::internal("the network's communicator has ended")),
            false => Ok(inside),
        }
    }

    /// Lets nobody enter any more, and those inside leave, `patience` long. False if that was done before.
    fn end_calls(&self, patience: Option<Duration>) -> bool {
        if self.ended.swap(true, Ordering::SeqCst) {
            return false;
        }
        let start = Instant::now();
        while self.calls.load(Ordering::SeqCst) > 0
            && patience.is_none_or(|patience| start.elapsed() < patience)
        {
            std::thread::sleep(Duration::from_micros(50));
        }
        true
    }
}

impl Drop for OwnCommunicator {
    fn drop(&mut self) {
        // Who has a reason to end it otherwise has done so.
        self.abort(|| true);
    }
}

struct Inside<'a>(&'a OwnCommunicator);

impl Drop for Inside<'_> {
    fn drop(&mut self) {
        self.0.calls.fetch_sub(1, Ordering::SeqCst);
    }
}

fn number(value: usize) -> Result<c_int> {
    c_int::try_from(value).map_err(|_| Error::internal(format!("NCCL cannot count to {value}")))
}

#[cfg(test)]
#[path = "own_tests.rs"]
pub mod tests;
