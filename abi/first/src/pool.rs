//! Two functions for allocators of others, such as PyTorch's pluggable one, that cut pieces from memory that peers map.
#![allow(unsafe_code)]

use crate::objects::{GROUPS, GUARD, Subject};
use crate::types::{cudaStream_t, ncclEpGroup_t, ncclResult_t};
use nccl_ep_core::error::refusal::{self, OfMemory};
use nccl_ep_core::error::{Error, Result};
use nccl_ep_core::fork;
use nccl_ep_core::model::tensor::DevPtr;
use parking_lot::Mutex;
use range_alloc::RangeAllocator;
use std::cell::Cell;
use std::collections::BTreeMap;
use std::ffi::{c_int, c_void};
use std::ptr::null_mut;

/// Bytes of a group's memory that pieces are cut from.
struct Pool {
    group: usize,
    begin: usize,
    bytes: usize,
    free: RangeAllocator<usize>,
    /// Where the pieces end that were cut, by where they begin.
    taken: BTreeMap<usize, usize>,
}

/// What pieces are multiples of, as torch's allocator has it.
const ALIGN: usize = 512;

static POOLS: Mutex<Vec<Pool>> = Mutex::new(Vec::new());

thread_local! {
    /// Where the calling thread's pool begins; 0 for none.
    static USED: Cell<usize> = const { Cell::new(0) };
}

impl Pool {
    fn new(group: usize, begin: usize, bytes: usize) -> Self {
        Self { group, begin, bytes, free: RangeAllocator::new(begin..begin + bytes), taken: BTreeMap::new() }
    }

    /// Where `bytes` begin that are the caller's from now on.
    fn take(&mut self, bytes: usize) -> Option<usize> {
        let bytes = bytes.max(1).checked_next_multiple_of(ALIGN).filter(|&it| it <= self.bytes)?;
        let piece = self.free.allocate_range(bytes).ok()?;
        self.taken.insert(piece.start, piece.end);
        Some(piece.start)
    }

    /// Takes back the piece that begins at `begin`; any other place has none.
    fn give(&mut self, begin: usize) {
        if let Some(end) = self.taken.remove(&begin) {
            self.free.free_range(begin..end);
        }
    }

    /// Whether the group still has the memory.
    fn is_alive(&self) -> bool {
        has(self.group, self.begin, self.bytes).is_ok()
    }
}

/// Refuses bytes that are not wholly in one piece of the group's memory.
fn has(group: usize, begin: usize, bytes: usize) -> Result<()> {
    let outside = || Error::argument(refusal::Subject::Memory, OfMemory::OfGroup);
    let found = GROUPS.resolve(group)?.session.memory_at(DevPtr(begin))?;
    let left = (found.range.begin + found.range.bytes) - begin as u64;
    if bytes as u64 > left {
        return Err(outside().got(format_args!("{bytes} bytes"), format_args!("at most {left}")));
    }
    Ok(())
}

/// Lets `ncclEpPoolAlloc` of the calling thread cut from `bytes` at `ptr`, which nothing else uses.
/// What was cut there before, on any thread, stays. Local, and enqueues nothing.
///
/// @param ep_group  the group
/// @param ptr       in memory of `ncclEpMemAlloc` or `ncclEpMemRegister`, a multiple of 512; NULL:
///                  no memory from now on
/// @param bytes     how many, wholly there; as before while pieces that were cut there are in use
///
/// Returns `ncclInvalidArgument` for a NULL or dead group, for bytes that are not in its memory, for
/// others than those from which pieces in use were cut, or a `ptr` that is no such multiple.
///
/// # Safety
/// None: foreign addresses are recognised.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclEpPoolUse(ep_group: ncclEpGroup_t, ptr: *mut c_void, bytes: usize) -> ncclResult_t {
    let (group, begin) = (ep_group as usize, ptr as usize);
    GUARD.run("ncclEpPoolUse", Subject::Group(group), || {
        GROUPS.resolve(group)?;
        if !ptr.is_null() {
            has(group, begin, bytes)?;
            if begin % ALIGN != 0 {
                return Err(Error::argument(refusal::Subject::Memory, OfMemory::OfPieces));
            }
            let mut pools = POOLS.lock();
            // Other bytes replace what nobody uses any more.
            pools.retain(|it| it.is_alive() && (it.begin != begin || it.bytes == bytes || !it.taken.is_empty()));
            match pools.iter().find(|it| it.begin == begin && it.group == group) {
                None => pools.push(Pool::new(group, begin, bytes)),
                Some(pool) if pool.bytes == bytes => {}
                Some(pool) => {
                    return Err(Error::argument(refusal::Subject::MemoryBytes, OfMemory::AsCut).got(bytes, pool.bytes));
                }
            }
        }
        USED.set(begin);
        Ok(())
    })
}

/// Cuts `bytes` from the memory of the calling thread's last `ncclEpPoolUse`. With `ncclEpPoolFree`
/// for `torch.cuda.memory.CUDAPluggableAllocator`.
///
/// Returns NULL if it has no such memory, or no room there.
///
/// # Safety
/// None.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclEpPoolAlloc(bytes: usize, device: c_int, stream: cudaStream_t) -> *mut c_void {
    let _ = (device, stream); // Torch's order of streams needs neither.
    let used = USED.get();
    if fork::is_child() || used == 0 {
        return null_mut();
    }
    let mut pools = POOLS.lock();
    let pool = pools.iter_mut().find(|it| it.begin == used && it.is_alive());
    let piece = pool.and_then(|it| it.take(bytes));
    piece.map_or(null_mut(), |it| it as *mut c_void)
}

/// Takes back what `ncclEpPoolAlloc` has cut, on any thread, before or after the group is destroyed.
///
/// # Safety
/// None: a foreign address is ignored.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclEpPoolFree(ptr: *mut c_void, bytes: usize, device: c_int, stream: cudaStream_t) {
    let _ = (bytes, device, stream);
    if fork::is_child() {
        return;
    }
    let address = ptr as usize;
    let mut pools = POOLS.lock();
    let owns = |it: &&mut Pool| (it.begin..it.begin + it.bytes).contains(&address);
    if let Some(pool) = pools.iter_mut().find(owns) {
        pool.give(address);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_apart_and_come_back_once() {
        let mut pool = Pool::new(0, ALIGN, 3 * ALIGN + 100);
        let pieces = [0, 1, ALIGN].map(|bytes| pool.take(bytes).unwrap());
        assert_eq!(pieces, [1, 2, 3].map(|it| it * ALIGN));
        assert_eq!(pool.take(1), None, "what is left is less than a piece");
        for begin in [2 * ALIGN, 2 * ALIGN, 7, ALIGN] {
            pool.give(begin);
        }
        assert_eq!(pool.take(2 * ALIGN), Some(ALIGN));
        assert_eq!(pool.take(usize::MAX), None);
    }
}
