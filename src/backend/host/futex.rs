//! Waits for a change of a number in shared memory, across processes.

use rustix::thread::futex::{self, Flags, Timespec};
use std::sync::atomic::AtomicU32;
use std::time::Duration;

/// Sleeps while `word` equals `seen`, at most `patience`. May wake up without a reason.
pub fn wait(word: &AtomicU32, seen: u32, patience: Duration) {
    let timeout = Timespec::try_from(patience).ok();
    let _ = futex::wait(word, Flags::empty(), seen, timeout.as_ref());
}

/// Wakes all sleepers on `word`.
pub fn wake_all(word: &AtomicU32) {
    let _ = futex::wake(word, Flags::empty(), u32::MAX / 2);
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::Ordering;
    use std::time::Instant;

    #[test]
    fn a_wake_ends_the_sleep() {
        let word = Arc::new(AtomicU32::new(0));
        let sleeper = Arc::clone(&word);
        let start = Instant::now();
        let thread = std::thread::spawn(move || {
            while sleeper.load(Ordering::Acquire) == 0 {
                wait(&sleeper, 0, Duration::from_secs(20));
            }
        });
        word.store(1, Ordering::Release);
        wake_all(&word);
        thread.join().unwrap();
        assert!(start.elapsed() < Duration::from_secs(10));
    }

    #[test]
    fn patience_ends() {
        let start = Instant::now();
        wait(&AtomicU32::new(7), 7, Duration::from_millis(20));
        assert!(start.elapsed() < Duration::from_secs(5));
    }
}
