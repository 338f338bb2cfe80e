//! Ends a transport's communicator at a quiescent moment of the device, in a call that begins or ends a group.
//!
//! `ncclCommDestroy` frees device memory, partly on NCCL's threads. That synchronizes the device, blocks every launch
//! meanwhile, and invalidates captures in global mode (`bench/end_beside_capture.cu`). So the device stays quiescent
//! until NCCL is done, and a call of the program chooses the moment, never a thread of this library. A communicator
//! that a graph uses is not destroyed: NCCL would wait for the graph, and free memory at any time after.
//!
//! A failed communicator is aborted at once. A thread frees it at the next quiescent moment, as other nodes may not
//! notice before then (`bench/abort_calls.cu`).
//!
//! If ranks of this node destroy it at different times, NCCL chooses the moment.

use crate::backend::detached;
use crate::backend::device::Device;
use crate::backend::nccl::own::OwnCommunicator;
use crate::backend::net::two_sided::outstanding::Outstanding;
use crate::backend::quiescence::Attempt;
use crate::model::ids::CommRank;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

/// How long a call waits for a quiescent moment: other groups may always have operations under way.
const PATIENCE: Duration = Duration::from_millis(100);
/// How long the device is kept quiescent while NCCL frees memory, which takes 50 to 500 ms. Limited because NCCL may
/// first wait for other ranks of the node, which may wait for this one in another group.
const MOST_AT_REST: Duration = Duration::from_secs(5);
const PAUSE: Duration = Duration::from_millis(1);
const LONG_PAUSE: Duration = Duration::from_millis(20);
/// How long NCCL's threads take to notice an abort. Until then, freeing the communicator takes as long.
const NOTICED_AFTER: Duration = Duration::from_secs(1);

/// A communicator that nobody uses any more, except graphs.
pub struct Ending {
    pub comm: Arc<OwnCommunicator>,
    device: Arc<dyn Device>,
    _operations: Option<Arc<Outstanding>>,
}

impl Ending {
    /// `comm` on `device`, whose operations outside graphs have ended or are to be ended.
    pub fn new(comm: Arc<OwnCommunicator>, device: Arc<dyn Device>) -> Self {
        Self { comm, device, _operations: None }
    }

    /// The same, with `operations` that may still run: they live until it has ended.
    pub fn of(self, operations: Arc<Outstanding>) -> Self {
        Self { _operations: Some(operations), ..self }
    }

    pub fn context_number(&self) -> u64 {
        self.device.context_number()
    }

    /// Whether another group could use it: its rank and number of ranks are `place`, in the context of `device`.
    pub fn fits(&self, device: &dyn Device, place: (usize, CommRank)) -> bool {
        self.comm.place() == place
            && self.context_number() == device.context_number()
            && self.comm.asynchronous_error().is_none()
    }

    /// Destroys it at a quiescent moment, if there is one soon; otherwise gives it back. Returns when done, or after
    /// half of `limit`, at most five seconds, if NCCL waits for other ranks.
    pub fn end(self, limit: Duration) -> Result<(), Self> {
        let start = Instant::now();
        while self.attempt(limit) == Attempt::Busy {
            if start.elapsed() >= PATIENCE.min(limit) {
                return Err(self);
            }
            std::thread::sleep(PAUSE);
        }
        Ok(())
    }

    /// Ends its operations at once, wherever they are, and returns. Then a thread frees it, which may wait forever for
    /// the right moment.
    pub fn abort(self, limit: Duration) {
        drop(detached::start(move || self.free_aborted(limit)));
    }

    /// The same on the calling thread, which must be the library's own and free nothing else.
    pub fn free_aborted(&self, limit: Duration) {
        if self.device.lost().is_some() {
            // NCCL would write to memory that is gone with the device.
            return self.comm.abandon();
        }
        let (go, wait) = channel();
        let own = Arc::clone(&self.comm);
        if detached::start(move || own.abort(|| wait.recv().is_ok())).is_err() {
            return self.comm.abort(|| true);
        }
        std::thread::sleep(NOTICED_AFTER);
        let mut free = || {
            // Nobody listens if another thread has ended it.
            if go.send(()).is_ok() {
                self.comm.wait_for_end(at_rest(limit));
            }
        };
        while self.comm.is_in_graphs() || self.device.attempt(&mut free) == Attempt::Busy {
            std::thread::sleep(LONG_PAUSE);
        }
    }

    /// Ends its operations on the calling thread, which must be the library's own; frees nothing.
    pub fn abort_here(&self) {
        match self.device.lost() {
            Some(_) => self.comm.abandon(),
            None => self.comm.abort(|| false),
        }
    }

    /// Begins the end if the device is quiescent, and keeps it so until done.
    fn attempt(&self, limit: Duration) -> Attempt {
        let attempt = self.device.attempt(&mut || {
            let own = Arc::clone(&self.comm);
            match detached::start(move || own.destroy()) {
                Ok(()) => drop(self.comm.wait_for_end(at_rest(limit))),
                Err(_) => self.comm.destroy(),
            }
        });
        if attempt == Attempt::Gone {
            self.comm.abandon();
        }
        attempt
    }
}

