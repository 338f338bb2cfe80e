//! Marks that show which captured operations run in a graph's replay.
//!
//! A captured operation begins with a kernel of one warp that writes the time to a word of host memory, and ends with
//! one that writes zero. So checking takes only a read of memory, not a driver call that a busy device could block.
//! Copies instead of these kernels took more than three times as long (`docs/development/host-time.md`).

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

/// The marks of one transport.
pub fn new_replay_marks(context: &Arc<Context>, places: usize) -> Result<Option<Arc<dyn ReplayMarks>>> {
    Ok(Some(Arc::new(GraphMarks::new(context, places)?)))
}

/// The marks of a transport's operations.
struct GraphMarks {
    module: Module,
    /// Must outlive all graphs: whoever ends the communicator ensures that.
    places: HostPage<u64>,
    count: usize,
    in_graphs: GraphCount,
}

impl GraphMarks {
    /// Marks for `count` operations; none is captured yet.
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

/// Nothing waits for the driver's call of the destructor.
const NO_SYNC: c_uint = sys::CUuserObject_flags::CU_USER_OBJECT_NO_DESTRUCTOR_SYNC as c_uint;
/// The graph takes over the object's only reference.
const MOVE: c_uint = sys::CUuserObjectRetain_flags::CU_GRAPH_USER_OBJECT_MOVE as c_uint;

/// Counts captured operations; each counts until its graphs are gone.
#[derive(Debug, Default)]
pub struct GraphCount(Arc<AtomicUsize>);

impl GraphCount {
    /// Counts an operation in the graph into which `stream` is captured. Does nothing if the capture is invalidated and
    /// thus has no graph, as the next launch reports that.
    pub fn add(&self, stream: Stream) -> Result<()> {
        let Some(graph) = graph_of(stream)? else { return Ok(()) };
        let mut object = null_mut();
        // If a call fails, the graph may or may not have the object, so the operation counts forever.
        self.0.fetch_add(1, Ordering::SeqCst);
        let count = Arc::into_raw(Arc::clone(&self.0)) as *mut c_void;
        // SAFETY: writes one handle; `count` is a reference that `drop_count` drops.
        unsafe { call!(cuUserObjectCreate(&mut object, count, Some(drop_count), 1, NO_SYNC))? };
        // SAFETY: the graph is under construction and the object has one reference, which is given away.
        unsafe { call!(cuGraphRetainUserObject(graph, object, 1, MOVE)) }
    }

    /// Whether any graph with counted operations exists.
    pub fn has_any(&self) -> bool {
        self.0.load(Ordering::SeqCst) > 0
    }
}

unsafe extern "C" fn drop_count(count: *mut c_void) {
    // SAFETY: from `add`, once for each call.
    let count = unsafe { Arc::from_raw(count as *const AtomicUsize) };
    count.fetch_sub(1, Ordering::SeqCst);
}
