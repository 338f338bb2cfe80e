//! The blocks and threads of an LL operation, and who of them sends.
#![forbid(unsafe_code)]

use crate::backend::cuda::driver::function::LaunchShape;
use crate::tuning::Choice;
use std::ops::RangeInclusive;

/// Blocks of a launch: the first `send_blocks` send rows, the last `receive_blocks` do all else.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grid {
    pub blocks: u32,
    pub threads: u32,
    pub send_blocks: u32,
    pub receive_blocks: u32,
}

impl Grid {
    /// Every block does everything.
    pub fn shared(blocks: u32, threads: u32) -> Self {
        Self {
            blocks,
            threads,
            send_blocks: blocks,
            receive_blocks: blocks,
        }
    }

    /// `senders` blocks send rows, `receivers` others do all else; on a tiny device all do both.
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

    /// A grid that was measured, with as many threads as the kernel can work with.
    pub fn chosen(choice: Choice, possible: RangeInclusive<u32>) -> Self {
        let threads = choice.threads.clamp(*possible.start(), *possible.end());
        let receivers = choice.blocks.saturating_sub(choice.send_blocks);
        Self::split(choice.send_blocks, receivers, threads)
    }

    /// This grid with at least `blocks` blocks. Those that are added receive.
    pub fn with_receivers(self, blocks: u32) -> Self {
        let added = blocks.saturating_sub(self.blocks);
        Self {
            blocks: self.blocks + added,
            receive_blocks: self.receive_blocks + added,
            ..self
        }
    }

    /// The same, but those that are added send; where all blocks do both, they do both, too.
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

    /// The same with at least `threads` threads.
    pub fn with_threads(self, threads: u32) -> Self {
        let threads = self.threads.max(threads);
        Self { threads, ..self }
    }

    /// The launch of this grid with so much dynamic shared memory.
    pub fn launch_shape(&self, shared_bytes: u32) -> LaunchShape {
        LaunchShape {
            blocks: self.blocks,
            threads: self.threads,
            shared_bytes,
        }
    }
}

/// As many blocks as wanted, but no more than run at the same time: they wait for each other's peers.
pub fn at_most(wanted: usize, blocks: u32) -> u32 {
    u32::try_from(wanted).unwrap_or(u32::MAX).min(blocks)
}
