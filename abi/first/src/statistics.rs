//! Running statistics: this library's own addition to the interface.
#![allow(unsafe_code)]

use crate::objects::{GUARD, Group, Subject};
use crate::types::{ncclEpGroup_t, ncclResult_t};
use nccl_ep_abi::refuse;
use nccl_ep_core::model::tensor::DevPtr;

/// Counts the rows that each local expert receives: from now on every dispatch of the group adds them to
/// `rows_of_expert`, behind itself on its stream, in a staged one behind `ncclEpComplete`. In LL those dispatches count
/// that deliver rows by expert and have a RECV_EXPERT_COUNTER_DEVICE; in HT all.
///
/// A small kernel of its own adds, also in graphs that are captured from now on, which keep the address. Local: ranks may
/// differ.
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
    GUARD.run("ncclEpGroupCountRows", Subject::Nothing, || {
        let group = Group::resolve(ep_group as usize)?;
        if !rows_of_expert.is_aligned() {
            let refused = refuse::argument("rows_of_expert", "must be aligned for its elements");
            let expected = format_args!("a multiple of {}", align_of::<i64>());
            return Err(refused.got(format_args!("{rows_of_expert:p}"), expected));
        }
        group.session.count_rows((!rows_of_expert.is_null()).then_some(DevPtr(rows_of_expert as usize)))
    })
}
