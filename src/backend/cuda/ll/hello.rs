//! What ranks tell each other of a new handle over the network: both sides of a message must know its size.
//!
//! Ranks tell when they make the handle, which is why all must make their handles in one order. The first
//! operation waits on the host if the others' words are not there yet; later ones know them.
//!
//! Every operation sends such a word again, its *head*, with which operation it is: nothing else would tell rows of
//! one type from those of another. All heads that a handle may need are written when it is made.
#![forbid(unsafe_code)]

use crate::backend::cuda::driver::copy::set_word;
use crate::backend::cuda::driver::event::ApartFromCaptures;
use crate::backend::cuda::driver::memory::{Buffer, CudaMemory, HostPage};
use crate::backend::cuda::driver::stream::StreamScope;
use crate::backend::cuda::group_context::GroupContext;
use crate::backend::cuda::ll::network::LlNetwork;
use crate::backend::cuda::ll::signature::Signature;
use crate::backend::cuda::params::common::{OP_LL_COMBINE, OP_LL_DISPATCH};
use crate::backend::cuda::params::ll::{LL_CHANNELS, LlHello};
use crate::backend::cuda::sizes::number;
use crate::backend::transport::{Label, Message};
use crate::backend::{DeviceMemory, Faults, StreamMark};
use crate::error::refusal::{AmongRanks, Role, Subject};
use crate::error::{Error, Result};
use crate::model::dtype::DType;
use crate::model::ops::{Routing, Stream};
use crate::model::tensor::DevPtr;
use parking_lot::Mutex;
use std::mem::offset_of;
use std::sync::Arc;
use std::time::Duration;

/// Of a word.
pub const BYTES: usize = size_of::<LlHello>();
/// How long the host sleeps before it looks again.
const PAUSE: Duration = Duration::from_micros(20);

/// The operations of heads that are written when the handle is made, each on every channel with every type of rows.
const OPERATIONS: [u32; 2] = [OP_LL_DISPATCH, OP_LL_COMBINE];
const TYPES: usize = DType::LAST as usize + 1;
const CHANNELS: usize = LL_CHANNELS as usize;
/// Index of the first head of each channel for rows of another size than usual, whose signature is written anew for
/// each operation.
const OTHER_ROWS: usize = OPERATIONS.len() * CHANNELS * TYPES;
/// Index of this rank's hello, behind all heads.
const OWN: usize = OTHER_ROWS + CHANNELS;

/// A handle's memory for the words: the heads, this rank's hello, then the hellos of its sources from 1 on.
pub struct HelloMemory {
    page: HostPage<LlHello>,
    device: Buffer,
    arrived: Mutex<Box<dyn StreamMark>>,
    used: Mutex<Used>,
    /// Bytes of a row, as a rule.
    row_bytes: u32,
}

/// The last operations with this memory: the words of the next handle come behind no stream's back.
struct Used {
    /// By channel: receive phases have no common order.
    by: Vec<Box<dyn StreamMark>>,
    is_in_graphs: bool,
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
    /// Memory for a rank with `sources` sources, whose rows have `row_bytes` as a rule.
    pub fn new(memory: &Arc<CudaMemory>, sources: usize, row_bytes: usize) -> Result<Self> {
        Ok(Self {
            page: HostPage::new(memory.context(), OWN + sources)?,
            device: Buffer::new(memory, (OWN + sources) * BYTES)?,
            arrived: Mutex::new(memory.new_mark()?),
            used: Mutex::new(Used {
                by: (0..LL_CHANNELS)
                    .map(|_| memory.new_mark())
                    .collect::<Result<_>>()?,
                is_in_graphs: false,
            }),
            row_bytes: number(row_bytes)?,
        })
    }

    /// Whether nothing uses it any more.
    pub fn is_free(&self) -> bool {
        let used = self.used.lock();
        let is_over = |mark: &dyn StreamMark| mark.is_over() == Ok(true);
        !used.is_in_graphs
            && is_over(&**self.arrived.lock())
            && used.by.iter().all(|mark| is_over(&**mark))
    }

    /// An operation on `channel` uses it, the last of which `stream` has been given.
    pub fn is_used(&self, channel: u32, stream: Stream) -> Result<()> {
        let mut used = self.used.lock();
        let mark = used.by.get_mut(channel as usize);
        let mark = mark.ok_or_else(|| Error::internal("no such channel"))?;
        if !mark.record(stream)? {
            used.is_in_graphs = true;
        }
        Ok(())
    }

    /// Where the words of the sources from 1 on are on the device.
    pub fn of_sources(&self) -> *const LlHello {
        self.at(OWN + 1).0 as *const LlHello
    }

