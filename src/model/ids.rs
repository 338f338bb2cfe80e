//! Numbers of ranks and nodes, each kind of a type of its own, so that they cannot be confused.

use std::fmt;

macro_rules! ids {
    ($($(#[$doc:meta])* $name:ident;)*) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[repr(transparent)]
        pub struct $name(u32);

        impl $name {
            /// The number `index`, which fits in 32 bits, as NCCL counts ranks in an `int`.
            pub const fn new(index: usize) -> Self {
                Self(index as u32)
            }

            /// The number as an index of arrays.
            pub const fn index(self) -> usize {
                self.0 as usize
            }

            /// The number as a kernel parameter.
            pub const fn word(self) -> u32 {
                self.0
            }

            /// The numbers below `count`, ascending.
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
    /// The number of a rank within its node (LSA team).
    LocalRank;
    /// The number of a rank in a communicator across nodes.
    CommRank;
    /// The number of a node; nodes are ordered by their lowest ranks.
    Node;
    /// The number of a source, among the ranks that one rank forwards for; that rank itself is number 0.
    SourceIx;
}
