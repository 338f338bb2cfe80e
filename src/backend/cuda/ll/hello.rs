//! The handshake of a new LL handle between nodes: both sides of a message must know its size.
//!
//! It is sent when a handle is made, which is why all ranks must make their handles in one order. The first operation
//! waits on the host if the others' *hellos* are not there yet; later ones have them.
//!
//! Every message of an operation begins with the same struct, its header (*head*): nothing else would tell rows of one
//! type from those of another.

use crate::backend::Faults;
use crate::backend::cuda::driver::capture_mode::ApartFromCaptures;
use crate::backend::cuda::driver::memory::{CudaMemory, HostPage};
use crate::backend::cuda::driver::stream::StreamScope;
use crate::backend::cuda::group_context::GroupContext;
use crate::backend::cuda::ll::fingerprint::LlFingerprint;
use crate::backend::cuda::ll::network::LlNetwork;
use crate::backend::cuda::params::common::KernelOp;
use crate::backend::cuda::params::ll::LlHello;
use crate::backend::cuda::regions::to_u32;
use crate::backend::device::{Marks as _, StreamMark};
use crate::backend::net::two_sided::{Label, Message};
use crate::error::refusal::{AmongRanks, Role, Subject};
use crate::error::{Error, Result};
use crate::model::ops::Routing;
use crate::model::tensor::DevPtr;
use parking_lot::Mutex;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};
use std::time::{Duration, Instant};

/// Of a word.
const BYTES: usize = size_of::<LlHello>();
/// How long the host polls without sleeping: on a fast network the hellos come within that, and the shortest sleep
/// takes as long as they do.
const AWAKE: Duration = Duration::from_micros(100);
/// How long it sleeps between polls after that.
const NAP: Duration = Duration::from_micros(20);

/// A handle's memory for the handshake: this rank's hello, then those of its sources from 1 on. The network reads and
/// writes host memory: a copy behind an exchange might hold up copies of other streams.
pub struct HelloMemory {
    page: HostPage<LlHello>,
    arrived: Mutex<Box<dyn StreamMark>>,
}

/// The tokens of a rank's sources, from 1 on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SourceTokens {
    /// Of each.
    pub of: Vec<usize>,
    /// Of the one that has most.
    pub most: u32,
}

impl HelloMemory {
    /// Memory for a rank with `sources` sources.
    pub fn new(memory: &Arc<CudaMemory>, sources: usize) -> Result<Self> {
        Ok(Self {
            page: HostPage::new(memory.context(), sources)?,
            arrived: Mutex::new(memory.new_mark()?),
        })
    }

    /// Whether nothing uses it any more.
    pub fn is_free(&self) -> bool {
        self.arrived.lock().is_over() == Ok(true)
    }

    fn at(&self, index: usize) -> DevPtr {
        DevPtr(self.page.device() as usize + index * BYTES)
    }

    /// Enqueues the handshake of handle `handle`.
    pub fn send(
        &self,
        (context, network): (&GroupContext, &LlNetwork),
        handle: u32,
        routing: &Routing,
    ) -> Result<()> {
        let _apart = ApartFromCaptures::enter()?;
        let hello = LlHello {
            handle,
            tokens: to_u32(routing.tokens)?,
            fingerprint: LlFingerprint::of_no_operation(to_u32(routing.top_k)?).to_word(),
            channel: 0,
            scales_word: 0,
            epoch: 0,
            padding: [0; 2],
        };
        self.page.write(0, hello);
        // The network reads it after this.
        fence(Ordering::Release);
        let at = &context.module.enter(network.background())?;
        let turn = network.background_order.begin(at)?;
        turn.end_after(self.exchange(network, handle, at))
    }

    fn exchange(&self, network: &LlNetwork, handle: u32, at: &StreamScope) -> Result<()> {
        let message = |peer, index| Message {
            peer,
            data: self.at(index),
            bytes: BYTES,
        };
        let sources = network.sources();
        let others = sources.iter().enumerate().skip(1);
        network.exchange(
            label(handle),
            |gateways, sends, receives| {
                sends.extend(gateways.iter().map(|&peer| message(peer, 0)));
                receives.extend(others.map(|(index, &peer)| message(peer, index)));
            },
            at.stream,
        )?;
        self.arrived.lock().record(at.stream)?;
        Ok(())
    }

