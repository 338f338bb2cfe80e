//! The fingerprint: what all ranks must agree on in an LL operation. Ranks exchange it first, in one
//! word.

use crate::backend::cuda::fault::{differs, op_value, other_rows};
use crate::backend::cuda::params::common::{Fault, FaultReport, KernelOp};
use crate::backend::cuda::params::ll::LL_MAX_TOP_K;
use crate::backend::cuda::scaled_rows::ScalesWord;
use crate::error::Error;
use crate::error::refusal::{Role, Subject};
use crate::model::group::LlCombineMode;
use crate::model::layout::layout_name;
use crate::model::tensor::DType;

/// Lowest bits of the fields; the bytes of a row are at the bottom.
const OP_SHIFT: u32 = 30;
const DTYPE_SHIFT: u32 = 26;
const TOP_K_SHIFT: u32 = 20;
/// In the field of ids per token, which has their number less 1: whether rows are rank-major.
const BY_RANK: u32 = 32;
/// Unit of the row size in the word; every row is a multiple of it.
const ROW_UNIT: u32 = 16;

/// In the field of the operation: a dispatch of rows with scales. No LL operation has that number.
const SCALED_DISPATCH: u32 = KernelOp::PeerSelftest as u32;
/// There: a dispatch into a view, of rows without scales, which are rank-major; or, of others, a combine in which each
/// entry's row comes home.
const VIEW_OR_EXACT: u32 = 0;

/// The longest row that a fingerprint can express.
pub const MOST_ROW_BYTES: usize = (((1 << TOP_K_SHIFT) - 1) * ROW_UNIT) as usize;

// An operation, type or number of ids that does not fit must not be read as another.
const _: () = assert!((KernelOp::LlDispatch as u32) < 1 << (32 - OP_SHIFT));
const _: () = assert!((KernelOp::LlCombine as u32) < 1 << (32 - OP_SHIFT));
const _: () = assert!((DType::LAST as u32) < 1 << (OP_SHIFT - DTYPE_SHIFT));
const _: () = assert!(LL_MAX_TOP_K <= BY_RANK);
const _: () = assert!(BY_RANK << 1 == 1 << (DTYPE_SHIFT - TOP_K_SHIFT));

/// An operation as its peers must run it, too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LlFingerprint {
    pub op: KernelOp,
    /// Whether its rows have scales; the scales word says which.
    pub scaled: bool,
    /// NCCL's number of the element type.
    pub dtype: u32,
    /// Ids per token, at least 1.
    pub top_k: u32,
    /// Whether rows are rank-major.
    pub by_rank: bool,
    /// Whether rows go straight into a view; only if they are rank-major. Of rows with scales their word says it.
    pub in_view: bool,
    /// Whether each entry's row comes home; only if they are not.
    pub exact: bool,
    /// Bytes per row without its scales, at most [`MOST_ROW_BYTES`].
    pub row_bytes: u32,
}

impl LlFingerprint {
    /// The word that ranks exchange.
    pub fn to_word(self) -> u32 {
        let op = match (self.scaled, self.in_view || self.exact) {
            (true, _) => SCALED_DISPATCH,
            (false, true) => VIEW_OR_EXACT,
            (false, false) => self.op as u32,
        };
        op << OP_SHIFT
            | self.dtype << DTYPE_SHIFT
            | (self.top_k.wrapping_sub(1) % BY_RANK) << TOP_K_SHIFT
            | if self.by_rank { BY_RANK << TOP_K_SHIFT } else { 0 }
            | (self.row_bytes / ROW_UNIT)
    }

    /// The fingerprint in a peer's word.
    pub fn from_word(word: u32) -> Self {
        let field = |from: u32, to: u32| (word >> from) & ((1 << (to - from)) - 1);
        let by_rank = field(TOP_K_SHIFT, DTYPE_SHIFT) >= BY_RANK;
        let number = field(OP_SHIFT, 32);
        let combines = match number {
            VIEW_OR_EXACT => !by_rank,
            number => number == KernelOp::LlCombine as u32,
        };
        Self {
            op: if combines { KernelOp::LlCombine } else { KernelOp::LlDispatch },
            scaled: number == SCALED_DISPATCH,
            dtype: field(DTYPE_SHIFT, OP_SHIFT),
            top_k: field(TOP_K_SHIFT, DTYPE_SHIFT) % BY_RANK + 1,
            by_rank,
            in_view: number == VIEW_OR_EXACT && by_rank,
            exact: number == VIEW_OR_EXACT && !by_rank,
            row_bytes: field(0, TOP_K_SHIFT) * ROW_UNIT,
        }
    }
}

