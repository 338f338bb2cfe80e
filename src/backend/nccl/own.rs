//! The library's own communicators: each has its own id and is never split off the caller's, because a split one may
//! share the caller's abort flag.
#![allow(unsafe_code)]

use crate::backend::device::Device;
use crate::backend::nccl::network::Network;
use crate::backend::nccl::{Config, ID_BYTES, UINT8, UniqueId};
use crate::error::{Error, Result};
use crate::model::hash::fnv1a;
use crate::model::ids::CommRank;
use crate::model::ops::Stream;
use crate::model::tensor::DevPtr;
use parking_lot::Mutex;
use std::ffi::{c_int, c_uint, c_void};
use std::ptr::{null, null_mut};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// `NCCL_CONFIG_UNDEF_INT`.
const UNDEFINED: c_int = c_int::MIN;
const CONFIG_MAGIC: c_uint = 0xcafe_beef;
/// The NCCL that introduced this form of configuration.
const CONFIG_VERSION: c_uint = 21800;
/// From this size on, broadcasts between two ranks are faster in NCCL than sends and receives
/// (`docs/development/high-throughput.md`).
pub const BROADCAST_BYTES: usize = 3 << 20;
/// How long an abort waits for other threads' calls to return before it begins.
const PATIENCE: Duration = Duration::from_millis(100);

/// Whether a live graph has operations of a group.
pub type InGraphs = Box<dyn Fn() -> bool + Send>;

/// One message in a grouped exchange; the caller keeps them in order.
#[derive(Clone, Copy, Debug)]
pub struct Part {
    /// The other rank, by the communicator's numbering.
    pub peer: CommRank,
    pub data: DevPtr,
    /// Equal on both sides, not zero.
    pub bytes: usize,
}

/// A communicator. One thread at a time may enqueue; any thread may end it.
pub struct OwnCommunicator {
    network: Network,
    ranks: usize,
    rank: CommRank,
    raw: *mut c_void,
    /// Entered around calls that create or end it: NCCL restores the thread's previous device, and on a thread that had
    /// none, that would create a context on device 0.
    device: Arc<dyn Device>,
    /// Identifies the communicator, with the same number on all ranks.
    pub tag: u64,
    /// For each group that has used it, whether graphs of that group are alive.
    graphs: Mutex<Vec<InGraphs>>,
    /// Threads inside NCCL calls on it.
    calls: AtomicUsize,
    ended: AtomicBool,
    /// NCCL has freed the communicator's resources.
    freed: AtomicBool,
}

// SAFETY: an `ncclComm_t` may be used from any thread.
unsafe impl Send for OwnCommunicator {}
// SAFETY: callers ensure that one thread at a time enqueues (see this type's documentation); NCCL allows the other
// calls concurrently.
unsafe impl Sync for OwnCommunicator {}

impl OwnCommunicator {
    /// Joins the communicator of `ranks` ranks with this id, on `device`. Blocks until all have joined, without a
    /// deadline. NCCL's kernels have at most `most_blocks` blocks.
    pub fn join(
        network: Network,
        id: &[u8; ID_BYTES],
        ranks: usize,
        rank: CommRank,
        most_blocks: usize,
        device: Arc<dyn Device>,
    ) -> Result<Self> {
        let _entered = device.enter()?;
        let mut config = Config {
            size: size_of::<Config>(),
            magic: CONFIG_MAGIC,
            version: CONFIG_VERSION,
            // A non-blocking communicator would not let kernels follow on the stream before NCCL is ready.
            blocking: 1,
            // A cluster would need several free multiprocessors in one GPC at once.
            cga_cluster_size: 0,
            min_ctas: UNDEFINED,
            max_ctas: number(most_blocks)?,
            net_name: null(),
            split_share: 0,
        };
        let mut raw = null_mut();
        let (count, place) = (number(ranks)?, number(rank.index())?);
        // SAFETY: writes one handle; the configuration is of the size that it says.
        let code = unsafe { (network.own.ncclCommInitRankConfig)(&mut raw, count, UniqueId(*id), place, &mut config) };
        network.check("ncclCommInitRankConfig", code)?;
        Ok(Self {
            network,
            ranks,
            rank,
            raw,
            device,
            tag: fnv1a(id),
            graphs: Mutex::default(),
            calls: AtomicUsize::new(0),
            ended: AtomicBool::new(false),
            freed: AtomicBool::new(false),
        })
    }

