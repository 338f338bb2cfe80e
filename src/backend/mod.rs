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
use crate::backend::net::two_sided::replays::ReplayMarks;
use crate::backend::objects::GroupObjects;
use crate::error::{Code, Error, Result};
use crate::model::group::{ByMode, GroupFacts, RankChoices};
use crate::model::handle_state::{COMPARED_WORDS, GivenBlock, HEADER_WORDS, HandleHome};
use crate::model::ops::{
    HandleForm, HtCombine, HtDispatch, LlDispatch, LlOp, Routing, RoutingCounters, StagedSlot, Stream, ViewBank,
};
use crate::model::tensor::DevPtr;
use crate::model::topology::Topology;
use std::sync::Arc;
use std::time::Duration;

/// One rank's side of an open group.
pub struct OpenGroup {
    pub common: Arc<dyn GroupBackend>,
    /// What makes their handles.
    pub mode: ByMode<Arc<dyn LlGroupBackend>, Arc<dyn HtGroupBackend>>,
}

/// The failures of operations while they run. Every call looks here first.
pub trait Faults: Send + Sync {
    fn first(&self) -> Option<Error>;
}

/// A group's backend in a few words.
#[derive(Clone, Copy, Debug)]
pub struct Profile {
    pub backend: &'static str,
    /// Bytes of the device that peers map; `None` if they follow what operations need.
    pub window_bytes: Option<usize>,
    /// The most blocks of a kernel that waits for other ranks; `None` if nothing is launched.
    pub most_blocks: Option<u32>,
    /// Whether the launch shapes of a tuning file are in use.
    pub tuned: bool,
    /// HT on several nodes: about how many bytes a rank sends in one pass.
    pub chunk_bytes: Option<usize>,
}

/// What groups have in both modes.
pub trait GroupBackend: Send + Sync {
    fn device(&self) -> Arc<dyn Device>;
    fn faults(&self) -> Arc<dyn Faults>;
    /// What is worth telling about this rank's side.
    fn profile(&self) -> Profile;
    fn objects(&self) -> &dyn GroupObjects;
    /// Handles that are made from now on have their blocks from there, on a device.
    fn take_blocks_from(&self, _blocks: Arc<dyn Blocks>) {}
    /// Makes the memory of an LL group's views, where it is one of all ranks. Collective, as [`GroupObjects::make`].
    fn make_views(&self, _stream: Stream) -> Result<()> {
        Ok(())
    }
    /// Waits for the group's operations, then releases what peers can see. Collective unless a fault is known.
    fn close(&self, stream: Stream) -> Result<()>;
}

pub trait LlGroupBackend: Send + Sync {
    /// Creates a handle whose block is in `home`, a caller's memory on one node only; local, and enqueues no work.
    /// `routing` is an error on a rank that refused its arguments, and that rank gets it back. Over several nodes the
    /// ranks that forward for it learn of that from the handle's first use. In a caller's memory the block of an equal handle serves combines before this one dispatches. A block of the library's that a graph uses
    /// serves no handle but those made on a stream while that graph is captured there.
    fn open_handle(
        self: Arc<Self>,
        routing: Result<Routing>,
        home: HandleHome,
        stream: Stream,
    ) -> Result<Box<dyn LlBackend>>;
}

pub trait HtGroupBackend: Send + Sync {
    /// Creates a handle: exchanges the routing over all ranks. `routing` is an error on a rank that refused its
    /// arguments, and that rank gets it back. The others learn of it from this call, or from the handle's first use.
    fn open_handle(self: Arc<Self>, routing: Result<HtRouting>, stream: Stream) -> Result<Box<dyn HtBackend>>;

    /// Bytes of a handle's block in a caller's memory; `None` if handles have no common size.
    fn block_bytes(&self, top_k: usize, form: HandleForm) -> Result<Option<usize>>;

    /// A handle over `block`, for a routing of so many tokens that an equal one has stored there, or its bytes; the ids are
    /// not looked at. Local, enqueues no work and does not touch the block: each operation compares its header.
    fn reopen_handle(self: Arc<Self>, routing: Routing, block: GivenBlock) -> Result<Box<dyn HtBackend>>;
}

