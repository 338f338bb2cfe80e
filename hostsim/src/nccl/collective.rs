//! Collectives, as executed by the stream's worker.
//!
//! A collective is a sequence of rounds. In a round each rank writes up to one slot of bytes, all meet, and each reads
//! the slots it needs. Slots alternate between two banks: before a rank overwrites a bank, two rounds later, all have
//! met once more after reading it.
#![allow(unsafe_code)]

use std::ptr;
use std::sync::atomic::Ordering;

use super::comm::Comm;
use super::datatype::{DataType, Sum};
use super::error::{Code, Failure, Outcome};
use super::meeting::{Room, meet};
use super::segment::{BANKS, DESCRIPTION, SLOT};

/// Which collective.
#[derive(Clone, Copy)]
pub(crate) enum Kind {
    AllGather,
    AllReduce(Sum),
    /// From this rank.
    Broadcast(usize),
}

/// One collective with checked arguments. `count` is the caller's, in elements.
#[derive(Clone, Copy)]
pub(crate) struct Collective {
    pub(crate) kind: Kind,
    pub(crate) send: usize,
    pub(crate) recv: usize,
    pub(crate) count: usize,
    pub(crate) datatype: DataType,
}

impl Kind {
    /// The function by which callers know it.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::AllGather => "ncclAllGather",
            Self::AllReduce(_) => "ncclAllReduce",
            Self::Broadcast(_) => "ncclBroadcast",
        }
    }

    fn number(self) -> u64 {
        match self {
            Self::AllGather => 0,
            Self::AllReduce(_) => 1,
            Self::Broadcast(root) => 2 + root as u64,
        }
    }
}

impl Collective {
    /// Takes part in the collective.
    pub(crate) fn run(&self, comm: &Comm) -> Outcome<()> {
        comm.delays.sleep();
        self.announce(comm);
        let bytes = self.count * self.datatype.size;
        let mut turn = Turn { comm, collective: self, checked: false };
        for (offset, len) in pieces(bytes, SLOT) {
            self.round(&mut turn, bytes, (offset, len))?;
        }
        comm.executed.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    /// Moves `len` of each rank's `bytes`, from `offset` on. If some ranks never come, the others' bytes are delivered
    /// all the same, as NCCL may do.
    fn round(&self, turn: &mut Turn, bytes: usize, (offset, len): (usize, usize)) -> Outcome<()> {
        let comm = turn.comm;
        let bank = comm.rounds.fetch_add(1, Ordering::Relaxed) % BANKS;
        if !matches!(self.kind, Kind::Broadcast(root) if root != comm.rank) {
            copy(self.send + offset, turn.slot(bank, comm.rank), len);
        }
        let met = turn.meet();
        let deliver = |rank, to| {
            if turn.has_come(rank) {
                copy(turn.slot(bank, rank), to + offset, len);
            }
        };
        match self.kind {
            Kind::AllGather => (0..comm.ranks()).for_each(|rank| deliver(rank, self.recv + rank * bytes)),
            Kind::AllReduce(sum) if met.is_ok() => turn.add_up(sum, bank, self.recv + offset, len),
            Kind::Broadcast(root) if root != comm.rank || self.send != self.recv => deliver(root, self.recv),
            Kind::AllReduce(_) | Kind::Broadcast(_) => {}
        }
        met
    }

    /// Publishes this rank's view of the collective.
    fn announce(&self, comm: &Comm) {
        let words = &comm.segment.lane(comm.rank).description[comm.executed() % BANKS];
        for (to, from) in words.iter().zip(self.words()) {
            to.store(from, Ordering::Relaxed);
        }
    }

    /// Refuses if another rank has announced something else.
    fn compare(&self, comm: &Comm) -> Outcome<()> {
        let bank = comm.executed() % BANKS;
        for rank in 0..comm.ranks() {
            let words = comm.segment.lane(rank).description[bank].each_ref().map(|word| word.load(Ordering::Relaxed));
            if words != self.words() {
                let failure = Failure::new(
                    Code::InvalidUsage,
                    format!(
                        "rank {}: {} does not match the call on rank {rank}: {}",
                        comm.rank,
                        self.kind.name(),
                        self.difference(words)
                    ),
                );
                comm.refuse(&failure);
                return Err(failure);
            }
        }
        Ok(())
    }

    fn words(&self) -> [u64; DESCRIPTION] {
        [self.kind.number(), self.count as u64, self.datatype.number as u64]
    }

    fn difference(&self, theirs: [u64; DESCRIPTION]) -> String {
        const NAMES: [&str; DESCRIPTION] = ["collective or root", "count", "datatype"];
        let ours = self.words();
        (0..DESCRIPTION).find(|index| ours[*index] != theirs[*index]).map_or_else(String::new, |index| {
            format!("{} is {} here and {} there", NAMES[index], ours[index], theirs[index])
        })
    }
}

impl Comm {
    fn executed(&self) -> usize {
        self.executed.load(Ordering::Relaxed)
    }
}

/// A collective in progress.
struct Turn<'a> {
    comm: &'a Comm,
    collective: &'a Collective,
    checked: bool,
}

impl Turn<'_> {
    /// Whether a rank has filled its slot of this round.
    fn has_come(&self, rank: usize) -> bool {
        let steps = |rank: usize| {
            let steps = &self.comm.segment.lane(rank).steps;
            steps[Room::Stream as usize].load(Ordering::Acquire)
        };
        steps(self.comm.rank).wrapping_sub(steps(rank)) as i32 <= 0
    }

    /// Meets the others, after which all have filled their slots.
    fn meet(&mut self) -> Outcome<()> {
        let comm = self.comm;
        meet(&comm.segment, comm.rank, Room::Stream, self.collective.kind.name())?;
        if !self.checked {
            self.collective.compare(comm)?;
            self.checked = true;
        }
        Ok(())
    }

    fn slot(&self, bank: usize, rank: usize) -> usize {
        self.comm.segment.slot(bank, rank) as usize
    }

    /// Sums the slots of all ranks.
    fn add_up(&self, sum: Sum, bank: usize, to: usize, len: usize) {
        if len == 0 {
            return;
        }
        let inputs: Vec<&[u8]> = (0..self.comm.ranks())
            .map(|rank| {
                // SAFETY: `len` is at most a slot; nobody writes this bank until all ranks have
                // met again, which includes this one.
                unsafe { std::slice::from_raw_parts(self.slot(bank, rank) as *const u8, len) }
            })
            .collect();
        // SAFETY: the call checked that the receive buffer has the range; it belongs to this
        // operation until the stream moves on.
        sum(&inputs, unsafe { std::slice::from_raw_parts_mut(to as *mut u8, len) });
    }
}

/// Copies between a slot and a checked buffer.
fn copy(from: usize, to: usize, len: usize) {
    if len > 0 {
        // SAFETY: both ranges were checked by the call or lie within a slot whose turn it is, and
        // a slot never overlaps a buffer.
        unsafe { ptr::copy_nonoverlapping(from as *const u8, to as *mut u8, len) };
    }
}

/// Cuts a length into pieces, at least one, so that an empty collective is a meeting, too.
fn pieces(total: usize, size: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..total.div_ceil(size).max(1)).map(move |index| {
        let offset = index * size;
        (offset, size.min(total - offset))
    })
}
