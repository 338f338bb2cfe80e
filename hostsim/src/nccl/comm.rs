//! One rank's end of a communicator, its splits, and the handles that C holds.

use std::ffi::{c_int, c_void};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::delay::Delays;
use super::error::{Code, Failure, Outcome};
use super::meeting::{Room, connecting, meet};
use super::segment::{NOTE, Segment};
use super::unique_id::Rendezvous;
use crate::cuda::error::CudaError;
use crate::cuda::queue::{Ticket, refuse_on_worker};
use crate::handles::Handles;
use crate::report;

/// How long an operation that other ranks left waits to be aborted.
const PATIENCE: Duration = Duration::from_secs(1);
const PAUSE: Duration = Duration::from_millis(1);
/// `NCCL_SPLIT_NOCOLOR`: the rank joins no new communicator.
pub(crate) const NO_COLOUR: c_int = -1;

/// One rank's end of a communicator.
pub(crate) struct Comm {
    pub(crate) segment: Segment,
    pub(crate) rank: usize,
    pub(crate) device: usize,
    /// Collectives executed so far; equal on all ranks, so its parity selects the bank.
    pub(crate) executed: AtomicUsize,
    /// Rounds of collectives so far; likewise equal.
    pub(crate) rounds: AtomicUsize,
    /// The last submitted operation: operations of a communicator never overlap.
    pub(crate) last: Mutex<Option<Ticket>>,
    pub(crate) delays: Delays,
    /// Cloned by each captured operation.
    pub(crate) graphs: Arc<()>,
    /// Whether the call that connects the ranks has been made.
    connected: AtomicBool,
    failure: Mutex<Option<Failure>>,
}

impl Comm {
    /// Joins the communicator at a rendezvous; returns when all ranks have joined.
    pub(crate) fn join(rendezvous: Rendezvous, ranks: usize, rank: usize, device: usize) -> Outcome<Self> {
        const CALL: &str = "ncclCommInitRank";
        let segment = Segment::map(rendezvous, ranks)?;
        let header = segment.header();
        let size = ranks as u32;
        let known = header.ranks.compare_exchange(0, size, Ordering::AcqRel, Ordering::Acquire);
        if let Err(other) = known
            && other != size
        {
            segment.fail(Code::InvalidArgument, rank);
            let text = format!("nranks differs between ranks (got {ranks}, another has {other})");
            return Err(Failure::argument(text));
        }
        let process = &segment.lane(rank).process;
        if process.compare_exchange(0, std::process::id(), Ordering::AcqRel, Ordering::Acquire).is_err() {
            segment.fail(Code::InvalidUsage, rank);
            return Err(Failure::new(Code::InvalidUsage, format!("rank {rank} joined twice")));
        }
        let delays = Delays::of_rank(rank);
        delays.sleep();
        let joined = meet(&segment, rank, Room::Host, CALL);
        rendezvous.release();
        joined?;
        delays.sleep();
        Ok(Self {
            segment,
            rank,
            device,
            executed: AtomicUsize::new(0),
            rounds: AtomicUsize::new(0),
            last: Mutex::new(None),
            delays,
            graphs: Arc::default(),
            connected: AtomicBool::new(false),
            failure: Mutex::new(None),
        })
    }

    pub(crate) fn ranks(&self) -> usize {
        self.segment.ranks()
    }

    /// The failure of this rank or any other, or this rank's abort, if there is one.
    pub(crate) fn health(&self) -> Outcome<()> {
        if let Some(failure) = self.failure.lock().clone() {
            return Err(failure);
        }
        if self.segment.has_left(self.rank) {
            let text = format!("rank {}: the communicator was aborted", self.rank);
            return Err(Failure::new(Code::InvalidUsage, text));
        }
        match self.segment.failure() {
            None => Ok(()),
            Some((code, reporter)) => Err(Failure::new(code, format!("the communicator failed on rank {reporter}"))),
        }
    }

    /// Waits until no graph has an operation of the communicator.
    pub(crate) fn wait_for_graphs(&self) {
        while Arc::strong_count(&self.graphs) > 1 {
            std::thread::sleep(PAUSE);
        }
    }

    /// Connects the ranks in the call of the first operation, if the environment says so; returns when all have come.
    pub(crate) fn connect(&self) -> Outcome<()> {
        if connecting().is_none() || self.connected.swap(true, Ordering::AcqRel) {
            return Ok(());
        }
        self.delays.sleep();
        meet(&self.segment, self.rank, Room::Host, "connecting")
    }

