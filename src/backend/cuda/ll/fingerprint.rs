//! What all ranks must agree on in an LL operation, in the single word that they exchange first.

use crate::backend::cuda::fault::{differs, op_value, other_rows};
use crate::backend::cuda::params::common::{Fault, FaultReport, KernelOp};
use crate::backend::cuda::params::ll::LL_MAX_TOP_K;
use crate::error::Error;
use crate::error::refusal::{Role, Subject};
use crate::model::group::LlCombineMode;
use crate::model::layout::layout_name;
use crate::model::ops::ViewBank;
use crate::model::tensor::DType;

/// Rows are multiples of this size, and the word has their size in this unit.
const ROW_UNIT: u32 = 16;

/// The longest row that a fingerprint can express.
pub const MOST_ROW_BYTES: usize = 15 << 20;

// The word is a number in mixed radix. Its digits, highest first: the kind of operation, the type, ids per token less
// 1, the row size.
const RUNS: u32 = DISPATCH_BY_RANK + 2 * DISPATCHES_BY_RANK;
const TYPES: u32 = DType::LAST as u32 + 1;
const ROWS: u32 = MOST_ROW_BYTES as u32 / ROW_UNIT + 1;
const _: () = assert!(RUNS as u64 * TYPES as u64 * LL_MAX_TOP_K as u64 * ROWS as u64 <= 1 << u32::BITS);

// Kinds of operation, in order: expert-major dispatch without scales, with scales; combine, exact combine; rank-major
// dispatch without a view, into each bank of views; then the rank-major ones again, with scales.
const COMBINE: u32 = 2;
const COMBINE_BY_RANK: u32 = 4;
const DISPATCH_BY_RANK: u32 = 5;
const DISPATCHES_BY_RANK: u32 = 1 + ViewBank::COUNT as u32;

/// The properties of an operation that must be the same on all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LlFingerprint {
    pub op: KernelOp,
    /// Whether rows have scales; a word of its own says which.
    pub scaled: bool,
    /// NCCL's number of the element type.
    pub dtype: u32,
    /// Ids per token, at least 1.
    pub top_k: u32,
    /// Whether rows are rank-major.
    pub by_rank: bool,
    /// Rank-major: the bank of views into which rows go directly.
    pub view: Option<ViewBank>,
    /// Expert-major: whether a combine sends the row of each entry, instead of sums.
    pub exact: bool,
    /// Bytes per row without its scales, at most [`MOST_ROW_BYTES`].
    pub row_bytes: u32,
}

impl LlFingerprint {
    /// The word that ranks exchange.
    pub fn to_word(self) -> u32 {
        let digits = [(self.run(), RUNS), (self.dtype, TYPES), (self.top_k - 1, LL_MAX_TOP_K)];
        let word = digits.into_iter().fold(0, |word, (digit, values)| word * values + digit);
        word * ROWS + self.row_bytes / ROW_UNIT
    }

    /// The fingerprint that a peer's word encodes.
    pub fn from_word(word: u32) -> Self {
        let (word, row) = (word / ROWS, word % ROWS);
        let (word, top_k) = (word / LL_MAX_TOP_K, word % LL_MAX_TOP_K);
        let (run, dtype) = (word / TYPES, word % TYPES);
        let of_rank = run.checked_sub(DISPATCH_BY_RANK);
        let combines = (COMBINE..DISPATCH_BY_RANK).contains(&run);
        Self {
            op: if combines { KernelOp::LlCombine } else { KernelOp::LlDispatch },
            scaled: of_rank.map_or(run == 1, |number| number >= DISPATCHES_BY_RANK),
            dtype,
            top_k: top_k + 1,
            by_rank: run >= COMBINE_BY_RANK,
            view: of_rank.and_then(|number| ViewBank::at((number % DISPATCHES_BY_RANK).checked_sub(1)? as usize)),
            exact: run == COMBINE + 1,
            row_bytes: row * ROW_UNIT,
        }
    }

