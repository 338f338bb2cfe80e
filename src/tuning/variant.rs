//! Operations, and the ways to run them that have names.

use crate::log::shown;

crate::named! {
    /// An operation with a launch shape of its own, by its names in files.
    Operation:
    LlDispatch = 0, "ll_dispatch";
    LlCombine = 1, "ll_combine";
    HtDispatch = 2, "ht_dispatch";
    HtCombine = 3, "ht_combine";
}

impl Operation {
    /// The operation that a file calls `name`.
    pub(super) fn of_file(name: &str) -> Result<Self, String> {
        Self::named(name).ok_or_else(|| format!("unknown operation {:?}", shown(name)))
    }
}

crate::named! {
    /// A way to run an operation, by the number that callers know.
    Variant:
    /// LL combine: a rank sums its rows of a token and sends one.
    LlReduce = 1, "ll.reduce";
    /// LL combine: each entry's row comes home.
    LlExact = 2, "ll.exact";
    /// HT: rows pass through the receiver's ring.
    HtRing = 3, "ht.ring";
    /// HT dispatch: rows are stored where the receiver wants them.
    HtDirect = 4, "ht.direct";
    /// HT combine: homes load the rows and sum them.
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
