//! The first messages of a transport: one to each gateway, and what comes from the sources is checked.

use crate::backend::device::Device;
use crate::backend::nccl::own::{BROADCAST_BYTES, by_broadcasts};
use crate::backend::net::two_sided::members::Members;
use crate::backend::net::two_sided::{Label, Message, Transport};
use crate::error::{Code, Error, Result};
use crate::model::ops::Stream;
use crate::model::tensor::DevPtr;
use std::time::{Duration, Instant};

/// What a rank says of itself: its number and one more, so that it is not zero.
const WORD: usize = size_of::<u64>();

/// Sends this rank's word to every gateway and checks the sources', which come within `limit`. False if they
/// do not. Then the ranks are connected as messages of up to `most_bytes` need it.
pub fn run(
    transport: &dyn Transport,
    (device, stream): (&dyn Device, Stream),
    members: &Members,
    most_bytes: usize,
    limit: Duration,
) -> Result<bool> {
    let start = Instant::now();
    let rank = members.rank;
    let sources = transport.sources();
    // This rank's word, and what is received.
    let bytes = (1 + sources.len()) * WORD;
    let own = device.alloc_own(bytes)?;
    let mut words = vec![0; bytes];
    for (to, from) in words.iter_mut().zip(word(rank)) {
        *to = from;
    }
    device.upload(own, &words)?;
    exchange(transport, rank, (own, WORD), stream)?;
    // For the other way of large messages NCCL connects the ranks anew, with tens of MiB that others do not need.
    let unread_bytes = if by_broadcasts(members.ranks.len(), most_bytes) {
        (1 + sources.len()) * BROADCAST_BYTES
    } else {
        0
    };
    let unread = device.alloc_own(unread_bytes)?;
    if unread_bytes > 0 {
        exchange(transport, rank, (unread, BROADCAST_BYTES), stream)?;
    }
    // After a failure the memory belongs to what is on the stream.
    while !device.is_idle(stream)? {
        if let Some(fault) = transport.health() {
            return Err(fault);
        }
        if start.elapsed() > limit {
            return Ok(false);
        }
        std::thread::sleep(Duration::from_micros(50));
    }
    if let Some(fault) = transport.health() {
        return Err(fault);
    }
    device.download(&mut words, own)?;
    device.free_own(own, bytes);
    device.free_own(unread, unread_bytes);
    check(rank, sources, &words).map(|()| true)
}

/// Sends the bytes of `data` to every gateway; what comes from each source lies behind them.
fn exchange(
    transport: &dyn Transport,
    rank: usize,
    (data, bytes): (DevPtr, usize),
    stream: Stream,
) -> Result<()> {
    let message = |peer, data| Message { peer, data, bytes };
    let sends = transport.gateways().iter();
    let sends: Vec<_> = sends.map(|&peer| message(peer, data)).collect();
    let places = transport.sources().iter().enumerate();
    let receives = places.map(|(i, &peer)| message(peer, DevPtr(data.0 + (1 + i) * bytes)));
    let receives: Vec<_> = receives.filter(|message| message.peer != rank).collect();
    transport.exchange(Label::WARM_UP, &sends, &receives, stream)
}

fn word(rank: usize) -> [u8; WORD] {
    (rank as u64 + 1).to_le_bytes()
}

/// Whether `words` are what [`run`] wants to see there.
fn check(rank: usize, sources: &[usize], words: &[u8]) -> Result<()> {
    let (words, _) = words.as_chunks::<WORD>();
    for (index, &source) in sources.iter().enumerate() {
        if source != rank && words.get(1 + index) != Some(&word(source)) {
            let text =
                format!("rank {rank} received wrong data from rank {source} over the network");
            return Err(Error::new(Code::InternalError, text));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::device::tests::TestDevice;
    use crate::model::topology::{NodeId, Topology};
    use parking_lot::Mutex;

    /// Notes the bytes of messages.
    struct Noted<'a> {
        members: &'a Members,
        sent: Mutex<Vec<usize>>,
    }

    impl Transport for Noted<'_> {
        fn gateways(&self) -> &[usize] {
            &self.members.gateways
        }
        fn sources(&self) -> &[usize] {
            &self.members.sources
        }
        fn exchange(
            &self,
            _label: Label,
            sends: &[Message],
            receives: &[Message],
            _stream: Stream,
        ) -> Result<()> {
            assert!(receives.iter().all(|it| it.bytes == sends[0].bytes));
            self.sent.lock().push(sends[0].bytes);
            Ok(())
        }
        fn end_late(&self, _label: Label, _waited: Duration) -> Option<Error> {
            None
        }
        fn health(&self) -> Option<Error> {
            None
        }
        fn abort(&self) {}
        fn fail(&self, _error: &Error) {}
    }

    /// What rank 0 sends where the nodes of the ranks are the letters.
    fn sent(nodes: &str, most_bytes: usize) -> Vec<usize> {
        let id = |node: char| NodeId::from_text(&node.to_string());
        let ids: Vec<_> = nodes.chars().map(id).collect();
        let members = &Members::new(&Topology::from_ids(&ids), 0);
        let sent = Mutex::default();
        let transport = Noted { members, sent };
        let on: (&dyn Device, _) = (&TestDevice::default(), Stream::DEFAULT);
        // Nothing comes.
        assert!(run(&transport, on, members, most_bytes, Duration::ZERO).is_err());
        transport.sent.into_inner()
    }

    #[test]
    fn two_ranks_that_send_large_messages_are_connected_for_them() {
        assert_eq!(sent("ab", BROADCAST_BYTES), [WORD, BROADCAST_BYTES]);
        assert_eq!(sent("aabb", BROADCAST_BYTES), [WORD, BROADCAST_BYTES]);
        assert_eq!(sent("ab", BROADCAST_BYTES - 1), [WORD]);
        assert_eq!(sent("abc", usize::MAX), [WORD]);
        assert_eq!(sent("aab", usize::MAX), [WORD]);
    }

    #[test]
    fn words_are_those_of_the_sources() {
        let words =
            |ranks: [usize; 4]| -> Vec<u8> { ranks.iter().flat_map(|&it| word(it)).collect() };
        let nothing = 98;
        assert!(check(1, &[0, 1, 4], &words([1, 0, nothing, 4])).is_ok());
        assert!(check(1, &[0, 1, 4], &words([1, 2, nothing, 4])).is_err());
        assert!(check(1, &[0, 1, 4], &words([1, 0, nothing, 5])).is_err());
        assert!(check(1, &[0, 1, 4], &words([1, 0, nothing, 4])[..24]).is_err());
    }
}
