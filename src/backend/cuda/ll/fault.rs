//! What ranks do not agree on in a low-latency operation, as its kernels report it.

use crate::backend::cuda::fault::{differs, op_value, other_rows};
use crate::backend::cuda::ll::fingerprint::LlFingerprint;
use crate::backend::cuda::params::common::{Fault, FaultReport};
use crate::error::Error;
use crate::error::refusal::{Role, Subject};
use crate::model::group::LlCombineMode;
use crate::model::layout::layout_name;
use crate::model::tensor::DType;

/// The failure of a report with fingerprints; none of any other.
pub fn of_report(report: &FaultReport) -> Option<Error> {
    (report.state == Fault::Differs as u32).then(|| difference(report))
}

/// What two ranks do not agree on, from their fingerprints.
fn difference(report: &FaultReport) -> Error {
    let [mine, theirs] = [report.expected, report.got].map(LlFingerprint::from_word);
    let differs = |subject| differs(report, subject);
    if mine.op != theirs.op {
        differs(Subject::Operation).found(op_value(mine.op), op_value(theirs.op))
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
    use crate::backend::cuda::scaled_rows::ScalesWord;
    use crate::model::scales::ScaleType;

    const OURS: LlFingerprint = LlFingerprint {
        op: KernelOp::LlDispatch as u32,
        scaled: false,
        dtype: DType::Bfloat16 as u32,
        top_k: 8,
        by_rank: false,
        in_view: false,
        exact: false,
        row_bytes: 14_336,
    };

    fn text(theirs: LlFingerprint, [expected_scales, got_scales]: [u32; 2]) -> String {
        let report = FaultReport {
            state: Fault::Differs as u32,
            op: KernelOp::LlDispatch as u32,
            what: Wait::Begin as u32,
            peer: 3,
            expected: OURS.to_word(),
            got: theirs.to_word(),
            waited_ms: 0,
            expected_scales,
            got_scales,
        };
        difference(&report).text()
    }

    #[test]
    fn a_difference_names_what_differs() {
        let text = |theirs| text(theirs, [0; 2]);
        let rule = "AmongRanks(Same { rank: 3 })";
        let row_bytes = 16;
        assert_eq!(text(LlFingerprint { row_bytes, ..OURS }), format!("RowBytes: {rule} (got 14336, expected 16)"));
        let top_k = 32;
        assert_eq!(text(LlFingerprint { top_k, ..OURS }), format!("Size(Ids, 1): {rule} (got 8, expected 32)"));
        let by_rank = true;
        assert_eq!(
            text(LlFingerprint { by_rank, ..OURS }),
            format!("Layout: {rule} (got expert-major, expected rank-major)")
        );
        let in_view = true;
        assert_eq!(
            text(LlFingerprint { by_rank, in_view, ..OURS }),
            format!("Layout: {rule} (got expert-major, expected rank-major in a view)")
        );
        let dtype = DType::Float16 as u32;
        assert_eq!(text(LlFingerprint { dtype, ..OURS }), format!("RowType: {rule} (got bfloat16, expected float16)"));
        let op = KernelOp::LlCombine as u32;
        assert!(text(LlFingerprint { op, ..OURS }).starts_with("Operation: AmongRanks"));
        let exact = true;
        let word = |exact| LlFingerprint { op, exact, ..OURS }.to_word();
        assert_ne!(word(exact), word(!exact));
    }

    #[test]
    fn scales_that_differ_are_named() {
        let rule = "AmongRanks(Same { rank: 3 })";
        let word = |dtype| ScalesWord::new(ScaleType { dtype, count: 4 }).0;
        let (float, byte) = (word(DType::Float32), word(DType::Uint8));
        assert_eq!(text(OURS, [float, 0]), format!("RowBytes: {rule} (got 14336 + 16, expected 14336 + 0)"));
        assert_eq!(text(OURS, [byte, float]), format!("RowBytes: {rule} (got 14336 + 4, expected 14336 + 16)"));
        assert_eq!(text(OURS, [float, word(DType::Int32)]), format!("ScaleType: {rule} (got float32, expected int32)"));
    }
}
