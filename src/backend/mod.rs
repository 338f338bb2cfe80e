//! The interface of a backend. The siblings `host` and `cuda` never see each other.
//!
//! Opening a group or an HT handle is collective. Everything else is local to a rank, and
//! operations are only enqueued. A method that makes sense for one sibling only belongs inside that
//! sibling.

pub mod bootstrap;
pub mod cuda;
mod detached;
mod dylib;
pub mod host;
pub mod nccl;
pub mod own_stream;
pub mod platform;
pub mod quiet;
pub mod select;
pub mod transport;

use crate::backend::quiet::{Attempt, Works};
use crate::error::{Error, Result};
use crate::model::ops::{HtCombine, HtDispatch, LlOp, Routing, StagedSlot, Stream};
use crate::model::tensor::DevPtr;
use crate::tuning::Tuning;
use std::any::Any;
use std::sync::{Arc, Weak};

/// Memory of the device that a group runs on.
pub trait DeviceMemory: Send + Sync {
    /// Allocates `bytes`; zero bytes may give NULL.
    fn alloc(&self, bytes: usize) -> Result<DevPtr>;
    /// Frees the result of [`DeviceMemory::alloc`], at once or at the device's next quiet moment;
    /// NULL is fine.
    fn free(&self, data: DevPtr) -> Result<()>;
    /// Memory for the library's own use; may reuse memory that another group gave back.
    fn alloc_own(&self, bytes: usize) -> Result<DevPtr>;
    /// Gives back the result of [`DeviceMemory::alloc_own`]; no operation uses it any more.
    fn free_own(&self, data: DevPtr, bytes: usize);
    /// The address by which the device reaches mapped host memory.
    fn device_alias(&self, host: DevPtr) -> Result<DevPtr>;
    /// Copies `from` to the device and waits for the copy.
    fn upload(&self, to: DevPtr, from: &[u8]) -> Result<()>;
    /// Copies from the device into `to` and waits for the copy.
    fn download(&self, to: &mut [u8], from: DevPtr) -> Result<()>;
    /// Whether everything enqueued on `stream` has run.
    fn is_idle(&self, stream: Stream) -> Result<bool>;
    /// A stream that is not ordered with any other, not even with the legacy default one.
    fn create_stream(&self) -> Result<Stream>;
    /// Destroys the result of [`DeviceMemory::create_stream`].
    fn destroy_stream(&self, stream: Stream);
    /// Announces work on the device that waits for other ranks. Until the result is dropped, no
    /// call waits for the whole device.
    fn begin(&self) -> Box<dyn Any + Send>;
    /// Reports an exchange that was given up and may never end; `mark` is behind it. Freeing memory would
    /// wait for it, so everything stays allocated until it has ended.
    fn strand(&self, mark: Box<dyn StreamMark>);
    /// Counts `works` among what waits for other ranks on the device.
    fn watch_works(&self, works: Weak<dyn Works>);
    /// Does `work`, which may wait for the whole device, if the device is quiet and no graph has operations.
    fn attempt(&self, work: &mut dyn FnMut()) -> Attempt;
    /// The failure of a device that was reset: nothing on it is left, and nothing can be freed there. `None` for any
    /// other.
    fn lost(&self) -> Option<Error> {
        None
    }
    /// What tells the context from all others that the process has or had; zero on a device without contexts.
    fn context_number(&self) -> u64 {
        0
    }
    /// A mark for streams.
    fn new_mark(&self) -> Result<Box<dyn StreamMark>>;
    /// Marks for operations in graphs, with a place for each of `places`; `None` on a device without graphs.
    fn new_replay_marks(&self, _places: usize) -> Result<Option<Arc<dyn ReplayMarks>>> {
        Ok(None)
    }
    /// Whether work on `stream` would go into a graph, or have to wait for a stream whose work does. A device without
    /// graphs has no captures.
    fn is_captured(&self, _stream: Stream) -> Result<bool> {
        Ok(false)
    }
    /// Does `work` so that captures which this thread has open go on, even if it makes calls that end them otherwise.
    /// A device without graphs has no captures.
    fn apart_from_captures(&self, work: &mut dyn FnMut()) -> Result<()> {
        work();
        Ok(())
    }
    /// Makes the device, which this process numbers `device`, the calling thread's until the result is dropped. What
    /// the thread calls meanwhile disturbs no capture of another one.
    fn enter(&self, device: usize) -> Result<Box<dyn Any>>;
}

/// A place in what streams have been given.
pub trait StreamMark: Send {
    /// Marks what `stream` has been given so far. False, and no mark, while the stream is captured.
    fn record(&mut self, stream: Stream) -> Result<bool>;
    /// Whether what was marked has run; also if it has ended in an error.
    fn is_over(&self) -> Result<bool>;
}

