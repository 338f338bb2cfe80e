//! Layouts: the order of received rows in the output of a dispatch and the input of its combine.

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// `[experts, slots, *]`: a row per (token, k). Rows of a local expert are contiguous, by source rank, token, k.
    ExpertMajor {
        /// Number of local experts.
        experts: usize,
        /// Room for rows of each.
        slots: usize,
    },
    /// `[ranks, slots, *]`: a row per token that names an expert of the rank. The rows of a source rank are contiguous,
    /// by token.
    RankMajor {
        /// Number of source ranks.
        ranks: usize,
        /// Room for rows of each.
        slots: usize,
    },
    /// `[n, *]`: a row per token that names an expert of the rank, by source rank, then token. The caller's tensor has
    /// n rows.
    Flat,
}

/// The name of an LL operation's layout, and whether its rows are in a view.
pub fn layout_name(by_rank: bool, in_view: bool) -> &'static str {
    match (by_rank, in_view) {
        (_, true) => "rank-major in a view",
        (true, false) => "rank-major",
        (false, false) => "expert-major",
    }
}

/// A row, identified by its zone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowOf {
    /// The local expert or, rank-major, the source rank; ignored in a flat layout.
    pub zone: usize,
    /// How many rows of the zone come before it.
    pub ordinal: usize,
}

impl Layout {
    /// The number of a tensor's dimensions before the last, which is a row's.
    pub const fn dims(self) -> usize {
        match self {
            Self::ExpertMajor { .. } | Self::RankMajor { .. } => 2,
            Self::Flat => 1,
        }
    }

    /// Number of rows of a tensor; `None` if the caller's tensor determines it.
    pub const fn rows(self) -> Option<usize> {
        match self {
            Self::ExpertMajor { experts: zones, slots } | Self::RankMajor { ranks: zones, slots } => {
                Some(zones * slots)
            }
            Self::Flat => None,
        }
    }

    /// Room for rows of one expert; `None` if a row is for all experts of the rank.
    pub const fn slots(self) -> Option<usize> {
        match self {
            Self::ExpertMajor { slots, .. } => Some(slots),
            Self::RankMajor { .. } | Self::Flat => None,
        }
    }

    /// Whether the layout is that of LL dispatches which deliver ids.
    pub const fn is_rank_major(self) -> bool {
        matches!(self, Self::RankMajor { .. })
    }

    /// The index of a row, with all dimensions but the last flattened.
    pub const fn number(self, row: RowOf) -> usize {
        match self {
            Self::ExpertMajor { slots, .. } | Self::RankMajor { slots, .. } => row.zone * slots + row.ordinal,
            Self::Flat => row.ordinal,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_of_an_expert_lie_together() {
        let layout = Layout::ExpertMajor { experts: 3, slots: 5 };
        let number = |zone, ordinal| layout.number(RowOf { zone, ordinal });
        assert_eq!((number(0, 4), number(1, 0), number(2, 4)), (4, 5, 14));
        assert_eq!((layout.rows(), layout.dims()), (Some(15), 2));
        assert_eq!(layout.slots(), Some(5));
    }

    #[test]
    fn rows_of_a_source_lie_together() {
        let layout = Layout::RankMajor { ranks: 2, slots: 7 };
        let number = |zone, ordinal| layout.number(RowOf { zone, ordinal });
        assert_eq!((number(0, 6), number(1, 0)), (6, 7));
        assert_eq!((layout.rows(), layout.dims()), (Some(14), 2));
        assert_eq!(layout.slots(), None);
    }

    #[test]
    fn flat_rows_have_no_expert() {
        assert_eq!(Layout::Flat.number(RowOf { zone: 7, ordinal: 3 }), 3);
        assert_eq!((Layout::Flat.rows(), Layout::Flat.dims()), (None, 1));
    }
}
