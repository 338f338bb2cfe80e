//! Sleeping on a word of shared memory.
//!
//! Futexes let more ranks than processors wait without burning the processors that the others
//! need. They work over processes because the words lie in a shared mapping.

use rustix::thread::futex::{self, Flags, Timespec};
use std::sync::atomic::AtomicU32;
use std::time::Duration;

/// Sleeps while the word has the value `seen`, at most for `limit`. May wake early: callers look again.
pub(crate) fn wait(word: &AtomicU32, seen: u32, limit: Duration) {
    let timeout = Timespec::try_from(limit).ok();
    let _ = futex::wait(word, Flags::empty(), seen, timeout.as_ref());
}

/// Wakes everyone who sleeps on the word.
pub(crate) fn wake_all(word: &AtomicU32) {
    let _ = futex::wake(word, Flags::empty(), u32::MAX / 2);
}
