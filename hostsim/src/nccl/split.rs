//! `ncclCommSplit`: new communicators out of an existing one.
//!
//! Ranks exchange colour and key through their notes in the parent's segment, at the meeting for
//! host calls, so that a split does not wait for work on streams.
#![allow(unsafe_code)]

use std::ffi::c_int;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::boundary;
use super::comm::{Comm, check_config, find, ncclComm_t, ncclConfig_t, publish};
use super::error::{Failure, Outcome, ncclResult_t};
use super::group::{self, Task};
use super::meeting::{Room, meet};
use super::segment::NOTE;
use super::store;
use super::unique_id::Place;

const CALL: &str = "ncclCommSplit";
/// `NCCL_SPLIT_NOCOLOR`: the rank joins no new communicator.
const NO_COLOUR: c_int = -1;

/// Splits a communicator: one new one per colour, ranks in order of key, then of old rank.
///
/// # Safety
/// `newcomm` is null or valid for a write, until the end of the group if one is open; `config` is
/// null or points to an `ncclConfig_t`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommSplit(
    comm: ncclComm_t,
    color: c_int,
    key: c_int,
    newcomm: *mut ncclComm_t,
    config: *const ncclConfig_t,
) -> ncclResult_t {
    boundary(|| {
        let parent = find(comm)?;
        // SAFETY: passed on under this function's contract.
        unsafe { check_config(config) }?;
        if newcomm.is_null() || color < NO_COLOUR {
            return Err(Failure::argument(format!(
                "newcomm is NULL or color is {color}"
            )));
        }
        let out = newcomm as usize;
        group::run(Task::Setup(Box::new(move || {
            let made = split(&parent, color, key)?.map_or(std::ptr::null_mut(), publish);
            // SAFETY: checked above not to be null; the caller keeps it valid until the group's
            // end.
            unsafe { store(out as *mut ncclComm_t, made) }
        })))
    })
}

fn split(parent: &Arc<Comm>, colour: c_int, key: c_int) -> Outcome<Option<Comm>> {
    parent.health()?;
    write_note(parent, [colour as u64, key as u64, 0]);
    meet(&parent.segment, parent.rank, Room::Host, CALL)?;
    let notes: Vec<_> = (0..parent.ranks())
        .map(|rank| read_note(parent, rank))
        .collect();
    let members = members_of(&notes, colour);
    // All have read the notes once all have come here again; only then may they change.
    meet(&parent.segment, parent.rank, Room::Host, CALL)?;
    let leads = colour != NO_COLOUR && members.first() == Some(&parent.rank);
    if leads {
        let place = Place::create().inspect_err(|failure| parent.refuse(failure))?;
        write_note(parent, place.to_words());
    }
    meet(&parent.segment, parent.rank, Room::Host, CALL)?;
    let (Some(leader), true) = (members.first(), colour != NO_COLOUR) else {
        return Ok(None);
    };
    let place = Place::from_words(read_note(parent, *leader));
    let seat = members
        .iter()
        .position(|rank| *rank == parent.rank)
        .unwrap_or_default();
    Comm::join(place, members.len(), seat, parent.device).map(Some)
}

/// The old ranks of a colour in their new order.
fn members_of(notes: &[[u64; NOTE]], colour: c_int) -> Vec<usize> {
    let mut members: Vec<usize> = (0..notes.len())
        .filter(|rank| notes[*rank][0] as c_int == colour)
        .collect();
    members.sort_by_key(|rank| (notes[*rank][1] as c_int, *rank));
    members
}

fn write_note(comm: &Comm, words: [u64; NOTE]) {
    for (to, from) in comm.segment.lane(comm.rank).note.iter().zip(words) {
        to.store(from, Ordering::Relaxed);
    }
}

fn read_note(comm: &Comm, rank: usize) -> [u64; NOTE] {
    comm.segment
        .lane(rank)
        .note
        .each_ref()
        .map(|word| word.load(Ordering::Relaxed))
}

#[cfg(test)]
mod tests {
    use super::members_of;

    #[test]
    fn members_are_ordered_by_key_then_rank() {
        let notes = [[7, 2, 0], [8, 0, 0], [7, (-1i32) as u64, 0], [7, 2, 0]];
        assert_eq!(members_of(&notes, 7), [2, 0, 3]);
        assert_eq!(members_of(&notes, 8), [1]);
        assert!(members_of(&notes, 9).is_empty());
    }
}
