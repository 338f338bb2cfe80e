//! Operations, and the ways to run them that have names.

use crate::log::shown;

/// An operation with a launch shape of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    LlDispatch,
    LlCombine,
    HtDispatch,
    HtCombine,
}

impl Operation {
    /// All of them, each at the index of its own number.
    pub const ALL: [Self; 4] = [Self::LlDispatch, Self::LlCombine, Self::HtDispatch, Self::HtCombine];

    /// The name in the file.
    pub fn name(self) -> &'static str {
        match self {
            Self::LlDispatch => "ll_dispatch",
            Self::LlCombine => "ll_combine",
            Self::HtDispatch => "ht_dispatch",
            Self::HtCombine => "ht_combine",
        }
    }

    /// The operation that a file calls `name`.
    pub(super) fn of_file(name: &str) -> Result<Self, String> {
        let found = Self::ALL.into_iter().find(|it| it.name() == name);
        found.ok_or_else(|| format!("unknown operation {:?}", shown(name)))
    }
}

/// A way to run an operation, by the number that callers know.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Variant {
    /// LL combine: a rank sums its rows of a token and sends one.
    LlReduce = 1,
    /// LL combine: each entry's row comes home.
    LlExact = 2,
    /// HT: rows pass through the receiver's ring.
    HtRing = 3,
    /// HT dispatch: rows are stored where the receiver wants them.
    HtDirect = 4,
    /// HT combine: homes load the rows and sum them.
    HtPull = 5,
}

impl Variant {
    const ALL: [Self; 5] = [Self::LlReduce, Self::LlExact, Self::HtRing, Self::HtDirect, Self::HtPull];

    pub fn from_number(number: u32) -> Option<Self> {
        Self::ALL.into_iter().find(|it| *it as u32 == number)
    }

    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|it| it.name() == name)
    }

    pub fn name(self) -> &'static str {
        match self {
            Self::LlReduce => "ll.reduce",
            Self::LlExact => "ll.exact",
            Self::HtRing => "ht.ring",
            Self::HtDirect => "ht.direct",
            Self::HtPull => "ht.pull",
        }
    }

    pub fn is_of(self, operation: Operation) -> bool {
        match self {
            Self::LlReduce | Self::LlExact => operation == Operation::LlCombine,
            Self::HtRing => matches!(operation, Operation::HtDispatch | Operation::HtCombine),
            Self::HtDirect => operation == Operation::HtDispatch,
            Self::HtPull => operation == Operation::HtCombine,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_numbers_are_their_own() {
        for variant in Variant::ALL {
            assert_eq!(Variant::from_number(variant as u32), Some(variant));
            assert_eq!(Variant::named(variant.name()), Some(variant));
            assert_ne!(Operation::ALL.into_iter().filter(|it| variant.is_of(*it)).count(), 0);
        }
        assert_eq!(Variant::from_number(0), None);
        assert_eq!(Variant::from_number(6), None);
        assert_eq!(Variant::named("ll"), None);
    }
}
