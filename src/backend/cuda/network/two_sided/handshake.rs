//! The handshake of a new handle between nodes, without which receivers would not know the sizes of messages.
//!
//! When a handle is created, every rank announces its number of tokens to its rail peers; so all ranks must create
//! handles in the same order. HT waits for the others' announcements at once, LL in the first operation.

use crate::backend::Faults as _;
use crate::backend::cuda::driver::memory::{CudaMemory, HostPage};
use crate::backend::cuda::driver::stream::StreamScope;
use crate::backend::cuda::fault::FaultPage;
use crate::backend::cuda::kernels::to_u32;
use crate::backend::cuda::network::Network;
use crate::backend::cuda::params::common::MessageHeader;
use crate::backend::device::{Device as _, StreamMark};
use crate::backend::net::two_sided::{Label, Message};
use crate::error::refusal::{AmongRanks, Subject};
use crate::error::{Error, Result};
use crate::model::ids::GroupRank;
use crate::model::tensor::DevPtr;
use parking_lot::Mutex;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};
use std::time::{Duration, Instant};

const BYTES: usize = size_of::<MessageHeader>();
/// How long the host polls without sleeping. On a fast network the headers arrive in this time, which the shortest
/// sleep would already take.
const SPIN_TIME: Duration = Duration::from_micros(100);
/// After that time the host sleeps for so long between polls.
const POLL_INTERVAL: Duration = Duration::from_micros(20);

/// Memory for a handshake: this rank's header, then those of the ranks that it forwards for. It is host memory, which
/// the network accesses directly, as a copy queued after an exchange could delay copies of other streams.
pub struct Handshake {
    page: HostPage<MessageHeader>,
    arrived: Mutex<Box<dyn StreamMark>>,
}

/// A handle being created.
#[derive(Clone, Copy)]
pub struct NewHandle<'a> {
    pub network: &'a Network,
    pub faults: &'a FaultPage,
    /// What the handle is called in error texts.
    pub what: &'static str,
    pub number: u32,
}

impl NewHandle<'_> {
    pub fn label(&self) -> Label {
        Label { what: self.what, number: u64::from(self.number) }
    }
}

/// What a rank announces about a new handle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Announced {
    pub tokens: usize,
    /// The number of ids per token, or why the rank refuses.
    pub verdict: u32,
}

impl Handshake {
    /// Memory for a rank that forwards for `forwarded` ranks, including itself.
    pub fn new(memory: &Arc<CudaMemory>, forwarded: usize) -> Result<Self> {
        Ok(Self { page: HostPage::new(&memory.context, forwarded)?, arrived: Mutex::new(memory.new_mark()?) })
    }

    /// Whether its last exchange, if any, has run.
    pub fn is_free(&self) -> bool {
        self.arrived.lock().is_over() == Ok(true)
    }

    /// Enqueues the handshake of `handle` on `at`.
    pub fn send(&self, handle: &NewHandle<'_>, own: Announced, at: &StreamScope) -> Result<()> {
        let header = MessageHeader {
            handle: handle.number,
            tokens: to_u32(own.tokens)?,
            fingerprint: own.verdict,
            ..Default::default()
        };
        self.page.write(0, header);
        // The network reads the header only after this fence.
        fence(Ordering::Release);
        let message =
            |(index, &peer)| Message { peer, data: DevPtr(self.page.device() as usize + index * BYTES), bytes: BYTES };
        let view = &handle.network.view;
        let sends = view.rail_peers.iter().map(|it| message((0, it)));
        let receives = view.forwarded().iter().enumerate().skip(1).map(message);
        let label = handle.label();
        let exchanges = &handle.network.exchanges;
        exchanges.enqueue(label, sends, receives, at.stream)?;
        self.arrived.lock().record(at.stream)?;
        Ok(())
    }

    /// Waits until the others' headers are here.
    ///
    /// A handshake that runs is a network operation with a watchdog, whose deadline is earlier. But stream order may
    /// put the handshake after a stream that never gets there; then the watchdog's time has not begun, and this limit
    /// ends the network.
    fn wait_until_arrived(&self, handle: &NewHandle<'_>) -> Result<()> {
        let transport = handle.network.exchanges.transport()?;
        let limit = 2 * handle.faults.timeout;
        let start = Instant::now();
        while !self.arrived.lock().is_over()? {
            if let Some(fault) = transport.health().or_else(|| handle.faults.first()) {
                return Err(fault);
            }
            let waited = start.elapsed();
            if waited > limit
                && let Some(fault) = transport.end_late(handle.label(), waited)
            {
                return Err(fault);
            }
            if waited < SPIN_TIME {
                std::hint::spin_loop();
            } else {
                std::thread::sleep(POLL_INTERVAL);
            }
        }
        transport.health().map_or(Ok(()), Err)
    }

    /// Waits for the headers about `handle` from the other ranks that this one forwards for. Ends the network if a
    /// header is about another handle, or announces more than `most_tokens`.
    pub fn wait(&self, handle: &NewHandle<'_>, most_tokens: usize) -> Result<Vec<Announced>> {
        self.wait_until_arrived(handle)?;
        let remote = handle.network.view.remote().iter().zip(1..);
        let read = |(&rank, index)| {
            let header = self.page.read(index);
            let header = header.ok_or_else(|| Error::internal("no handshake"))?;
            check(header, rank, handle.number, most_tokens)
        };
        let all: Result<_> = remote.map(read).collect();
        all.inspect_err(|error| handle.network.fail(error))
    }
}

/// The announcement in a header of `rank`, which must be about handle `number`.
fn check(header: MessageHeader, rank: GroupRank, number: u32, most_tokens: usize) -> Result<Announced> {
    // The header may also be of an operation on an earlier handle, where this rank creates a new one.
    if header.handle != number || header.epoch != 0 {
        return Err(Error::usage(Subject::Handle, AmongRanks::Same { rank }).got(number, header.handle));
    }
    let (tokens, verdict) = (header.tokens as usize, header.fingerprint);
    if tokens > most_tokens {
        return Err(Error::internal(format!("rank {rank} announces {tokens} tokens, more than {most_tokens}")));
    }
    Ok(Announced { tokens, verdict })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_handshake_of_this_handle_is_refused() {
        let said = |handle, epoch, tokens| {
            let header = MessageHeader { handle, tokens, fingerprint: 2, epoch, ..Default::default() };
            check(header, GroupRank::new(5), 7, 4)
        };
        let announced = |tokens| Announced { tokens, verdict: 2 };
        assert_eq!(said(7, 0, 4), Ok(announced(4)));
        assert_eq!(said(7, 0, 0), Ok(announced(0)));
        assert!(said(8, 0, 4).is_err());
        assert!(said(7, 1, 4).is_err());
        assert!(said(7, 0, 5).is_err());
    }
}
