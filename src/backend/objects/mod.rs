//! Objects of a group: memory of its ranks that the ranks of a node map of each other.

pub mod group;

use crate::error::refusal::{AmongRanks, OfMemory, Subject};
use crate::error::{Error, Result, Value};
use crate::model::objects::{MAX_OBJECTS, OBJECT_ALIGN, ObjectOffset, Range, Ranges};
use crate::model::ops::Stream;
use crate::model::tensor::DevPtr;
use parking_lot::RwLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

/// The memory that this rank wants for an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wanted {
    /// New memory of so many bytes.
    New(usize),
    /// So many bytes at the caller's address.
    Given(DevPtr, usize),
}

/// Who owns an object's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The library's, from [`Wanted::New`].
    Own,
    Given,
    /// The library's, for views: a dispatch allocates it, and operations' tensors are not looked up there.
    Views,
}

/// Facts about an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Found {
    /// This rank's memory of it.
    pub range: Range,
    pub kind: Kind,
    /// How many tensors of operations lay in it.
    pub tensors: u64,
    /// How many tensors of the group's operations lay in no object, since the group has any.
    pub plain: u64,
    /// How many operations of the group had a tensor in an object, but used buffers because other ranks' had none.
    pub fallbacks: u64,
    /// How many other ranks this rank shares mappings with.
    pub peers: usize,
    /// The address of each rank's memory as this rank maps it; 0 where it does not. Valid until the object ends.
    pub bases: DevPtr,
}

/// The memory of a group's objects, in which operations look up their tensors.
pub struct Recognised {
    ranges: RwLock<Ranges>,
    any: AtomicBool,
    /// Numbers of tensors found in each object, and in none.
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
    /// Where a tensor of `bytes` at `address` lies, if peers can reach it. Counted, so an operation must ask once per
    /// tensor.
    pub fn locate(&self, address: u64, bytes: u64) -> Option<ObjectOffset> {
        if !self.any() {
            return None;
        }
        let place = self.ranges.read().locate(address, bytes);
        let count = place.map(|it| it.object as usize).and_then(|it| self.tensors.get(it));
        count.unwrap_or(&self.plain).fetch_add(1, Ordering::Relaxed);
        place
    }

    /// Numbers of operations' tensors in `object`, and in none.
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

/// The objects of a group, however their memory is mapped.
pub trait GroupObjects: Send + Sync {
    /// Creates an object of `kind` with this rank's memory as `wanted`; returns its address. Collective: every rank
    /// gets one, or every rank an error.
    fn make(&self, wanted: Result<Wanted>, kind: Kind, stream: Stream) -> Result<DevPtr>;
    /// Ends the object of `kind` that begins at `data` on this rank. Collective.
    fn end(&self, data: DevPtr, kind: Kind, stream: Stream) -> Result<()>;
    /// The object that contains the byte at `data`; local.
    fn find(&self, data: DevPtr) -> Option<Found>;
    /// The library's memory of this rank; local.
    fn own(&self) -> Vec<Range>;
    /// The error of an exchange that other ranks never joined: no further one is possible.
    fn lost(&self) -> Option<Error>;
}

/// This rank's memory of an object, and its mappings of its peers'. If dropped after it was published, the memory stays
/// allocated, as a peer may map it.
pub trait Mapped: Send {
    /// Bytes that a peer needs to map it.
    const RECORD_BYTES: usize;

    /// The first byte of this rank's memory.
    fn begin(&self) -> DevPtr;
    /// Notes that peers have the record from now on.
    fn publish(&mut self);
    /// Unmaps the peers' memory; returns whether nothing is left mapped.
    fn unmap(&mut self) -> bool;
    /// Ends it: the peers have unmapped everything, or will not use the rest.
    fn give_back(self, all_unmapped: bool);
}

/// How a backend maps memory. Objects are known to it by number.
pub trait Mapper: Send + Sync {
    type Mapped: Mapped;

    /// Refuses if this rank cannot map now. A device without graphs always can.
    fn check(&self) -> Result<()> {
        Ok(())
    }
    /// Memory for an object, and its record.
    fn take(&self, wanted: Wanted) -> Result<(Self::Mapped, Vec<u8>)>;
    /// Maps what the `records` of all ranks describe, as far as this rank can reach it. Returns the addresses of each
    /// rank's memory, its own included, and 0 for unreachable ones. What was mapped before an error stays in `mapped`.
    /// Waits for other ranks no longer than the call has `left`.
    fn map(&self, mapped: &mut Self::Mapped, records: &[&[u8]], left: Duration) -> Result<Vec<usize>>;
    /// Tells operations the addresses of the ranks' memory of an object, if they access it.
    fn show(&self, _object: u32, _bases: &[usize]) -> Result<()> {
        Ok(())
    }
    /// Refuses to end an object that operations in graphs may use.
    fn check_graphs(&self) -> Result<()> {
        Ok(())
    }
    /// Waits until this rank's operations of the group have run.
    fn rest(&self, left: Duration) -> Result<()>;
    /// [`Found::fallbacks`], if operations can fall back at all.
    fn fallbacks(&self) -> u64 {
        0
    }
}

/// Refuses a caller's memory that other processes cannot map because of `cause`.
pub fn unmappable(cause: Error) -> Error {
    let expected = Value::Text("memory of cudaMalloc".to_owned());
    Error::argument(Subject::Memory, OfMemory::Mappable).found(Value::Error(cause), expected)
}

/// Refuses `bytes` of a caller's that reach beyond what is `left` of their allocation.
pub fn check_left(bytes: usize, left: usize) -> Result<()> {
    if bytes <= left {
        return Ok(());
    }
    let refused = Error::argument(Subject::MemoryBytes, OfMemory::InOneAllocation);
    Err(refused.got(bytes, format_args!("at most {left}")))
}

impl Wanted {
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
