//! Communicators: creation, questions and end.
#![allow(unsafe_code)]
#![allow(non_camel_case_types)]

use std::ffi::{c_int, c_uint, c_void};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::Mutex;

use super::error::{Code, Failure, Outcome, ncclResult_t};
use super::group::{self, Task};
use super::meeting::{Room, meet};
use super::segment::{MAX_RANKS, Segment};
use super::unique_id::{Place, ncclUniqueId};
use super::{boundary, store};
use crate::cuda::device;
use crate::cuda::error::CudaError;
use crate::cuda::queue::{Ticket, refuse_on_worker};
use crate::handles::Handles;
use crate::report;

/// C's `ncclComm_t`.
pub type ncclComm_t = *mut c_void;

/// NCCL version that the stand-ins present.
const NCCL_VERSION: c_int = 22809;
const CONFIG_MAGIC: c_uint = 0xcafe_beef;

/// The fields of C's `ncclConfig_t` that every version has and callers must not touch.
#[repr(C)]
pub struct ncclConfig_t {
    size: usize,
    magic: c_uint,
    version: c_uint,
}

/// One rank's end of a communicator.
pub(crate) struct Comm {
    pub(crate) segment: Segment,
    pub(crate) rank: usize,
    pub(crate) device: usize,
    /// Collectives executed so far; all ranks count alike, so the parity picks a bank for all.
    pub(crate) executed: AtomicUsize,
    /// Rounds of collectives so far, likewise.
    pub(crate) rounds: AtomicUsize,
    /// The last submitted operation: operations of a communicator never overlap.
    pub(crate) last: Mutex<Option<Ticket>>,
    failure: Mutex<Option<Failure>>,
}

static COMMS: Handles<Comm> = Handles::new(0x5300_0000_0000);

/// The communicator behind a handle.
pub(crate) fn find(comm: ncclComm_t) -> Outcome<Arc<Comm>> {
    COMMS
        .get(comm as usize)
        .ok_or_else(|| Failure::argument("comm is NULL, destroyed, or no communicator"))
}

/// Makes a communicator known to C.
pub(crate) fn publish(comm: Comm) -> ncclComm_t {
    COMMS.insert(Arc::new(comm)) as ncclComm_t
}

/// Why a communicator has failed, if it is one and has.
pub(crate) fn failure_text(handle: usize) -> Option<String> {
    COMMS
        .get(handle)?
        .health()
        .err()
        .map(|failure| failure.text)
}

impl Comm {
    /// Joins the communicator at a place; returns when all ranks have joined.
    pub(crate) fn join(place: Place, ranks: usize, rank: usize, device: usize) -> Outcome<Self> {
        const CALL: &str = "ncclCommInitRank";
        let segment = Segment::map(place, ranks)?;
        let header = segment.header();
        let size = ranks as u32;
        let known = header
            .ranks
            .compare_exchange(0, size, Ordering::AcqRel, Ordering::Acquire);
        if let Err(other) = known
            && other != size
        {
            segment.fail(Code::InvalidArgument, rank);
            let text = format!("nranks differs between ranks (got {ranks}, another has {other})");
            return Err(Failure::argument(text));
        }
        let process = &segment.lane(rank).process;
        let seat =
            process.compare_exchange(0, std::process::id(), Ordering::AcqRel, Ordering::Acquire);
        if seat.is_err() {
            segment.fail(Code::InvalidUsage, rank);
            return Err(Failure::new(
                Code::InvalidUsage,
                format!("rank {rank} joined twice"),
            ));
        }
        let joined = meet(&segment, rank, Room::Host, CALL);
        place.release();
        joined?;
        Ok(Self {
            segment,
            rank,
            device,
            executed: AtomicUsize::new(0),
            rounds: AtomicUsize::new(0),
            last: Mutex::new(None),
            failure: Mutex::new(None),
        })
    }

    pub(crate) fn ranks(&self) -> usize {
        self.segment.ranks()
    }

    /// The failure that this rank or any other has met, if any.
    pub(crate) fn health(&self) -> Outcome<()> {
        if let Some(failure) = self.failure.lock().clone() {
            return Err(failure);
        }
        match self.segment.failure() {
            None => Ok(()),
            Some((code, reporter)) => {
                let text = format!("the communicator failed on rank {reporter}");
                Err(Failure::new(code, text))
            }
        }
    }

    /// Marks the communicator failed for all ranks, and says why once.
    pub(crate) fn refuse(&self, failure: &Failure) {
        if self.segment.fail(failure.code, self.rank) {
            report::failure(&failure.text);
        }
    }

    /// Runs an operation on a stream's worker: a failure stays with the communicator, and becomes
    /// an error of the stream.
    pub(crate) fn execute(&self, job: impl FnOnce(&Self) -> Outcome<()>) -> Result<(), CudaError> {
        let Err(failure) = self.health().and_then(|()| job(self)) else {
            return Ok(());
        };
        let error = match failure.code {
            Code::RemoteError => CudaError::LaunchTimeout,
            _ => CudaError::LaunchFailure,
        };
        self.failure.lock().get_or_insert(failure);
        Err(error)
    }

    /// Waits for the operations that this rank has submitted.
    fn finish(&self) -> Outcome<()> {
        refuse_on_worker()?;
        let last = self.last.lock().clone();
        if let Some(ticket) = last {
            ticket.wait();
        }
        Ok(())
    }
}

