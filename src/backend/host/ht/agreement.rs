//! Creation of an HT handle: an operation in which every rank announces its ids, or its refusal.
//!
//! The host waits for it. It uses the windows like every operation, so a rank whose group has failed need not take
//! part: the others see its failure mark, and no exchange is left on the communicator.
#![allow(unsafe_code)]

use crate::backend::host::device::{bytes, write_counts, write_numbers};
use crate::backend::host::fingerprint::{announce, read_as};
use crate::backend::host::group_state::GroupState;
use crate::backend::host::ht::route::{HtMap, ID_BYTES, RankIds};
use crate::backend::host::message::{Message, Reader};
use crate::backend::{HtRouting, not_exchanged};
use crate::error::refusal::{AmongRanks, Operation, Role, Subject};
use crate::error::{Code, Context, Error, Result};
use crate::model::group::GroupFacts;
use crate::model::ids::GroupRank;
use crate::model::ops::{HandleForm, Routing, RoutingCounters, Stream};
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, channel};

/// Most rows that a rank may receive, even in a group without a bound.
const MOST_ROWS: usize = i32::MAX as usize;

/// The map of a new handle. Collective; `wanted` is an error on a rank that refused its arguments, and that rank gets
/// it back at once.
pub fn exchange(shared: &Arc<GroupState>, wanted: Result<HtRouting>, stream: Stream) -> Result<HtMap> {
    let (sender, receiver) = channel();
    let refused = wanted.as_ref().err().cloned();
    let own = Arc::clone(shared);
    let work = move |epoch| {
        let (agreed, outcome) = match gather_announcements(&own, &wanted, epoch) {
            Ok(all) => (agree(&own.facts, &wanted, epoch, all), Ok(())),
            Err(error) => (Err(error.clone()), Err(error)),
        };
        // On a rank that refused, the receiver is gone.
        let _ = sender.send(agreed);
        outcome
    };
    let epoch = shared.enqueue_operation(Operation::HtHandle, stream, || (), work)?;
    if let Some(refused) = refused {
        return Err(refused);
    }
    // This operation has a deadline, and so does each one before it; their sum would exceed even twice that, and other
    // work on the stream has none.
    let patience = 2 * shared.mailboxes.timeout();
    match receiver.recv_timeout(patience) {
        Ok(agreed) => agreed,
        Err(RecvTimeoutError::Disconnected) => Err(match shared.mailboxes.fault() {
            Some(fault) => fault.during(Context::GroupFailed),
            None => Error::internal("no word of a handle"),
        }),
        Err(RecvTimeoutError::Timeout) => {
            let error = not_exchanged(patience, &shared.mailboxes.missing(epoch));
            shared.mailboxes.fail(error.clone());
            Err(error)
        }
    }
}

/// A rank's announcement: its ids, or why it refuses.
type Announced = Result<RankIds>;

/// Announces this rank's part and reads those of all ranks.
fn gather_announcements(shared: &GroupState, wanted: &Result<HtRouting>, epoch: u64) -> Result<Vec<Announced>> {
    let refusal;
    let mut message = Message::default();
    announce(Operation::HtHandle, &mut message);
    match wanted {
        Ok(HtRouting { routing, .. }) => {
            let Routing { tokens, top_k, ids, width, .. } = *routing;
            message.number(0);
            message.number(tokens);
            message.number(top_k);
            // SAFETY: `rule` has checked the tensor `[T, K]` of ids as wide; the caller keeps it until
            // the handle is made.
            let ids = unsafe { bytes(ids, tokens * top_k * width.bytes()) };
            message.bytes(width.widened(ids));
        }
        Err(error) => {
            message.number(error.code() as usize);
            refusal = (shared.formatter)(error);
            message.number(refusal.len());
            message.bytes(refusal.as_bytes());
        }
    }
    shared.mailboxes.post(epoch, &message)?;
    let messages = shared.mailboxes.receive_all(epoch)?;
    let messages = messages.iter().enumerate();
    messages
        .map(|(source, message)| read(read_as(Operation::HtHandle, message, source)?, source, &shared.facts))
        .collect()
}

