//! Two functions for allocators of others, such as PyTorch's pluggable one, that cut pieces from memory that peers map.
#![allow(unsafe_code)]

use crate::objects::{GROUPS, on_group};
use crate::types::{cudaStream_t, ncclEpGroup_t, ncclResult_t};
use nccl_ep_core::error::refusal::{self, OfMemory};
use nccl_ep_core::error::{Error, Result};
use nccl_ep_core::fork;
use nccl_ep_core::model::tensor::DevPtr;
use parking_lot::Mutex;
use std::cell::Cell;
use std::collections::BTreeMap;
use std::ffi::{c_int, c_void};
use std::iter::once;
use std::ops::Range;
use std::ptr::null_mut;

/// Bytes of a group's memory that pieces are cut from.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Pool {
    group: usize,
    begin: usize,
    bytes: usize,
}

/// The pieces of all pools that are in use, by where they begin: where each ends, and its pool. A piece may outlive its
/// group, as torch frees some late; another group's pool over the same bytes cuts around it until then.
struct Pieces(BTreeMap<usize, (usize, Pool)>);

/// What pieces are multiples of, as torch's allocator has it.
const ALIGN: usize = 512;

static PIECES: Mutex<Pieces> = Mutex::new(Pieces(BTreeMap::new()));

thread_local! {
    /// The calling thread's.
    static USED: Cell<Option<Pool>> = const { Cell::new(None) };
}

impl Pool {
    fn range(&self) -> Range<usize> {
        self.begin..self.begin + self.bytes
    }

    /// Whether the group still has the memory.
    fn is_alive(&self) -> bool {
        has(self.group, self.begin, self.bytes).is_ok()
    }
}

impl Pieces {
    /// What is left of `pool`; where a piece reaches across its border, also a range that ends before it begins.
    fn gaps(&self, pool: &Pool) -> impl Iterator<Item = Range<usize>> {
        let Range { start, end } = pool.range();
        let before = self.0.range(..start).next_back().map_or(start, |(_, (end, _))| start.max(*end));
        let within = self.0.range(start..end);
        let begins = within.clone().map(|(&begin, _)| begin);
        let ends = within.map(|(_, (end, _))| *end);
        once(before).chain(ends).zip(begins.chain(once(end))).map(|(from, to)| from..to)
    }

    /// Where `bytes` of `pool` begin that are the caller's from now on: in the smallest gap, so that large ones last.
    fn take(&mut self, pool: &Pool, bytes: usize) -> Option<usize> {
        let bytes = bytes.max(1).checked_next_multiple_of(ALIGN)?;
        let gap = self.gaps(pool).filter(|gap| gap.len() >= bytes).min_by_key(Range::len)?;
        self.0.insert(gap.start, (gap.start + bytes, *pool));
        Some(gap.start)
    }

    /// Takes back the piece that begins at `begin`; any other place has none.
    fn give(&mut self, begin: usize) {
        self.0.remove(&begin);
    }

    /// The pool with the group and the begin of `pool`, but other bytes, that pieces in use were cut from.
    fn other(&self, pool: &Pool) -> Option<&Pool> {
        let mut pools = self.0.range(pool.begin..).map(|(_, (_, pool))| pool);
        pools.find(|it| it.group == pool.group && it.begin == pool.begin && it.bytes != pool.bytes)
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

/// Lets `ncclEpPoolAlloc` in the calling thread cut pieces from `bytes` at `ptr`, which nothing else may use. Pieces
/// that were cut there before, on any thread, stay. Local, enqueues nothing.
///
/// @param ep_group  the group
/// @param ptr       in memory of `ncclEpMemAlloc` or `ncclEpMemRegister`, a multiple of 512; NULL: no memory from now
///                  on
/// @param bytes     bytes at `ptr`, all in that memory; unchanged while pieces that were cut there are in use
///
/// Returns `ncclInvalidArgument` for a NULL or dead group, for bytes that are not in its memory or differ from those
/// that pieces in use were cut from, or for a `ptr` that is not a multiple of 512.
///
/// # Safety
/// None: foreign addresses are recognised.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclEpPoolUse(ep_group: ncclEpGroup_t, ptr: *mut c_void, bytes: usize) -> ncclResult_t {
    let (group, begin) = (ep_group as usize, ptr as usize);
    let pool = Pool { group, begin, bytes };
    on_group("ncclEpPoolUse", ep_group, |_| {
        if !ptr.is_null() {
            has(group, begin, bytes)?;
            if begin % ALIGN != 0 {
                return Err(Error::argument(refusal::Subject::Memory, OfMemory::OfPieces));
            }
            if let Some(other) = PIECES.lock().other(&pool) {
                let refused = Error::argument(refusal::Subject::MemoryBytes, OfMemory::AsCut);
                return Err(refused.got(bytes, other.bytes));
            }
        }
        USED.set((!ptr.is_null()).then_some(pool));
        Ok(())
    })
}

/// Cuts `bytes` from the memory of the calling thread's last `ncclEpPoolUse`. Together with `ncclEpPoolFree`, for
/// `torch.cuda.memory.CUDAPluggableAllocator`.
///
/// Returns NULL without such memory, or without room there.
///
/// # Safety
/// None.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclEpPoolAlloc(bytes: usize, device: c_int, stream: cudaStream_t) -> *mut c_void {
    let _ = (device, stream); // Torch's order of streams needs neither.
    if fork::is_child() {
        return null_mut();
    }
    let pool = USED.get().filter(Pool::is_alive);
    let piece = pool.and_then(|it| PIECES.lock().take(&it, bytes));
    piece.map_or(null_mut(), |it| it as *mut c_void)
}

