//! How the ranks of a group create and end objects.
//!
//! They do so in the same order, so their numbers agree. Each exchange says which call a rank makes, on which object,
//! and in its verdict whether it can. Before an object ends, each rank waits for its own operations, unmaps its peers'
//! memory, and tells them; only then is the memory freed. If a rank does not come, the memory stays, as that rank may
//! still map it and write there.

use crate::backend::bootstrap::Bootstrap;
use crate::backend::objects::{Found, GroupObjects, Kind, Mapped, Mapper, Recognised, Wanted};
use crate::error::refusal::{AmongRanks, OfMemory, Operation, Subject};
use crate::error::{Error, Result, Value};
use crate::model::ids::GroupRank;
use crate::model::objects::{MAX_OBJECTS, Range, Ranges};
use crate::model::ops::Stream;
use crate::model::tensor::DevPtr;
use parking_lot::Mutex;
use std::sync::Arc;

/// A group's objects on one rank.
pub struct Objects<M: Mapper> {
    pub bootstrap: Bootstrap,
    mapper: M,
    recognised: Arc<Recognised>,
    /// Held by a call for as long as it needs the other ranks.
    calls: Mutex<()>,
    entries: Mutex<[Option<Entry<M::Mapped>>; MAX_OBJECTS]>,
}

struct Entry<T> {
    range: Range,
    kind: Kind,
    mapped: T,
    bases: Box<[usize]>,
}

impl<T> Entry<T> {
    fn found(&self, (tensors, plain): (u64, u64), fallbacks: u64) -> Found {
        Found {
            range: self.range,
            kind: self.kind,
            tensors,
            plain,
            fallbacks,
            peers: self.bases.iter().filter(|it| **it != 0).count() - 1,
            bases: DevPtr(self.bases.as_ptr() as usize),
        }
    }
}

impl<M: Mapper> Objects<M> {
    /// No objects yet; their tensors will be `recognised`.
    pub fn new(bootstrap: Bootstrap, mapper: M, recognised: Arc<Recognised>) -> Self {
        Self {
            bootstrap,
            mapper,
            recognised,
            calls: Mutex::default(),
            entries: Mutex::new([const { None }; MAX_OBJECTS]),
        }
    }

    /// As [`GroupObjects::make`]; returns where this rank sees each rank's memory.
    pub fn make_of_all(&self, wanted: Result<Wanted>, kind: Kind, stream: Stream) -> Result<Box<[usize]>> {
        let bootstrap = &self.bootstrap;
        let _call = self.calls.lock();
        bootstrap.begin_call();
        let object = self.entries.lock().iter().position(Option::is_none);
        let call = Call::making(kind, object.unwrap_or(MAX_OBJECTS) as u32);
        let taken = wanted.and_then(|wanted| self.take(wanted, call.object));
        let mine = taken.as_ref().map(|(_, _, record)| record.clone());
        let records = meet(bootstrap, call, mine.map_err(Error::clone), M::Mapped::RECORD_BYTES, stream);
        let (mut mapped, range, _) = match taken {
            Ok(taken) => taken,
            Err(error) => return records.and(Err(error)),
        };
        // If a rank is known to have refused, no rank maps anything.
        if records.is_ok() || bootstrap.lost().is_some() {
            mapped.publish();
        }
        let records = records?;
        let records: Vec<&[u8]> = records.iter().map(|it| &it[..]).collect();
        let bases = self.bootstrap.within_most(|left| self.mapper.map(&mut mapped, &records, left));
        let shown = bases.and_then(|bases| {
            self.mapper.show(call.object, &bases)?;
            Ok(bases.into_boxed_slice())
        });
        let verdict = shown.as_ref().map(|_| Vec::new()).map_err(Error::clone);
        if let Err(error) = bootstrap.agree(verdict, 0, stream) {
            // That error is the one to report; memory that cannot be freed stays.
            let _ = self.part(call.object, mapped, Ok(()), stream);
            return Err(error);
        }
        let bases = shown?;
        let entry = Entry { range, kind, mapped, bases: bases.clone() };
        if let Some(place) = self.entries.lock().get_mut(call.object as usize) {
            *place = Some(entry);
        }
        if kind != Kind::Views {
            self.recognised.add(range);
        }
        Ok(bases)
    }

