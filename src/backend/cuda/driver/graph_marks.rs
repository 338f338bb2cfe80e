//! Marks that operations in graphs leave in every replay.
//!
//! An operation begins with a kernel of one warp, which writes the time to a place in host memory, and ends with one
//! that writes zero. So a look is a read of memory: no call of the driver that a busy device could hold up. Copies of
//! words instead of kernels took more than three times as long (`docs/development/host-time.md`).

use crate::backend::cuda::driver::context::Context;
use crate::backend::cuda::driver::function::LaunchShape;
use crate::backend::cuda::driver::graph_count::GraphCount;
use crate::backend::cuda::driver::memory::HostPage;
use crate::backend::cuda::driver::module::Module;
use crate::backend::cuda::kernels;
use crate::backend::cuda::params::common::{REPLAY_MARK_THREADS, ReplayMarkParams};
use crate::backend::net::two_sided::replays::ReplayMarks;
use crate::error::{Error, Result};
use crate::model::ops::Stream;
use std::sync::Arc;

const SHAPE: LaunchShape = LaunchShape::new(1, REPLAY_MARK_THREADS);

/// Those of one transport.
pub fn new_replay_marks(context: &Arc<Context>, places: usize) -> Result<Option<Arc<dyn ReplayMarks>>> {
    Ok(Some(Arc::new(GraphMarks::new(context, places)?)))
}

/// The marks of one sequence of operations.
struct GraphMarks {
    module: Module,
    /// Who ends the communicator keeps them until no graph is left.
    places: HostPage<u64>,
    count: usize,
    in_graphs: GraphCount,
}

impl GraphMarks {
    /// `count` places of operations that are not in graphs yet.
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
        let params = ReplayMarkParams { place: self.places.device().wrapping_add(place), begins: u32::from(begins) };
        let _entered = self.module.context().enter()?;
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
