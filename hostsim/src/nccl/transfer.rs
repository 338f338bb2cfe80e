//! Sends and receives, as executed by the stream's worker.
//!
//! For each ordered pair of ranks there is a mailbox of one chunk. Both sides announce the size of each message in it
//! before data moves, so a message begins when both have reached it, as over NCCL's network transports, and both notice
//! different sizes. All transfers of a group progress together; transfers between the same two ranks in one direction
//! keep their order. An idle rank sleeps on its bell, which the others ring.
#![allow(unsafe_code)]

use std::collections::{BTreeMap, VecDeque};
use std::ptr;
use std::sync::atomic::Ordering;
use std::time::Instant;

use super::comm::Comm;
use super::error::{Code, Failure, Outcome};
use super::meeting::Watch;
use super::segment::{self, Announcements, Mailbox};

/// The direction of the data.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Direction {
    Send,
    Receive,
}

impl Direction {
    /// The function by which callers know it.
    pub(crate) fn call(self) -> &'static str {
        match self {
            Self::Send => "ncclSend",
            Self::Receive => "ncclRecv",
        }
    }
}

/// One send or receive with checked arguments.
#[derive(Clone, Copy)]
pub(crate) struct Transfer {
    pub(crate) direction: Direction,
    pub(crate) peer: usize,
    pub(crate) buffer: usize,
    pub(crate) bytes: usize,
}

/// The progress of the first transfer of a line.
#[derive(Clone, Copy)]
enum Stage {
    /// Not begun; delayed until this time.
    Held(Instant),
    /// Announced to the peer as this number.
    Announced(u32),
    /// Both sides agree on the size, and this many bytes have been moved.
    Moving(usize),
}

/// The transfers between this rank and one peer in one direction, the first being under way.
struct Line {
    direction: Direction,
    peer: usize,
    waiting: VecDeque<Transfer>,
    stage: Stage,
}

/// Completes a group of transfers.
pub(crate) fn run(comm: &Comm, transfers: &[Transfer]) -> Outcome<()> {
    let mut lines = line_up(comm, transfers);
    let bell = &comm.segment.lane(comm.rank).bell;
    let mut watch = Watch::start(&comm.segment, comm.rank, "ncclSend/ncclRecv");
    while !lines.is_empty() {
        // Read before the mailboxes, so that a change in between ends the sleep at once.
        let seen = bell.load(Ordering::Acquire);
        let mut advanced = false;
        for line in &mut lines {
            while line.advance(comm)? {
                advanced = true;
            }
        }
        lines.retain(|line| !line.waiting.is_empty());
        let held = lines.iter().filter_map(Line::held_until).min();
        if advanced {
            watch.restart();
        } else if let Some(until) = held {
            comm.health()?;
            segment::wait(bell, seen, until.saturating_duration_since(Instant::now()));
            watch.restart();
        } else {
            let missing = || {
                let mut peers: Vec<usize> = lines.iter().map(|line| line.peer).collect();
                peers.sort_unstable();
                peers.dedup();
                peers
            };
            watch.pause(bell, seen, &missing)?;
        }
    }
    Ok(())
}

/// Sorts transfers by direction and peer; those of one line keep their order.
fn line_up(comm: &Comm, transfers: &[Transfer]) -> Vec<Line> {
    let mut lines: BTreeMap<_, VecDeque<Transfer>> = BTreeMap::new();
    for &transfer in transfers {
        lines.entry((transfer.direction, transfer.peer)).or_default().push_back(transfer);
    }
    let line = |((direction, peer), waiting)| Line { direction, peer, waiting, stage: begin_later(comm) };
    lines.into_iter().map(line).collect()
}

fn begin_later(comm: &Comm) -> Stage {
    Stage::Held(Instant::now() + comm.delays.draw())
}

impl Line {
    /// The time until which the line is delayed, if it is.
    fn held_until(&self) -> Option<Instant> {
        match self.stage {
            Stage::Held(until) => Some(until),
            Stage::Announced(_) | Stage::Moving(_) => None,
        }
    }

