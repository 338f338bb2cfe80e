//! Sleeping on a word of shared memory.
//!
//! Futexes let more ranks than processors wait without burning the processors that the others
//! need. They work over processes because the words lie in a shared mapping.
#![allow(unsafe_code)]

use std::ptr;
use std::sync::atomic::AtomicU32;
use std::time::Duration;

/// Sleeps while the word has the value `seen`, at most for `limit`. May wake early: callers look again.
pub(crate) fn wait(word: &AtomicU32, seen: u32, limit: Duration) {
    let timeout = libc::timespec {
        tv_sec: libc::time_t::try_from(limit.as_secs()).unwrap_or(libc::time_t::MAX),
        tv_nsec: libc::c_long::from(limit.subsec_nanos()),
    };
    // SAFETY: the word outlives the call, the kernel only reads it and the timeout.
    unsafe {
        libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAIT, seen, &raw const timeout);
    }
}

/// Wakes everyone who sleeps on the word.
pub(crate) fn wake_all(word: &AtomicU32) {
    // SAFETY: the word outlives the call; waking has no effect on memory.
    unsafe {
        libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAKE, i32::MAX, ptr::null::<libc::timespec>());
    }
}
