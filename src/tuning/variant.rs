//! Operations, and their named variants.

use crate::log::shown;

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
