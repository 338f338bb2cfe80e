//! Calls that may never return, each in its own thread.

use crate::error::{Error, Result};
use once_cell::sync::Lazy;
use parking_lot::{Condvar, Mutex};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread::Builder;
use std::time::Duration;

type Work = Box<dyn FnOnce() + Send>;

/// Threads kept for when the system refuses a new one: ending a failed network must still be possible then.
#[derive(Default)]
struct Spares {
    state: Mutex<State>,
    given: Condvar,
}

#[derive(Default)]
struct State {
    /// The number of threads to keep; surplus ones exit.
    wanted: usize,
    threads: usize,
    idle: usize,
    /// Work for idle threads, never more than there are.
    work: Vec<Work>,
}

static SPARES: Lazy<Arc<Spares>> = Lazy::new(Arc::default);

/// Keeps `count` spare threads from now on.
pub fn keep_spares(count: usize) -> Result<()> {
    SPARES.keep(count)
}

impl Spares {
    fn keep(self: &Arc<Self>, count: usize) -> Result<()> {
        let mut state = self.state.lock();
        state.wanted = count;
        self.given.notify_all();
        while state.threads < count {
            let own = Arc::clone(self);
            spawn("nccl-ep-spare", move || own.serve())?;
            state.threads += 1;
        }
        Ok(())
    }

    /// Hands `work` to an idle thread, if there is one.
    fn give(&self, work: Work) -> Option<()> {
        let mut state = self.state.lock();
        if state.idle <= state.work.len() {
            return None;
        }
        state.work.push(work);
        self.given.notify_one();
        Some(())
    }

    fn serve(&self) {
        let mut state = self.state.lock();
        state.idle += 1;
        while state.threads <= state.wanted || !state.work.is_empty() {
            let Some(work) = state.work.pop() else {
                self.given.wait(&mut state);
                continue;
            };
            state.idle -= 1;
            drop(state);
            // A panic is the work's; the thread stays.
            let _ = catch_unwind(AssertUnwindSafe(work));
            state = self.state.lock();
            state.idle += 1;
        }
        state.idle -= 1;
        state.threads -= 1;
    }
}

/// The works that [`start`] was given.
struct Works {
    /// How many have not ended.
    running: usize,
    /// What must not be dropped while any is running.
    kept: Vec<Box<dyn Send>>,
}

static WORKS: Mutex<Works> = Mutex::new(Works { running: 0, kept: Vec::new() });

impl Works {
    /// One has ended; returns what may be dropped now.
    fn end(&mut self) -> Vec<Box<dyn Send>> {
        self.running -= 1;
        if self.running == 0 { std::mem::take(&mut self.kept) } else { Vec::new() }
    }
}

struct AtWork;

impl AtWork {
    fn begin() -> Self {
        WORKS.lock().running += 1;
        Self
    }
}

impl Drop for AtWork {
    fn drop(&mut self) {
        let _dropped_unlocked = WORKS.lock().end();
    }
}

/// Drops `thing` once no work is running: now, if work ends within a moment, or later in a worker thread.
pub fn drop_when_idle(thing: impl Send + 'static) {
    if is_at_work() {
        let mut works = WORKS.lock();
        if works.running > 0 {
            works.kept.push(Box::new(thing));
        }
    }
}

/// Whether any work is running, after a moment of grace for threads about to exit.
fn is_at_work() -> bool {
    const LOOKS: usize = 100;
    (0..LOOKS).all(|_| {
        let goes_on = WORKS.lock().running > 0;
        if goes_on {
            std::thread::sleep(Duration::from_millis(1));
        }
        goes_on
    })
}

/// Runs `work` in a thread of its own, which nobody joins.
pub fn start(work: impl FnOnce() + Send + 'static) -> Result<()> {
    let at_work = AtWork::begin();
    let work = move || {
        work();
        drop(at_work);
    };
    // If no thread can be started, the closure is lost with it.
    let work = Arc::new(Mutex::new(Some(work)));
    let own = Arc::clone(&work);
    let run = move || {
        let work = own.lock().take();
        if let Some(work) = work {
            work();
        }
    };
    spawn("nccl-ep-network", run).or_else(|error| {
        let work = work.lock().take();
        work.and_then(|work| SPARES.give(Box::new(work))).ok_or(error)
    })
}

