//! The shared memory of one communicator: layout, mapping, access.
//!
//! Everything that ranks write concurrently is an atomic that starts as zero, like fresh memory, so no rank must
//! initialise before the others. Bulk data goes through raw slots; meetings (`meeting`) decide who may access them.
#![allow(unsafe_code)]

use memmap2::{MmapOptions, MmapRaw};
use rustix::thread::futex::{self, Flags, Timespec};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use super::error::{Code, Outcome};
use super::unique_id::{Rendezvous, failed, grow};

/// Bytes that a rank can show the others in one round of a collective.
pub(crate) const SLOT: usize = 1 << 20;
/// Slots alternate between two banks, so that one meeting per round suffices.
pub(crate) const BANKS: usize = 2;
/// Largest communicator; bounds the address space of mailboxes.
pub(crate) const MAX_RANKS: usize = 1024;
/// Words that describe a collective, see `collective`.
pub(crate) const DESCRIPTION: usize = 3;
/// Words for host-side exchanges, see `comm`.
pub(crate) const NOTE: usize = 3;

/// How a failure is packed, see [`Header`].
const CODE_BITS: u32 = 8;
const CODE_MASK: u32 = (1 << CODE_BITS) - 1;

/// Shared by all ranks.
#[repr(C, align(64))]
pub(crate) struct Header {
    pub(crate) ranks: AtomicU32,
    /// Zero, or the result code with which the communicator has failed, and above it the reporting rank: one word, so
    /// that it cannot be read half-written.
    failed: AtomicU32,
    /// One for work on streams, one for host calls: neither waits for the other.
    pub(crate) meetings: [Meeting; 2],
}

/// State of one barrier.
#[repr(C)]
pub(crate) struct Meeting {
    pub(crate) present: AtomicU32,
    pub(crate) generation: AtomicU32,
}

/// Written by one rank, read by all.
#[repr(C, align(64))]
pub(crate) struct Lane {
    /// Process of the rank; zero until it has joined.
    pub(crate) process: AtomicU32,
    /// How often the rank has come to each meeting.
    pub(crate) steps: [AtomicU32; 2],
    /// Counts the changes of the rank's mailboxes.
    pub(crate) bell: AtomicU32,
    /// Not zero once the rank has destroyed or aborted its end: it no longer takes part.
    left: AtomicU32,
    /// The rank's view of the current collective, in alternating banks.
    pub(crate) description: [[AtomicU64; DESCRIPTION]; BANKS],
    /// Host-side exchange.
    pub(crate) note: [AtomicU64; NOTE],
}

/// Messages from one rank to another. It holds a chunk while `posted` is ahead of `taken`.
#[repr(C, align(64))]
pub(crate) struct Mailbox {
    pub(crate) posted: AtomicU32,
    pub(crate) taken: AtomicU32,
    /// Bytes in the chunk.
    pub(crate) len: AtomicU64,
    /// The sends that the sender has reached.
    pub(crate) sends: Announcements,
    /// The receives that the receiver has reached.
    pub(crate) receives: Announcements,
}

/// What one side of a mailbox has told the other about its messages. Neither side is ever more than one message ahead,
/// as each waits for the other's announcement, so two sizes are enough.
#[repr(C)]
pub(crate) struct Announcements {
    number: AtomicU32,
    bytes: [AtomicU64; BANKS],
}

impl Announcements {
    /// Announces the next message of this side, and returns its number.
    pub(crate) fn announce(&self, bytes: usize) -> u32 {
        let number = self.number.load(Ordering::Relaxed).wrapping_add(1);
        self.bytes[number as usize % BANKS].store(bytes as u64, Ordering::Relaxed);
        self.number.store(number, Ordering::Release);
        number
    }

    /// The size of message `number`, if it has been announced.
    pub(crate) fn size(&self, number: u32) -> Option<usize> {
        let announced = self.number.load(Ordering::Acquire);
        (announced.wrapping_sub(number) as i32 >= 0)
            .then(|| self.bytes[number as usize % BANKS].load(Ordering::Relaxed) as usize)
    }
}

