//! Sends and receives as the stream's worker executes them.
//!
//! Each ordered pair of ranks has a mailbox of one chunk. All transfers of a group progress together;
//! transfers between the same two ranks in one direction keep their order. An idle rank sleeps on its
//! bell, which the others ring.
#![allow(unsafe_code)]

use std::collections::{BTreeMap, VecDeque};
use std::ptr;
use std::sync::atomic::Ordering;

use super::comm::Comm;
use super::error::{Code, Failure, Outcome};
use super::meeting::Watch;

/// Which way the data goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Direction {
    Send,
    Receive,
}

impl Direction {
    /// The function that a caller knows it by.
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

/// The transfers between this rank and one peer in one direction, the first being under way.
struct Line {
    direction: Direction,
    peer: usize,
    waiting: VecDeque<Transfer>,
    /// Bytes of the first transfer that have been moved.
    moved: usize,
}

/// Completes a group of transfers.
pub(crate) fn run(comm: &Comm, transfers: Vec<Transfer>) -> Outcome<()> {
    let mut lines = line_up(transfers);
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
        if advanced {
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

fn line_up(transfers: Vec<Transfer>) -> Vec<Line> {
    let mut lines = BTreeMap::new();
    for transfer in transfers {
        let Transfer {
            direction, peer, ..
        } = transfer;
        lines
            .entry((direction, peer))
            .or_insert_with(|| Line {
                direction,
                peer,
                waiting: VecDeque::new(),
                moved: 0,
            })
            .waiting
            .push_back(transfer);
    }
    lines.into_values().collect()
}

impl Line {
    /// Moves one chunk if the mailbox permits.
    fn advance(&mut self, comm: &Comm) -> Outcome<bool> {
        let Some(transfer) = self.waiting.front().copied() else {
            return Ok(false);
        };
        let moved = match self.direction {
            Direction::Send => post(comm, &transfer, self.moved),
            Direction::Receive => take(comm, &transfer, self.moved)?,
        };
        let Some(len) = moved else { return Ok(false) };
        comm.segment.ring(self.peer);
        self.moved += len;
        if self.moved == transfer.bytes {
            self.waiting.pop_front();
            self.moved = 0;
        }
        Ok(true)
    }
}

/// Puts the next chunk into the mailbox; nothing while the previous one is still there.
fn post(comm: &Comm, transfer: &Transfer, moved: usize) -> Option<usize> {
    let segment = &comm.segment;
    let mailbox = segment.mailbox(comm.rank, transfer.peer);
    let posted = mailbox.posted.load(Ordering::Relaxed);
    if mailbox.taken.load(Ordering::Acquire) != posted {
        return None;
    }
    let len = segment.chunk_size().min(transfer.bytes - moved);
    let chunk = segment.chunk(comm.rank, transfer.peer);
    // SAFETY: the call checked the buffer; the chunk is the sender's while the mailbox is empty.
    unsafe { ptr::copy_nonoverlapping((transfer.buffer + moved) as *const u8, chunk, len) };
    mailbox.len.store(len as u64, Ordering::Relaxed);
    mailbox
        .total
        .store(transfer.bytes as u64, Ordering::Relaxed);
    mailbox
        .posted
        .store(posted.wrapping_add(1), Ordering::Release);
    Some(len)
}

/// Takes a chunk out of the mailbox; nothing while there is none.
fn take(comm: &Comm, transfer: &Transfer, moved: usize) -> Outcome<Option<usize>> {
    let segment = &comm.segment;
    let mailbox = segment.mailbox(transfer.peer, comm.rank);
    let taken = mailbox.taken.load(Ordering::Relaxed);
    if mailbox.posted.load(Ordering::Acquire) == taken {
        return Ok(None);
    }
    let total = mailbox.total.load(Ordering::Relaxed) as usize;
    if total != transfer.bytes {
        let text = format!(
            "rank {}: ncclRecv of {} bytes meets ncclSend of {total} bytes on rank {}",
            comm.rank, transfer.bytes, transfer.peer
        );
        let failure = Failure::new(Code::InvalidUsage, text);
        comm.refuse(&failure);
        return Err(failure);
    }
    let len = (mailbox.len.load(Ordering::Relaxed) as usize).min(total - moved);
    let chunk = segment.chunk(transfer.peer, comm.rank);
    // SAFETY: the call checked the buffer; the chunk is the receiver's while the mailbox is full.
    unsafe { ptr::copy_nonoverlapping(chunk, (transfer.buffer + moved) as *mut u8, len) };
    mailbox
        .taken
        .store(taken.wrapping_add(1), Ordering::Release);
    Ok(Some(len))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn transfers_keep_their_order_per_peer_and_direction() {
        let transfer = |direction, peer, bytes| Transfer {
            direction,
            peer,
            buffer: 0,
            bytes,
        };
        let lines = line_up(vec![
            transfer(Direction::Send, 1, 10),
            transfer(Direction::Receive, 1, 20),
            transfer(Direction::Send, 1, 30),
            transfer(Direction::Send, 0, 40),
        ]);
        let sizes: Vec<Vec<usize>> = lines
            .iter()
            .map(|line| line.waiting.iter().map(|transfer| transfer.bytes).collect())
            .collect();
        assert_eq!(sizes, [vec![40], vec![10, 30], vec![20]]);
    }
}
