//! From a failure to the end of the network's operations.
//!
//! Host and device are told first, as what aborted operations received is undefined. Telling the device is a driver
//! call, which may block on the very operations to be aborted. So a thread does it, and then aborts them; if that takes
//! too long, the watchdog aborts them. Nothing else waits meanwhile: other groups may have failed, too.

use crate::backend::detached;
use crate::backend::net::OnFault;
use crate::backend::net::two_sided::ending::Ending;
use crate::error::Error;
use once_cell::sync::OnceCell;
use parking_lot::Mutex;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Grace for copying the failure marks to the device before the communicator is aborted.
const PATIENCE: Duration = Duration::from_millis(500);

/// Handles one transport's failure.
pub struct Failing {
    pub group: Arc<dyn OnFault>,
    /// The deadline for waits for other ranks.
    limit: Duration,
    /// Why the transport has ended. Set under the lock of `state`: whoever sees it finds what is to be ended.
    fault: OnceCell<Error>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// When the group was told; `None` if it knew before.
    told: Option<Instant>,
    /// A thread is telling the device.
    is_marking: bool,
    /// What to end; `None` without a failure, and once a thread is ending it.
    ending: Option<Ending>,
}

impl Failing {
    /// No failure yet of the transport of `group`.
    pub fn new(group: Arc<dyn OnFault>, limit: Duration) -> Self {
        Self { group, limit, fault: OnceCell::new(), state: Mutex::default() }
    }

    /// Why the transport has ended, if it has.
    pub fn fault(&self) -> Option<&Error> {
        self.fault.get()
    }

    /// Tells the group of the failure `error`, and ends `ending` after that, unless the transport has ended before.
    pub fn fail(self: &Arc<Self>, error: Error, ending: Ending) {
        self.begin(error, false, ending);
    }

    /// The same for an error that the group knows.
    pub fn give_up(self: &Arc<Self>, error: Error, ending: Ending) {
        self.begin(error, true, ending);
    }

    /// Records that the transport has ended, with nothing to be ended here; false if it had before.
    pub fn close(&self, error: Error) -> bool {
        let _state = self.state.lock();
        self.fault.set(error).is_ok()
    }

    fn begin(self: &Arc<Self>, error: Error, is_known: bool, ending: Ending) {
        {
            let mut state = self.state.lock();
            if self.fault.get().is_some() {
                return;
            }
            if !is_known {
                self.group.failed(&error);
                state.told = Some(Instant::now());
            }
            state.ending = Some(ending);
            let _ = self.fault.set(error);
        }
        // If no thread can be started, the watchdog tries again, or dropping the communicator ends it.
        self.go_on();
    }

    /// Called by the watchdog in each period until the operations have ended. The last resort of a process that gets no
    /// more threads; no NCCL group is open on the watchdog's thread.
    pub fn look(self: &Arc<Self>) {
        if !self.go_on()
            && let Some(ending) = self.take()
        {
            ending.abort_here();
        }
    }

    /// Starts the next step. False if no thread can be started for it.
    fn go_on(self: &Arc<Self>) -> bool {
        let mut state = self.state.lock();
        if state.told.is_some() && !state.is_marking {
            let own = Arc::clone(self);
            let marks = detached::start(move || {
                own.group.mark();
                own.end();
            });
            state.is_marking = marks.is_ok();
        }
        let is_time = state.told.is_none_or(|it| it.elapsed() > PATIENCE);
        if !is_time || state.ending.is_none() {
            return true;
        }
        let own = Arc::clone(self);
        detached::start(move || own.end()).is_ok()
    }

    /// Whether there is something to end that no thread is ending.
    pub fn has_to_end(&self) -> bool {
        self.state.lock().ending.is_some()
    }

    /// Runs in a thread of its own.
    fn end(&self) {
        if let Some(ending) = self.take() {
            ending.free_aborted(self.limit);
        }
    }