    /// Takes one step with the first transfer, if its delay is over and the peer is ready.
    fn advance(&mut self, comm: &Comm) -> Outcome<bool> {
        let Some(transfer) = self.waiting.front().copied() else { return Ok(false) };
        let (mailbox, ours, theirs) = self.sides(comm);
        let moved = match self.stage {
            Stage::Held(until) if Instant::now() < until => return Ok(false),
            Stage::Held(_) => {
                self.stage = Stage::Announced(ours.announce(transfer.bytes));
                comm.segment.ring(self.peer);
                return Ok(true);
            }
            Stage::Announced(number) => match theirs.size(number) {
                None => return Ok(false),
                Some(size) => {
                    compare(comm, &transfer, size)?;
                    0
                }
            },
            Stage::Moving(moved) => {
                let len = match self.direction {
                    Direction::Send => post(comm, mailbox, &transfer, moved),
                    Direction::Receive => take(comm, mailbox, &transfer, moved),
                };
                let Some(len) = len else { return Ok(false) };
                comm.segment.ring(self.peer);
                moved + len
            }
        };
        self.stage = Stage::Moving(moved);
        if moved == transfer.bytes {
            self.waiting.pop_front();
            self.stage = begin_later(comm);
        }
        Ok(true)
    }

    /// The mailbox, and this rank's announcements and the peer's in it.
    fn sides<'a>(&self, comm: &'a Comm) -> (&'a Mailbox, &'a Announcements, &'a Announcements) {
        match self.direction {
            Direction::Send => {
                let mailbox = comm.segment.mailbox(comm.rank, self.peer);
                (mailbox, &mailbox.sends, &mailbox.receives)
            }
            Direction::Receive => {
                let mailbox = comm.segment.mailbox(self.peer, comm.rank);
                (mailbox, &mailbox.receives, &mailbox.sends)
            }
        }
    }
}

/// Fails the communicator if the peer's size differs from this rank's.
fn compare(comm: &Comm, transfer: &Transfer, theirs: usize) -> Outcome<()> {
    let ours = transfer.bytes;
    if ours == theirs {
        return Ok(());
    }
    let (from, sent, to, wanted) = match transfer.direction {
        Direction::Send => (comm.rank, ours, transfer.peer, theirs),
        Direction::Receive => (transfer.peer, theirs, comm.rank, ours),
    };
    let text = format!("ncclSend of {sent} bytes on rank {from} meets ncclRecv of {wanted} bytes on rank {to}");
    let failure = Failure::new(Code::InvalidUsage, text);
    comm.refuse(&failure);
    Err(failure)
}

/// Puts the next chunk into the mailbox; `None` while the previous one is still there.
fn post(comm: &Comm, mailbox: &Mailbox, transfer: &Transfer, moved: usize) -> Option<usize> {
    let segment = &comm.segment;
    let posted = mailbox.posted.load(Ordering::Relaxed);
    if mailbox.taken.load(Ordering::Acquire) != posted {
        return None;
    }
    let len = segment.chunk_size().min(transfer.bytes - moved);
    let chunk = segment.chunk(comm.rank, transfer.peer);
    // SAFETY: the call checked the buffer; the chunk is the sender's while the mailbox is empty.
    unsafe { ptr::copy_nonoverlapping((transfer.buffer + moved) as *const u8, chunk, len) };
    mailbox.len.store(len as u64, Ordering::Relaxed);
    mailbox.posted.store(posted.wrapping_add(1), Ordering::Release);
    Some(len)
}

/// Takes a chunk out of the mailbox; `None` if there is none.
fn take(comm: &Comm, mailbox: &Mailbox, transfer: &Transfer, moved: usize) -> Option<usize> {
    let taken = mailbox.taken.load(Ordering::Relaxed);
    if mailbox.posted.load(Ordering::Acquire) == taken {
        return None;
    }
    let len = (mailbox.len.load(Ordering::Relaxed) as usize).min(transfer.bytes - moved);
    let chunk = comm.segment.chunk(transfer.peer, comm.rank);
    // SAFETY: the call checked the buffer; the chunk is the receiver's while the mailbox is full.
    unsafe { ptr::copy_nonoverlapping(chunk, (transfer.buffer + moved) as *mut u8, len) };
    mailbox.taken.store(taken.wrapping_add(1), Ordering::Release);
    Some(len)
}
