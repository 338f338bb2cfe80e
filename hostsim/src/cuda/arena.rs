//! One allocation: a separate mapping with poison inside and inaccessible pages on both sides.
//!
//! The block's end is pushed against the rear guard page as far as 256-byte alignment permits, so that a write past the
//! end faults at once; the few bytes of padding keep the poison, which is checked when the block is freed.
#![allow(unsafe_code)]

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
use rustix::param::page_size;
use std::fs::File;
use std::io::Write;
use std::os::fd::{AsRawFd, RawFd};
use std::ptr;

/// What fresh memory is filled with: a value that is no plausible index, size or float.
pub(crate) const POISON: u8 = 0xCB;
/// Blocks of at least this size get huge pages, if the system agrees.
const LARGE: usize = 4 << 20;
/// Alignment of every allocation, as `cudaMalloc` promises.
pub(crate) const ALIGNMENT: usize = 256;

/// A mapping `[guard][slack, block, padding][guard]`, released when dropped.
pub(crate) struct Region {
    mapping: usize,
    mapped: usize,
    block: usize,
    size: usize,
    /// Contains the pages, if others may map them.
    file: Option<File>,
}

/// How another process maps a block: a memory file with a sealed length, whose last page no block uses.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Share {
    /// Valid as long as the block lives.
    pub(crate) file: RawFd,
    /// Its length, without the last page.
    pub(crate) length: usize,
    /// The block's offset in the file.
    pub(crate) offset: usize,
}

impl Region {
    /// Maps a poisoned block of `size` bytes; `None` if the system has no room for it.
    pub(crate) fn map(size: usize) -> Option<Self> {
        let page = page_size();
        let padded = size.checked_next_multiple_of(ALIGNMENT)?;
        let inner = padded.checked_next_multiple_of(page)?;
        let mapped = inner.checked_add(2 * page)?;
        // SAFETY: a fresh anonymous mapping at an address of the kernel's choice.
        let base = unsafe {
            libc::mmap(ptr::null_mut(), mapped, libc::PROT_NONE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1, 0)
        };
        if base == libc::MAP_FAILED {
            return None;
        }
        let mapping = base as usize;
        let region = Self { mapping, mapped, block: mapping + page + inner - padded, size, file: None };
        // SAFETY: the range lies inside the mapping made above.
        let opened =
            unsafe { libc::mprotect((mapping + page) as *mut libc::c_void, inner, libc::PROT_READ | libc::PROT_WRITE) };
        if opened != 0 {
            return None;
        }
        // Avoids a page fault per page, which would take longer than the poisoning; not every system supports it.
        let advice = if inner < LARGE { libc::MADV_POPULATE_WRITE } else { libc::MADV_HUGEPAGE };
        // SAFETY: the inner pages are writable now and belong to this region alone.
        unsafe {
            libc::madvise((mapping + page) as *mut libc::c_void, inner, advice);
            ptr::write_bytes((mapping + page) as *mut u8, POISON, inner);
        }
        Some(region)
    }

    /// Moves the pages into a memory file that takes their place, once; `None` if the system refuses. Nobody may write
    /// there meanwhile.
    pub(crate) fn share(&mut self) -> Option<Share> {
        let page = page_size();
        let (begin, length) = (self.mapping + page, self.mapped - 2 * page);
        if self.file.is_none() {
            self.file = Some(into_file(begin, length)?);
        }
        Some(Share { file: self.file.as_ref()?.as_raw_fd(), length, offset: self.block - begin })
    }

    pub(crate) fn address(&self) -> usize {
        self.block
    }

    /// Whether an address lies anywhere in the mapping, guards included.
    pub(crate) fn covers(&self, address: usize) -> bool {
        (self.mapping..self.mapping + self.mapped).contains(&address)
    }

    /// Whether the bytes around the block still hold the poison: nobody wrote there.
    pub(crate) fn surroundings_intact(&self) -> bool {
        let page = page_size();
        let end = self.mapping + self.mapped - page;
        [self.mapping + page..self.block, self.block + self.size..end].into_iter().all(|range| {
            // SAFETY: both ranges lie in the writable part of the mapping, which `&self` keeps.
            let bytes = unsafe { std::slice::from_raw_parts(range.start as *const u8, range.len()) };
            bytes.iter().all(|byte| *byte == POISON)
        })
    }

    /// Gives the memory back but keeps the addresses, inaccessible, so that a use after free
    /// faults instead of meeting somebody else's data.
    pub(crate) fn seal(&mut self) {
        self.file = None;
        let start = self.mapping as *mut libc::c_void;
        // SAFETY: the mapping belongs to this region; replacing it leaves no reference behind,
        // since callers only hold raw addresses.
        unsafe {
            libc::mmap(
                start,
                self.mapped,
                libc::PROT_NONE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED | libc::MAP_NORESERVE,
                -1,
                0,
            );
        }
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: the mapping was made by `map` and is released once.
        unsafe { libc::munmap(self.mapping as *mut libc::c_void, self.mapped) };
    }
}

/// A file with the `length` bytes at `begin`, whole pages of a mapping; takes their place.
fn into_file(begin: usize, length: usize) -> Option<File> {
    let file = memfd_create("ncclep_hostsim", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING);
    let mut file = File::from(file.ok()?);
    // SAFETY: the callers' pages, readable and not written meanwhile.
    let bytes = unsafe { std::slice::from_raw_parts(begin as *const u8, length) };
    file.write_all(bytes).ok()?;
    file.set_len((length + page_size()) as u64).ok()?;
    fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL).ok()?;
    // SAFETY: the pages are the callers'; what takes their place has the same bytes.
    let mapped = unsafe {
        libc::mmap(
            begin as *mut libc::c_void,
            length,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_SHARED | libc::MAP_FIXED | libc::MAP_POPULATE,
            file.as_raw_fd(),
            0,
        )
    };
    (mapped != libc::MAP_FAILED).then_some(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shared_pages_keep_their_bytes_and_their_guards() {
        let mut region = Region::map(5000).expect("memory");
        let byte = region.address() as *mut u8;
        // SAFETY: inside the block.
        unsafe { byte.write(7) };
        let share = region.share().expect("a file");
        let again = region.share().expect("the same");
        assert_eq!((share.file, share.offset), (again.file, again.offset));
        let bytes = std::fs::read(format!("/proc/self/fd/{}", share.file)).expect("the file");
        assert_eq!(bytes.len(), share.length + page_size());
        assert_eq!(bytes[share.offset], 7);
        assert!(region.surroundings_intact());
        region.seal();
        assert!(region.file.is_none());
    }
}