    /// Takes out what is to be ended.
    fn take(&self) -> Option<Ending> {
        self.state.lock().ending.take()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::device::tests::TestDevice;
    use crate::backend::nccl::own::OwnCommunicator;
    use crate::backend::nccl::own::tests::third_of_three;
    use crate::backend::quiescence::Attempt;
    use crate::model::ops::Stream;
    use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

    const MINUTE: Duration = Duration::from_secs(60);
    const SHORT: Duration = Duration::from_millis(100);

    /// A group whose device blocks copies while this is locked.
    #[derive(Default)]
    struct Group {
        is_told: AtomicBool,
        marks: AtomicUsize,
        is_marked: AtomicBool,
        has_ended: AtomicBool,
        held_up: Mutex<()>,
    }

    impl OnFault for Group {
        fn failed(&self, _error: &Error) {
            self.is_told.store(true, Ordering::SeqCst);
        }
        fn mark(&self) {
            self.marks.fetch_add(1, Ordering::SeqCst);
            drop(self.held_up.lock());
            self.is_marked.store(true, Ordering::SeqCst);
        }
        fn has_failed(&self) -> bool {
            self.has_ended.load(Ordering::SeqCst)
        }
    }

    fn failing(group: &Arc<Group>, device: &TestDevice) -> (Arc<Failing>, Arc<OwnCommunicator>, Ending) {
        let comm = Arc::new(third_of_three(0));
        let ending = Ending::new(Arc::clone(&comm), Arc::new(device.clone()));
        let group: Arc<dyn OnFault> = group.clone();
        (Arc::new(Failing::new(group, MINUTE)), comm, ending)
    }

    /// Whether its operations have ended.
    fn has_ended(comm: &OwnCommunicator) -> bool {
        comm.exchange(&[], &[], Stream::DEFAULT).is_err()
    }

    fn wait_for(is_so: impl Fn() -> bool) {
        while !is_so() {
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn the_device_is_told_before_the_end() {
        let group = Arc::new(Group::default());
        let (failing, comm, ending) = failing(&group, &TestDevice::default());
        let held_up = group.held_up.lock();
        failing.fail(Error::internal("lost"), ending);
        assert!(group.is_told.load(Ordering::SeqCst));
        failing.look();
        std::thread::sleep(SHORT);
        assert!(!has_ended(&comm));
        assert_eq!(group.marks.load(Ordering::SeqCst), 1);
        drop(held_up);
        wait_for(|| has_ended(&comm));
        assert!(group.is_marked.load(Ordering::SeqCst));
    }

    #[test]
    fn many_end_within_one_patience_on_a_device_that_takes_nothing() {
        let group = Arc::new(Group::default());
        let _held_up = group.held_up.lock();
        let all: Vec<_> = (0..64).map(|_| failing(&group, &TestDevice::default())).collect();
        let start = Instant::now();
        let mut watched = Vec::new();
        for (failing, comm, ending) in all {
            failing.fail(Error::internal("lost"), ending);
            watched.push((failing, comm));
        }
        assert!(start.elapsed() < PATIENCE, "nobody waits");
        wait_for(|| {
            watched.iter().for_each(|(failing, _)| failing.look());
            watched.iter().all(|(_, comm)| has_ended(comm))
        });
        assert!(start.elapsed() >= PATIENCE);
        assert!(start.elapsed() < 4 * PATIENCE);
    }

    #[test]
    fn what_the_group_knows_ends_at_once() {
        let group = Arc::new(Group::default());
        let (failing, comm, ending) = failing(&group, &TestDevice::default());
        failing.give_up(Error::internal("lost"), ending);
        wait_for(|| has_ended(&comm));
        assert!(!group.is_told.load(Ordering::SeqCst));
    }

    #[test]
    fn nothing_is_written_for_a_device_that_was_reset() {
        let device = TestDevice::default();
        device.let_attempts_be(Attempt::Gone);
        let (_, comm, ending) = failing(&Arc::default(), &device);
        ending.abort_here();
        assert!(has_ended(&comm));
        assert!(!comm.wait_for_end(SHORT));
    }

    #[test]
    fn the_watchdog_may_look_at_any_moment() {
        for _ in 0..50 {
            let group = Arc::new(Group::default());
            let (failing, comm, ending) = failing(&group, &TestDevice::default());
            let start = std::thread::scope(|scope| {
                let has_begun = Arc::new(AtomicBool::new(false));
                let looks = Arc::clone(&has_begun);
                let (failing, comm) = (&failing, &comm);
                scope.spawn(move || {
                    while !has_ended(comm) {
                        (0..100).for_each(|_| failing.look());
                        looks.store(true, Ordering::SeqCst);
                    }
                });
                wait_for(|| has_begun.load(Ordering::SeqCst));
                let start = Instant::now();
                failing.fail(Error::internal("lost"), ending);
                start
            });
            assert!(start.elapsed() < PATIENCE && group.is_marked.load(Ordering::SeqCst));
        }
    }
}
