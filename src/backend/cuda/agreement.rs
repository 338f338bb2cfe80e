//! The verdicts by which ranks learn whether all agree on a new handle, and what follows if one does not.
//!
//! HT: the verdicts travel with the counts. Creation does not wait for the other ranks, so a rank may get a handle on
//! which the ranks disagree. Its kernel finds that out, and then nothing runs on the handle: calls are refused once the
//! host knows, and operations enqueued earlier fail.
//!
//! LL: over several nodes, along the rails. A rank that forwards for a refusing rank refuses its own operations.

use crate::backend::cuda::params::ht::{
    HT_DISAGREED, HT_DISAGREED_RANK_SHIFT, HT_DISAGREED_TOP_K, HT_VERDICT_CODE_SHIFT,
};
use crate::error::refusal::{AmongRanks, Role, Subject};
use crate::error::{Code, Error};
use crate::model::ids::GroupRank;
use std::sync::atomic::{AtomicU32, Ordering};

/// The number of the next handle, the same on all ranks. Never 0, as fresh memory holds zeros.
pub fn next_number(handles: &AtomicU32) -> u32 {
    match handles.fetch_add(1, Ordering::Relaxed).wrapping_add(1) {
        0 => next_number(handles),
        number => number,
    }
}

/// The verdict of a rank that agrees, with `top_k` ids per token.
pub fn verdict_with(top_k: u32) -> u32 {
    top_k
}

/// The verdict of a rank that refuses.
pub fn verdict_refusing(error: &Error) -> u32 {
    (error.code() as u32) << HT_VERDICT_CODE_SHIFT
}

/// The error with which operations on a handle are refused because of `rank`'s `verdict`; `None` if that rank agreed.
pub fn refusal_of(rank: GroupRank, verdict: u32) -> Option<Error> {
    let code = verdict >> HT_VERDICT_CODE_SHIFT;
    let rule = AmongRanks::RefusedBy { rank, code: Code::from_raw(code.cast_signed()) };
    (code != 0).then(|| Error::refusal(Code::RemoteError, Subject::Handle, rule))
}

/// The error of operations on a handle whose number of rows, `rows`, is really a verdict; `None` if it is a number.
/// This rank has `top_k` ids per token.
pub fn disagreement(rows: u32, top_k: u32) -> Option<Error> {
    if rows & HT_DISAGREED == 0 {
        return None;
    }
    let rank = (rows & !HT_DISAGREED & !HT_DISAGREED_TOP_K) >> HT_DISAGREED_RANK_SHIFT;
    let rank = GroupRank::from(rank);
    let verdict = rows & ((1 << HT_DISAGREED_RANK_SHIFT) - 1);
    if rows & HT_DISAGREED_TOP_K != 0 {
        return Some(
            Error::argument(Subject::Size(Role::Ids, 1), AmongRanks::Same { rank })
                .got(top_k, format_args!("{verdict} as on rank {rank}")),
        );
    }
    refusal_of(rank, verdict)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::refusal::InSequence;

    #[test]
    fn no_handle_has_number_zero() {
        let handles = AtomicU32::new(u32::MAX - 1);
        assert_eq!([(); 3].map(|()| next_number(&handles)), [u32::MAX, 1, 2]);
    }

    #[test]
    fn a_disagreement_names_the_rank_and_the_reason() {
        assert_eq!(disagreement(0x7fff_ffff, 8), None);
        let from = |rank: u32, verdict| HT_DISAGREED | rank << HT_DISAGREED_RANK_SHIFT | verdict;
        let refused = verdict_refusing(&Error::usage(Subject::Stream, InSequence::NoCaptureOfRouting));
        let error = disagreement(from(71, refused), 8).unwrap();
        assert_eq!(error.code(), Code::RemoteError);
        assert_eq!(error.text(), "Handle: AmongRanks(RefusedBy { rank: 71, code: InvalidUsage })");
        let error = disagreement(from(3, verdict_with(32)) | HT_DISAGREED_TOP_K, 8).unwrap();
        assert_eq!(error.code(), Code::InvalidArgument);
        assert_eq!(error.text(), "Size(Ids, 1): AmongRanks(Same { rank: 3 }) (got 8, expected 32 as on rank 3)");
    }
}
