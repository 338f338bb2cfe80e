//! A transport's first messages: one to each rail peer, with the received ones checked.

use crate::backend::device::Device;
use crate::backend::nccl::own::{BROADCAST_BYTES, by_broadcasts};
use crate::backend::net::two_sided::members::Members;
use crate::backend::net::two_sided::{Label, Message, Transport};
use crate::error::{Code, Error, Result};
use crate::model::ids::GroupRank;
use crate::model::node_view::NodeView;
use crate::model::ops::Stream;
use crate::model::tensor::DevPtr;
use std::time::{Duration, Instant};

/// A rank's word: its number plus one, so that it is not zero.
const WORD: usize = size_of::<u64>();

/// Sends this rank's word to every rail peer and checks those that arrive, within `limit`; false if they do not.
/// Connects the ranks for messages of up to `most_bytes`.
pub fn run(
    transport: &dyn Transport,
    (device, stream): (&dyn Device, Stream),
    members: &Members,
    most_bytes: usize,
    limit: Duration,
) -> Result<bool> {
    let start = Instant::now();
    let view = &*members.view;
    // This rank's word, followed by received words.
    let places = view.forwarded().len();
    let bytes = places * WORD;
    let own = device.alloc_own(bytes)?;
    let mut words = vec![0; bytes];
    for (to, from) in words.iter_mut().zip(word(view.rank)) {
        *to = from;
    }
    device.upload(own, &words)?;
    exchange(transport, view, (own, WORD), stream)?;
    // For large messages, sent by broadcasts, NCCL makes further connections, with tens of MiB that others do not need.
    let unread_bytes = if by_broadcasts(members.ranks.len(), most_bytes) { places * BROADCAST_BYTES } else { 0 };
    let unread = device.alloc_own(unread_bytes)?;
    if unread_bytes > 0 {
        exchange(transport, view, (unread, BROADCAST_BYTES), stream)?;
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
    check(view, &words).map(|()| true)
}

/// Sends the first `bytes` of `data` to every rail peer; what they send is received behind them.
fn exchange(transport: &dyn Transport, view: &NodeView, (data, bytes): (DevPtr, usize), stream: Stream) -> Result<()> {
    let message = |(index, &peer): (usize, _)| Message { peer, data: DevPtr(data.0 + index * bytes), bytes };
    let sends: Vec<_> = view.rail_peers.iter().map(|it| message((0, it))).collect();
    let receives: Vec<_> = view.forwarded().iter().enumerate().skip(1).map(message).collect();
    transport.exchange(Label::WARM_UP, &sends, &receives, stream)
}

fn word(rank: GroupRank) -> [u8; WORD] {
    (rank.index() as u64 + 1).to_le_bytes()
}

/// Checks the `words` that [`run`] received.
fn check(view: &NodeView, words: &[u8]) -> Result<()> {
    let (words, _) = words.as_chunks::<WORD>();
    for (index, &source) in view.forwarded().iter().enumerate() {
        if words.get(index) != Some(&word(source)) {
            let rank = view.rank;
            let text = format!("rank {rank} received wrong data from rank {source} over the network");
            return Err(Error::new(Code::InternalError, text));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::device::tests::TestDevice;
    use crate::backend::net::two_sided::members::tests::members;
    use parking_lot::Mutex;

    /// Records the sizes of messages.
    #[derive(Default)]
    struct Noted(Mutex<Vec<usize>>);

    impl Transport for Noted {
        fn exchange(&self, _label: Label, sends: &[Message], receives: &[Message], _stream: Stream) -> Result<()> {
            assert!(receives.iter().all(|it| it.bytes == sends[0].bytes));
            self.0.lock().push(sends[0].bytes);
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

    /// Sizes of what rank 0 sends; `nodes` has a letter per rank that names its node.
    fn sent(nodes: &str, most_bytes: usize) -> Vec<usize> {
        let members = &members(nodes, 0);
        let transport = Noted::default();
        let on: (&dyn Device, _) = (&TestDevice::default(), Stream::DEFAULT);
        // Nothing arrives.
        assert!(run(&transport, on, members, most_bytes, Duration::ZERO).is_err());
        transport.0.into_inner()
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
    fn words_are_those_of_the_forwarded_ranks() {
        let words = |ranks: [usize; 3]| -> Vec<u8> { ranks.map(GroupRank::new).into_iter().flat_map(word).collect() };
        let view = &members("abc", 1).view;
        assert!(check(view, &words([1, 0, 2])).is_ok());
        assert!(check(view, &words([1, 2, 2])).is_err());
        assert!(check(view, &words([1, 0, 3])).is_err());
        assert!(check(view, &words([1, 0, 2])[..16]).is_err());
    }
}
