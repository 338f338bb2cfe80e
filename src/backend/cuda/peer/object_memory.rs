//! A rank's memory of one object, which is a window of its own or part of a caller's allocation, and the peers'.

use crate::backend::cuda::driver::context::Context;
use crate::backend::cuda::driver::memory::CudaMemory;
use crate::backend::cuda::peer::window::{Window, WindowRecord};
use crate::backend::cuda::peer::windows::PeerWindows;
use crate::error::refusal::{OfMemory, Subject};
use crate::error::{Error, Result, Value};
use crate::model::ids::GroupRank;
use crate::model::node_view::NodeView;
use crate::model::tensor::DevPtr;
use std::sync::Arc;

/// Windows are whole pages of the device: what shares one with other memory would be mapped with it.
const PAGE_BYTES: usize = 2 << 20;
const OFFSET_BYTES: usize = size_of::<u64>();

/// This rank's memory of an object, and its mappings of the peers'.
pub struct ObjectMemory {
    windows: PeerWindows,
    begin: DevPtr,
}

impl ObjectMemory {
    /// Length of a record: that of the window, and where in it the memory begins.
    pub const RECORD_BYTES: usize = WindowRecord::BYTES + OFFSET_BYTES;

    /// New memory of `bytes`, with arbitrary content, and its record.
    pub fn new(memory: &Arc<CudaMemory>, bytes: usize) -> Result<(Self, Vec<u8>)> {
        let window = Window::with_any(memory, bytes.checked_next_multiple_of(PAGE_BYTES).unwrap_or(bytes))?;
        let begin = window.base();
        let record = WindowRecord::new(&window)?;
        Ok(Self::at(begin, window, &record))
    }

    /// The caller's `bytes` at `begin`, which must be in one allocation of a kind that other processes can map.
    pub fn given(context: &Arc<Context>, begin: DevPtr, bytes: usize) -> Result<(Self, Vec<u8>)> {
        let _entered = context.enter()?;
        let window = Window::given(context, begin).map_err(unmappable)?;
        let record = WindowRecord::new(&window).map_err(unmappable)?;
        let left = (window.base().0 + record.bytes()).saturating_sub(begin.0);
        if bytes > left {
            return Err(Error::argument(Subject::MemoryBytes, OfMemory::InOneAllocation)
                .got(bytes, format_args!("at most {left}")));
        }
        Ok(Self::at(begin, window, &record))
    }

    fn at(begin: DevPtr, window: Window, record: &WindowRecord) -> (Self, Vec<u8>) {
        let offset = (begin.0 - window.base().0) as u64;
        let mut record = record.to_bytes();
        record.extend(offset.to_le_bytes());
        (Self { windows: PeerWindows::new(window), begin }, record)
    }

    /// Its first byte here.
    pub fn begin(&self) -> DevPtr {
        self.begin
    }

    /// The record was sent: other ranks may map it from now on.
    pub fn publish(&mut self) {
        self.windows.publish();
    }

    /// Maps the memory of the other ranks of this node; `records` are those of all ranks of the group. Gives where it
    /// begins here, by rank of the group; 0 on other nodes. If one fails, the earlier mappings stay.
    pub fn map(&mut self, view: &NodeView, records: &[&[u8]]) -> Result<Vec<usize>> {
        let mut bases = vec![0; records.len()];
        let all = GroupRank::all(records.len()).zip(records).zip(&mut bases);
        for ((peer, record), base) in all.filter(|((peer, _), _)| view.locals.contains(peer)) {
            if peer == view.rank {
                *base = self.begin.0;
                continue;
            }
            let (record, offset) =
                record.split_last_chunk::<OFFSET_BYTES>().ok_or_else(|| Error::internal("a short record of memory"))?;
            *base = self.windows.map(view, peer, record, None)?.0 + u64::from_le_bytes(*offset) as usize;
        }
        Ok(bases)
    }

    /// Unmaps the peers' memory if the device is quiescent, and says whether none is mapped.
    pub fn unmap(&mut self) -> bool {
        self.windows.unmap()
    }

    /// As windows end.
    pub fn into_windows(self) -> PeerWindows {
        self.windows
    }
}

fn unmappable(cause: Error) -> Error {
    let expected = Value::Text("memory of cudaMalloc".to_owned());
    Error::argument(Subject::Memory, OfMemory::Mappable).found(Value::Error(cause), expected)
}
