//! The entry points that create, query and end communicators.
#![allow(unsafe_code)]

use std::ffi::c_int;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::boundary::{boundary, read_rank, store};
use super::comm::{Comm, NO_COLOUR, find, ncclComm_t, publish, remove};
use super::config::check_config;
pub use super::config::ncclConfig_t;
use super::error::{Failure, Outcome, ncclResult_t};
use super::group::{self, Task};
use super::segment::MAX_RANKS;
use super::unique_id::{Rendezvous, ncclUniqueId};
use crate::cuda::device;
use crate::cuda::recording;

/// How long after an abort memory is freed: NCCL's threads notice it with a delay.
const NOTICED_AFTER: Duration = Duration::from_millis(50);

/// How many calls created a communicator with settings.
static MADE_WITH_SETTINGS: AtomicU64 = AtomicU64::new(0);

/// Joins a communicator with the thread's current device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommInitRank(
    comm: *mut ncclComm_t,
    nranks: c_int,
    id: ncclUniqueId,
    rank: c_int,
) -> ncclResult_t {
    // SAFETY: passed on under this function's contract.
    boundary(|| unsafe { join(comm, nranks, &id, rank) })
}

/// As `ncclCommInitRank`, with settings; a non-blocking communicator is refused.
///
/// # Safety
/// `comm` is null or valid for a write, until the end of the group if one is open; `config` is null
/// or points to an `ncclConfig_t`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommInitRankConfig(
    comm: *mut ncclComm_t,
    nranks: c_int,
    id: ncclUniqueId,
    rank: c_int,
    config: *const ncclConfig_t,
) -> ncclResult_t {
    boundary(|| {
        // SAFETY: passed on under this function's contract.
        unsafe {
            check_config(config)?;
            MADE_WITH_SETTINGS.fetch_add(1, Ordering::Relaxed);
            join(comm, nranks, &id, rank)
        }
    })
}

/// As `ncclCommInitRankConfig`, with any number of ids, of which only the first is used.
///
/// # Safety
/// As of `ncclCommInitRankConfig`; `ids` is null or points to `count` ids.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommInitRankScalable(
    comm: *mut ncclComm_t,
    nranks: c_int,
    rank: c_int,
    count: c_int,
    ids: *const ncclUniqueId,
    config: *const ncclConfig_t,
) -> ncclResult_t {
    boundary(|| {
        if ids.is_null() || count < 1 {
            return Err(Failure::argument(format!("commIds is NULL, or nId is {count}")));
        }
        // SAFETY: passed on under this function's contract.
        unsafe {
            check_config(config)?;
            join(comm, nranks, &*ids, rank)
        }
    })
}

/// How many communicators this process has created with settings, as the library does.
#[unsafe(no_mangle)]
pub extern "C" fn ncclEpHostsimCommunicators() -> u64 {
    MADE_WITH_SETTINGS.load(Ordering::Relaxed)
}

/// Joins a communicator, now or at the end of an open group.
///
/// # Safety
/// `comm` is null or valid for a write, until the end of the group if one is open.
unsafe fn join(comm: *mut ncclComm_t, nranks: c_int, id: &ncclUniqueId, rank: c_int) -> Outcome<()> {
    if comm.is_null() {
        return Err(Failure::argument("comm is NULL"));
    }
    let ranks = usize::try_from(nranks).ok().filter(|ranks| (1..=MAX_RANKS).contains(ranks));
    let ranks = ranks.ok_or_else(|| Failure::argument(format!("nranks must be 1 to {MAX_RANKS} (got {nranks})")))?;
    let rank = read_rank("rank", rank, ranks)?;
    let rendezvous = Rendezvous::decode(id)?;
    let device = device::current_index();
    let out = comm as usize;
    group::run(Task::Setup(Box::new(move || {
        let made = publish(Comm::join(rendezvous, ranks, rank, device)?);
        // SAFETY: checked above not to be null; the caller keeps it valid until the group's end.
        store(unsafe { (out as *mut ncclComm_t).as_mut() }, made)
    })))
}

/// Splits a communicator: one new one per colour, ranks in order of key, then of old rank.
///
/// # Safety
/// `newcomm` is null or valid for a write, until the end of the group if one is open; `config` is
/// null or points to an `ncclConfig_t`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommSplit(
    comm: ncclComm_t,
    color: c_int,
    key: c_int,
    newcomm: *mut ncclComm_t,
    config: *const ncclConfig_t,
) -> ncclResult_t {
    boundary(|| {
        let parent = find(comm)?;
        // SAFETY: passed on under this function's contract.
        unsafe { check_config(config) }?;
        if newcomm.is_null() || color < NO_COLOUR {
            return Err(Failure::argument(format!("newcomm is NULL or color is {color}")));
        }
        let out = newcomm as usize;
        group::run(Task::Setup(Box::new(move || {
            let made = parent.split(color, key)?.map_or(std::ptr::null_mut(), publish);
            // SAFETY: checked above not to be null; the caller keeps it valid until the group's end.
            store(unsafe { (out as *mut ncclComm_t).as_mut() }, made)
        })))
    })
}

/// Waits for the communicator's operations on this rank, then destroys it here. Returns once everything else on the
/// device has ended, too, and graphs with its operations are destroyed.
#[unsafe(no_mangle)]
pub extern "C" fn ncclCommDestroy(comm: ncclComm_t) -> ncclResult_t {
    boundary(|| {
        let gone = find(comm)?;
        gone.destroy()?;
        remove(comm);
        free_memory(&gone)
    })
}

/// Aborts the communicator here, from any thread. Operations that have not finished end without result, so that streams
/// go on, and fail on the other ranks. Then waits until everything else on the device has ended; in a group, the end of
/// the group waits for that.
#[unsafe(no_mangle)]
pub extern "C" fn ncclCommAbort(comm: ncclComm_t) -> ncclResult_t {
    boundary(|| {
        let gone = find(comm)?;
        remove(comm);
        gone.abort()?;
        let free = move || {
            std::thread::sleep(NOTICED_AFTER);
            free_memory(&gone)
        };
        group::run(Task::Free(Box::new(free)))
    })
}

/// NCCL frees a communicator's memory once no graph has any of its operations and nothing runs on its device. Its own
/// threads free some of it, which captures forbid whatever the caller's mode.
fn free_memory(gone: &Comm) -> Outcome<()> {
    gone.wait_for_graphs();
    let own = std::thread::spawn(recording::refuse_unsafe_call);
    // NCCL ignores a refusal.
    let _ = own.join();
    Ok(device::device(gone.device)?.come_to_rest()?)
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclCommCount(comm: ncclComm_t, count: Option<&mut c_int>) -> ncclResult_t {
    boundary(|| store(count, find(comm)?.ranks() as c_int))
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclCommUserRank(comm: ncclComm_t, rank: Option<&mut c_int>) -> ncclResult_t {
    boundary(|| store(rank, find(comm)?.rank as c_int))
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclCommCuDevice(comm: ncclComm_t, index: Option<&mut c_int>) -> ncclResult_t {
    boundary(|| store(index, find(comm)?.device as c_int))
}

/// The failure that an operation has met on any rank, or success.
#[unsafe(no_mangle)]
pub extern "C" fn ncclCommGetAsyncError(comm: ncclComm_t, result: Option<&mut ncclResult_t>) -> ncclResult_t {
    boundary(|| {
        let code = find(comm)?.health().map_or_else(|failure| failure.code as ncclResult_t, |()| 0);
        store(result, code)
    })
}