/// Takes back a piece of `ncclEpPoolAlloc`, on any thread, before or after the group is destroyed.
///
/// # Safety
/// None: a foreign address is ignored.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclEpPoolFree(ptr: *mut c_void, bytes: usize, device: c_int, stream: cudaStream_t) {
    let _ = (bytes, device, stream);
    if !fork::is_child() {
        PIECES.lock().give(ptr as usize);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_apart_and_come_back_once() {
        let (mut pieces, pool) = (Pieces(BTreeMap::new()), Pool { group: 1, begin: ALIGN, bytes: 3 * ALIGN + 100 });
        let taken = [0, 1, ALIGN].map(|bytes| pieces.take(&pool, bytes).unwrap());
        assert_eq!(taken, [1, 2, 3].map(|it| it * ALIGN));
        assert_eq!(pieces.take(&pool, 1), None, "what is left is less than a piece");
        for begin in [2 * ALIGN, 2 * ALIGN, 7, ALIGN] {
            pieces.give(begin);
        }
        assert_eq!(pieces.take(&pool, 2 * ALIGN), Some(ALIGN));
        assert_eq!(pieces.take(&pool, usize::MAX), None);
    }

    /// Those of a group that has ended may be freed when another one cuts the same bytes.
    #[test]
    fn a_pool_cuts_around_the_pieces_of_others() {
        let pool = |group, [begin, bytes]: [usize; 2]| Pool { group, begin: begin * ALIGN, bytes: bytes * ALIGN };
        let mut pieces = Pieces(BTreeMap::new());
        let old = pool(1, [2, 8]);
        for (blocks, begin) in [(2, 2), (1, 4), (1, 5), (4, 6)] {
            assert_eq!(pieces.take(&old, blocks * ALIGN), Some(begin * ALIGN));
        }
        // One piece begins before it, and one ends behind it.
        let new = pool(2, [3, 5]);
        assert_eq!(pieces.take(&new, 1), None);
        pieces.give(4 * ALIGN);
        assert_eq!(pieces.take(&new, 2 * ALIGN), None);
        assert_eq!(pieces.take(&new, ALIGN), Some(4 * ALIGN));
        pieces.give(2 * ALIGN);
        assert_eq!(pieces.take(&new, ALIGN), Some(3 * ALIGN), "the part of the piece that is in this pool");
        pieces.give(6 * ALIGN);
        assert_eq!(pieces.take(&new, 2 * ALIGN), Some(6 * ALIGN));
        assert_eq!(pieces.take(&new, 1), None);
    }

    #[test]
    fn other_bytes_are_told_while_pieces_are_in_use() {
        let mut pieces = Pieces(BTreeMap::new());
        let pool = Pool { group: 1, begin: ALIGN, bytes: 4 * ALIGN };
        let piece = pieces.take(&pool, 1).unwrap();
        assert!(pieces.other(&pool).is_none());
        assert!(pieces.other(&Pool { bytes: ALIGN, ..pool }).is_some_and(|it| *it == pool));
        assert!(pieces.other(&Pool { bytes: ALIGN, group: 2, ..pool }).is_none());
        pieces.give(piece);
        assert!(pieces.other(&Pool { bytes: ALIGN, ..pool }).is_none());
    }
}