/// The failure of a report with fingerprints; none of any other.
pub fn of_report(report: &FaultReport) -> Option<Error> {
    (report.state == Fault::Differs as u32).then(|| difference(report))
}

/// What two ranks do not agree on, from their fingerprints.
fn difference(report: &FaultReport) -> Error {
    let [mine, theirs] =
        [(report.expected, report.expected_scales), (report.got, report.got_scales)].map(|(fingerprint, scales)| {
            let fingerprint = LlFingerprint::from_word(fingerprint);
            let in_view = fingerprint.in_view || ScalesWord(scales).is_in_view();
            LlFingerprint { in_view, ..fingerprint }
        });
    let differs = |subject| differs(report, subject);
    if mine.op != theirs.op {
        differs(Subject::Operation).found(op_value(mine.op as u32), op_value(theirs.op as u32))
    } else if mine.top_k != theirs.top_k {
        differs(Subject::Size(Role::Ids, 1)).got(mine.top_k, theirs.top_k)
    } else if (mine.by_rank, mine.in_view) != (theirs.by_rank, theirs.in_view) {
        let name = |it: LlFingerprint| layout_name(it.by_rank, it.in_view);
        differs(Subject::Layout).got(name(mine), name(theirs))
    } else if mine.exact != theirs.exact {
        let [mine, theirs] = LlCombineMode::variants(mine.exact);
        differs(Subject::Variant).got(mine, theirs)
    } else if let Some(error) = other_rows(report, mine.row_bytes as usize, theirs.row_bytes as usize) {
        error
    } else {
        let name = |raw| DType::from_raw(raw).map_or_else(|| raw.to_string(), |dtype| dtype.to_string());
        differs(Subject::RowType).got(name(mine.dtype), name(theirs.dtype))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::cuda::params::common::{KernelOp, Wait};
    use crate::model::scales::ScaleType;

    #[test]
    fn a_fingerprint_survives_its_word() {
        const DISPATCH: KernelOp = KernelOp::LlDispatch;
        const COMBINE: KernelOp = KernelOp::LlCombine;
        for (op, scaled, special, dtype) in [
            (DISPATCH, false, false, DType::Bfloat16),
            (DISPATCH, true, false, DType::Float8E4M3),
            (DISPATCH, false, true, DType::Bfloat16),
            (COMBINE, false, true, DType::Bfloat16),
            (COMBINE, false, false, DType::Float16),
            (COMBINE, false, false, DType::LAST),
        ] {
            for (top_k, row_bytes, by_rank) in
                [(1, 16, false), (LL_MAX_TOP_K, MOST_ROW_BYTES as u32, false), (LL_MAX_TOP_K, 16, true)]
            {
                let fingerprint = LlFingerprint {
                    op,
                    scaled,
                    dtype: dtype as u32,
                    top_k,
                    by_rank,
                    in_view: special && op == DISPATCH && by_rank,
                    exact: special && op == COMBINE && !by_rank,
                    row_bytes,
                };
                assert_eq!(LlFingerprint::from_word(fingerprint.to_word()), fingerprint);
            }
        }
    }

    #[test]
    fn rows_with_scales_that_go_into_a_view_are_told_from_others() {
        let word = LlFingerprint {
            op: KernelOp::LlDispatch,
            scaled: true,
            dtype: DType::Float8E4M3 as u32,
            top_k: 8,
            by_rank: true,
            in_view: false,
            exact: false,
            row_bytes: 7168,
        }
        .to_word();
        let scales = ScalesWord::new(ScaleType { dtype: DType::Float32, count: 56 });
        let report = FaultReport {
            state: Fault::Differs as u32,
            op: KernelOp::LlDispatch as u32,
            what: Wait::Begin as u32,
            peer: 3,
            expected: word,
            got: word,
            waited_ms: 0,
            expected_scales: scales.in_view(true).0,
            got_scales: scales.0,
        };
        assert!(difference(&report).text().starts_with("Layout"));
    }
}