/// Marks that operations in graphs leave in each replay.
pub trait ReplayMarks: Send + Sync {
    /// Captures, from `stream`, that the operation of `place` begins. Like any launch it may be held up, by a call that
    /// waits for the device.
    fn begin(&self, place: usize, stream: Stream) -> Result<()>;
    /// Captures that it ends.
    fn end(&self, place: usize, stream: Stream) -> Result<()>;
    /// Whether a graph, or something made of it, has any of them and is not destroyed.
    fn are_in_graphs(&self) -> bool;
    /// When the operation of `place` began that a replay is in, on a clock of the device's own; zero if none is.
    fn began(&self, place: usize) -> u64;
}

/// One rank's side of an open group, in the group's mode.
pub enum OpenGroup {
    /// Low latency.
    Ll(Arc<dyn LlGroupBackend>),
    /// High throughput.
    Ht(Arc<dyn HtGroupBackend>),
}

impl OpenGroup {
    /// The part that both modes have.
    pub fn common(&self) -> &dyn GroupBackend {
        match self {
            Self::Ll(group) => group.as_ref(),
            Self::Ht(group) => group.as_ref(),
        }
    }
}

/// The failures of operations while they run. Every call looks here first.
pub trait Faults: Send + Sync {
    /// The first failure.
    fn first(&self) -> Option<Error>;
}

/// A group's backend in a few words.
#[derive(Clone, Copy, Debug)]
pub struct Profile {
    /// Its name.
    pub backend: &'static str,
    /// Bytes of the device that peers map; `None` if they follow what operations need.
    pub window_bytes: Option<usize>,
    /// Whether the launch shapes of a tuning file are in use.
    pub tuned: bool,
    /// HT on several nodes: about how many bytes a rank sends in one pass.
    pub chunk_bytes: Option<usize>,
}

/// The part that groups of both modes have.
pub trait GroupBackend: Send + Sync {
    /// The group's device memory.
    fn memory(&self) -> Arc<dyn DeviceMemory>;
    /// The failures of the group's operations.
    fn faults(&self) -> Arc<dyn Faults>;
    /// What is worth telling about this rank's side.
    fn profile(&self) -> Profile;
    /// Sets launch shapes, if this backend launches anything: of the LL handles that are made, and the HT operations
    /// that are enqueued, from now on. A matter of this rank alone.
    fn tune(&self, _tuning: Tuning) {}
    /// Waits for the group's operations, then releases what peers can see. Collective unless a fault is known.
    fn close(&self, stream: Stream) -> Result<()>;
}

/// A group for LL operations.
pub trait LlGroupBackend: GroupBackend {
    /// Creates a handle; local, and enqueues no work.
    fn open_handle(&self, routing: Routing) -> Result<Box<dyn LlBackend>>;
}

/// A group for HT operations.
pub trait HtGroupBackend: GroupBackend {
    /// Creates a handle: exchanges the routing over all ranks. `routing` is an error on a rank that
    /// refused its arguments, and that rank gets it back. The others learn of it from this call, or
    /// from the handle's first use.
    fn open_handle(&self, routing: Result<HtRouting>, stream: Stream)
    -> Result<Box<dyn HtBackend>>;
}

/// The inputs for an HT handle.
#[derive(Clone, Copy, Debug)]
pub struct HtRouting {
    /// This rank's ids.
    pub routing: Routing,
    /// int32 `[L]`, device address: receives the number of tokens per local expert.
    pub counter: Option<DevPtr>,
}

/// LL operations of one handle.
pub trait LlBackend: Send + Sync {
    /// Enqueues a whole operation.
    fn run(&self, op: &LlOp, stream: Stream) -> Result<()>;
    /// Enqueues only the send phase, in `slot`, which is free and the same on all ranks.
    fn send(&self, op: &LlOp, slot: StagedSlot, stream: Stream) -> Result<()>;
    /// Enqueues the receive phase of `op`, which was sent in `slot`. It runs after the send phase,
    /// on any stream.
    fn receive(&self, op: &LlOp, slot: StagedSlot, stream: Stream) -> Result<()>;
    /// Gives up the receive phase of `op`, which was sent in `slot`, so that peers need not wait
    /// for it.
    fn abandon(&self, op: &LlOp, slot: StagedSlot);
}

/// HT operations of one handle.
pub trait HtBackend: Send + Sync {
    /// Enqueues a dispatch.
    fn dispatch(&self, op: &HtDispatch, stream: Stream) -> Result<()>;
    /// Enqueues a combine.
    fn combine(&self, op: &HtCombine, stream: Stream) -> Result<()>;
    /// Number of rows that dispatch delivers to this rank; may wait for the routing exchange.
    fn num_recv_tokens(&self) -> Result<usize>;
}