    /// Marks the communicator failed for all ranks, and reports why, once.
    pub(crate) fn refuse(&self, failure: &Failure) {
        if self.segment.fail(failure.code, self.rank) {
            report::failure(&failure.text);
        }
    }

    /// Runs an operation on a stream's worker: a failure stays with the communicator and becomes an error of the
    /// stream. As in NCCL, an operation that other ranks left lasts until this rank aborts it, and then simply ends;
    /// here there is a limit.
    pub(crate) fn execute(&self, job: impl FnOnce(&Self) -> Outcome<()>) -> Result<(), CudaError> {
        let Err(failure) = self.health().and_then(|()| job(self)) else {
            self.delays.sleep();
            return Ok(());
        };
        let is_let_down = failure.code == Code::RemoteError;
        self.failure.lock().get_or_insert(failure);
        let start = Instant::now();
        while is_let_down && !self.segment.has_left(self.rank) && start.elapsed() < PATIENCE {
            std::thread::sleep(PAUSE);
        }
        match (self.segment.has_left(self.rank), is_let_down) {
            (true, _) => Ok(()),
            (false, true) => Err(CudaError::LaunchTimeout),
            (false, false) => Err(CudaError::LaunchFailure),
        }
    }

    /// Aborts this rank's end. Operations that this rank has submitted end unfinished, and then fail on the other
    /// ranks.
    pub(crate) fn abort(&self) -> Outcome<()> {
        refuse_on_worker()?;
        let last = self.last.lock().clone();
        let unfinished = last.is_some_and(|ticket| !ticket.is_done());
        self.segment.leave(self.rank);
        if unfinished {
            self.segment.fail(Code::RemoteError, self.rank);
        }
        self.finish()
    }

    /// Destroys this rank's end once the operations that it has submitted are done.
    pub(crate) fn destroy(&self) -> Outcome<()> {
        self.finish()?;
        self.segment.leave(self.rank);
        Ok(())
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

/// Ranks exchange colour and key through their notes in the parent's segment, at the meeting for host calls, so that a
/// split does not wait for work on streams.
impl Comm {
    /// This rank's end of its new communicator, if its colour has one.
    pub(crate) fn split(&self, colour: c_int, key: c_int) -> Outcome<Option<Self>> {
        let meet_all = || meet(&self.segment, self.rank, Room::Host, "ncclCommSplit");
        self.health()?;
        self.write_note([colour as u64, key as u64, 0]);
        meet_all()?;
        let notes: Vec<_> = (0..self.ranks()).map(|rank| self.read_note(rank)).collect();
        let members = members_of(&notes, colour);
        // All have read the notes once all meet here again; only then may they change.
        meet_all()?;
        if colour != NO_COLOUR && members.first() == Some(&self.rank) {
            let rendezvous = Rendezvous::create().inspect_err(|failure| self.refuse(failure))?;
            self.write_note(rendezvous.to_words());
        }
        meet_all()?;
        let (Some(leader), true) = (members.first(), colour != NO_COLOUR) else { return Ok(None) };
        let rendezvous = Rendezvous::from_words(self.read_note(*leader));
        let seat = members.iter().position(|rank| *rank == self.rank).unwrap_or_default();
        Self::join(rendezvous, members.len(), seat, self.device).map(Some)
    }

    fn write_note(&self, words: [u64; NOTE]) {
        for (to, from) in self.segment.lane(self.rank).note.iter().zip(words) {
            to.store(from, Ordering::Relaxed);
        }
    }

    fn read_note(&self, rank: usize) -> [u64; NOTE] {
        self.segment.lane(rank).note.each_ref().map(|word| word.load(Ordering::Relaxed))
    }
}

/// The old ranks with this colour in their new order.
fn members_of(notes: &[[u64; NOTE]], colour: c_int) -> Vec<usize> {
    let mut members: Vec<usize> = (0..notes.len()).filter(|rank| notes[*rank][0] as c_int == colour).collect();
    members.sort_by_key(|rank| (notes[*rank][1] as c_int, *rank));
    members
}

pub type ncclComm_t = *mut c_void;

/// The communicators that C holds handles of.
static COMMS: Handles<Comm> = Handles::new(0x5300_0000_0000);

/// Registers a communicator and returns its handle.
pub(crate) fn publish(comm: Comm) -> ncclComm_t {
    COMMS.insert(Arc::new(comm)) as ncclComm_t
}

pub(crate) fn find(comm: ncclComm_t) -> Outcome<Arc<Comm>> {
    COMMS.get(comm as usize).ok_or_else(|| Failure::argument("comm is NULL, destroyed, or no communicator"))
}

pub(crate) fn remove(comm: ncclComm_t) {
    COMMS.remove(comm as usize);
}