#[derive(Clone, Debug)]
pub struct HtRouting {
    pub routing: Routing,
    /// int32 `[L]`, device address: receives the number of tokens per local expert.
    pub counter: Option<DevPtr>,
    /// What it tells beside that; over several nodes the numbers of experts at most.
    pub counters: RoutingCounters,
    /// Where the handle's block is.
    pub home: HandleHome,
}

/// Refuses a block, in a caller's memory, whose first `words` are not those of the `expected` header.
pub fn check_header(words: &[u32], expected: &[u32; HEADER_WORDS]) -> Result<()> {
    let mut pairs = words.iter().zip(expected).take(COMPARED_WORDS).zip(0..);
    match pairs.find(|((got, expected), _)| got != expected) {
        Some(((got, expected), word)) => Err(foreign_state(word, *got, *expected)),
        None => Ok(()),
    }
}

/// The failure of an operation whose handle's block, in a caller's memory, is of another handle, or none: word `word` of
/// its header is `got`.
pub fn foreign_state(word: u32, got: u32, expected: u32) -> Error {
    let text = "the handle's memory holds no routing of a handle like this one";
    let shown = |value: u32| format!("word {word} {value:#x}");
    Error::new(Code::InvalidUsage, text).got(shown(got), shown(expected))
}

/// The refusal of a question that only the handle can answer that was routed.
pub fn opened_again() -> Error {
    Error::new(Code::InvalidUsage, "the number of rows is known where the handle was routed")
}

/// LL operations of one handle.
pub trait LlBackend: Send + Sync {
    /// The address of `bank`, where a rank-major dispatch leaves the rows of its `op`; the same for each such call.
    /// `None` before [`GroupBackend::make_views`].
    fn view(&self, op: &LlDispatch, staged: bool, bank: ViewBank) -> Result<Option<DevPtr>>;
    /// Enqueues a whole operation.
    fn run(&self, op: &LlOp, stream: Stream) -> Result<()>;
    /// Enqueues only the send phase, in `slot`, which is free and the same on all ranks.
    fn send(&self, op: &LlOp, slot: StagedSlot, stream: Stream) -> Result<()>;
    /// Enqueues the receive phase of `op`, which was sent in `slot`. It runs after the send phase, on any stream.
    fn receive(&self, op: &LlOp, slot: StagedSlot, stream: Stream) -> Result<()>;
    /// Gives up the receive phase of `op`, which was sent in `slot`, so that peers need not wait for it.
    fn abandon(&self, op: &LlOp, slot: StagedSlot);
    /// Enqueues that `counts`, int32 `[L]`, are added to `totals`, int64 `[L]`, behind the dispatch that delivers them.
    fn add_counts(&self, counts: DevPtr, totals: DevPtr, stream: Stream) -> Result<()>;
}

/// HT operations of one handle.
pub trait HtBackend: Send + Sync {
    fn dispatch(&self, op: &HtDispatch, stream: Stream) -> Result<()>;
    fn combine(&self, op: &HtCombine, stream: Stream) -> Result<()>;
    /// Enqueues that the rows of each local expert are added to `totals`, int64 `[L]`, behind a dispatch.
    fn add_counts(&self, totals: DevPtr, stream: Stream) -> Result<()>;
    /// Number of rows that dispatch delivers to this rank; none if the routing exchange does not end within that time. An
    /// error on a handle that was opened again: its number is on the device alone.
    fn num_recv_tokens(&self, within: Duration) -> Result<Option<usize>>;
    /// The same of the routing that lies in the handle's block when `stream` comes there, which need not be its own: a
    /// caller may have put another one there. `None` if that is no routing of such a handle, as an operation will find.
    fn num_recv_tokens_in_block(&self, _stream: Stream) -> Result<Option<usize>> {
        self.num_recv_tokens(Duration::MAX)
    }
}

/// A device that groups can be opened on.
pub trait Platform {
    fn device(&self) -> Arc<dyn Device>;
    /// Marks with so many places for operations of NCCL's two-sided network in graphs; `None` on a device without graphs.
    fn new_replay_marks(&self, _places: usize) -> Result<Option<Arc<dyn ReplayMarks>>> {
        Ok(None)
    }
    /// Opens a group in the mode of the facts, for ranks on these nodes. Collective: every rank
    /// gets a group, or every rank an error.
    fn open(
        &self,
        facts: GroupFacts,
        topology: Topology,
        bootstrap: Bootstrap,
        choices: &RankChoices,
        stream: Stream,
    ) -> Result<OpenGroup>;
}
