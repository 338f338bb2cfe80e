//! Which phases of an operation a launch runs, and on which channel.
#![forbid(unsafe_code)]

use crate::backend::cuda::params::ll::{
    LL_CHANNELS, LL_PHASE_RECEIVE, LL_PHASE_SEND, LL_WHOLE_CHANNEL,
};
use crate::model::ops::{STAGED_SLOTS, StagedSlot};

/// The part of an operation that a launch runs, and its channel.
#[derive(Clone, Copy)]
pub struct Part {
    pub channel: u32,
    pub phases: u32,
    /// Whether the operation's outputs are wanted.
    pub keep: bool,
}

impl Part {
    /// A whole operation on one node.
    pub const WHOLE: Self = Self {
        channel: LL_WHOLE_CHANNEL,
        phases: LL_PHASE_SEND | LL_PHASE_RECEIVE,
        keep: true,
    };

    /// The send phase in `slot`.
    pub fn send(slot: StagedSlot) -> Self {
        Self {
            channel: channel(slot),
            phases: LL_PHASE_SEND,
            keep: true,
        }
    }

    /// The receive phase in `slot`.
    pub fn receive(slot: StagedSlot, keep: bool) -> Self {
        Self {
            channel: channel(slot),
            phases: LL_PHASE_RECEIVE,
            keep,
        }
    }
}

/// The channel of operations in `slot`; whole operations have a channel of their own.
fn channel(slot: StagedSlot) -> u32 {
    LL_WHOLE_CHANNEL + 1 + slot.index() as u32
}

const _: () = assert!(LL_CHANNELS as usize == 1 + STAGED_SLOTS);