/// Starts a thread that nobody joins.
pub fn spawn(name: &str, work: impl FnOnce() + Send + 'static) -> Result<()> {
    let thread = Builder::new().name(name.to_owned());
    thread.spawn(work).map(drop).map_err(|cause| Error::system("a thread for the network", &cause))
}

/// The result of `work`, if it comes within `limit`; else `None`: the work continues, and its thread drops the result.
pub fn within<T: Send + 'static>(limit: Duration, work: impl FnOnce() -> T + Send + 'static) -> Result<Option<T>> {
    let (sender, receiver) = channel();
    start(move || drop(sender.send(work())))?;
    match receiver.recv_timeout(limit) {
        Ok(given) => Ok(Some(given)),
        Err(RecvTimeoutError::Timeout) => Ok(None),
        Err(RecvTimeoutError::Disconnected) => Err(Error::internal("a thread for the network has panicked")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicBool, Ordering};

    /// Notes when it is dropped.
    struct Kept(Arc<AtomicBool>);

    impl Drop for Kept {
        fn drop(&mut self) {
            self.0.store(true, Ordering::SeqCst);
        }
    }

    #[test]
    fn what_comes_in_time_is_given() {
        assert_eq!(within(Duration::from_secs(60), || 7).unwrap(), Some(7));
    }

    #[test]
    fn what_comes_late_is_dropped_where_it_was_made() {
        let dropped = Arc::new(AtomicBool::new(false));
        let (go, wait) = channel();
        let kept = Kept(Arc::clone(&dropped));
        let late = within(Duration::from_millis(5), move || {
            let _ = wait.recv();
            kept
        });
        assert!(late.unwrap().is_none());
        let dropped_when_idle = Arc::new(AtomicBool::new(false));
        drop_when_idle(Kept(Arc::clone(&dropped_when_idle)));
        assert!(!dropped.load(Ordering::SeqCst) && !dropped_when_idle.load(Ordering::SeqCst));
        go.send(()).unwrap();
        while !dropped.load(Ordering::SeqCst) || !dropped_when_idle.load(Ordering::SeqCst) {
            std::thread::yield_now();
        }
    }

    #[test]
    fn spares_take_what_no_other_thread_does() {
        let spares = Arc::new(Spares::default());
        let wait_for = |is_so: fn(&State) -> bool| {
            while !is_so(&spares.state.lock()) {
                std::thread::yield_now();
            }
        };
        assert!(spares.give(Box::new(|| ())).is_none());
        spares.keep(1).unwrap();
        for _ in 0..3 {
            wait_for(|state| state.idle == 1);
            let (go, wait) = channel::<()>();
            let work = move || {
                let _ = wait.recv();
            };
            assert!(spares.give(Box::new(work)).is_some());
            assert!(spares.give(Box::new(|| ())).is_none());
            wait_for(|state| state.idle == 0);
            assert!(spares.give(Box::new(|| ())).is_none());
            drop(go);
        }
        wait_for(|state| state.idle == 1);
        assert!(spares.give(Box::new(|| panic!("on purpose"))).is_some());
        wait_for(|state| state.idle == 1 && state.work.is_empty());
        spares.keep(0).unwrap();
        wait_for(|state| state.threads == 0);
    }

    #[test]
    fn a_panic_is_an_error() {
        assert!(within(Duration::from_secs(60), || panic!("on purpose")).is_err());
    }

    #[test]
    fn work_that_ends_drops_nothing_while_other_work_is_running() {
        let mut works = Works { running: 2, kept: vec![Box::new(7)] };
        assert!(works.end().is_empty() && works.kept.len() == 1);
        assert!(works.end().len() == 1 && works.kept.is_empty());
    }
}
