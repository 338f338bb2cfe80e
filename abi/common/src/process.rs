//! The claim of a process by one library. Two, with a core each, would not know of each other's operations, so one would
//! wait for the whole device while a kernel of the other waits there for its peers.
//!
//! A library has no symbol by which another one could ask it. So each leaves a mark where all can look: a page of an
//! anonymous file, whose name stands in the list of the process's mappings.
#![allow(unsafe_code)]

use memmap2::{Mmap, MmapOptions};
use nccl_ep_core::error::{Code, Error, Result};
use parking_lot::Mutex;
use std::ffi::CString;
use std::fs::File;
use std::os::fd::FromRawFd;

const MAPPINGS: &str = "/proc/self/maps";
const NAME: &str = "nccl_ep_core_of_";

/// What this library has left; for as long as the process lives.
static MARK: Mutex<Option<Mmap>> = Mutex::new(None);

/// Claims the process for `library`, and refuses if another one has. Where the system has no such files or list, it
/// succeeds.
pub fn claim(library: &str) -> Result<()> {
    let mut kept = MARK.lock();
    if kept.is_some() {
        return Ok(()); // Another one would have found the mark.
    }
    let mark = mark(library);
    let mappings = std::fs::read_to_string(MAPPINGS).unwrap_or_default();
    if let Some(other) = other_mark(&mappings, library) {
        return Err(refusal(other, library));
    }
    *kept = mark;
    Ok(())
}

#[cold]
fn refusal(other: &str, library: &str) -> Error {
    let rule =
        format!("this process: has groups of {other}, and may have those of one library only");
    Error::new(Code::InvalidUsage, rule).got(library, other)
}

/// The mark of `library`, until the result is dropped.
fn mark(library: &str) -> Option<Mmap> {
    let name = CString::new(format!("{NAME}{library}")).ok()?;
    // SAFETY: the name is a string, and a new descriptor is nobody else's.
    let file = unsafe {
        let descriptor = libc::memfd_create(name.as_ptr(), libc::MFD_CLOEXEC);
        (descriptor >= 0).then(|| File::from_raw_fd(descriptor))
    }?;
    file.set_len(1).ok()?;
    // SAFETY: nobody reads the page, or knows the file.
    unsafe { MmapOptions::new().map(&file) }.ok()
}

/// The library other than `library` that has left a mark.
fn other_mark<'a>(mappings: &'a str, library: &str) -> Option<&'a str> {
    let marks = mappings.lines().filter_map(|line| {
        let (_, rest) = line.split_once("/memfd:")?;
        rest.strip_prefix(NAME)?.split_whitespace().next()
    });
    marks.into_iter().find(|other| *other != library)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_library_has_a_process() {
        let other = mark("libtwo.so");
        assert!(other.is_some());
        let refused = claim("libone.so").map_err(|error| error.code());
        assert_eq!(refused, Err(Code::InvalidUsage));
        drop(other);
        assert_eq!(claim("libone.so"), Ok(()));
        assert_eq!(claim("libone.so"), Ok(()));
        let mappings = std::fs::read_to_string(MAPPINGS).unwrap();
        assert_eq!(other_mark(&mappings, "libtwo.so"), Some("libone.so"));
    }

    #[test]
    fn other_mappings_are_no_marks() {
        let mappings = "7f00-7f01 r--s 00000000 00:01 7 /memfd:nccl_ep (deleted)\n\
                        7f02-7f03 r-xp 00000000 08:01 9 /lib/libnccl_ep.so\n";
        assert_eq!(other_mark(mappings, "libnccl_ep.so.0"), None);
        let line = "7f00-7f01 r--s 00000000 00:01 7 /memfd:nccl_ep_core_of_libnccl_ep.so (deleted)";
        assert_eq!(other_mark(line, "libnccl_ep.so.0"), Some("libnccl_ep.so"));
        assert_eq!(other_mark(line, "libnccl_ep.so"), None);
    }
}
