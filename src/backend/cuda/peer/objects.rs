//! The objects of a group as its operations see them: memory of the ranks that their peers map.

use crate::backend::cuda::driver::memory::{Buffer, CudaMemory, HostPage};
use crate::backend::device::Memory;
use crate::backend::objects::Recognised;
use crate::error::Result;
use crate::model::objects::{MAX_OBJECTS, Place};
use crate::model::tensor::DevPtr;
use once_cell::sync::OnceCell;
use std::sync::Arc;

const ADDRESS_BYTES: usize = size_of::<u64>();

/// Where tensors lie, and where kernels find the peers' memory. The table exists before any object, and a row of it
/// changes only while no operation uses its object: so graphs can use objects made after their capture.
pub struct Objects {
    memory: Arc<CudaMemory>,
    pub recognised: Arc<Recognised>,
    table: Buffer,
    fallbacks: OnceCell<HostPage<u64>>,
    /// Ranks of this node.
    ranks: usize,
}

impl Objects {
    /// No objects yet, in a group with `ranks` on this node.
    pub fn new(memory: &Arc<CudaMemory>, ranks: usize) -> Result<Self> {
        Ok(Self {
            memory: Arc::clone(memory),
            recognised: Arc::default(),
            table: Buffer::zeroed(memory, Self::table_bytes(ranks))?,
            fallbacks: OnceCell::new(),
            ranks,
        })
    }

    /// Device memory that the table takes.
    const fn table_bytes(ranks: usize) -> usize {
        MAX_OBJECTS * ranks * ADDRESS_BYTES
    }

    /// Where a tensor of `bytes` at `address` lies, if peers can reach it.
    pub fn place_of(&self, address: u64, bytes: u64) -> Option<Place> {
        self.recognised.place_of(address, bytes)
    }

    /// Whether the group has an object; between two given operations all ranks answer alike.
    pub fn any(&self) -> bool {
        self.recognised.any()
    }

    /// The device address of `u64 [MAX_OBJECTS][ranks]`: this rank's address of the memory that each rank of this node
    /// has for an object, by local rank; 0 if none.
    pub fn table(&self) -> u64 {
        self.table.data().0 as u64
    }

    /// Where kernels count operations that could not access this rank's tensor in place.
    pub fn fallbacks_on_device(&self) -> Result<*mut u64> {
        Ok(self.page()?.device())
    }

    /// Allocated with the first object, as an operation may be captured.
    fn page(&self) -> Result<&HostPage<u64>> {
        self.fallbacks.get_or_try_init(|| HostPage::new(&self.memory.context, 1))
    }

    /// The number of those operations.
    pub fn fallbacks(&self) -> u64 {
        self.fallbacks.get().and_then(|page| page.read(0)).unwrap_or_default()
    }

    /// Tells kernels the addresses of the ranks' memory of `object`; zeros for one that ends.
    pub fn write(&self, object: u32, bases: &[usize]) -> Result<()> {
        self.page()?;
        let row = self.ranks * ADDRESS_BYTES;
        let mut bytes: Vec<u8> = bases.iter().flat_map(|it| it.to_ne_bytes()).collect();
        bytes.resize(row, 0);
        self.memory.upload(DevPtr(self.table.data().0 + object as usize * row), &bytes)
    }
}
