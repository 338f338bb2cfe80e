//! Claims the process for one library. Two, each with a core of its own, would not know of each other's operations, so
//! one might synchronize the device while a kernel of the other waits there for its peers.
//!
//! A library has no symbol by which another one could ask it. So each leaves a mark where all can look: a page of an
//! anonymous file, whose name stands in the list of the process's mappings.
#![allow(unsafe_code)]

use memmap2::{Mmap, MmapOptions};
use nccl_ep_core::backend::detached;
use nccl_ep_core::error::{Code, Error, Result};
use parking_lot::Mutex;
use std::ffi::CString;
use std::fs::File;
use std::os::fd::FromRawFd;
use std::sync::{Arc, Weak};

const MAPPINGS: &str = "/proc/self/maps";
const NAME: &str = "nccl_ep_core_of_";

/// This library's mark, if it has groups.
static MARK: Mutex<Weak<Mark>> = Mutex::new(Weak::new());

/// A library's claim on the process, until the last reference is dropped.
pub struct Mark(Option<Mmap>);

impl Drop for Mark {
    fn drop(&mut self) {
        // A network that still ends in the background may synchronize the device.
        if let Some(page) = self.0.take() {
            detached::drop_when_idle(page);
        }
    }
}

/// Claims the process for `library`; refuses if another library has, even another copy of the same. Succeeds if the
/// system lacks such files or the list.
pub fn claim(library: &str) -> Result<Arc<Mark>> {
    let mut known = MARK.lock();
    if let Some(mark) = known.upgrade() {
        return Ok(mark); // Another one would have found it.
    }
    // Each copy has its own statics.
    let own = format!("{library}@{:p}", &raw const MARK);
    let mark = Arc::new(Mark(page(&own)));
    let mappings = std::fs::read(MAPPINGS).unwrap_or_default();
    if let Some(other) = other_mark(&String::from_utf8_lossy(&mappings), &own) {
        return Err(refusal(other, library));
    }
    *known = Arc::downgrade(&mark);
    Ok(mark)
}

#[cold]
fn refusal(other: &str, library: &str) -> Error {
    let rule = format!("this process: has groups of {other}, and may have those of one library only");
    Error::new(Code::InvalidUsage, rule).got(library, other)
}

/// The page of a mark, which exists until it is dropped.
fn page(own: &str) -> Option<Mmap> {
    let name = CString::new(format!("{NAME}{own}")).ok()?;
    // SAFETY: the name is a string, and a new descriptor is nobody else's.
    let file = unsafe {
        let descriptor = libc::memfd_create(name.as_ptr(), libc::MFD_CLOEXEC);
        (descriptor >= 0).then(|| File::from_raw_fd(descriptor))
    }?;
    // The file stays empty, as a process that may write no files is killed if it makes one longer.
    // SAFETY: nobody reads the page, or knows the file.
    unsafe { MmapOptions::new().len(1).map(&file) }.ok()
}

/// The library that has left a mark other than `own`.
fn other_mark<'a>(mappings: &'a str, own: &str) -> Option<&'a str> {
    let marks = mappings.lines().filter_map(|line| {
        let (_, rest) = line.split_once("/memfd:")?;
        rest.strip_prefix(NAME)?.split_whitespace().next()
    });
    let other = marks.into_iter().find(|other| *other != own)?;
    Some(other.split_once('@').map_or(other, |(library, _)| library))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt;

    fn refused(library: &str) -> Option<Code> {
        claim(library).err().map(|error| error.code())
    }

    #[test]
    fn one_library_has_a_process_while_it_has_groups() {
        // The list shows this path unescaped.
        let path = std::env::temp_dir().join(OsStr::from_bytes(b"nccl_ep_\xff"));
        let file = File::create_new(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        file.set_len(1).unwrap();
        // SAFETY: nobody reads the page.
        let _odd = unsafe { MmapOptions::new().map(&file) };
        let no = Some(Code::InvalidUsage);
        for other in ["libtwo.so@0x1", "libone.so@0x1"] {
            let other = page(other);
            assert!(other.is_some());
            assert_eq!(refused("libone.so"), no);
            drop(other);
            assert_eq!(refused("libone.so"), None);
        }
        let marks = |own: &str| {
            let mappings = std::fs::read(MAPPINGS).unwrap();
            other_mark(&String::from_utf8_lossy(&mappings), own).map(str::to_owned)
        };
        assert_eq!(marks("libtwo.so@0x1"), None);
        let (first, second) = (claim("libone.so").unwrap(), claim("libone.so").unwrap());
        drop(first);
        assert_eq!(marks("libtwo.so@0x1").as_deref(), Some("libone.so"));
        drop(second);
        assert_eq!(marks("libtwo.so@0x1"), None);
    }

    #[test]
    fn other_mappings_are_no_marks() {
        let mappings = "7f00-7f01 r--s 00000000 00:01 7 /memfd:nccl_ep (deleted)\n\
                        7f02-7f03 r-xp 00000000 08:01 9 /lib/libnccl_ep.so\n";
        assert_eq!(other_mark(mappings, "libnccl_ep.so.0"), None);
        let line = "7f00-7f01 r--s 00000000 00:01 7 /memfd:nccl_ep_core_of_libnccl_ep.so@0x7 (deleted)";
        assert_eq!(other_mark(line, "libnccl_ep.so.0@0x7"), Some("libnccl_ep.so"));
        assert_eq!(other_mark(line, "libnccl_ep.so@0x70"), Some("libnccl_ep.so"));
        assert_eq!(other_mark(line, "libnccl_ep.so@0x7"), None);
    }
}
