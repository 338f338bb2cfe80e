//! The registry of all live allocations of device memory and pinned host memory.
//!
//! It knows what a pointer is, so copies with a wrong direction, stale pointers and ranges past the end are refused
//! before they do damage.

use std::collections::{BTreeMap, VecDeque};
use std::sync::OnceLock;

use parking_lot::Mutex;

use super::arena::{Region, Share};
use super::error::CudaError;
use crate::report;

/// Freed blocks whose addresses stay reserved, so that using them still faults.
const QUARANTINE: usize = 512;
/// Blocks at least this large are checked against the memory that the machine has left.
const LARGE: usize = 64 << 20;

/// What an allocation is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Memory {
    /// From `cudaMalloc` on the device with this index.
    Device(usize),
    /// From `cudaHostAlloc` on the device with this index.
    Pinned(usize),
    /// The program's own pages, registered with the device with this index.
    Registered(usize),
}

/// What a range of addresses is to the runtime.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Range {
    /// Inside one live allocation.
    Inside(Memory),
    /// Unknown: ordinary host memory.
    Pageable,
    /// Leaves the allocation it starts in, or lies in freed memory.
    Invalid,
}

struct Block {
    size: usize,
    memory: Memory,
    /// `None` for registered pages.
    region: Option<Region>,
}

struct Heap {
    live: BTreeMap<usize, Block>,
    freed: VecDeque<Region>,
}

static HEAP: Mutex<Heap> = Mutex::new(Heap { live: BTreeMap::new(), freed: VecDeque::new() });

/// Bytes that were available, and total bytes, at the process's first query.
static CAPACITY: OnceLock<(usize, usize)> = OnceLock::new();

/// Allocates; zero bytes give the address 0.
pub(crate) fn allocate(size: usize, memory: Memory) -> Result<usize, CudaError> {
    if size == 0 {
        return Ok(0);
    }
    if size >= LARGE && size > memory_info().0 {
        return Err(CudaError::MemoryAllocation);
    }
    let region = Region::map(size).ok_or(CudaError::MemoryAllocation)?;
    let address = region.address();
    let block = Block { size, memory, region: Some(region) };
    HEAP.lock().live.insert(address, block);
    Ok(address)
}

/// Registers the program's own pages as pinned memory of a device, until they are released or the device is reset.
pub(crate) fn register(address: usize, size: usize, device: usize) -> Result<(), CudaError> {
    let memory = Memory::Registered(device);
    let mut heap = HEAP.lock();
    let is_free = |end| heap.live.range(..end).next_back().is_none_or(|(start, block)| start + block.size <= address);
    if size == 0 || !address.checked_add(size).is_some_and(is_free) {
        return Err(CudaError::InvalidValue);
    }
    heap.live.insert(address, Block { size, memory, region: None });
    Ok(())
}

/// What kind of allocation starts at an address, if one does.
pub(crate) fn starts_at(address: usize) -> Option<Memory> {
    HEAP.lock().live.get(&address).map(|block| block.memory)
}

/// The block of device memory that contains an address: its begin and size.
pub(crate) fn block_of(address: usize) -> Option<(usize, usize)> {
    let heap = HEAP.lock();
    let (begin, block) = heap.live.range(..=address).next_back()?;
    let is_inside = address - begin < block.size && matches!(block.memory, Memory::Device(_));
    is_inside.then_some((*begin, block.size))
}

/// Lets other processes map the block of device memory that begins at an address.
pub(crate) fn share(begin: usize) -> Option<Share> {
    HEAP.lock().live.get_mut(&begin)?.region.as_mut()?.share()
}

/// Frees the allocation that starts at an address; reports writes outside of it.
pub(crate) fn release(address: usize) -> Result<(), CudaError> {
    let mut heap = HEAP.lock();
    let Block { size, region, .. } = heap.live.remove(&address).ok_or(CudaError::InvalidValue)?;
    let Some(mut region) = region else { return Ok(()) };
    let intact = region.surroundings_intact();
    region.seal();
    heap.freed.push_back(region);
    if heap.freed.len() > QUARANTINE {
        heap.freed.pop_front();
    }
    if !intact {
        report::failure(&format!("memory next to the {size}-byte block {address:#x} was written"));
        return Err(CudaError::IllegalAddress);
    }
    Ok(())
}

