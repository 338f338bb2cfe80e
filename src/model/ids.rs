//! Numbers of ranks and nodes, a distinct type each, so that they cannot be confused.

use std::fmt;

macro_rules! ids {
    ($($(#[$doc:meta])* $name:ident;)*) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[repr(transparent)]
        pub struct $name(u32);

        impl $name {
            /// Number `index`. NCCL counts ranks in an `int`, so it fits.
            pub const fn new(index: usize) -> Self {
                Self(index as u32)
            }

            /// The index into arrays with one entry for each.
            pub const fn index(self) -> usize {
                self.0 as usize
            }

            /// The number as kernels take it.
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
    /// A rank within its node (LSA team): the index of its window there.
    LocalRank;
    /// A rank of a communicator across nodes.
    CommRank;
    /// A node of the group, by its lowest rank.
    Node;
    /// A rank among those that one rank forwards for; that rank itself is number 0.
    SourceIx;
}