    /// This rank's memory for `object`, where it is, and its record.
    fn take(&self, wanted: Wanted, object: u32) -> Result<(M::Mapped, Range, Vec<u8>)> {
        self.mapper.check()?;
        wanted.check()?;
        if object as usize >= MAX_OBJECTS {
            return Err(Error::usage(Subject::Group, OfMemory::FewerObjects)
                .got(MAX_OBJECTS + 1, format_args!("at most {MAX_OBJECTS}")));
        }
        if let Wanted::Given(data, bytes) = wanted {
            self.check_apart(data, bytes)?;
        }
        let (mapped, record) = self.mapper.take(wanted)?;
        let begin = mapped.begin();
        // A caller's memory that was freed meanwhile counts here as long as its object lives.
        self.check_apart(begin, wanted.bytes())?;
        Ok((mapped, Range { begin: begin.0 as u64, bytes: wanted.bytes() as u64, object }, record))
    }

    fn check_apart(&self, begin: DevPtr, bytes: usize) -> Result<()> {
        let overlaps = self.recognised.ranges.read().overlaps(begin.0 as u64, bytes as u64);
        overlaps.map_or(Ok(()), |other| {
            Err(Error::argument(Subject::Memory, OfMemory::Apart).got(
                format_args!("{bytes} bytes at {:#x}", begin.0),
                format_args!("none of the {} at {:#x}", other.bytes, other.begin),
            ))
        })
    }

    fn begins_at(&self, data: DevPtr, kind: Kind) -> Result<Range> {
        let is_it = |it: &Found| it.range.begin == data.0 as u64 && it.kind == kind;
        self.find(data).filter(is_it).map(|it| it.range).ok_or_else(|| {
            let rule = match kind {
                Kind::Own | Kind::Views => OfMemory::OfOwn,
                Kind::Given => OfMemory::OfGiven,
            };
            Error::argument(Subject::Memory, rule)
        })
    }

    /// Unmaps the peers' memory, tells them, and gives this rank's back once all have done so; nothing happens unless
    /// its operations have `rested`. Collective.
    fn part(&self, object: u32, mut mapped: M::Mapped, rested: Result<()>, stream: Stream) -> Result<()> {
        let hidden = rested.and_then(|()| self.mapper.show(object, &[]));
        let mine = hidden.map(|()| vec![u8::from(mapped.unmap())]);
        // If a rank is lost, or its operations may still run, what was published stays.
        mapped.give_back(self.bootstrap.agree(mine, 1, stream)?.iter().all(|it| *it == [1]));
        Ok(())
    }

    /// Takes out all objects when the group ends, which the ranks do together.
    pub fn take_all(&self) -> Vec<M::Mapped> {
        let _call = self.calls.lock();
        let mut entries = self.entries.lock();
        let taken = entries.iter_mut().filter_map(Option::take).map(|it| it.mapped).collect();
        drop(entries);
        self.recognised.change(|ranges| *ranges = Ranges::default());
        taken
    }
}

impl<M: Mapper> GroupObjects for Objects<M> {
    fn make(&self, wanted: Result<Wanted>, kind: Kind, stream: Stream) -> Result<DevPtr> {
        let bases = self.make_of_all(wanted, kind, stream)?;
        Ok(DevPtr(bases.get(self.bootstrap.rank().index()).copied().unwrap_or_default()))
    }

    fn end(&self, data: DevPtr, kind: Kind, stream: Stream) -> Result<()> {
        let _call = self.calls.lock();
        self.bootstrap.begin_call();
        let found = self.begins_at(data, kind);
        let call = Call::ending(kind, found.as_ref().map_or(MAX_OBJECTS as u32, |it| it.object));
        let mine = found.and_then(|_| {
            self.mapper.check()?;
            self.mapper.check_graphs()?;
            Ok(vec![0; M::Mapped::RECORD_BYTES])
        });
        meet(&self.bootstrap, call, mine, M::Mapped::RECORD_BYTES, stream)?;
        let place = self.entries.lock().get_mut(call.object as usize).map(Option::take);
        let entry = place.flatten().ok_or_else(|| Error::internal("an object that is gone"))?;
        self.recognised.change(|ranges| ranges.remove(call.object));
        let rested = self.bootstrap.within_most(|left| self.mapper.rest(left));
        self.part(call.object, entry.mapped, rested, stream)
    }

