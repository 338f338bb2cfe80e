//! Detects processes forked from one that had created a group.
//!
//! In a child no thread of the parent exists, any lock may be held forever by one of them, and CUDA does not work. So a
//! child must refuse every call before it touches anything; each ABI checks first.
#![allow(unsafe_code)]

use crate::error::refusal::{InSequence, Subject};
use crate::error::{Error, Result};
use std::sync::Once;
use std::sync::atomic::{AtomicBool, Ordering};

static IS_CHILD: AtomicBool = AtomicBool::new(false);

/// Marks all children that this process forks from now on.
pub fn watch() {
    static WATCHED: Once = Once::new();
    WATCHED.call_once(|| {
        // SAFETY: the handler is a function of this library; the C library drops it when the library is unloaded. If
        // registration fails for lack of memory, children go undetected.
        unsafe { libc::pthread_atfork(None, None, Some(note_child)) };
    });
}

extern "C" fn note_child() {
    IS_CHILD.store(true, Ordering::Relaxed);
}

/// Whether this process is such a child.
pub fn is_child() -> bool {
    IS_CHILD.load(Ordering::Relaxed)
}

/// Refuses calls in such a child.
pub fn check() -> Result<()> {
    if is_child() { Err(Error::usage(Subject::Process, InSequence::NotForked)) } else { Ok(()) }
}