/// A mapping of the segment.
pub(crate) struct Segment {
    memory: MmapRaw,
    layout: Layout,
}

/// Offsets for a number of ranks.
#[derive(Clone, Copy)]
struct Layout {
    ranks: usize,
    mailboxes: usize,
    slots: usize,
    chunks: usize,
    chunk: usize,
    size: usize,
}

impl Layout {
    fn new(ranks: usize) -> Self {
        const PAGE: usize = 4096;
        /// Address space for the mailbox chunks of small communicators.
        const CHUNK_BUDGET: usize = 64 << 20;
        let pairs = ranks * ranks;
        let chunk = (CHUNK_BUDGET / pairs).clamp(16 << 10, 256 << 10).next_multiple_of(PAGE);
        let mailboxes = size_of::<Header>() + ranks * size_of::<Lane>();
        let slots = (mailboxes + pairs * size_of::<Mailbox>()).next_multiple_of(PAGE);
        let chunks = slots + BANKS * ranks * SLOT;
        Self { ranks, mailboxes, slots, chunks, chunk, size: chunks + pairs * chunk }
    }
}

impl Segment {
    /// Maps the memory that the ranks found at a rendezvous, for a communicator of `ranks` ranks.
    pub(crate) fn map(rendezvous: Rendezvous, ranks: usize) -> Outcome<Self> {
        let layout = Layout::new(ranks);
        let file = rendezvous.open()?;
        grow(&file, layout.size)?;
        let memory = MmapOptions::new().len(layout.size).no_reserve_swap().map_raw(&file);
        Ok(Self { memory: memory.map_err(|cause| failed("mmap", &cause))?, layout })
    }

    pub(crate) fn ranks(&self) -> usize {
        self.layout.ranks
    }

    fn base(&self) -> usize {
        self.memory.as_ptr() as usize
    }

    pub(crate) fn header(&self) -> &Header {
        // SAFETY: the header lies at the start of the mapping, which is page-aligned and lives as
        // long as `self`; all its fields are atomics, for which any bytes are valid.
        unsafe { &*(self.base() as *const Header) }
    }

    pub(crate) fn lane(&self, rank: usize) -> &Lane {
        debug_assert!(rank < self.ranks());
        let offset = size_of::<Header>() + rank * size_of::<Lane>();
        // SAFETY: as for the header; the layout reserves `ranks` lanes here.
        unsafe { &*((self.base() + offset) as *const Lane) }
    }

    pub(crate) fn mailbox(&self, from: usize, to: usize) -> &Mailbox {
        let offset = self.layout.mailboxes + self.pair(from, to) * size_of::<Mailbox>();
        // SAFETY: as for the header; the layout reserves one mailbox per ordered pair here.
        unsafe { &*((self.base() + offset) as *const Mailbox) }
    }

    /// Address of the chunk that goes with a mailbox.
    pub(crate) fn chunk(&self, from: usize, to: usize) -> *mut u8 {
        let offset = self.layout.chunks + self.pair(from, to) * self.layout.chunk;
        (self.base() + offset) as *mut u8
    }

    /// Bytes of a mailbox chunk.
    pub(crate) fn chunk_size(&self) -> usize {
        self.layout.chunk
    }

    /// Address of a rank's slot in a bank.
    pub(crate) fn slot(&self, bank: usize, rank: usize) -> *mut u8 {
        debug_assert!(bank < BANKS && rank < self.ranks());
        (self.base() + self.layout.slots + (bank * self.ranks() + rank) * SLOT) as *mut u8
    }

    fn pair(&self, from: usize, to: usize) -> usize {
        debug_assert!(from < self.ranks() && to < self.ranks());
        from * self.ranks() + to
    }

