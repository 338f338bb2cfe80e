//! Numbers of ranks and nodes, each with a type of its own, so that none is taken for another.

use std::fmt;

macro_rules! ids {
    ($($(#[$doc:meta])* $name:ident;)*) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[repr(transparent)]
        pub struct $name(u32);

        impl $name {
            /// Number `index`. NCCL counts ranks in an `int`, so each fits.
            pub const fn new(index: usize) -> Self {
                Self(index as u32)
            }

            /// As an index into what has one entry for each.
            pub const fn index(self) -> usize {
                self.0 as usize
            }

            /// As kernels take it.
            pub const fn word(self) -> u32 {
                self.0
            }

            /// All `count` of them, ascending.
            pub fn all(count: usize) -> impl DoubleEndedIterator<Item = Self> {
                (0..count).map(Self::new)
            }
        }

        impl From<u32> for $name {
            fn from(word: u32) -> Self {
                Self(word)
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(to)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(to)
            }
        }
    )*};
}

ids! {
    /// A rank of the group.
    GroupRank;
    /// A rank among those of its node, its LSA team: the index of its window there.
    LocalRank;
    /// A rank of a communicator between nodes.
    CommRank;
    /// A node of the group, by its lowest rank.
    Node;
    /// A rank among those that a rank forwards for, which itself is number 0.
    SourceIx;
}
