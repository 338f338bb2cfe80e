//! Refusal to work in a forked process: as with CUDA, whose context does not survive a fork, a child of a process
//! that had a stream can make no call. Here it has none of the threads that run the streams.
#![allow(unsafe_code)]

use std::sync::Once;
use std::sync::atomic::{AtomicBool, Ordering};

static IS_CHILD: AtomicBool = AtomicBool::new(false);

/// From now on the children of this process are told from it.
pub(crate) fn watch() {
    static WATCHED: Once = Once::new();
    WATCHED.call_once(|| {
        // SAFETY: the handler is a function of this library, forgotten when the library is unloaded.
        unsafe { libc::pthread_atfork(None, None, Some(note_child)) };
    });
}

extern "C" fn note_child() {
    IS_CHILD.store(true, Ordering::Relaxed);
}

pub(crate) fn is_child() -> bool {
    IS_CHILD.load(Ordering::Relaxed)
}
