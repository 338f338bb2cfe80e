//! Two functions for allocators of others, such as PyTorch's pluggable one, that cut pieces from memory that peers map.
#![allow(unsafe_code)]

use crate::cuts::Cuts;
use crate::guard::{GUARD, Subject};
use crate::objects::Group;
use crate::types::{cudaStream_t, ncclEpGroup_t, ncclResult_t};
use nccl_ep_core::error::refusal::{self, OfMemory};
use nccl_ep_core::error::{Error, Result};
use nccl_ep_core::fork;
use nccl_ep_core::model::tensor::DevPtr;
use parking_lot::Mutex;
use std::cell::Cell;
use std::ffi::{c_int, c_void};
use std::ptr::null_mut;

/// Bytes of a group's memory that pieces are cut from.
struct Pool {
    group: usize,
    begin: usize,
    bytes: usize,
    cuts: Cuts,
}

static POOLS: Mutex<Vec<Pool>> = Mutex::new(Vec::new());

thread_local! {
    /// Where the calling thread's pool begins; 0 for none.
    static USED: Cell<usize> = const { Cell::new(0) };
}

impl Pool {
    /// Whether the group still has the memory.
    fn is_alive(&self) -> bool {
        has(self.group, self.begin, self.bytes).is_ok()
    }
}

/// Refuses bytes that are not wholly in one piece of the group's memory.
fn has(group: usize, begin: usize, bytes: usize) -> Result<()> {
    let outside = || Error::argument(refusal::Subject::Memory, OfMemory::OfGroup);
    let found = Group::resolve(group)?.session.memory_at(DevPtr(begin))?;
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
/// @param bytes     how many, wholly there
///
/// Returns `ncclInvalidArgument` for a NULL or dead group, or bytes that are not in its memory.
///
/// # Safety
/// None: foreign addresses are recognised.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclEpPoolUse(ep_group: ncclEpGroup_t, ptr: *mut c_void, bytes: usize) -> ncclResult_t {
    let (group, begin) = (ep_group as usize, ptr as usize);
    GUARD.run("ncclEpPoolUse", Subject::Group(group), || {
        Group::resolve(group)?;
        if !ptr.is_null() {
            has(group, begin, bytes)?;
            let mut pools = POOLS.lock();
            pools.retain(Pool::is_alive);
            if !pools.iter().any(|it| it.begin == begin && it.group == group) {
                pools.push(Pool { group, begin, bytes, cuts: Cuts::new(bytes) });
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
    let piece = pool.and_then(|it| it.cuts.take(bytes));
    piece.map_or(null_mut(), |it| (used + it) as *mut c_void)
}

/// Takes back what `ncclEpPoolAlloc` has cut, on any thread, before or after the group is destroyed.
///
/// # Safety
/// None: a foreign address is ignored.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclEpPoolFree(ptr: *mut c_void, bytes: usize, device: c_int, stream: cudaStream_t) {
    let _ = (bytes, device, stream);
    let address = ptr as usize;
    let mut pools = POOLS.lock();
    let owns = |it: &&mut Pool| (it.begin..it.begin + it.bytes).contains(&address);
    if let Some(pool) = pools.iter_mut().find(owns) {
        pool.cuts.give(address - pool.begin);
    }
}