    /// The number of its ranks, and this one's rank.
    pub fn place(&self) -> (usize, CommRank) {
        (self.ranks, self.rank)
    }

    /// Registers a group that uses it; `in_graphs` says whether graphs of that group are alive.
    pub fn serve(&self, in_graphs: InGraphs) {
        let mut graphs = self.graphs.lock();
        graphs.retain(|are_there| are_there());
        graphs.push(in_graphs);
    }

    /// Whether a graph has operations of any group that used it.
    pub fn is_in_graphs(&self) -> bool {
        self.graphs.lock().iter().any(|are_there| are_there())
    }

    /// Enqueues messages as one operation, in which all progress together. Between two ranks they arrive in sending
    /// order. The memory must stay allocated until `stream` has run them.
    pub fn exchange(&self, sends: &[Part], receives: &[Part], stream: Stream) -> Result<()> {
        // Both ranks know all messages, so they choose the same.
        let largest = sends.iter().chain(receives).map(|part| part.bytes).max().unwrap_or(0);
        self.grouped(|| {
            if by_broadcasts(self.ranks, largest) {
                self.broadcast(sends, receives, stream)
            } else {
                self.send_and_receive(sends, receives, stream)
            }
        })
    }

    fn send_and_receive(&self, sends: &[Part], receives: &[Part], stream: Stream) -> Result<()> {
        let network = &self.network;
        let stream = stream.0 as *mut c_void;
        for &Part { peer, data, bytes } in sends {
            let (data, peer) = (data.0 as *const c_void, number(peer.index())?);
            // SAFETY: the communicator is alive (`enter`); the addresses are the device's.
            let code = unsafe { (network.own.ncclSend)(data, bytes, UINT8, peer, self.raw, stream) };
            network.check("ncclSend", code)?;
        }
        for &Part { peer, data, bytes } in receives {
            let (data, peer) = (data.0 as *mut c_void, number(peer.index())?);
            // SAFETY: as for sending.
            let code = unsafe { (network.own.ncclRecv)(data, bytes, UINT8, peer, self.raw, stream) };
            network.check("ncclRecv", code)?;
        }
        Ok(())
    }

    /// For two ranks only. Both make the same broadcasts in the same order: the first rank's, then the second's.
    fn broadcast(&self, sends: &[Part], receives: &[Part], stream: Stream) -> Result<()> {
        let (of_first, of_second) = match self.rank.index() {
            0 => (sends, receives),
            _ => (receives, sends),
        };
        let network = &self.network;
        let stream = stream.0 as *mut c_void;
        for (root, parts) in [(0, of_first), (1, of_second)] {
            for &Part { data, bytes, .. } in parts {
                let data = data.0 as *mut c_void;
                // SAFETY: as for sending; each rank gives memory of its own.
                let code = unsafe { (network.own.ncclBroadcast)(data, data, bytes, UINT8, root, self.raw, stream) };
                network.check("ncclBroadcast", code)?;
            }
        }
        Ok(())
    }

    /// Groups `calls` into one operation.
    fn grouped(&self, calls: impl FnOnce() -> Result<()>) -> Result<()> {
        let _inside = self.enter()?;
        let network = &self.network;
        // SAFETY: no arguments.
        network.check("ncclGroupStart", unsafe { (network.own.ncclGroupStart)() })?;
        let called = calls();
        // The group must be closed, whatever came of its calls. SAFETY: no arguments.
        let closed = network.check("ncclGroupEnd", unsafe { (network.own.ncclGroupEnd)() });
        called.and(closed)
    }

    /// An error that NCCL met after its calls had returned; `None` once this has ended.
    pub fn asynchronous_error(&self) -> Option<Error> {
        let _inside = self.enter().ok()?;
        let mut state = 0;
        // SAFETY: the communicator is alive (`enter`); writes one number.
        let code = unsafe { (self.network.own.ncclCommGetAsyncError)(self.raw, &mut state) };
        let asked = self.network.check("ncclCommGetAsyncError", code);
        asked.and_then(|()| self.network.check("an operation of NCCL", state)).err()
    }