    /// Waits until the sources' hellos of handle `handle` are here.
    ///
    /// The handshake is a network operation, and the watchdog's deadline comes first once it runs. It is stream-ordered
    /// after the group's earlier network operations, and so perhaps after a stream that never reaches its part: then
    /// the watchdog's clock has not started, so this limit applies and ends the network.
    fn wait_until_arrived(
        &self,
        (context, network): (&GroupContext, &LlNetwork),
        handle: u32,
    ) -> Result<()> {
        let transport = network.transport()?;
        let limit = 2 * context.faults.timeout();
        let start = Instant::now();
        while !self.arrived.lock().is_over()? {
            if let Some(fault) = transport.health().or_else(|| context.faults.first()) {
                return Err(fault);
            }
            let waited = start.elapsed();
            if waited > limit
                && let Some(fault) = transport.end_late(label(handle), waited)
            {
                return Err(fault);
            }
            match waited < AWAKE {
                true => std::hint::spin_loop(),
                false => std::thread::sleep(NAP),
            }
        }
        transport.health().map_or(Ok(()), Err)
    }

    /// Waits for the sources' hellos of handle `handle`, and checks them.
    pub fn wait(
        &self,
        (context, network): (&GroupContext, &LlNetwork),
        handle: u32,
        routing: &Routing,
    ) -> Result<SourceTokens> {
        self.wait_until_arrived((context, network), handle)?;
        let sources = network.sources().iter().enumerate().skip(1);
        let mut of = Vec::new();
        for (index, &rank) in sources {
            let said = self
                .page
                .read(index)
                .ok_or_else(|| Error::internal("no hello"))?;
            let tokens = check(said, rank, handle, routing, network.max_tokens());
            of.push(tokens.inspect_err(|error| network.fail(error))?);
        }
        let most = to_u32(of.iter().copied().max().unwrap_or(0))?;
        Ok(SourceTokens { of, most })
    }
}

/// How texts of failures name the handshake of handle `handle`.
fn label(handle: u32) -> Label {
    Label {
        what: "LL handle",
        number: u64::from(handle),
    }
}

/// The tokens of `rank`, if its hello fits this rank's handle.
fn check(
    said: LlHello,
    rank: usize,
    handle: u32,
    routing: &Routing,
    max_tokens: usize,
) -> Result<usize> {
    let same = AmongRanks::Same { rank };
    let fingerprint = LlFingerprint::from_word(said.fingerprint);
    // It may also have an operation on an earlier handle, where this rank has a new one.
    let of_operation = [KernelOp::LlDispatch, KernelOp::LlCombine].map(|it| it as u32);
    if said.handle != handle || of_operation.contains(&fingerprint.op) {
        return Err(Error::usage(Subject::Handle, same).got(handle, said.handle));
    }
    let top_k = fingerprint.top_k as usize;
    if top_k != routing.top_k {
        return Err(Error::usage(Subject::Size(Role::Ids, 1), same).got(routing.top_k, top_k));
    }
    let tokens = said.tokens as usize;
    match tokens <= max_tokens {
        true => Ok(tokens),
        false => Err(Error::internal(format!("rank {rank} has {tokens} tokens"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::ops::IdWidth;

    #[test]
    fn another_handle_or_top_k_is_refused() {
        let routing = Routing {
            ids: DevPtr(8),
            width: IdWidth::Bits64,
            tokens: 3,
            top_k: 2,
        };
        let said = |handle, tokens, top_k| {
            let hello = LlHello {
                handle,
                tokens,
                fingerprint: LlFingerprint::of_no_operation(top_k).to_word(),
                channel: 0,
                scales_word: 0,
                epoch: 0,
                padding: [0; 2],
            };
            check(hello, 5, 7, &routing, 4)
        };
        assert_eq!(said(7, 4, 2), Ok(4));
        assert_eq!(said(7, 0, 2), Ok(0));
        assert!(said(8, 4, 2).is_err());
        assert!(said(7, 4, 3).is_err());
        assert!(said(7, 5, 2).is_err());
    }
}
