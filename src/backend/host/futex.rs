//! Waits for a change of a number in shared memory, across processes.
#![allow(unsafe_code)]

use std::sync::atomic::AtomicU32;
use std::time::Duration;

/// Sleeps while `word` equals `seen`, at most `patience`. May wake up without a reason.
pub fn wait(word: &AtomicU32, seen: u32, patience: Duration) {
    let timeout = libc::timespec {
        tv_sec: libc::time_t::try_from(patience.as_secs()).unwrap_or(libc::time_t::MAX),
        tv_nsec: libc::c_long::from(patience.subsec_nanos().cast_signed()),
    };
    // SAFETY: `word` is a live, aligned 32-bit word; the kernel only compares and sleeps.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAIT, seen, &raw const timeout) };
}

/// Wakes all sleepers on `word`.
pub fn wake_all(word: &AtomicU32) {
    // SAFETY: `word` is a live, aligned 32-bit word.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAKE, i32::MAX) };
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
