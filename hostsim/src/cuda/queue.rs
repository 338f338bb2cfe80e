//! Streams: one queue and one worker thread each.
//!
//! Work of a stream runs in order on its own thread, so a host function that waits for other ranks never blocks another
//! stream. Order between streams is expressed with tickets: a piece of work starts after the tickets it was given.
//! Tickets only name work submitted earlier, so waits cannot form a cycle.

use std::cell::Cell;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use parking_lot::{Condvar, Mutex};

use super::error::CudaError;
use crate::presence;

/// What a stream executes.
pub(crate) type Job = Box<dyn FnOnce() -> Result<(), CudaError> + Send>;

/// How a stream relates to the legacy default stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// The legacy default stream itself.
    Legacy,
    /// Ordered with the legacy default stream in both directions.
    Blocking,
    /// Created with `cudaStreamNonBlocking`: not ordered with it.
    NonBlocking,
}

pub(crate) struct Stream {
    pub(crate) device: usize,
    pub(crate) kind: Kind,
    state: Mutex<State>,
    arrived: Condvar,
    advanced: Condvar,
    /// The most work that may wait behind the one that runs; further submissions wait for room.
    room: u64,
}

struct State {
    queue: VecDeque<Work>,
    submitted: u64,
    completed: u64,
    closing: bool,
    error: Option<CudaError>,
}

struct Work {
    after: Vec<Ticket>,
    job: Job,
}

/// Names one submitted piece of work.
#[derive(Clone)]
pub(crate) struct Ticket {
    /// The stream the work was submitted to.
    pub(crate) stream: Arc<Stream>,
    number: u64,
}

thread_local! {
    static ON_WORKER: Cell<bool> = const { Cell::new(false) };
}

/// Refuses calls made from inside a stream's work: as in CUDA, a host function must not call back
/// into the runtime, and here it would wait for itself.
pub(crate) fn refuse_on_worker() -> Result<(), CudaError> {
    if ON_WORKER.get() { Err(CudaError::NotPermitted) } else { Ok(()) }
}

impl Stream {
    /// Creates a stream and starts its worker.
    pub(crate) fn start(device: usize, kind: Kind) -> Result<Arc<Self>, CudaError> {
        let state = State { queue: VecDeque::new(), submitted: 0, completed: 0, closing: false, error: None };
        let stream = Arc::new(Self {
            device,
            kind,
            state: Mutex::new(state),
            arrived: Condvar::new(),
            advanced: Condvar::new(),
            room: room(),
        });
        presence::watch();
        let worker = Arc::clone(&stream);
        std::thread::Builder::new()
            .name(format!("hostsim-dev{device}"))
            .spawn(move || worker.work())
            .map_err(|_| CudaError::MemoryAllocation)?;
        Ok(stream)
    }

    /// Appends work, once there is room for it. Order with other streams is up to the caller: see
    /// [`super::device::Device::submit`].
    pub(super) fn push(self: &Arc<Self>, after: Vec<Ticket>, job: Job) -> Ticket {
        let mut state = self.state.lock();
        while state.submitted - state.completed > self.room {
            self.advanced.wait(&mut state);
        }
        state.submitted += 1;
        state.queue.push_back(Work { after, job });
        self.arrived.notify_one();
        Ticket { stream: Arc::clone(self), number: state.submitted }
    }

    /// A ticket for the last submitted work, or nothing if the stream is idle.
    pub(crate) fn pending(self: &Arc<Self>) -> Option<Ticket> {
        let state = self.state.lock();
        (state.completed < state.submitted).then(|| Ticket { stream: Arc::clone(self), number: state.submitted })
    }

    /// Waits until all work submitted so far is done and returns the stream's error, once.
    pub(crate) fn drain(self: &Arc<Self>) -> Result<(), CudaError> {
        refuse_on_worker()?;
        if let Some(ticket) = self.pending() {
            ticket.wait();
        }
        self.take_error()
    }

    /// The first failure of the stream's work since the last call.
    pub(crate) fn take_error(&self) -> Result<(), CudaError> {
        self.state.lock().error.take().map_or(Ok(()), Err)
    }

    /// Lets the worker end once the queue is empty.
    pub(crate) fn close(&self) {
        self.state.lock().closing = true;
        self.arrived.notify_one();
    }

    /// Whether the stream has been closed and has nothing left to do.
    pub(crate) fn retired(&self) -> bool {
        let state = self.state.lock();
        state.closing && state.completed == state.submitted
    }

    fn work(&self) {
        ON_WORKER.set(true);
        while let Some(work) = self.next() {
            work.after.iter().for_each(Ticket::wait);
            self.complete(catch_unwind(AssertUnwindSafe(work.job)).unwrap_or(Err(CudaError::Unknown)));
        }
    }

    fn next(&self) -> Option<Work> {
        let mut state = self.state.lock();
        loop {
            if let Some(work) = state.queue.pop_front() {
                return Some(work);
            }
            if state.closing {
                return None;
            }
            self.arrived.wait(&mut state);
        }
    }

    fn complete(&self, result: Result<(), CudaError>) {
        let mut state = self.state.lock();
        state.completed += 1;
        if let Err(error) = result {
            state.error.get_or_insert(error);
        }
        self.advanced.notify_all();
    }
}

/// `NCCLEP_HOSTSIM_QUEUE` if it is a number, otherwise no limit.
fn room() -> u64 {
    let text = std::env::var("NCCLEP_HOSTSIM_QUEUE").ok();
    text.and_then(|text| text.trim().parse().ok()).filter(|&room| room > 0).unwrap_or(u64::MAX)
}

impl Ticket {
    /// Waits until the work is done.
    pub(crate) fn wait(&self) {
        let mut state = self.stream.state.lock();
        while state.completed < self.number {
            self.stream.advanced.wait(&mut state);
        }
    }

    pub(crate) fn is_done(&self) -> bool {
        self.stream.state.lock().completed >= self.number
    }
}