    fn find(&self, data: DevPtr) -> Option<Found> {
        let range = self.recognised.ranges.read().find(data.0 as u64)?;
        let entries = self.entries.lock();
        let counts = self.recognised.counts(range.object);
        Some(entries.get(range.object as usize)?.as_ref()?.found(counts, self.mapper.fallbacks()))
    }

    fn own(&self) -> Vec<Range> {
        let entries = self.entries.lock();
        let own = entries.iter().flatten().filter(|it| matches!(it.kind, Kind::Own | Kind::Views));
        own.map(|it| it.range).collect()
    }

    fn lost(&self) -> Option<Error> {
        self.bootstrap.lost()
    }
}

/// A collective call, and the object that it creates or ends.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Call {
    operation: Operation,
    pub object: u32,
}

impl Call {
    const ALL: [Operation; 5] = [
        Operation::MemoryNew,
        Operation::MemoryEnd,
        Operation::MemoryGiven,
        Operation::MemoryGivenEnd,
        Operation::LlDispatch,
    ];
    const BYTES: usize = 8;

    pub fn making(kind: Kind, object: u32) -> Self {
        let operation = match kind {
            Kind::Own => Operation::MemoryNew,
            Kind::Given => Operation::MemoryGiven,
            Kind::Views => Operation::LlDispatch,
        };
        Self { operation, object }
    }

    pub fn ending(kind: Kind, object: u32) -> Self {
        let operation = match kind {
            Kind::Own | Kind::Views => Operation::MemoryEnd,
            Kind::Given => Operation::MemoryGivenEnd,
        };
        Self { operation, object }
    }

    fn to_bytes(self) -> [u8; Self::BYTES] {
        let number = Self::ALL.iter().position(|it| *it == self.operation).unwrap_or(Self::ALL.len()) as u32;
        let mut bytes = [0; Self::BYTES];
        let (first, second) = bytes.split_at_mut(4);
        first.copy_from_slice(&number.to_le_bytes());
        second.copy_from_slice(&self.object.to_le_bytes());
        bytes
    }

    fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let [number, object] = bytes.as_chunks::<4>().0 else { return None };
        let operation = *Self::ALL.get(u32::from_le_bytes(*number) as usize)?;
        Some(Self { operation, object: u32::from_le_bytes(*object) })
    }

    /// Refuses if `rank` makes another call.
    fn check_same(self, rank: GroupRank, other: Option<Self>) -> Result<()> {
        let Some(other) = other else { return Err(Error::internal("a call of another rank that is none")) };
        if other == self {
            return Ok(());
        }
        let same = AmongRanks::Same { rank };
        Err(if other.operation == self.operation {
            Error::usage(Subject::Memory, same)
                .got(format_args!("object {}", self.object), format_args!("object {}", other.object))
        } else {
            Error::usage(Subject::Operation, same)
                .found(Value::Operation(self.operation), Value::Operation(other.operation))
        })
    }
}

/// Exchanges `mine`, a record of `bytes`, with the ranks that make the same `call`. All get the records, or all fail.
pub fn meet(
    bootstrap: &Bootstrap,
    call: Call,
    mine: Result<Vec<u8>>,
    bytes: usize,
    stream: Stream,
) -> Result<Vec<Vec<u8>>> {
    let mine = mine.map(|record| [&call.to_bytes()[..], &record].concat());
    let mut records = bootstrap.agree(mine, Call::BYTES + bytes, stream)?;
    for (rank, record) in GroupRank::all(records.len()).zip(&mut records) {
        let head: Vec<u8> = record.drain(..Call::BYTES).collect();
        call.check_same(rank, Call::from_bytes(&head))?;
    }
    Ok(records)
}
