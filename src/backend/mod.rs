//! What a backend must be able to do. The siblings `host` and `cuda` never see each other.
//!
//! Opening a group or an HT handle is collective; everything else is local to a rank, and an
//! operation is only enqueued. If a method is wanted that one sibling alone could give meaning to, it
//! belongs inside that sibling.

pub mod bootstrap;
pub mod cuda;
mod dylib;
pub mod host;
pub mod nccl;
pub mod platform;
pub mod quiet;
pub mod select;
pub mod transport;

use crate::backend::quiet::Works;
use crate::error::{Error, Result};
use crate::model::ops::{HtCombine, HtDispatch, LlOp, Routing, StagedSlot, Stream};
use crate::model::tensor::DevPtr;
use std::any::Any;
use std::sync::{Arc, Weak};

/// Memory of the device that a group runs on.
pub trait DeviceMemory: Send + Sync {
    /// Allocates `bytes`; zero bytes may give NULL.
    fn alloc(&self, bytes: usize) -> Result<DevPtr>;
    /// Frees what [`DeviceMemory::alloc`] gave, at once or when nothing on the device waits for other ranks; NULL is
    /// fine.
    fn free(&self, data: DevPtr) -> Result<()>;
    /// Memory for the library's own use, perhaps what another group has given back.
    fn alloc_own(&self, bytes: usize) -> Result<DevPtr>;
    /// Gives back what [`DeviceMemory::alloc_own`] gave, and nothing uses any more.
    fn free_own(&self, data: DevPtr, bytes: usize);
    /// The address by which the device reaches mapped host memory.
    fn device_alias(&self, host: DevPtr) -> Result<DevPtr>;
    /// Copies `from` to the device; returns when it is there.
    fn upload(&self, to: DevPtr, from: &[u8]) -> Result<()>;
    /// Copies from the device into `to`; returns when it is there.
    fn download(&self, to: &mut [u8], from: DevPtr) -> Result<()>;
    /// Whether everything enqueued on `stream` has run.
    fn is_idle(&self, stream: Stream) -> Result<bool>;
    /// A stream that waits for no other, the legacy default one included.
    fn create_stream(&self) -> Result<Stream>;
    /// Destroys what [`DeviceMemory::create_stream`] gave.
    fn destroy_stream(&self, stream: Stream);
    /// Something that waits for other ranks begins on the device. Until the result is dropped nothing waits for
    /// the device as a whole.
    fn begin(&self) -> Box<dyn Any>;
    /// An exchange on `stream` was given up and may be there for ever: freeing memory would wait for it, so
    /// everything stays allocated until it is gone.
    fn strand(&self, stream: Stream);
    /// Counts `works` among what waits for other ranks on the device.
    fn watch_works(&self, works: Weak<dyn Works>);
    /// A mark for streams.
    fn new_mark(&self) -> Result<Box<dyn StreamMark>>;
    /// Makes the device, which this process numbers `device`, the calling thread's until the result is dropped.
    fn enter(&self, device: usize) -> Result<Box<dyn Any>>;
}

/// A place in what streams have been given.
pub trait StreamMark: Send {
    /// Marks what `stream` has been given so far. False, and no mark, while the stream is captured.
    fn record(&mut self, stream: Stream) -> Result<bool>;
    /// Whether what was marked has run; also if it has ended in an error.
    fn is_over(&self) -> Result<bool>;
}

/// One rank's side of an open group, in the mode that it was opened for.
pub enum OpenGroup {
    /// Low latency.
    Ll(Box<dyn LlGroupBackend>),
    /// High throughput.
    Ht(Box<dyn HtGroupBackend>),
}

impl OpenGroup {
    /// What both modes have.
    pub fn common(&self) -> &dyn GroupBackend {
        match self {
            Self::Ll(group) => group.as_ref(),
            Self::Ht(group) => group.as_ref(),
        }
    }
}

/// Where failures show that operations meet while they run. Every call looks here first.
pub trait Faults: Send + Sync {
    /// The first failure.
    fn first(&self) -> Option<Error>;
}

/// What groups of both modes have.
pub trait GroupBackend: Send + Sync {
    /// The group's device memory.
    fn memory(&self) -> Arc<dyn DeviceMemory>;
    /// Where failures of the group's operations show.
    fn faults(&self) -> Arc<dyn Faults>;
    /// Waits for the group's operations, then releases what peers can see. Collective unless a fault is known.
    fn close(&self, stream: Stream) -> Result<()>;
}

/// A group for LL operations.
pub trait LlGroupBackend: GroupBackend {
    /// A handle; local and without work on any stream.
    fn open_handle(&self, routing: Routing) -> Result<Box<dyn LlBackend>>;
}

/// A group for HT operations.
pub trait HtGroupBackend: GroupBackend {
    /// A handle: exchanges the routing over all ranks. `routing` is an error on a rank that refused its
    /// arguments, which gets it back; the others learn of it here, or from the handle's first use.
    fn open_handle(&self, routing: Result<HtRouting>, stream: Stream)
    -> Result<Box<dyn HtBackend>>;
}

/// What an HT handle is made of.
#[derive(Clone, Copy, Debug)]
pub struct HtRouting {
    /// This rank's ids.
    pub routing: Routing,
    /// int32 `[L]`, device address: gets the received tokens per local expert.
    pub counter: Option<DevPtr>,
}

/// LL operations of one handle.
pub trait LlBackend: Send + Sync {
    /// Enqueues a whole operation.
    fn run(&self, op: &LlOp, stream: Stream) -> Result<()>;
    /// Enqueues the send phase only, in `slot`, which is free and the same on all ranks.
    fn send(&self, op: &LlOp, slot: StagedSlot, stream: Stream) -> Result<()>;
    /// Enqueues the receive phase of `op`, which was sent in `slot`, after its send phase even on another stream.
    fn receive(&self, op: &LlOp, slot: StagedSlot, stream: Stream) -> Result<()>;
    /// Gives up the receive phase of `op`, which was sent in `slot`, so that the peers need not wait for it.
    fn abandon(&self, op: &LlOp, slot: StagedSlot);
}

/// HT operations of one handle.
pub trait HtBackend: Send + Sync {
    /// Enqueues a dispatch.
    fn dispatch(&self, op: &HtDispatch, stream: Stream) -> Result<()>;
    /// Enqueues a combine.
    fn combine(&self, op: &HtCombine, stream: Stream) -> Result<()>;
    /// Rows that dispatch delivers to this rank; may wait for the exchange of the routing.
    fn num_recv_tokens(&self) -> Result<usize>;
}
