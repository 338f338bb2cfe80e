//! Marks that captured operations leave in every replay.
//!
//! An operation begins with a kernel of one warp that writes the time to a place in host memory, and ends with one that
//! writes zero. So looking is a read of memory, not a driver call that a busy device could block. Copies of words took
//! more than three times as long as these kernels (`docs/development/host-time.md`).

use crate::backend::cuda::driver::api::call;
use crate::backend::cuda::driver::context::Context;
use crate::backend::cuda::driver::memory::HostPage;
use crate::backend::cuda::driver::module::Module;
use crate::backend::cuda::driver::stream::graph_of;
use crate::backend::cuda::kernels;
use crate::backend::cuda::kernels::LaunchShape;
use crate::backend::cuda::params::common::{REPLAY_MARK_THREADS, ReplayMarkParams};
use crate::backend::net::two_sided::replays::ReplayMarks;
use crate::error::{Error, Result};
use crate::model::ops::Stream;
use cudarc::driver::sys;
use std::ffi::{c_uint, c_void};
use std::ptr::null_mut;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

const SHAPE: LaunchShape = LaunchShape::new(1, REPLAY_MARK_THREADS);

/// Those of one transport.
pub fn new_replay_marks(context: &Arc<Context>, places: usize) -> Result<Option<Arc<dyn ReplayMarks>>> {
    Ok(Some(Arc::new(GraphMarks::new(context, places)?)))
}

/// The marks of one sequence of operations.
struct GraphMarks {
    module: Module,
    /// Whoever ends the communicator keeps them until no graph is left.
    places: HostPage<u64>,
    count: usize,
    in_graphs: GraphCount,
}

impl GraphMarks {
    /// `count` places, without captured operations yet.
    fn new(context: &Arc<Context>, count: usize) -> Result<Self> {
        Ok(Self {
            module: Module::load(context)?,
            places: HostPage::new(context, count)?,
            count,
            in_graphs: GraphCount::default(),
        })
    }

    fn capture(&self, place: usize, begins: bool, stream: Stream) -> Result<()> {
        if place >= self.count {
            return Err(Error::internal(format!("no place {place} for a mark")));
        }
        let params = ReplayMarkParams { began_at: self.places.device().wrapping_add(place), begins: u32::from(begins) };
        let _entered = self.module.context.enter()?;
        if begins {
            self.in_graphs.add(stream)?;
        }
        self.module.launch_on(kernels::replay_mark(), SHAPE, &params, stream)
    }
}

impl ReplayMarks for GraphMarks {
    fn begin(&self, place: usize, stream: Stream) -> Result<()> {
        self.capture(place, true, stream)
    }

    fn end(&self, place: usize, stream: Stream) -> Result<()> {
        self.capture(place, false, stream)
    }

    fn are_in_graphs(&self) -> bool {
        self.in_graphs.has_any()
    }

    fn began(&self, place: usize) -> u64 {
        self.places.read(place).unwrap_or_default()
    }
}

/// Nobody waits for the driver to call the destructor.
const NO_SYNC: c_uint = sys::CUuserObject_flags::CU_USER_OBJECT_NO_DESTRUCTOR_SYNC as c_uint;
/// The graph takes over the only reference.
const MOVE: c_uint = sys::CUuserObjectRetain_flags::CU_GRAPH_USER_OBJECT_MOVE as c_uint;

/// A number of captured operations, each of which counts until its graphs are gone.
#[derive(Debug, Default)]
pub struct GraphCount(Arc<AtomicUsize>);

impl GraphCount {
    /// Counts an operation in the graph that `stream` is captured into. An invalidated capture has no graph; the next
    /// launch reports that.
    pub fn add(&self, stream: Stream) -> Result<()> {
        let Some(graph) = graph_of(stream)? else { return Ok(()) };
        let mut object = null_mut();
        // If a call fails, it is unknown what the graph holds, so the operation counts forever.
        self.0.fetch_add(1, Ordering::SeqCst);
        let count = Arc::into_raw(Arc::clone(&self.0)) as *mut c_void;
        // SAFETY: writes one handle; `count` is a reference that `let_go` drops.
        unsafe { call!(cuUserObjectCreate(&mut object, count, Some(let_go), 1, NO_SYNC))? };
        // SAFETY: the graph is under construction and the object has one reference, which is given away.
        unsafe { call!(cuGraphRetainUserObject(graph, object, 1, MOVE)) }
    }

    /// Whether a graph has any of them.
    pub fn has_any(&self) -> bool {
        self.0.load(Ordering::SeqCst) > 0
    }
}

unsafe extern "C" fn let_go(count: *mut c_void) {
    // SAFETY: from `add`, once for each call.
    let count = unsafe { Arc::from_raw(count as *const AtomicUsize) };
    count.fetch_sub(1, Ordering::SeqCst);
}