fn read(mut reader: Reader<'_>, source: usize, facts: &GroupFacts) -> Result<Announced> {
    if reader.number()? != 0 {
        let length = reader.number()?;
        let text = String::from_utf8_lossy(reader.bytes(length)?);
        let text = format!("rank {source} refused: {text}");
        return Ok(Err(Error::new(Code::RemoteError, text)));
    }
    let (tokens, top_k) = (reader.number()?, reader.number()?);
    let most = facts.max_tokens.unwrap_or(MOST_ROWS / facts.ranks);
    if tokens > most {
        return Err(Error::internal(format!("rank {source} tells of more than {most} tokens")));
    }
    RankIds::copied(reader.array(tokens.saturating_mul(top_k), ID_BYTES)?, top_k).map(Ok)
}

/// The map, if all ranks announced ids and the same number per token. Also fills the counter.
fn agree(facts: &GroupFacts, wanted: &Result<HtRouting>, epoch: u64, announced: Vec<Announced>) -> Result<HtMap> {
    let HtRouting { routing, counter, counters, storage } = wanted.as_ref().map_err(Error::clone)?;
    let all: Vec<RankIds> = announced.into_iter().collect::<Result<_>>()?;
    let other = all.iter().position(|ids| ids.top_k != routing.top_k);
    if let Some((rank, theirs)) = other.and_then(|rank| Some((rank, all.get(rank)?.top_k))) {
        let rule = AmongRanks::Same { rank: GroupRank::new(rank) };
        return Err(Error::argument(Subject::Size(Role::Ids, 1), rule)
            .got(routing.top_k, format_args!("{theirs} as on rank {rank}")));
    }
    let map = HtMap::new(facts, epoch, &all, routing.form);
    write_counts(*counter, &map.counts)?;
    write_counters(&map, routing.form, counters)?;
    if let Some(block) = storage.caller_block {
        map.store(facts, routing, block)?;
    }
    Ok(map)
}

/// Reports the routing in this map to the caller.
pub fn write_counters(map: &HtMap, form: HandleForm, counters: &RoutingCounters) -> Result<()> {
    let Some(zones) = form.zones else {
        write_numbers(counters.experts, map.counts.iter().copied())?;
        return write_numbers(counters.total, [(map.received() + map.dropped) as u32]);
    };
    let zones: Vec<_> = map.zones.zones(zones.most_slots.unwrap_or(usize::MAX)).collect();
    write_numbers(counters.experts, zones.iter().map(|zone| zone.len() as u32))?;
    write_numbers(counters.offsets, zones.iter().map(|zone| zone.start as u32))?;
    write_numbers(counters.total, [map.zones.total() as u32])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::group::Algorithm;

    fn facts() -> GroupFacts {
        GroupFacts { algorithm: Algorithm::HighThroughput, experts: 4, max_tokens: Some(6), ..GroupFacts::SAMPLE }
    }

    fn read_numbers(numbers: &[u64]) -> Result<Announced> {
        let message: Vec<u8> = numbers.iter().flat_map(|it| it.to_ne_bytes()).collect();
        read(Reader::new(&message), 1, &facts())
    }

    #[test]
    fn ids_and_refusals_are_announced() {
        let ids = read_numbers(&[0, 2, 1, 3, u64::MAX]).unwrap().unwrap();
        assert_eq!(ids.top_k, 1);
        assert_eq!(ids.ids, [3_u64, u64::MAX].map(u64::to_ne_bytes).concat());
        assert!(read_numbers(&[0, 6, 0]).unwrap().unwrap().ids.is_empty());
        let error = read_numbers(&[4, 8, u64::from_ne_bytes(*b"no, no!!")]).unwrap().err().unwrap();
        assert_eq!(error.text(), "rank 1 refused: no, no!!");
        assert_eq!(error.code(), Code::RemoteError);
    }

    #[test]
    fn a_rank_cannot_announce_more_than_it_sends() {
        for numbers in [[0, 7, 0, 0], [0, u64::MAX, 1, 0], [0, 2, 1, 0], [0, 6, 1 << 61, 0], [5, 17, 0, 0]] {
            assert!(read_numbers(&numbers).is_err(), "{numbers:?}");
        }
    }
}
