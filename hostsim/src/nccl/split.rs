//! `ncclCommSplit`: splits a communicator into new ones.
//!
//! Ranks exchange colour and key through their notes in the parent's segment, at the meeting for host calls, so that a
//! split does not wait for work on streams.

use std::ffi::c_int;
use std::sync::atomic::Ordering;

use super::comm::Comm;
use super::error::Outcome;
use super::meeting::{Room, meet};
use super::segment::NOTE;
use super::unique_id::Rendezvous;

const CALL: &str = "ncclCommSplit";
/// `NCCL_SPLIT_NOCOLOR`: the rank joins no new communicator.
pub(crate) const NO_COLOUR: c_int = -1;

/// This rank's end of its new communicator, if its colour has one.
pub(crate) fn split(parent: &Comm, colour: c_int, key: c_int) -> Outcome<Option<Comm>> {
    parent.health()?;
    write_note(parent, [colour as u64, key as u64, 0]);
    meet(&parent.segment, parent.rank, Room::Host, CALL)?;
    let notes: Vec<_> = (0..parent.ranks()).map(|rank| read_note(parent, rank)).collect();
    let members = members_of(&notes, colour);
    // All have read the notes once all meet here again; only then may they change.
    meet(&parent.segment, parent.rank, Room::Host, CALL)?;
    let leads = colour != NO_COLOUR && members.first() == Some(&parent.rank);
    if leads {
        let rendezvous = Rendezvous::create().inspect_err(|failure| parent.refuse(failure))?;
        write_note(parent, rendezvous.to_words());
    }
    meet(&parent.segment, parent.rank, Room::Host, CALL)?;
    let (Some(leader), true) = (members.first(), colour != NO_COLOUR) else { return Ok(None) };
    let rendezvous = Rendezvous::from_words(read_note(parent, *leader));
    let seat = members.iter().position(|rank| *rank == parent.rank).unwrap_or_default();
    Comm::join(rendezvous, members.len(), seat, parent.device).map(Some)
}

/// The old ranks with this colour in their new order.
fn members_of(notes: &[[u64; NOTE]], colour: c_int) -> Vec<usize> {
    let mut members: Vec<usize> = (0..notes.len()).filter(|rank| notes[*rank][0] as c_int == colour).collect();
    members.sort_by_key(|rank| (notes[*rank][1] as c_int, *rank));
    members
}

fn write_note(comm: &Comm, words: [u64; NOTE]) {
    for (to, from) in comm.segment.lane(comm.rank).note.iter().zip(words) {
        to.store(from, Ordering::Relaxed);
    }
}

fn read_note(comm: &Comm, rank: usize) -> [u64; NOTE] {
    comm.segment.lane(rank).note.each_ref().map(|word| word.load(Ordering::Relaxed))
}
