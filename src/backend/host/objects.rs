//! Objects of a group on the CPU: memory of the stand-ins, in memory files that the ranks map of each other.
//!
//! Operations look tensors up there as on GPUs, but still exchange their rows by messages.
#![allow(unsafe_code)]

use crate::backend::device::Memory;
use crate::backend::host::group_state::GroupState;
use crate::backend::host::runtime::HostRuntime;
use crate::backend::host::shared_file::{self, Address, SharedBlock};
use crate::backend::objects::{Mapped, Mapper, Wanted, check_left, unmappable};
use crate::error::{Error, Result};
use crate::model::ids::GroupRank;
use crate::model::node_view::NodeView;
use crate::model::tensor::DevPtr;
use memmap2::{MmapOptions, MmapRaw};
use std::sync::Arc;
use std::time::Duration;

/// Target of the link in `/proc` of a shared allocation's descriptor.
const LINK: &str = "/memfd:ncclep_hostsim (deleted)";
const WORD: usize = size_of::<u64>();

/// Maps memory of this node's ranks.
pub struct HostMapper {
    pub runtime: HostRuntime,
    pub shared: Arc<GroupState>,
    pub view: NodeView,
}

/// A rank's memory of an object, and its mappings of the peers'.
pub struct ObjectMemory {
    begin: DevPtr,
    /// The library's, to be freed at the end.
    own: Option<HostRuntime>,
    is_published: bool,
    mappings: Vec<MmapRaw>,
}

impl ObjectMemory {
    /// The memory at `begin` in `block`, and its record.
    fn at(begin: DevPtr, own: Option<HostRuntime>, block: &SharedBlock) -> (Self, Vec<u8>) {
        let file = Address { process: std::process::id(), descriptor: block.file };
        let offset = block.offset + (begin.0 - block.begin);
        let mut record = file.to_bytes();
        record.extend((block.file_bytes as u64).to_le_bytes());
        record.extend((offset as u64).to_le_bytes());
        (Self { begin, own, is_published: false, mappings: Vec::new() }, record)
    }

    /// Maps the memory that `record` describes.
    fn map(&mut self, record: &[u8]) -> Result<usize> {
        let (file, numbers) = record.split_at_checked(Address::BYTES).unwrap_or_default();
        let [bytes, offset] = numbers.as_chunks::<WORD>().0 else {
            return Err(Error::internal("a short record of memory"));
        };
        let [bytes, offset] = [bytes, offset].map(|it| u64::from_le_bytes(*it) as usize);
        let address = Address::from_bytes(file)?;
        let file = shared_file::open(address, LINK)?;
        if offset >= bytes || bytes as u64 > shared_file::length(&file)? {
            return Err(shared_file::foreign(address));
        }
        let mapping = MmapOptions::new().len(bytes).map_raw(&file);
        let mapping = mapping.map_err(|cause| Error::system("mapping a shared window", &cause))?;
        let base = mapping.as_mut_ptr() as usize + offset;
        self.mappings.push(mapping);
        Ok(base)
    }
}

impl Drop for ObjectMemory {
    fn drop(&mut self) {
        if let Some(runtime) = self.own
            && !self.is_published
        {
            // A failure to free memory cannot be handled.
            let _ = runtime.free(self.begin);
        }
    }
}

impl Mapped for ObjectMemory {
    const RECORD_BYTES: usize = Address::BYTES + 2 * WORD;

    fn begin(&self) -> DevPtr {
        self.begin
    }

    fn publish(&mut self) {
        self.is_published = true;
    }

    fn unmap(&mut self) -> bool {
        self.mappings.clear();
        true
    }

    /// What peers still map is their own concern.
    fn give_back(mut self, _all_unmapped: bool) {
        self.is_published = false;
    }
}

impl Mapper for HostMapper {
    type Mapped = ObjectMemory;

    fn take(&self, wanted: Wanted) -> Result<(ObjectMemory, Vec<u8>)> {
        match wanted {
            Wanted::New(bytes) => {
                let begin = self.runtime.alloc(bytes)?;
                let shared = self.runtime.shared_block(begin);
                let freed = |_: &Error| drop(self.runtime.free(begin));
                let block = shared.inspect_err(freed)?;
                Ok(ObjectMemory::at(begin, Some(self.runtime), &block))
            }
            Wanted::Given(begin, bytes) => {
                let block = self.runtime.shared_block(begin).map_err(unmappable)?;
                check_left(bytes, block.begin + block.bytes - begin.0)?;
                Ok(ObjectMemory::at(begin, None, &block))
            }
        }
    }

    fn map(&self, mapped: &mut ObjectMemory, records: &[&[u8]], _left: Duration) -> Result<Vec<usize>> {
        let rank = self.view.rank;
        let base_of = |(peer, record): (GroupRank, &&[u8])| {
            if peer == rank {
                return Ok(mapped.begin.0);
            }
            if !self.view.locals.contains(&peer) {
                return Ok(0);
            }
            let base = mapped.map(record);
            base.map_err(|error| error.within(format_args!("rank {rank} cannot map rank {peer}'s window")))
        };
        GroupRank::all(records.len()).zip(records).map(base_of).collect()
    }

    fn rest(&self, left: Duration) -> Result<()> {
        self.shared.wait_for_pending(left)
    }
}
