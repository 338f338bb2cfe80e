//! The blocks and threads of an LL operation, and which blocks send.
#![forbid(unsafe_code)]

use crate::backend::cuda::driver::function::LaunchShape;
use crate::tuning::Choice;
use std::ops::RangeInclusive;

/// Blocks of a launch: the first `send_blocks` send rows, the last `receive_blocks` do everything
/// else.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grid {
    pub blocks: u32,
    pub threads: u32,
    pub send_blocks: u32,
    pub receive_blocks: u32,
}

impl Grid {
    /// Every block sends and receives.
    pub fn shared(blocks: u32, threads: u32) -> Self {
        Self {
            blocks,
            threads,
            send_blocks: blocks,
            receive_blocks: blocks,
        }
    }

    /// `senders` blocks send rows, and `receivers` others do everything else. On a tiny device all
    /// blocks do both.
    pub fn split(senders: u32, receivers: u32, threads: u32) -> Self {
        if senders == 0 || receivers == 0 {
            return Self::shared((senders + receivers).max(1), threads);
        }
        Self {
            blocks: senders + receivers,
            threads,
            send_blocks: senders,
            receive_blocks: receivers,
        }
    }

    /// The measured grid `choice`, with its threads limited to the kernel's `possible` range.
    pub fn chosen(choice: Choice, possible: RangeInclusive<u32>) -> Self {
        let threads = choice.threads.clamp(*possible.start(), *possible.end());
        let receivers = choice.blocks.saturating_sub(choice.send_blocks);
        Self::split(choice.send_blocks, receivers, threads)
    }

    /// This grid with at least `blocks` blocks. Added blocks receive.
    pub fn with_receivers(self, blocks: u32) -> Self {
        let added = blocks.saturating_sub(self.blocks);
        Self {
            blocks: self.blocks + added,
            receive_blocks: self.receive_blocks + added,
            ..self
        }
    }

    /// This grid with at least `blocks` blocks. Added blocks send; where all blocks do both, they
    /// do both, too.
    pub fn with_senders(self, blocks: u32) -> Self {
        let does_both = self.receive_blocks == self.blocks;
        let grown = self.with_receivers(blocks);
        Self {
            send_blocks: self.send_blocks + grown.blocks - self.blocks,
            receive_blocks: match does_both {
                true => grown.receive_blocks,
                false => self.receive_blocks,
            },
            ..grown
        }
    }

    /// This grid with at least `threads` threads.
    pub fn with_threads(self, threads: u32) -> Self {
        let threads = self.threads.max(threads);
        Self { threads, ..self }
    }

    /// The launch of this grid with `shared_bytes` of dynamic shared memory.
    pub fn launch_shape(&self, shared_bytes: u32) -> LaunchShape {
        LaunchShape {
            blocks: self.blocks,
            threads: self.threads,
            shared_bytes,
        }
    }
}

/// `wanted`, limited to the `blocks` that run at the same time: blocks wait for those of the peers,
/// so all must run.
pub fn at_most(wanted: usize, blocks: u32) -> u32 {
    u32::try_from(wanted).unwrap_or(u32::MAX).min(blocks)
}
