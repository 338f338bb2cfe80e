//! Running statistics: this library's own addition to the interface.
#![allow(unsafe_code)]

use crate::objects::on_group;
use crate::types::{ncclEpGroup_t, ncclResult_t};
use nccl_ep_abi::refuse;
use nccl_ep_core::error::Result;
use nccl_ep_core::model::tensor::DevPtr;
use nccl_ep_core::session::group::Statistic;

/// Makes every later dispatch of the group add the rows that each local expert receives to `rows_of_expert`. Local:
/// ranks may differ. HT: counts all dispatches. LL: counts those that deliver rows by expert and have a
/// RECV_EXPERT_COUNTER_DEVICE.
///
/// A separate small kernel adds them, on the stream behind the dispatch, or behind `ncclEpComplete` if it is staged.
/// Graphs that are captured from now on contain it, and keep the address.
///
/// @param ep_group        the group
/// @param rows_of_expert  int64 `[L]` on the device. The caller sets it to zero first, reads or clears it at will on a
///                        stream behind the dispatches, and keeps it until they have ended. NULL stops counting
///
/// Returns `ncclInvalidArgument` for a NULL or dead `ep_group`, or a `rows_of_expert` that is not a multiple of 8; the
/// code of the failure if the group has failed.
///
/// # Safety
/// `rows_of_expert` is NULL or has L elements.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclEpGroupCountRows(ep_group: ncclEpGroup_t, rows_of_expert: *mut i64) -> ncclResult_t {
    on_group("ncclEpGroupCountRows", ep_group, |group| {
        group.session.collect(Statistic::Rows, numbers("rows_of_expert", rows_of_expert)?)
    })
}

/// Makes every later LL dispatch of the group add to `ns_of_source` how long this rank waits for each other rank.
/// Local: ranks may differ. HT dispatches are not timed.
///
/// A wait is the nanoseconds from when the dispatch is ready to receive until the source rank has told how many rows it
/// sends; in a staged dispatch, within `ncclEpComplete`. So `ns_of_source[r]` shows how much later rank r began its
/// dispatch than this rank. Waits overlap, so their sum means nothing. Over several nodes, earlier waits for the
/// network's messages are not included.
///
/// The dispatch's own kernel adds them, also in graphs that are captured from now on, which keep the address.
///
/// @param ep_group      the group
/// @param ns_of_source  int64 `[R]` on the device, under the rules of `ncclEpGroupCountRows` for `rows_of_expert`; NULL
///                      stops timing
///
/// Returns `ncclInvalidArgument` for a NULL or dead `ep_group`, or an `ns_of_source` that is not a multiple of 8; the
/// code of the failure if the group has failed.
///
/// # Safety
/// `ns_of_source` is NULL or has R elements.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclEpGroupTimeWaits(ep_group: ncclEpGroup_t, ns_of_source: *mut i64) -> ncclResult_t {
    on_group("ncclEpGroupTimeWaits", ep_group, |group| {
        group.session.collect(Statistic::Waits, numbers("ns_of_source", ns_of_source)?)
    })
}

/// As `ncclEpGroupTimeWaits`, but for combines, LL and HT.
///
/// A wait is the nanoseconds from when the combine has told the others what they need until a rank has begun it, too;
/// in HT, until the first row from that rank arrives, or the rank tells where its rows lie. A staged combine is timed
/// in both phases: if its send phase waits for weights, it waits for all ranks there. Over several nodes HT times only
/// the ranks of its node.
///
/// @param ep_group      the group
/// @param ns_of_source  int64 `[R]` on the device, may be that of `ncclEpGroupTimeWaits`; NULL stops timing
///
/// Returns as `ncclEpGroupTimeWaits`.
///
/// # Safety
/// `ns_of_source` is NULL or has R elements.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclEpGroupTimeCombineWaits(ep_group: ncclEpGroup_t, ns_of_source: *mut i64) -> ncclResult_t {
    on_group("ncclEpGroupTimeCombineWaits", ep_group, |group| {
        group.session.collect(Statistic::CombineWaits, numbers("ns_of_source", ns_of_source)?)
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
