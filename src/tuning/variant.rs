//! Operations, their named variants, and launch shapes.

use crate::log::shown;
use std::fmt::{self, Display, Formatter};

crate::named! {
    /// An operation with its own launch shape, with its name in files.
    Operation:
    LlDispatch = 0, "ll_dispatch";
    LlCombine = 1, "ll_combine";
    HtDispatch = 2, "ht_dispatch";
    HtCombine = 3, "ht_combine";
}

impl Operation {
    /// The operation named `name` in a file.
    pub(super) fn of_file(name: &str) -> Result<Self, String> {
        Self::named(name).ok_or_else(|| format!("unknown operation {:?}", shown(name)))
    }
}

crate::named! {
    /// A variant of an operation, with the number that callers know.
    Variant:
    /// LL combine: a rank sums its rows of a token and sends the sum.
    LlReduce = 1, "ll.reduce";
    /// LL combine: each entry's row goes home.
    LlExact = 2, "ll.exact";
    /// HT: rows pass through the receiver's ring.
    HtRing = 3, "ht.ring";
    /// HT dispatch: rows are stored directly into the receiver's output.
    HtDirect = 4, "ht.direct";
    /// HT combine: home ranks load the rows and sum them.
    HtPull = 5, "ht.pull";
}

impl Variant {
    pub fn is_of(self, operation: Operation) -> bool {
        match self {
            Self::LlReduce | Self::LlExact => operation == Operation::LlCombine,
            Self::HtRing => matches!(operation, Operation::HtDispatch | Operation::HtCombine),
            Self::HtDirect => operation == Operation::HtDispatch,
            Self::HtPull => operation == Operation::HtCombine,
        }
    }
}

/// A launch shape: `send_blocks` of `blocks` send; if both are equal, every block does everything.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Choice {
    pub blocks: u32,
    pub threads: u32,
    pub send_blocks: u32,
}

/// What is wrong with a launch shape.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unfit {
    Blocks { most: u32 },
    SendBlocks,
    Threads,
}

impl Display for Unfit {
    fn fmt(&self, to: &mut Formatter<'_>) -> fmt::Result {
        match self {
            Self::Blocks { most } => write!(to, "blocks must be 1 to {most}"),
            Self::SendBlocks => to.write_str("send_blocks must be 1 to blocks"),
            Self::Threads => to.write_str("threads must be a multiple of 32 up to 1024"),
        }
    }
}

impl Choice {
    /// Threads of a warp.
    pub const WARP: u32 = 32;

    /// The shape, if it fits a GPU with so many multiprocessors.
    pub fn fitting(self, multiprocessors: u32) -> Result<Self, Unfit> {
        const MOST_THREADS: u32 = 1024;
        if self.blocks == 0 || self.blocks > multiprocessors {
            return Err(Unfit::Blocks { most: multiprocessors });
        }
        if self.send_blocks == 0 || self.send_blocks > self.blocks {
            return Err(Unfit::SendBlocks);
        }
        if self.threads == 0 || !self.threads.is_multiple_of(Self::WARP) || self.threads > MOST_THREADS {
            return Err(Unfit::Threads);
        }
        Ok(self)
    }

    /// The shape capped at `blocks`, with the same share of sending blocks.
    pub fn at_most(self, blocks: u32) -> Self {
        if self.blocks <= blocks {
            return self;
        }
        Self { blocks, send_blocks: share(blocks, self.send_blocks, self.blocks).clamp(1, blocks.max(1)), ..self }
    }
}

/// `blocks * part / whole`, rounded down.
pub fn share(blocks: u32, part: u32, whole: u32) -> u32 {
    u32::try_from(u64::from(blocks) * u64::from(part) / u64::from(whole.max(1))).unwrap_or(blocks)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_numbers_are_their_own() {
        for variant in Variant::ALL {
            assert_eq!(Variant::from_raw(variant as u32), Some(variant));
            assert_eq!(Variant::named(variant.name()), Some(variant));
            assert_ne!(Operation::ALL.into_iter().filter(|it| variant.is_of(*it)).count(), 0);
        }
        assert_eq!(Variant::from_raw(0), None);
        assert_eq!(Variant::from_raw(6), None);
        assert_eq!(Variant::named("ll"), None);
    }
}