/// The longest that the device is kept quiescent, given the deadline `limit`: it must not make the other ranks' waits
/// for this one reach theirs.
fn at_rest(limit: Duration) -> Duration {
    MOST_AT_REST.min(limit / 2)
}

/// A communicator that no transport has taken yet. If none does, it is ended.
pub struct Untaken {
    comm: Arc<OwnCommunicator>,
    device: Arc<dyn Device>,
    is_taken: bool,
}

impl Untaken {
    /// `comm`, on `device`.
    pub fn new(comm: Arc<OwnCommunicator>, device: Arc<dyn Device>) -> Self {
        Self { comm, device, is_taken: false }
    }

    /// The communicator, to be ended by the caller.
    pub fn take(mut self) -> Arc<OwnCommunicator> {
        self.is_taken = true;
        Arc::clone(&self.comm)
    }
}

impl Drop for Untaken {
    fn drop(&mut self) {
        if !self.is_taken {
            let (comm, device) = (Arc::clone(&self.comm), Arc::clone(&self.device));
            Ending::new(comm, device).abort(MOST_AT_REST);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::device::tests::TestDevice;
    use crate::backend::nccl::own::tests::third_of_three;
    use crate::backend::net::two_sided::replays::ReplayMarks;
    use crate::model::ops::Stream;

    const MINUTE: Duration = Duration::from_secs(60);

    fn new(device: &TestDevice) -> (Arc<OwnCommunicator>, Ending) {
        let comm = Arc::new(third_of_three(0));
        let graphs = device.clone();
        comm.serve(Box::new(move || graphs.are_in_graphs()));
        let ending = Ending::new(Arc::clone(&comm), Arc::new(device.clone()));
        (comm, ending)
    }

    /// Ends a communicator on a device with this outcome of attempts; returns whether it ended.
    fn ended(attempt: Attempt) -> (Arc<OwnCommunicator>, TestDevice, bool) {
        let device = TestDevice::default();
        device.let_attempts_be(attempt);
        let (comm, ending) = new(&device);
        (comm, device, ending.end(MINUTE).is_ok())
    }

    #[test]
    fn it_ends_at_once_on_a_quiescent_device() {
        let (comm, _, has_ended) = ended(Attempt::Done);
        assert!(has_ended && comm.wait_for_end(Duration::ZERO));
    }

    #[test]
    fn the_device_rests_less_than_others_wait() {
        assert_eq!([MINUTE, 2 * NOTICED_AFTER].map(at_rest), [MOST_AT_REST, NOTICED_AFTER]);
    }

    #[test]
    fn on_a_busy_device_it_is_given_back() {
        let (comm, _, has_ended) = ended(Attempt::Busy);
        assert!(!has_ended && !comm.wait_for_end(Duration::ZERO));
    }

    #[test]
    fn it_is_left_alone_on_a_device_that_was_reset() {
        let (comm, device, has_ended) = ended(Attempt::Gone);
        assert!(has_ended);
        device.let_attempts_be(Attempt::Done);
        comm.destroy();
        comm.abort(|| true);
        assert!(!comm.wait_for_end(Duration::ZERO));
    }

    #[test]
    fn an_aborted_one_is_freed_at_a_quiescent_moment_after_its_graphs() {
        let device = TestDevice::default();
        device.let_attempts_be(Attempt::Busy);
        let (comm, ending) = new(&device);
        ending.abort(MINUTE);
        assert!(!comm.wait_for_end(NOTICED_AFTER + 3 * LONG_PAUSE));
        assert!(comm.exchange(&[], &[], Stream::DEFAULT).is_err());
        device.make_graph();
        device.let_attempts_be(Attempt::Done);
        assert!(!comm.wait_for_end(3 * LONG_PAUSE));
        device.destroy_graph();
        assert!(comm.wait_for_end(MINUTE));
    }

    #[test]
    fn one_that_nobody_takes_ends() {
        let untaken = |device: &TestDevice| Untaken::new(Arc::new(third_of_three(0)), Arc::new(device.clone()));
        let device = TestDevice::default();
        let dropped = untaken(&device);
        let comm = Arc::clone(&dropped.comm);
        drop(dropped);
        assert!(!comm.wait_for_end(NOTICED_AFTER / 2), "NCCL has not noticed the abort");
        assert!(comm.wait_for_end(MINUTE));
        let taken = untaken(&device).take();
        assert!(!taken.wait_for_end(NOTICED_AFTER + 3 * LONG_PAUSE));
    }

    #[test]
    fn an_aborted_one_is_left_alone_on_a_device_that_was_reset() {
        let device = TestDevice::default();
        device.let_attempts_be(Attempt::Gone);
        let (comm, ending) = new(&device);
        ending.free_aborted(MINUTE);
        assert!(!comm.wait_for_end(LONG_PAUSE));
    }
}