    /// Where the head of an operation on `channel` is, once `at` has come to it.
    pub fn head(&self, signature: Signature, channel: u32, at: &StreamScope) -> Result<DevPtr> {
        if signature.row_bytes == self.row_bytes {
            return Ok(self.at(head_index(signature, channel)));
        }
        let head = self.at(OTHER_ROWS + channel as usize);
        let word = DevPtr(head.0 + offset_of!(LlHello, signature));
        set_word(word, signature.to_word(), at)?;
        Ok(head)
    }

    fn at(&self, index: usize) -> DevPtr {
        DevPtr(self.device.data().0 + index * BYTES)
    }

    /// Enqueues the exchange of what ranks say about handle `handle`.
    pub fn send(
        &self,
        (context, network): (&GroupContext, &LlNetwork),
        handle: u32,
        routing: &Routing,
    ) -> Result<()> {
        let _apart = ApartFromCaptures::enter()?;
        self.write(LlHello {
            handle,
            tokens: number(routing.tokens)?,
            signature: Signature::of_no_operation(number(routing.top_k)?).to_word(),
            channel: 0,
        });
        let at = &context.module.enter(network.background())?;
        let turn = network.background_order.begin(at)?;
        self.page.copy_out(0, OWN + 1, self.at(0), at)?;
        let label = Label {
            what: "LL handle",
            number: u64::from(handle),
        };
        let message = |peer, index| Message {
            peer,
            data: self.at(OWN + index),
            bytes: BYTES,
        };
        let sources = network.sources();
        let others = sources.iter().enumerate().skip(1);
        network.exchange(
            label,
            |transport, sends, receives| {
                sends.extend(transport.gateways().iter().map(|&peer| message(peer, 0)));
                receives.extend(others.map(|(index, &peer)| message(peer, index)));
            },
            at.stream,
        )?;
        self.page
            .copy_in(OWN + 1, sources.len() - 1, self.at(OWN + 1), at)?;
        self.arrived.lock().record(at.stream)?;
        turn.end()
    }

    /// Writes this rank's hello, and the heads that go with it.
    fn write(&self, hello: LlHello) {
        self.page.write(OWN, hello);
        let of_hello = Signature::from_word(hello.signature);
        for channel in 0..LL_CHANNELS {
            let other = OTHER_ROWS + channel as usize;
            self.page.write(other, LlHello { channel, ..hello });
            let kinds = OPERATIONS
                .iter()
                .flat_map(|&op| (0..TYPES as u32).map(move |dtype| (op, dtype)));
            for (op, dtype) in kinds {
                let signature = Signature {
                    op,
                    dtype,
                    row_bytes: self.row_bytes,
                    ..of_hello
                };
                let head = LlHello {
                    signature: signature.to_word(),
                    channel,
                    ..hello
                };
                self.page.write(head_index(signature, channel), head);
            }
        }
    }

    /// Waits for what the sources say about handle `handle`, and checks it.
    pub fn wait(
        &self,
        (context, network): (&GroupContext, &LlNetwork),
        handle: u32,
        routing: &Routing,
    ) -> Result<SourceTokens> {
        let transport = network.transport()?;
        // The network's deadline ends the wait.
        while !self.arrived.lock().is_over()? {
            if let Some(fault) = transport.health().or_else(|| context.faults.first()) {
                return Err(fault);
            }
            std::thread::sleep(PAUSE);
        }
        if let Some(fault) = transport.health() {
            return Err(fault);
        }
        let sources = network.sources().iter().enumerate().skip(1);
        let mut of = Vec::new();
        for (index, &rank) in sources {
            let said = self
                .page
                .read(OWN + index)
                .ok_or_else(|| Error::internal("no hello"))?;
            let tokens = check(said, rank, handle, routing, network.max_tokens());
            of.push(tokens.inspect_err(|error| network.fail(error))?);
        }
        let most = number(of.iter().copied().max().unwrap_or(0))?;
        Ok(SourceTokens { of, most })
    }
}

/// Index of a head with rows of the usual size.
fn head_index(signature: Signature, channel: u32) -> usize {
    let op = OPERATIONS.iter().position(|&it| it == signature.op);
    (op.unwrap_or(0) * CHANNELS + channel as usize) * TYPES + signature.dtype as usize
}

/// The tokens of `rank`, if what it says fits what this rank has.
fn check(
    said: LlHello,
    rank: usize,
    handle: u32,
    routing: &Routing,
    max_tokens: usize,
) -> Result<usize> {
    let same = AmongRanks::Same { rank };
    let signature = Signature::from_word(said.signature);
    // It may also have an operation on an earlier handle, where this rank has a new one.
    if said.handle != handle || OPERATIONS.contains(&signature.op) {
        return Err(Error::usage(Subject::Handle, same).got(handle, said.handle));
    }
    let top_k = signature.top_k as usize;
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
                signature: Signature::of_no_operation(top_k).to_word(),
                channel: 0,
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
