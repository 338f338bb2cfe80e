//! Refuses to work in the presence of a GPU, and in a forked process.
//!
//! A program linked against the stand-ins by mistake must not compute on the CPU of a GPU machine and pass that off as
//! a GPU result. So every entry point asks here first. And as in CUDA, whose context does not survive a fork, a child
//! of a process that had a stream can make no call: it lacks the threads that run the streams.
#![allow(unsafe_code)]

use std::ffi::CStr;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Once, OnceLock};

use crate::report;

const DRIVER_NODE: &str = "/dev/nvidiactl";
const DRIVER_LIBRARY: &CStr = c"libcuda.so.1";
const OVERRIDE: &str = "NCCLEP_HOSTSIM_WITH_GPU";

/// Whether the stand-ins may be used in this process; reports why not on stderr, once.
pub(crate) fn permitted() -> bool {
    static PERMITTED: OnceLock<bool> = OnceLock::new();
    *PERMITTED.get_or_init(|| {
        let overridden = std::env::var(OVERRIDE).is_ok_and(|value| value == "1");
        match refusal(Path::new(DRIVER_NODE), DRIVER_LIBRARY, overridden) {
            None => true,
            Some(text) => {
                report::failure(&text);
                false
            }
        }
    })
}

/// The reason for a refusal, or `None` if no driver is found or the user insists.
fn refusal(node: &Path, library: &CStr, overridden: bool) -> Option<String> {
    if overridden {
        return None;
    }
    let found = if node.exists() {
        node.display().to_string()
    } else if loads(library) {
        library.to_string_lossy().into_owned()
    } else {
        return None;
    };
    Some(format!(
        "refusing to stand in for CUDA on a machine with an NVIDIA driver ({found} is present); \
         link against the real libraries, or set {OVERRIDE}=1 to use the CPU regardless"
    ))
}

fn loads(library: &CStr) -> bool {
    // SAFETY: the name is a C string; the only code run is the library's own initialisers, which
    // for the driver library are those that any CUDA program runs.
    let handle = unsafe { libc::dlopen(library.as_ptr(), libc::RTLD_LAZY | libc::RTLD_LOCAL) };
    if handle.is_null() {
        return false;
    }
    // SAFETY: the handle came from the dlopen above and is closed once.
    unsafe { libc::dlclose(handle) };
    true
}

static IS_CHILD: AtomicBool = AtomicBool::new(false);

/// Marks all children that this process forks from now on.
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

#[cfg(test)]
mod tests {
    use super::*;

    const NO_NODE: &str = "/nonexistent/nvidiactl";
    const NO_LIBRARY: &CStr = c"libhostsim_has_no_such_library.so.1";

    #[test]
    fn a_driver_is_refused_unless_the_user_insists() {
        let (node, library) = (Path::new("/dev/null"), c"libc.so.6");
        assert_eq!(refusal(Path::new(NO_NODE), NO_LIBRARY, false), None);
        assert_eq!(refusal(node, library, true), None);
        let text = refusal(node, NO_LIBRARY, false).expect("a refusal");
        assert!(text.contains("/dev/null") && text.contains(OVERRIDE), "{text}");
        let text = refusal(Path::new(NO_NODE), library, false).expect("a refusal");
        assert!(text.contains("libc.so.6"), "{text}");
    }
}
