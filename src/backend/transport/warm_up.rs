//! The first messages of a transport: one to each gateway, and what comes from the sources is checked.
#![forbid(unsafe_code)]

use crate::backend::DeviceMemory;
use crate::backend::nccl::own::BROADCAST_BYTES;
use crate::backend::transport::members::Members;
use crate::backend::transport::{Label, Message, Transport};
use crate::error::{Code, Error, Result};
use crate::model::ops::Stream;
use crate::model::tensor::DevPtr;
use std::time::{Duration, Instant};

/// What a rank says of itself: its number and one more, so that it is not zero.
const WORD: usize = size_of::<u64>();

/// Sends this rank's word to every gateway and checks the sources', which come within `limit`. False if they
/// do not.
pub fn run(
    transport: &dyn Transport,
    memory: &dyn DeviceMemory,
    members: &Members,
    stream: Stream,
    limit: Duration,
) -> Result<bool> {
    let start = Instant::now();
    let rank = members.rank;
    let sources = transport.sources();
    // This rank's word, and what is received.
    let bytes = (1 + sources.len()) * WORD;
    let own = memory.alloc_own(bytes)?;
    let mut words = vec![0; bytes];
    for (to, from) in words.iter_mut().zip(word(rank)) {
        *to = from;
    }
    memory.upload(own, &words)?;
    exchange(transport, rank, (own, WORD), stream)?;
    // Two ranks exchange large messages in another way, for which NCCL connects them anew.
    let unread_bytes = match members.ranks.len() {
        2 => (1 + sources.len()) * BROADCAST_BYTES,
        _ => 0,
    };
    let unread = memory.alloc_own(unread_bytes)?;
    if unread_bytes > 0 {
        exchange(transport, rank, (unread, BROADCAST_BYTES), stream)?;
    }
    // After a failure the memory belongs to what is on the stream.
    while !memory.is_idle(stream)? {
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
    memory.download(&mut words, own)?;
    memory.free_own(own, bytes);
    memory.free_own(unread, unread_bytes);
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
