//! The interface of a backend. The siblings `host` and `cuda` never see each other.
//!
//! Opening a group or an HT handle is collective. Everything else is local to a rank, and operations are only enqueued.
//! A method that makes sense for one sibling only belongs inside that sibling.

pub mod bootstrap;
pub mod cuda;
pub mod detached;
pub mod device;
mod dylib;
pub mod host;
pub mod nccl;
pub mod net;
pub mod objects;
pub mod quiescence;
pub mod select;

use crate::backend::bootstrap::Bootstrap;
use crate::backend::device::{Blocks, Device};
use crate::backend::objects::GroupObjects;
use crate::error::refusal::{OfSettings, OfTensor, Role, Setting, Subject};
use crate::error::{Code, Error, Result};
use crate::model::group::{ByMode, GroupFacts};
use crate::model::handle_state::{COMPARED_WORDS, CallerBlock, HEADER_WORDS, HandleStorage, shown};
use crate::model::ops::{
    HandleForm, HtCombine, HtDispatch, LlDispatch, LlOp, Routing, RoutingCounters, StagedSlot, Stream, ViewBank,
};
use crate::model::tensor::DevPtr;
use crate::model::topology::Topology;
use crate::tuning::Shapes;
use std::sync::Arc;
use std::time::Duration;

/// What the environment decides for this rank alone.
#[derive(Clone, Debug)]
pub struct RankChoices {
    /// Deadline of any wait for another rank.
    pub timeout: Duration,
    /// Path of what was measured on this machine.
    pub tuning_file: Option<String>,
    /// The launch shapes in that file.
    pub shapes: Shapes,
    /// Whether operations' ids and weights are checked.
    pub check: bool,
    /// Whether kernels may start while those before them run.
    pub programmatic: bool,
}

/// One rank's side of an open group.
pub struct OpenGroup {
    pub common: Arc<dyn GroupBackend>,
    /// Creates the group's handles.
    pub mode: ByMode<Arc<dyn LlGroupBackend>, Arc<dyn HtGroupBackend>>,
}

/// Failures of running operations, which every call checks first.
pub trait Faults: Send + Sync {
    fn first(&self) -> Option<Error>;
}

/// A short description of a group's backend.
#[derive(Clone, Copy, Debug)]
pub struct Profile {
    pub backend: &'static str,
    /// Bytes of device memory that peers map; `None` if that grows with what operations need.
    pub window_bytes: Option<usize>,
    /// The largest grid of a kernel that waits for other ranks, in blocks; `None` if nothing is launched.
    pub most_blocks: Option<u32>,
    /// Whether the launch shapes of a tuning file are in use.
    pub tuned: bool,
    /// HT on several nodes: about how many bytes a rank sends in one pass.
    pub chunk_bytes: Option<usize>,
}

/// What groups of both modes have.
pub trait GroupBackend: Send + Sync {
    fn device(&self) -> Arc<dyn Device>;
    fn faults(&self) -> Arc<dyn Faults>;
    /// Describes this rank's side.
    fn profile(&self) -> Profile;
    fn objects(&self) -> &dyn GroupObjects;
    /// Handles created from now on take their blocks from `blocks`, on a device.
    fn take_blocks_from(&self, _blocks: Arc<dyn Blocks>) {}
    /// Allocates an LL group's views, if they need one allocation on all ranks. Collective, as [`GroupObjects::make`].
    fn make_views(&self, _stream: Stream) -> Result<()> {
        Ok(())
    }
    /// Waits for the group's operations, then releases what peers can see. Collective, unless a fault is known.
    fn close(&self, stream: Stream) -> Result<()>;
}

pub trait LlGroupBackend: Send + Sync {
    /// Creates a handle; local, enqueues nothing. Its block is in `storage`, in a caller's memory on one node only. A
    /// rank that refused its arguments gets the error in `routing` back; over several nodes its forwarders learn of it
    /// on first use. In a caller's memory the block of an equal handle serves combines until this one dispatches. A
    /// block of the library's that a graph uses serves only handles made on a stream captured into that graph.
    fn open_handle(
        self: Arc<Self>,
        routing: Result<Routing>,
        storage: HandleStorage,
        stream: Stream,
    ) -> Result<Box<dyn LlBackend>>;
}

pub trait HtGroupBackend: Send + Sync {
    /// Creates a handle: exchanges the routing over all ranks. `routing` is an error on a rank that refused its
    /// arguments, and that rank gets it back. The others learn of it in this call, or when the handle is first used.
    fn open_handle(self: Arc<Self>, routing: Result<HtRouting>, stream: Stream) -> Result<Box<dyn HtBackend>>;

    /// Bytes of a handle's block in a caller's memory; `None` if handles have no common size.
    fn block_bytes(&self, top_k: usize, form: HandleForm) -> Result<Option<usize>>;

    /// A handle over `block`, which holds the routing of an equal handle with as many tokens, or a copy of its bytes;
    /// the ids are not read. Local: does not touch the block, whose header each operation compares.
    fn reopen_handle(self: Arc<Self>, routing: Routing, block: CallerBlock) -> Result<Box<dyn HtBackend>>;
}

