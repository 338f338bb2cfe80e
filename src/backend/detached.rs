//! Calls that may never return, in threads of their own.
#![forbid(unsafe_code)]

use crate::error::{Error, Result};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread::Builder;
use std::time::Duration;

/// Runs `work` in a thread of its own. Nobody waits for its end.
pub fn start(work: impl FnOnce() + Send + 'static) -> Result<()> {
    let thread = Builder::new().name("nccl-ep-network".to_owned());
    thread
        .spawn(work)
        .map(drop)
        .map_err(|cause| Error::system("a thread for the network", &cause))
}

/// What `work` gives within `limit`. Otherwise `None`: it goes on, and what it gives is dropped in its thread.
pub fn within<T: Send + 'static>(
    limit: Duration,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<Option<T>> {
    let (sender, receiver) = channel();
    start(move || drop(sender.send(work())))?;
    match receiver.recv_timeout(limit) {
        Ok(given) => Ok(Some(given)),
        Err(RecvTimeoutError::Timeout) => Ok(None),
        Err(RecvTimeoutError::Disconnected) => {
            Err(Error::internal("a thread for the network has panicked"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
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
        assert!(!dropped.load(Ordering::SeqCst));
        go.send(()).unwrap();
        while !dropped.load(Ordering::SeqCst) {
            std::thread::yield_now();
        }
    }

    #[test]
    fn a_panic_is_an_error() {
        let outcome = within(Duration::from_secs(60), || panic!("on purpose"));
        assert!(outcome.is_err());
    }
}
