//! One rank's memory that all ranks can map: a header of counters, and banks for messages.
//!
//! A window is an anonymous file (memfd) that peers open through `/proc`, so nothing is left behind when a process
//! dies. The file is sparse: a bank may grow to a terabyte, but costs only the pages that messages have touched.
//!
//! A peer's claims about its window are checked before use. The file must be such a memfd with a sealed length, so that
//! accesses to its mapping cannot kill this process. A message must lie inside its bank and be no longer than the
//! memory that the peer has written.
#![allow(unsafe_code)]

use crate::backend::host::shared_file::{self, Address, SEALS};
use crate::error::{Code, Error, Result};
use memmap2::{Mmap, MmapOptions, MmapRaw};
use rustix::fs::{FallocateFlags, MemfdFlags, fallocate, fcntl_add_seals, memfd_create};
use rustix::io::retry_on_intr;
use rustix::process::{Resource, getrlimit};
use rustix::thread::futex::{self, Flags, Timespec};
use std::fs::File;
use std::ops::Deref;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

/// The most messages that one rank may have posted and not all ranks have read: two staged operations, and two more so
/// that others can proceed meanwhile.
pub const BANKS: usize = 4;

/// Target of the link in `/proc` of a window's descriptor.
const LINK: &str = "/memfd:nccl_ep (deleted)";
/// Largest size of a bank, and of the header.
const BANK_BYTES: u64 = 1 << 40;
/// Alignment of banks; no page is larger.
const ALIGNMENT: u64 = 1 << 16;
/// Number of parts of a file: the header and the banks.
const PARTS: u64 = BANKS as u64 + 1;
/// The unit in which the kernel reports a file's memory.
const BLOCK_BYTES: u64 = 512;
/// Offset of the counters; the bell and the failure mark precede them.
const COUNTERS: usize = 64;
const BELL: usize = 0;
const FAILED: usize = 4;
const WORD: usize = size_of::<u64>();
/// Up to this size the kernel copies a message, which takes less time than mapping and unmapping it.
const COPIED_BYTES: usize = 1 << 16;
/// Memory is allocated in steps of this size.
const ALLOCATED_BYTES: usize = 1 << 20;

/// A mapped window: this rank's own, or a peer's.
pub struct Window {
    file: File,
    header: MmapRaw,
    bank_bytes: u64,
    ranks: usize,
    /// How much of each bank is known to have memory, of this rank's own.
    filled: [AtomicU64; BANKS],
}

impl Window {
    /// Creates a window that `ranks` ranks will read.
    pub fn create(ranks: usize) -> Result<Self> {
        let file = memfd_create("nccl_ep", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING);
        let file = File::from(file.map_err(|cause| Error::system("memfd_create", &cause.into()))?);
        // Creating a file beyond the process's limit would kill it with a signal.
        let limit = getrlimit(Resource::Fsize).current.unwrap_or(u64::MAX);
        file.set_len(bank_bytes(limit)? * PARTS).map_err(|cause| Error::system("sizing a shared window", &cause))?;
        fcntl_add_seals(&file, SEALS).map_err(|cause| Error::system("sealing a shared window", &cause.into()))?;
        allocate(&file, 0, header_bytes(ranks) as u64)
            .map_err(|cause| Error::system("memory for a shared window", &cause.into()))?;
        Self::map(file, ranks)
    }

    /// Opens the window at `address`, which must stay alive during the call.
    pub fn open(address: Address, ranks: usize) -> Result<Self> {
        let file = shared_file::open(address, LINK)?;
        let length = shared_file::length(&file)?;
        let is_whole = length.is_multiple_of(PARTS * ALIGNMENT) && (1..=BANK_BYTES).contains(&(length / PARTS));
        if is_whole { Self::map(file, ranks) } else { Err(shared_file::foreign(address)) }
    }

    fn map(file: File, ranks: usize) -> Result<Self> {
        let failed = |cause| Error::system("mapping a shared window", &cause);
        let bytes = header_bytes(ranks);
        let bank_bytes = shared_file::length(&file)? / PARTS;
        if bytes as u64 > bank_bytes {
            return Err(Error::internal("a window whose header has no room"));
        }
        let header = MmapOptions::new().len(bytes).map_raw(&file).map_err(failed)?;
        Ok(Self { file, header, bank_bytes, ranks, filled: Default::default() })
    }

