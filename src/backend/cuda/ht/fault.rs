//! What ranks do not agree on in high throughput, as kernels report it.

use crate::backend::cuda::fault::{differs, op_value, other_rows};
use crate::backend::cuda::ht::agreement::disagreement;
use crate::backend::cuda::ht::fingerprint::HtFingerprint;
use crate::backend::cuda::params::common::{Fault, FaultReport, KernelOp};
use crate::error::Error;
use crate::error::refusal::{AmongRanks, Role, Subject};
use crate::model::ids::GroupRank;

/// The failure of a report with fingerprints, or with the verdict on a handle; none of any other.
pub fn of_report(report: &FaultReport) -> Option<Error> {
    match Fault::from_raw(report.state)? {
        Fault::Differs => Some(other_shape(report)),
        Fault::Disagreed => Some(
            disagreement(report.got, report.expected).unwrap_or_else(|| Error::internal("a failure without a reason")),
        ),
        _ => None,
    }
}

/// What two ranks do not agree on, from the fingerprints of this rank and of another.
fn other_shape(report: &FaultReport) -> Error {
    let (mine, theirs) = (HtFingerprint(report.expected), HtFingerprint(report.got));
    let differs = |subject| differs(report, subject);
    let op = |word: HtFingerprint| {
        if word.is_combine() { KernelOp::HtCombine as u32 } else { KernelOp::HtDispatch as u32 }
    };
    if op(mine) != op(theirs) {
        return differs(Subject::Operation).found(op_value(op(mine)), op_value(op(theirs)));
    }
    if mine.handle() != theirs.handle() {
        return differs(Subject::Handle);
    }
    if mine.type_name() != theirs.type_name() {
        return differs(Subject::RowType).got(mine.type_name(), theirs.type_name());
    }
    if let Some(error) = other_rows(report, mine.row_bytes(), theirs.row_bytes()) {
        return error;
    }
    let rank = GroupRank::from(report.peer);
    if !mine.is_combine() {
        let rule = AmongRanks::SameDirection { rank };
        return Error::usage(Subject::Tensor(Role::IdsIn), rule);
    }
    let rule = AmongRanks::SameColumns { rank };
    Error::usage(Subject::Tensor(Role::WeightsIn), rule).got(mine.columns(), theirs.columns())
}