/// The version of NCCL that the stand-ins present.
///
/// # Safety
/// `version` is null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclGetVersion(version: *mut c_int) -> ncclResult_t {
    // SAFETY: passed on under this function's contract.
    boundary(|| unsafe { store(version, NCCL_VERSION) })
}

/// Joins a communicator with the thread's current device.
///
/// # Safety
/// `comm` is null or valid for a write, until the end of the group if one is open.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommInitRank(
    comm: *mut ncclComm_t,
    nranks: c_int,
    id: ncclUniqueId,
    rank: c_int,
) -> ncclResult_t {
    boundary(|| init(comm, nranks, &id, rank))
}

/// As `ncclCommInitRank`. The configuration is checked for being one; its settings concern
/// transports that do not exist here. The call always blocks.
///
/// # Safety
/// `comm` is null or valid for a write, until the end of the group if one is open; `config` is
/// null or points to an `ncclConfig_t`.
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
        unsafe { check_config(config) }?;
        init(comm, nranks, &id, rank)
    })
}

fn init(comm: *mut ncclComm_t, nranks: c_int, id: &ncclUniqueId, rank: c_int) -> Outcome<()> {
    if comm.is_null() {
        return Err(Failure::argument("comm is NULL"));
    }
    let ranks = usize::try_from(nranks)
        .ok()
        .filter(|ranks| (1..=MAX_RANKS).contains(ranks));
    let ranks = ranks.ok_or_else(|| {
        Failure::argument(format!("nranks must be 1 to {MAX_RANKS} (got {nranks})"))
    })?;
    let seat = usize::try_from(rank).ok().filter(|rank| *rank < ranks);
    let seat =
        seat.ok_or_else(|| Failure::argument(format!("rank must be below {ranks} (got {rank})")))?;
    let place = Place::decode(id)?;
    let device = device::current_index();
    let out = comm as usize;
    group::run(Task::Setup(Box::new(move || {
        let made = publish(Comm::join(place, ranks, seat, device)?);
        // SAFETY: checked above not to be null; the caller keeps it valid until the group's end.
        unsafe { store(out as *mut ncclComm_t, made) }
    })))
}

/// Refuses what is not a configuration.
///
/// # Safety
/// `config` is null or points to an `ncclConfig_t`.
pub(crate) unsafe fn check_config(config: *const ncclConfig_t) -> Outcome<()> {
    // SAFETY: by this function's contract.
    match unsafe { config.as_ref() } {
        Some(config) if config.magic != CONFIG_MAGIC => Err(Failure::argument(
            "config was not set with NCCL_CONFIG_INITIALIZER",
        )),
        Some(config) if config.size < size_of::<ncclConfig_t>() || config.version == 0 => Err(
            Failure::argument("config has an impossible size or version"),
        ),
        _ => Ok(()),
    }
}

/// Waits for the communicator's operations on this rank.
#[unsafe(no_mangle)]
pub extern "C" fn ncclCommFinalize(comm: ncclComm_t) -> ncclResult_t {
    boundary(|| find(comm)?.finish())
}

/// Waits for the communicator's operations on this rank, then ends it here.
#[unsafe(no_mangle)]
pub extern "C" fn ncclCommDestroy(comm: ncclComm_t) -> ncclResult_t {
    boundary(|| {
        find(comm)?.finish()?;
        COMMS.remove(comm as usize);
        Ok(())
    })
}

/// Ends the communicator here; operations that have not finished fail on all ranks.
#[unsafe(no_mangle)]
pub extern "C" fn ncclCommAbort(comm: ncclComm_t) -> ncclResult_t {
    boundary(|| {
        let gone = find(comm)?;
        COMMS.remove(comm as usize);
        let unfinished = gone
            .last
            .lock()
            .as_ref()
            .is_some_and(|ticket| !ticket.is_done());
        if unfinished {
            gone.segment.fail(Code::RemoteError, gone.rank);
        }
        gone.finish()
    })
}

/// Number of ranks.
///
/// # Safety
/// `count` is null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommCount(comm: ncclComm_t, count: *mut c_int) -> ncclResult_t {
    // SAFETY: passed on under this function's contract.
    boundary(|| unsafe { store(count, find(comm)?.ranks() as c_int) })
}

/// This rank.
///
/// # Safety
/// `rank` is null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommUserRank(comm: ncclComm_t, rank: *mut c_int) -> ncclResult_t {
    // SAFETY: passed on under this function's contract.
    boundary(|| unsafe { store(rank, find(comm)?.rank as c_int) })
}

/// The device that was current when the communicator was made.
///
/// # Safety
/// `index` is null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommCuDevice(comm: ncclComm_t, index: *mut c_int) -> ncclResult_t {
    // SAFETY: passed on under this function's contract.
    boundary(|| unsafe { store(index, find(comm)?.device as c_int) })
}

/// The failure that an operation has met on any rank, or success.
///
/// # Safety
/// `result` is null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommGetAsyncError(
    comm: ncclComm_t,
    result: *mut ncclResult_t,
) -> ncclResult_t {
    boundary(|| {
        let code = find(comm)?
            .health()
            .err()
            .map_or(0, |failure| failure.code as ncclResult_t);
        // SAFETY: passed on under this function's contract.
        unsafe { store(result, code) }
    })
}