    /// The address for peers, if this process created the window.
    pub fn address(&self) -> Address {
        Address { process: std::process::id(), descriptor: self.file.as_raw_fd() }
    }

    pub fn bank(&self, bank: usize) -> Bank<'_> {
        Bank { window: self, first: COUNTERS + bank * (self.ranks + 2) * WORD }
    }

    /// The bell's count, which grows with every change to the header.
    pub fn bell(&self) -> u32 {
        self.word(BELL).load(Ordering::Acquire)
    }

    /// Sleeps while the bell's count equals `rings`, at most `patience`. May wake up spuriously.
    pub fn wait_for_bell(&self, rings: u32, patience: Duration) {
        let timeout = Timespec::try_from(patience).ok();
        let _ = futex::wait(self.word(BELL), Flags::empty(), rings, timeout.as_ref());
    }

    fn ring(&self) {
        self.word(BELL).fetch_add(1, Ordering::AcqRel);
        let _ = futex::wake(self.word(BELL), Flags::empty(), u32::MAX / 2);
    }

    /// Tells all readers that this window's rank has failed.
    pub fn set_failed(&self) {
        self.word(FAILED).store(1, Ordering::Release);
        self.ring();
    }

    pub fn has_failed(&self) -> bool {
        self.word(FAILED).load(Ordering::Acquire) != 0
    }

    fn word(&self, offset: usize) -> &AtomicU32 {
        // SAFETY: inside the header (callers pass BELL or FAILED), aligned, and only used atomically.
        unsafe { AtomicU32::from_ptr(self.header.as_mut_ptr().add(offset).cast()) }
    }

    fn counter(&self, offset: usize) -> &AtomicU64 {
        assert!(offset + WORD <= self.header.len(), "a counter outside the window's header");
        // SAFETY: inside the header (asserted), aligned as offsets are multiples of 8 in a page-aligned
        // mapping, and only used atomically.
        unsafe { AtomicU64::from_ptr(self.header.as_mut_ptr().add(offset).cast()) }
    }
}

/// Bytes of the counters for so many ranks, and of what precedes them.
fn header_bytes(ranks: usize) -> usize {
    COUNTERS + BANKS * (ranks + 2) * WORD
}

/// Allocates memory for `bytes` of `file` from `at` on: writing to a mapped hole would end the process by SIGBUS if
/// there is none left.
fn allocate(file: &File, at: u64, bytes: u64) -> rustix::io::Result<()> {
    retry_on_intr(|| fallocate(file, FallocateFlags::empty(), at, bytes))
}

/// Bytes per bank if files are limited to `limit` bytes.
fn bank_bytes(limit: u64) -> Result<u64> {
    let bytes = BANK_BYTES.min(limit / PARTS) / ALIGNMENT * ALIGNMENT;
    if bytes > 0 {
        return Ok(bytes);
    }
    Err(Error::new(Code::SystemError, "the limit for files (ulimit -f) leaves no room for shared windows")
        .got(format_args!("{limit} bytes"), format_args!("{} or more", PARTS * ALIGNMENT)))
}

/// Counters and memory of one bank.
#[derive(Clone, Copy)]
pub struct Bank<'a> {
    window: &'a Window,
    first: usize,
}