    fn run(self) -> u32 {
        match (self.op, self.by_rank) {
            (KernelOp::LlCombine, false) => COMBINE + u32::from(self.exact),
            (KernelOp::LlCombine, true) => COMBINE_BY_RANK,
            (_, false) => u32::from(self.scaled),
            (_, true) => {
                let scaled = u32::from(self.scaled) * DISPATCHES_BY_RANK;
                DISPATCH_BY_RANK + scaled + self.view.map_or(0, |bank| bank.index() as u32 + 1)
            }
        }
    }
}

/// The error for a report about fingerprints; `None` for other reports.
pub fn of_report(report: &FaultReport) -> Option<Error> {
    (report.state == Fault::Differs as u32).then(|| difference(report))
}

/// The error that says in which property two ranks' fingerprints differ.
fn difference(report: &FaultReport) -> Error {
    let [mine, theirs] = [report.expected, report.got].map(LlFingerprint::from_word);
    let differs = |subject| differs(report, subject);
    if mine.op != theirs.op {
        differs(Subject::Operation).found(op_value(mine.op as u32), op_value(theirs.op as u32))
    } else if mine.top_k != theirs.top_k {
        differs(Subject::Size(Role::Ids, 1)).got(mine.top_k, theirs.top_k)
    } else if (mine.by_rank, mine.view.is_some()) != (theirs.by_rank, theirs.view.is_some()) {
        let name = |it: LlFingerprint| layout_name(it.by_rank, it.view.is_some());
        differs(Subject::Layout).got(name(mine), name(theirs))
    } else if let (Some(mine), Some(theirs), true) = (mine.view, theirs.view, mine.view != theirs.view) {
        differs(Subject::ViewPlace).got(mine.index(), theirs.index())
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

    #[test]
    fn a_fingerprint_survives_its_word() {
        const DISPATCH: KernelOp = KernelOp::LlDispatch;
        const COMBINE: KernelOp = KernelOp::LlCombine;
        let mut words = Vec::new();
        for (op, by_rank, scaled, view, exact) in [
            (DISPATCH, false, false, None, false),
            (DISPATCH, false, true, None, false),
            (DISPATCH, true, false, None, false),
            (DISPATCH, true, false, ViewBank::at(0), false),
            (DISPATCH, true, false, ViewBank::at(1), false),
            (DISPATCH, true, true, None, false),
            (DISPATCH, true, true, ViewBank::at(0), false),
            (DISPATCH, true, true, ViewBank::at(1), false),
            (COMBINE, false, false, None, false),
            (COMBINE, false, false, None, true),
            (COMBINE, true, false, None, false),
        ] {
            for dtype in [DType::Int8, DType::Bfloat16, DType::LAST].map(|dtype| dtype as u32) {
                for (top_k, row_bytes) in [(1, 16), (LL_MAX_TOP_K, MOST_ROW_BYTES as u32), (LL_MAX_TOP_K, 16)] {
                    let fingerprint = LlFingerprint { op, scaled, dtype, top_k, by_rank, view, exact, row_bytes };
                    assert_eq!(LlFingerprint::from_word(fingerprint.to_word()), fingerprint);
                    words.push(fingerprint.to_word());
                }
            }
        }
        let all = words.len();
        words.sort_unstable();
        words.dedup();
        assert_eq!(words.len(), all);
        LlFingerprint::from_word(u32::MAX);
    }

    #[test]
    fn a_difference_is_named() {
        let rows = LlFingerprint {
            op: KernelOp::LlDispatch,
            scaled: true,
            dtype: DType::Float8E4M3 as u32,
            top_k: 8,
            by_rank: true,
            view: ViewBank::at(0),
            exact: false,
            row_bytes: 7168,
        };
        let text_of = |theirs: LlFingerprint| {
            let report = FaultReport {
                state: Fault::Differs as u32,
                op: KernelOp::LlDispatch as u32,
                what: Wait::Begin as u32,
                peer: 3,
                expected: rows.to_word(),
                got: theirs.to_word(),
                waited_ms: 0,
                expected_scales: 0,
                got_scales: 0,
            };
            difference(&report).text()
        };
        assert!(text_of(LlFingerprint { view: None, ..rows }).starts_with("Layout"));
        assert!(text_of(LlFingerprint { view: ViewBank::at(1), ..rows }).starts_with("ViewPlace"));
    }
}