    /// Wakes a rank that waits for its mailboxes.
    pub(crate) fn ring(&self, rank: usize) {
        let bell = &self.lane(rank).bell;
        bell.fetch_add(1, Ordering::Release);
        wake_all(bell);
    }

    /// The code and the reporting rank of the communicator's failure, if it has failed.
    pub(crate) fn failure(&self) -> Option<(Code, u32)> {
        let word = self.header().failed.load(Ordering::Acquire);
        Some((Code::from_number(word & CODE_MASK)?, word >> CODE_BITS))
    }

    /// Marks the communicator failed and wakes all waiting ranks. True for the first to do so.
    pub(crate) fn fail(&self, code: Code, rank: usize) -> bool {
        let header = self.header();
        let word = code as u32 | (rank as u32) << CODE_BITS;
        let first = header.failed.compare_exchange(0, word, Ordering::AcqRel, Ordering::Acquire).is_ok();
        self.wake_everyone();
        first
    }

    /// Records that a rank no longer takes part, and wakes those who wait for it.
    pub(crate) fn leave(&self, rank: usize) {
        self.lane(rank).left.store(1, Ordering::Release);
        self.wake_everyone();
    }

    /// Whether a rank no longer takes part.
    pub(crate) fn has_left(&self, rank: usize) -> bool {
        self.lane(rank).left.load(Ordering::Acquire) != 0
    }

    fn wake_everyone(&self) {
        for meeting in &self.header().meetings {
            wake_all(&meeting.generation);
        }
        for rank in 0..self.ranks() {
            wake_all(&self.lane(rank).bell);
        }
    }
}

/// Sleeps while the word, in a shared mapping, has the value `seen`, at most for `limit`. May wake spuriously. With
/// more ranks than processors this does not burn the time that the other ranks need.
pub(crate) fn wait(word: &AtomicU32, seen: u32, limit: Duration) {
    let timeout = Timespec::try_from(limit).ok();
    let _ = futex::wait(word, Flags::empty(), seen, timeout.as_ref());
}

/// Wakes everyone who sleeps on the word.
pub(crate) fn wake_all(word: &AtomicU32) {
    let _ = futex::wake(word, Flags::empty(), u32::MAX / 2);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_do_not_overlap() {
        for ranks in [1, 2, 3, 8, 64, MAX_RANKS] {
            let layout = Layout::new(ranks);
            let lanes_end = size_of::<Header>() + ranks * size_of::<Lane>();
            assert!(lanes_end <= layout.mailboxes);
            assert_eq!(layout.mailboxes % align_of::<Mailbox>(), 0);
            assert!(layout.mailboxes + ranks * ranks * size_of::<Mailbox>() <= layout.slots);
            assert!(layout.slots + BANKS * ranks * SLOT <= layout.chunks);
            assert!(layout.chunks + ranks * ranks * layout.chunk <= layout.size);
        }
    }

    #[test]
    fn only_the_first_failure_counts() {
        let rendezvous = Rendezvous::create().expect("memfd");
        let segment = Segment::map(rendezvous, 2).expect("mapping");
        assert_eq!(segment.failure(), None);
        assert!(segment.fail(Code::RemoteError, 1));
        assert!(!segment.fail(Code::InvalidUsage, 0));
        assert_eq!(segment.failure(), Some((Code::RemoteError, 1)));
        rendezvous.release();
    }

    #[test]
    fn announcements_keep_the_last_two_sizes() {
        let rendezvous = Rendezvous::create().expect("memfd");
        let segment = Segment::map(rendezvous, 2).expect("mapping");
        let sends = &segment.mailbox(0, 1).sends;
        assert_eq!(sends.size(1), None);
        for number in 1..5 {
            assert_eq!(sends.announce(number as usize * 10), number);
        }
        assert_eq!(sends.size(3), Some(30));
        assert_eq!(sends.size(4), Some(40));
        assert_eq!(sends.size(5), None);
        rendezvous.release();
    }
}
