//! Whether this process was forked from one that had made a group.
//!
//! A child has none of its parent's threads, any lock may be held for ever by one of them, and CUDA does not work there.
//! So in a child every call must be refused before it touches anything. An ABI asks first of all.
#![allow(unsafe_code)]

use crate::error::refusal::{InSequence, Subject};
use crate::error::{Error, Result};
use std::sync::Once;
use std::sync::atomic::{AtomicBool, Ordering};

static IS_CHILD: AtomicBool = AtomicBool::new(false);

/// From now on the children of this process are told from it.
pub fn watch() {
    static WATCHED: Once = Once::new();
    WATCHED.call_once(|| {
        // SAFETY: the handler is a function of this library, and the C library forgets it when the library is unloaded.
        // Without memory for it children are not told from their parents.
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

/// Refuses such a child.
pub fn check() -> Result<()> {
    if is_child() { Err(Error::usage(Subject::Process, InSequence::NotForked)) } else { Ok(()) }
}
