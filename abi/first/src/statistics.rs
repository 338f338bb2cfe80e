//! Running statistics: this library's own addition to the interface.
#![allow(unsafe_code)]

use crate::objects::{GROUPS, GUARD, Subject};
use crate::types::{ncclEpGroup_t, ncclResult_t};
use nccl_ep_abi::refuse;
use nccl_ep_core::error::Result;
use nccl_ep_core::model::tensor::DevPtr;

/// Counts the rows that each local expert receives: from now on every dispatch of the group adds them to
/// `rows_of_expert`, behind itself on its stream, in a staged one behind `ncclEpComplete`. In LL those dispatches count
/// that deliver rows by expert and have a RECV_EXPERT_COUNTER_DEVICE; in HT all.
///
/// A small kernel of its own adds, also in graphs that are captured from now on, which keep the address. Local: ranks
/// may differ.
///
/// @param ep_group        the group
/// @param rows_of_expert  int64 `[L]` on the device, which the caller has set to zero, reads and clears at will on a
///                        stream behind the dispatches, and keeps until they have ended; NULL counts no more
///
/// Returns `ncclInvalidArgument` for a NULL or dead `ep_group`, or a `rows_of_expert` that is not a multiple of 8;
/// the failure's code in a group that has failed.
///
/// # Safety
/// `rows_of_expert` is NULL or has L elements.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclEpGroupCountRows(ep_group: ncclEpGroup_t, rows_of_expert: *mut i64) -> ncclResult_t {
    GUARD.run("ncclEpGroupCountRows", Subject::Group(ep_group as usize), || {
        let group = GROUPS.resolve(ep_group as usize)?;
        group.session.count_rows(numbers("rows_of_expert", rows_of_expert)?)
    })
}

/// Times how long this rank waits for each other: from now on every LL dispatch of the group adds the nanoseconds from
/// when it is ready to receive until a source rank has told how many rows come from there; a staged one does so in
/// `ncclEpComplete`. So what a rank's dispatch begins later than this one's is found under its number.
///
/// The kernel itself adds, also in graphs that are captured from now on, which keep the address. Waits overlap, so
/// their sum means nothing. Over several nodes those for the network's messages come before, and are not among them.
/// Local: ranks may differ. HT dispatches are not timed.
///
/// @param ep_group         the group
/// @param ns_of_source     int64 `[R]` on the device, as `rows_of_expert` of `ncclEpGroupCountRows`; NULL times no more
///
/// Returns `ncclInvalidArgument` for a NULL or dead `ep_group`, or an `ns_of_source` that is not a multiple of 8; the
/// failure's code in a group that has failed.
///
/// # Safety
/// `ns_of_source` is NULL or has R elements.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclEpGroupTimeWaits(ep_group: ncclEpGroup_t, ns_of_source: *mut i64) -> ncclResult_t {
    GUARD.run("ncclEpGroupTimeWaits", Subject::Group(ep_group as usize), || {
        let group = GROUPS.resolve(ep_group as usize)?;
        group.session.time_waits(numbers("ns_of_source", ns_of_source)?)
    })
}

/// The same for combines, LL and HT: from now on each adds the nanoseconds from when it has told the others what they
/// need until a rank has begun it, too; in HT until the first row comes from there, or the rank tells where its rows
/// lie. A staged one does so in both phases: where it waits for weights as it sends, it waits for all ranks then. Over
/// several nodes HT times the ranks of its node.
///
/// All else is as of `ncclEpGroupTimeWaits`.
///
/// @param ep_group         the group
/// @param ns_of_source     int64 `[R]` on the device, also that of `ncclEpGroupTimeWaits`; NULL times no more
///
/// Returns as `ncclEpGroupTimeWaits`.
///
/// # Safety
/// `ns_of_source` is NULL or has R elements.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclEpGroupTimeCombineWaits(ep_group: ncclEpGroup_t, ns_of_source: *mut i64) -> ncclResult_t {
    GUARD.run("ncclEpGroupTimeCombineWaits", Subject::Group(ep_group as usize), || {
        let group = GROUPS.resolve(ep_group as usize)?;
        group.session.time_combine_waits(numbers("ns_of_source", ns_of_source)?)
    })
}

/// The numbers to which operations add, if there are some.
fn numbers(argument: &'static str, at: *mut i64) -> Result<Option<DevPtr>> {
    if !at.is_aligned() {
        let refused = refuse::argument(argument, "must be aligned for its elements");
        return Err(refused.got(format_args!("{at:p}"), format_args!("a multiple of {}", align_of::<i64>())));
    }
    Ok((!at.is_null()).then_some(DevPtr(at as usize)))
}
