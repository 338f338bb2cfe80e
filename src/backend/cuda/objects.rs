//! Objects of a group on GPUs.

use crate::backend::cuda::driver::memory::CudaMemory;
use crate::backend::cuda::group_context::GroupContext;
use crate::backend::cuda::peer::object_memory::ObjectMemory;
use crate::backend::device::Device;
use crate::backend::objects::group::Objects;
use crate::backend::objects::{Mapper, Wanted};
use crate::error::refusal::{InSequence, OfMemory, Subject};
use crate::error::{Code, Error, Result};
use crate::model::node_view::NodeView;
use crate::model::ops::Stream;
use crate::model::tensor::DevPtr;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long the unmapping waits for a quiescent device: not until the deadline, as another thread's exchange may be
/// there whose peers wait for this rank.
const PATIENCE: Duration = Duration::from_millis(100);
const PAUSE: Duration = Duration::from_micros(50);

/// Maps memory of this node's ranks.
pub(super) struct CudaMapper {
    memory: Arc<CudaMemory>,
    group: Arc<GroupContext>,
    view: Arc<NodeView>,
    timeout: Duration,
}

/// Unmaps what `mapped` has of the peers' memory, and says whether nothing is left.
pub(super) fn unmap(mapped: &mut ObjectMemory) -> bool {
    let start = Instant::now();
    while !mapped.unmap() {
        if start.elapsed() > PATIENCE {
            return false;
        }
        std::thread::sleep(PAUSE);
    }
    true
}

impl CudaMapper {
    pub(super) fn objects(
        memory: &Arc<CudaMemory>,
        group: &Arc<GroupContext>,
        view: &Arc<NodeView>,
        timeout: Duration,
    ) -> Objects<Self> {
        let (memory, view) = (Arc::clone(memory), Arc::clone(view));
        let mapper = Self { memory, group: Arc::clone(group), view, timeout };
        Objects::new(mapper, Arc::clone(group.objects().recognised()))
    }
}

impl Mapper for CudaMapper {
    type Mapped = ObjectMemory;
    const RECORD_BYTES: usize = ObjectMemory::RECORD_BYTES;

    fn check(&self) -> Result<()> {
        let captured = |stream| self.memory.is_captured(stream);
        if captured(Stream::DEFAULT)? || captured(Stream::PER_THREAD)? {
            return Err(Error::usage(Subject::Group, InSequence::NoCaptureOfMemory));
        }
        Ok(())
    }

    fn take(&self, wanted: Wanted) -> Result<(ObjectMemory, Vec<u8>)> {
        match wanted {
            Wanted::New(bytes) => ObjectMemory::new(&self.memory, bytes),
            Wanted::Given(data, bytes) => ObjectMemory::given(self.memory.context(), data, bytes),
        }
    }

    fn begin(mapped: &ObjectMemory) -> DevPtr {
        mapped.begin()
    }

    fn publish(mapped: &mut ObjectMemory) {
        mapped.publish();
    }

    fn map(&self, mapped: &mut ObjectMemory, records: &[&[u8]]) -> Result<Vec<usize>> {
        mapped.map(&self.view, records, self.timeout)
    }

    fn show(&self, object: u32, bases: &[usize]) -> Result<()> {
        let bases = self.view.locals.iter().map(|rank| bases.get(rank.index()).copied().unwrap_or_default());
        self.group.objects().write(object, &bases.collect::<Vec<_>>())
    }

    fn check_graphs(&self) -> Result<()> {
        if self.memory.context().has_captured() {
            return Err(Error::usage(Subject::Memory, OfMemory::NotInGraphs));
        }
        Ok(())
    }

    fn rest(&self, left: Duration) -> Result<()> {
        let start = Instant::now();
        while !self.memory.context().has_rested()? {
            if start.elapsed() > left {
                let text = format!("its operations have not ended within {} ms", left.as_millis());
                return Err(Error::new(Code::RemoteError, text));
            }
            std::thread::sleep(PAUSE);
        }
        Ok(())
    }

    fn fallbacks(&self) -> u64 {
        self.group.objects().fallbacks()
    }

    fn unmap(&self, mapped: &mut ObjectMemory) -> bool {
        unmap(mapped)
    }

    fn give_back(mapped: ObjectMemory, all_unmapped: bool) {
        mapped.into_windows().give_back(all_unmapped);
    }
}