#[derive(Clone, Debug)]
pub struct HtRouting {
    pub routing: Routing,
    /// int32 `[L]`, device address: gets the number of tokens per local expert.
    pub counter: Option<DevPtr>,
    /// Further numbers that it reports; over several nodes at most those of `experts`.
    pub counters: RoutingCounters,
    /// Where the handle's block is.
    pub storage: HandleStorage,
}

/// Refuses a block in a caller's memory whose first `words` are not the `expected` header's.
pub fn check_header(words: &[u32], expected: &[u32; HEADER_WORDS]) -> Result<()> {
    let mut pairs = words.iter().zip(expected).take(COMPARED_WORDS).zip(0..);
    match pairs.find(|((got, expected), _)| got != expected) {
        Some(((got, expected), word)) => Err(foreign_state(word, *got, *expected)),
        None => Ok(()),
    }
}

/// The failure of an operation whose block, in a caller's memory, belongs to another kind of handle or holds none: word
/// `word` of its header is `got`.
pub fn foreign_state(word: u32, got: u32, expected: u32) -> Error {
    let text = "the handle's memory holds no routing of a handle like this one";
    Error::new(Code::InvalidUsage, text).got(shown(word, got), shown(word, expected))
}

/// The refusal of a tensor that has `got` of the `needed` rows: silently dropping tokens would be worse. Tensors that
/// end at the group's `bound`, if it is not 0, are as long as they may be.
pub fn too_few_rows(role: Role, (got, needed): (usize, usize), bound: usize) -> Error {
    let refused = match got == bound && bound > 0 {
        true => Error::usage(Subject::Setting(Setting::RecvRows), OfSettings::HoldsAllReceived),
        false => Error::usage(Subject::Size(role, 0), OfTensor::HoldsAllReceived),
    };
    refused.got(got, format_args!("{needed} or more"))
}

/// Refuses a question that only the handle that was routed can answer.
pub fn opened_again() -> Error {
    Error::new(Code::InvalidUsage, "the number of rows is known where the handle was routed")
}

/// The end of a wait for the routing of a handle, in which ranks `missing` sent nothing, if known.
pub fn not_exchanged(waited: Duration, missing: &[usize]) -> Error {
    let of = if missing.is_empty() { String::new() } else { format!(", without word of ranks {missing:?}") };
    let text = format!("the handle's routing was not exchanged within {} ms{of}", waited.as_millis());
    Error::new(Code::RemoteError, text)
}

/// LL operations of one handle.
pub trait LlBackend: Send + Sync {
    /// The address of the view in `bank` for a rank-major dispatch `op`, the same in each such call; `None` before
    /// [`GroupBackend::make_views`].
    fn view(&self, op: &LlDispatch, staged: bool, bank: ViewBank) -> Result<Option<DevPtr>>;
    /// Enqueues a whole operation.
    fn run(&self, op: &LlOp, stream: Stream) -> Result<()>;
    /// Enqueues only the send phase, in `slot`, which is free and the same on all ranks.
    fn send(&self, op: &LlOp, slot: StagedSlot, stream: Stream) -> Result<()>;
    /// Enqueues the receive phase of `op`, which was sent in `slot`. It runs after the send phase, on any stream.
    fn receive(&self, op: &LlOp, slot: StagedSlot, stream: Stream) -> Result<()>;
    /// Gives up the receive phase of `op`, which was sent in `slot`, so that peers do not wait for it.
    fn abandon(&self, op: &LlOp, slot: StagedSlot);
}

/// HT operations of one handle.
pub trait HtBackend: Send + Sync {
    fn dispatch(&self, op: &HtDispatch, stream: Stream) -> Result<()>;
    fn combine(&self, op: &HtCombine, stream: Stream) -> Result<()>;
    /// Enqueues adding the rows of each local expert to `totals`, int64 `[L]`, behind a dispatch.
    fn add_counts(&self, totals: DevPtr, stream: Stream) -> Result<()>;
    /// The rows that dispatch delivers to this rank; none if the routing exchange does not end in time. An error on a
    /// reopened handle, whose number only the device knows.
    fn num_recv_tokens(&self, within: Duration) -> Result<Option<usize>>;
    /// The same for the routing in the handle's block at that point of `stream`, which may be another than its own: a
    /// caller may have replaced it. `None` if it is no routing of such a handle, as an operation will find.
    fn num_recv_tokens_in_block(&self, _stream: Stream) -> Result<Option<usize>> {
        self.num_recv_tokens(Duration::MAX)
    }
}

/// A device that groups can be opened on.
pub trait Platform {
    fn device(&self) -> Arc<dyn Device>;
    /// Opens a group in the mode of the facts, for ranks on these nodes. Collective: every rank gets a group, or every
    /// rank an error.
    fn open(
        &self,
        facts: GroupFacts,
        topology: Topology,
        bootstrap: Bootstrap,
        choices: &RankChoices,
        stream: Stream,
    ) -> Result<OpenGroup>;
}