/// Frees everything that belongs to a device.
pub(crate) fn release_device(device: usize) {
    let addresses: Vec<usize> = {
        let heap = HEAP.lock();
        let owned = heap.live.iter().filter(|(_, block)| block.memory.device() == device);
        owned.map(|(address, _)| *address).collect()
    };
    for address in addresses {
        // `release` itself reports damage; a reset has nobody else to tell.
        let _ = release(address);
    }
}

/// Classifies `len` bytes from an address.
pub(crate) fn classify(address: usize, len: usize) -> Range {
    let heap = HEAP.lock();
    let candidate = heap.live.range(..=address).next_back();
    if let Some((start, block)) = candidate {
        let offset = address - start;
        if offset < block.size {
            let fits = len <= block.size - offset;
            return if fits { Range::Inside(block.memory) } else { Range::Invalid };
        }
        if block.region.as_ref().is_some_and(|it| it.covers(address)) {
            return Range::Invalid;
        }
    }
    if heap.freed.iter().any(|region| region.covers(address)) { Range::Invalid } else { Range::Pageable }
}

/// Bytes available on `device`, and total bytes, as if it had the machine's memory for itself: allocations of other
/// processes do not show, so that differences are exact.
pub(crate) fn device_info(device: usize) -> (usize, usize) {
    let (capacity, total) = *CAPACITY.get_or_init(memory_info);
    let heap = HEAP.lock();
    let of_device = |block: &&Block| block.memory == Memory::Device(device);
    let taken: usize = heap.live.values().filter(of_device).map(|it| it.size).sum();
    (capacity.saturating_sub(taken), total)
}

/// Bytes available and bytes in total, of the whole machine.
pub(crate) fn memory_info() -> (usize, usize) {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    (meminfo_field(&text, "MemAvailable:"), meminfo_field(&text, "MemTotal:"))
}

fn meminfo_field(text: &str, name: &str) -> usize {
    let value = text.lines().find_map(|line| line.strip_prefix(name));
    let kilobytes = value.and_then(|rest| rest.split_whitespace().next()?.parse::<usize>().ok());
    // If the machine does not say, allocations must not all fail.
    kilobytes.map_or(usize::MAX, |kilobytes| kilobytes << 10)
}

impl Memory {
    /// The device that was current when the memory was allocated.
    pub(crate) fn device(self) -> usize {
        match self {
            Self::Device(device) | Self::Pinned(device) | Self::Registered(device) => device,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn registered_pages_stay() {
        let pages = vec![7u8; 100];
        let address = pages.as_ptr() as usize;
        for _ in 0..2 {
            assert_eq!(register(address, 100, 905), Ok(()));
            assert!(register(address + 50, 100, 905).is_err());
            assert!(register(address + 200, usize::MAX, 905).is_err());
            assert_eq!(classify(address + 1, 99), Range::Inside(Memory::Registered(905)));
            release_device(905);
            assert_eq!(classify(address, 1), Range::Pageable);
            assert_eq!(pages, [7; 100]);
        }
    }

    #[test]
    fn a_device_has_less_by_what_it_has_allocated() {
        let (before, total) = device_info(903);
        let blocks = [Memory::Device(903), Memory::Device(904), Memory::Pinned(903)];
        let blocks = blocks.map(|memory| allocate(1000, memory).expect("memory"));
        assert_eq!(device_info(903), (before - 1000, total));
        for block in blocks {
            assert_eq!(release(block), Ok(()));
        }
        assert_eq!(device_info(903), (before, total));
    }

    #[test]
    fn meminfo_is_read_in_bytes() {
        let text = "MemTotal:   8 kB\nMemAvailable:  2 kB\n";
        assert_eq!(meminfo_field(text, "MemAvailable:"), 2048);
        assert_eq!(meminfo_field(text, "MemTotal:"), 8192);
        assert_eq!(meminfo_field("", "MemTotal:"), usize::MAX);
    }
}
