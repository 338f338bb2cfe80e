//! Objects of a group: memory of its ranks that those of a node map of each other.

pub mod group;

use crate::error::refusal::{AmongRanks, OfMemory, Subject};
use crate::error::{Error, Result};
use crate::model::objects::{MAX_OBJECTS, OBJECT_ALIGN, Place, Range, Ranges};
use crate::model::ops::Stream;
use crate::model::tensor::DevPtr;
use parking_lot::RwLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

/// Memory of this rank for an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wanted {
    /// New memory of so many bytes.
    New(usize),
    /// So many bytes at the caller's address.
    Given(DevPtr, usize),
}

/// Whose an object's memory is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The library's, from [`Wanted::New`].
    Own,
    Given,
    /// The library's, for views: a dispatch makes it, and no operation finds its tensors there.
    Views,
}

/// What is known of an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Found {
    /// This rank's memory of it.
    pub range: Range,
    pub kind: Kind,
    /// How many tensors of operations were found in it.
    pub tensors: u64,
    /// How many operations of the group have found in no object, since it has some.
    pub plain: u64,
    /// How many operations of the group had a tensor in an object, and used buffers all the same, as those of others had
    /// none.
    pub fallbacks: u64,
    /// How many other ranks' memory this rank maps, which map its own.
    pub peers: usize,
    /// Where this rank sees the memory of each rank, an address for each; 0 where it does not. They stay until the object
    /// ends.
    pub bases: DevPtr,
}

/// The memory of a group's objects, as operations look tensors up there.
pub struct Recognised {
    ranges: RwLock<Ranges>,
    any: AtomicBool,
    /// Tensors in each object, and in none.
    tensors: [AtomicU64; MAX_OBJECTS],
    plain: AtomicU64,
}

impl Default for Recognised {
    fn default() -> Self {
        Self {
            ranges: RwLock::default(),
            any: AtomicBool::new(false),
            tensors: [const { AtomicU64::new(0) }; MAX_OBJECTS],
            plain: AtomicU64::new(0),
        }
    }
}

impl Recognised {
    /// Where a tensor of `bytes` at `address` lies, if peers can reach it. An operation asks once for each tensor, which
    /// is counted.
    pub fn place_of(&self, address: u64, bytes: u64) -> Option<Place> {
        if !self.any() {
            return None;
        }
        let place = self.ranges.read().place_of(address, bytes);
        let count = place.map(|it| it.object as usize).and_then(|it| self.tensors.get(it));
        count.unwrap_or(&self.plain).fetch_add(1, Ordering::Relaxed);
        place
    }

    /// Tensors that operations had in `object`, and in none.
    fn counts(&self, object: u32) -> (u64, u64) {
        let tensors = self.tensors.get(object as usize).map_or(0, |it| it.load(Ordering::Relaxed));
        (tensors, self.plain.load(Ordering::Relaxed))
    }

    /// Recognises tensors in `range` from now on.
    fn add(&self, range: Range) {
        if let Some(tensors) = self.tensors.get(range.object as usize) {
            tensors.store(0, Ordering::Relaxed);
        }
        self.change(|ranges| ranges.insert(range));
    }

    pub fn any(&self) -> bool {
        self.any.load(Ordering::Relaxed)
    }

    fn change(&self, change: impl FnOnce(&mut Ranges)) {
        let mut ranges = self.ranges.write();
        change(&mut ranges);
        self.any.store(!ranges.is_empty(), Ordering::Relaxed);
    }
}

/// The objects of a group, whatever maps their memory.
pub trait GroupObjects: Send + Sync {
    /// Makes an object, with this rank's memory as `wanted`, of `kind`, and gives where it is. Collective: every rank gets
    /// one, or every rank an error.
    fn make(&self, wanted: Result<Wanted>, kind: Kind, stream: Stream) -> Result<DevPtr>;
    /// Ends the object whose memory of `kind` begins at `data` on this rank. Collective.
    fn end(&self, data: DevPtr, kind: Kind, stream: Stream) -> Result<()>;
    /// The object that the byte at `data` is in; local.
    fn find(&self, data: DevPtr) -> Option<Found>;
    /// The error of an exchange that other ranks never joined: no other can follow.
    fn lost(&self) -> Option<Error>;
}

/// This rank's memory of an object, and what it maps of its peers'. If it is dropped after it was published, the
/// memory stays, as a peer may map it.
pub trait Mapped: Send {
    /// Bytes of what a peer needs to map it.
    const RECORD_BYTES: usize;

    /// The first byte of this rank's memory.
    fn begin(&self) -> DevPtr;
    /// Peers have the record from now on.
    fn publish(&mut self);
    /// Unmaps the peers' memory, and says whether nothing is left.
    fn unmap(&mut self) -> bool;
    /// Ends it; the peers have unmapped all or will not use the rest.
    fn give_back(self, all_unmapped: bool);
}

/// How a backend maps memory. An object is known to it by its number.
pub trait Mapper: Send + Sync {
    type Mapped: Mapped;

    /// Refuses what this rank cannot do now.
    fn check(&self) -> Result<()>;
    /// Memory for an object, and its record.
    fn take(&self, wanted: Wanted) -> Result<(Self::Mapped, Vec<u8>)>;
    /// Maps what the `records` of all ranks describe, as far as this rank can reach it. Gives where it sees each rank's
    /// memory, its own too, and 0 for what it does not see. What was mapped before an error stays in `mapped`. Waits for
    /// other ranks no longer than what is `left` of the call.
    fn map(&self, mapped: &mut Self::Mapped, records: &[&[u8]], left: Duration) -> Result<Vec<usize>>;
    /// Tells operations where they find the ranks' memory of an object.
    fn show(&self, object: u32, bases: &[usize]) -> Result<()>;
    /// Refuses to end an object that operations in graphs may use.
    fn check_graphs(&self) -> Result<()>;
    /// Waits until the group's operations of this rank have run.
    fn rest(&self, left: Duration) -> Result<()>;
    /// [`Found::fallbacks`], where operations go another way at all.
    fn fallbacks(&self) -> u64 {
        0
    }
}

impl Wanted {
    pub fn kind(&self) -> Kind {
        match self {
            Self::New(_) => Kind::Own,
            Self::Given(..) => Kind::Given,
        }
    }

    fn bytes(&self) -> usize {
        match *self {
            Self::New(bytes) | Self::Given(_, bytes) => bytes,
        }
    }

    fn check(&self) -> Result<()> {
        if self.bytes() == 0 {
            return Err(Error::argument(Subject::MemoryBytes, OfMemory::NotEmpty));
        }
        match *self {
            Self::Given(data, _) if data.is_null() => Err(Error::argument(Subject::Memory, AmongRanks::NotNull)),
            Self::Given(data, _) if !(data.0 as u64).is_multiple_of(OBJECT_ALIGN) => {
                Err(Error::argument(Subject::Memory, OfMemory::Aligned)
                    .got(format_args!("{:#x}", data.0), "a multiple of 16"))
            }
            _ => Ok(()),
        }
    }
}