impl Bank<'_> {
    /// The operation whose message is in the bank; 0 before the first.
    pub fn posted(&self) -> u64 {
        self.window.counter(self.first).load(Ordering::Acquire)
    }

    /// Whether `reader` has released the message.
    pub fn is_read_by(&self, reader: usize) -> bool {
        let read = self.window.counter(self.first + (2 + reader) * WORD).load(Ordering::Acquire);
        read >= self.posted()
    }

    /// Announces the message of operation `epoch`, which is `bytes` long.
    pub fn post(&self, epoch: u64, bytes: usize) {
        self.window.counter(self.first + WORD).store(bytes as u64, Ordering::Relaxed);
        self.window.counter(self.first).store(epoch, Ordering::Release);
        self.window.ring();
    }

    /// Releases the message of operation `epoch` for `reader`.
    pub fn set_read(&self, reader: usize, epoch: u64) {
        self.window.counter(self.first + (2 + reader) * WORD).store(epoch, Ordering::Release);
        self.window.ring();
    }

    /// Writes a message of `bytes` with `fill`; only after every reader has released the last one.
    pub fn write(&self, bytes: usize, fill: impl FnOnce(&mut [u8]) -> Result<()>) -> Result<()> {
        let most = self.window.bank_bytes;
        if bytes as u64 > most {
            let text = "a message is longer than the limit for files (ulimit -f) allows";
            return Err(
                Error::new(Code::SystemError, text).got(format_args!("{bytes} bytes"), format_args!("at most {most}"))
            );
        }
        if bytes <= COPIED_BYTES {
            let mut message = vec![0; bytes];
            fill(&mut message)?;
            let written = self.window.file.write_all_at(&message, self.offset());
            return written.map_err(|cause| Error::system("writing a message", &cause));
        }
        self.allocate(bytes).map_err(|cause| Error::system("memory for a message", &cause.into()))?;
        // SAFETY: by the protocol of `mailboxes` no rank reads the bank now.
        let mapped = unsafe { self.options(bytes).map_mut(&self.window.file) };
        fill(&mut mapped.map_err(|cause| Error::system("mapping a message to write", &cause))?)
    }

    /// Allocates memory for `bytes` of the bank, in steps, as an interrupted call starts again.
    fn allocate(&self, bytes: usize) -> rustix::io::Result<()> {
        let Some(filled) = self.window.filled.get(self.index()) else { return Ok(()) };
        for at in (filled.load(Ordering::Relaxed)..bytes as u64).step_by(ALLOCATED_BYTES) {
            let step = (bytes as u64 - at).min(ALLOCATED_BYTES as u64);
            allocate(&self.window.file, self.offset() + at, step)?;
            filled.store(at + step, Ordering::Relaxed);
        }
        Ok(())
    }

    /// The message; only valid between its post and this rank's [`Bank::set_read`].
    pub fn read(&self) -> Result<Contents> {
        let bytes = self.window.counter(self.first + WORD).load(Ordering::Relaxed);
        // Reading a hole of the file would cost the reader memory, so the claimed length alone is not trusted.
        let file = self.window.file.metadata();
        let file = file.map_err(|cause| Error::system("the length of a message", &cause))?;
        let bytes = usize::try_from(bytes)
            .ok()
            .filter(|&bytes| bytes as u64 <= self.window.bank_bytes.min(file.blocks().saturating_mul(BLOCK_BYTES)));
        let bytes = bytes.ok_or_else(|| Error::internal("a message that is not there"))?;
        if bytes <= COPIED_BYTES {
            let mut message = vec![0; bytes];
            let read = self.window.file.read_exact_at(&mut message, self.offset());
            return read.map(|()| Contents::Copy(message)).map_err(|cause| Error::system("reading a message", &cause));
        }
        // SAFETY: by the protocol of `mailboxes` no rank writes to the bank now.
        unsafe { self.options(bytes).map(&self.window.file) }
            .map(Contents::Mapping)
            .map_err(|cause| Error::system("mapping a message to read", &cause))
    }

    fn index(&self) -> usize {
        (self.first - COUNTERS) / ((self.window.ranks + 2) * WORD)
    }

    /// Offset of the bank in the file.
    fn offset(&self) -> u64 {
        self.window.bank_bytes * (self.index() as u64 + 1)
    }

    fn options(&self, bytes: usize) -> MmapOptions {
        let mut options = MmapOptions::new();
        options.offset(self.offset()).len(bytes).populate();
        options
    }
}

/// The bytes of a message.
pub enum Contents {
    /// For short messages.
    Copy(Vec<u8>),
    /// For long messages.
    Mapping(Mmap),
}

impl Deref for Contents {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Self::Copy(bytes) => bytes,
            Self::Mapping(mapping) => mapping,
        }
    }
}

#[cfg(test)]
#[path = "window_tests.rs"]
mod tests;