    /// Frees the communicator after its operations. Blocks until they have run, and while a graph has any of them. Does
    /// nothing if it has ended already.
    pub fn destroy(&self) {
        if self.end_calls(None) {
            let _entered = self.device.enter();
            // SAFETY: nobody is inside, nobody enters any more, and this is the only end.
            let code = unsafe { (self.network.own.ncclCommDestroy)(self.raw) };
            drop(self.network.check("ncclCommDestroy", code));
            self.freed.store(true, Ordering::Release);
        }
    }

    /// Ends the operations wherever they are; what they were to receive is undefined. Then frees the communicator if
    /// `may_free` returns true; it may wait for the right moment. May block, like [`OwnCommunicator::destroy`]. Does
    /// nothing if it has ended already.
    ///
    /// NCCL ends the operations in the call, and frees when the group around it is closed (`bench/abort_calls.cu`, with
    /// 2.28; an NCCL that frees at once works too, except for the moment). Groups are per thread, so the thread must be
    /// the library's own.
    pub fn abort(&self, may_free: impl FnOnce() -> bool) {
        if !self.end_calls(Some(PATIENCE)) {
            return;
        }
        let _entered = self.device.enter();
        let network = &self.network;
        // SAFETY: no arguments.
        drop(network.check("ncclGroupStart", unsafe { (network.own.ncclGroupStart)() }));
        // SAFETY: nobody can enter any more, and only one thread gets here. A thread that is still inside waits for
        // other ranks; this call ends its wait, and NCCL allows it on any thread.
        let code = unsafe { (network.own.ncclCommAbort)(self.raw) };
        drop(network.check("ncclCommAbort", code));
        if may_free() {
            // SAFETY: no arguments.
            drop(network.check("ncclGroupEnd", unsafe { (network.own.ncclGroupEnd)() }));
            self.freed.store(true, Ordering::Release);
        }
    }

    /// Leaks the communicator: its device was reset, and nothing can be freed there.
    pub fn abandon(&self) {
        self.ended.store(true, Ordering::SeqCst);
    }

    /// Waits up to `limit` for another thread to end it; returns whether it has ended.
    pub fn wait_for_end(&self, limit: Duration) -> bool {
        let start = Instant::now();
        while !self.freed.load(Ordering::Acquire) && start.elapsed() < limit {
            std::thread::sleep(Duration::from_micros(50));
        }
        self.freed.load(Ordering::Acquire)
    }

    /// Counts a call until the result is dropped.
    fn enter(&self) -> Result<Inside<'_>> {
        self.calls.fetch_add(1, Ordering::SeqCst);
        let inside = Inside(self);
        if self.ended.load(Ordering::SeqCst) {
            Err(Error::internal("the network's communicator has ended"))
        } else {
            Ok(inside)
        }
    }

    /// Keeps new calls out, and waits up to `patience` for those inside to leave. False if it has ended before.
    fn end_calls(&self, patience: Option<Duration>) -> bool {
        if self.ended.swap(true, Ordering::SeqCst) {
            return false;
        }
        let start = Instant::now();
        while self.calls.load(Ordering::SeqCst) > 0 && patience.is_none_or(|patience| start.elapsed() < patience) {
            std::thread::sleep(Duration::from_micros(50));
        }
        true
    }
}

impl Drop for OwnCommunicator {
    fn drop(&mut self) {
        // Anybody with a reason to end it in another way has done so.
        self.abort(|| true);
    }
}

struct Inside<'a>(&'a OwnCommunicator);

impl Drop for Inside<'_> {
    fn drop(&mut self) {
        self.0.calls.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Whether messages, the largest of `bytes`, are sent by broadcasts among `ranks` ranks.
pub fn by_broadcasts(ranks: usize, bytes: usize) -> bool {
    ranks == 2 && bytes >= BROADCAST_BYTES
}

fn number(value: usize) -> Result<c_int> {
    c_int::try_from(value).map_err(|_| Error::internal(format!("NCCL cannot count to {value}")))
}

#[cfg(test)]
#[path = "own_tests.rs"]
pub mod tests;
