//! How operations are run, where a caller chooses.
#![allow(unsafe_code)]

use crate::objects::on_group;
use crate::types::{ncclEpChoice_t, ncclEpGroup_t, ncclEpQuery_t, ncclEpSelect_t, ncclResult_t};
use nccl_ep_abi::refuse;
use nccl_ep_core::error::Result;
use nccl_ep_core::model::ops::Launch;
use nccl_ep_core::session::choices::{ChoiceRequest, Query, Selector};
use nccl_ep_core::tuning::Operation;
use std::ffi::{c_uint, c_void};
use std::sync::Arc;

const CHOICE_BYTES: usize = size_of::<ncclEpChoice_t>();

/// Chooses how this rank runs each later `operation` of a group: a variant, a launch shape, or both. The choice is
/// copied.
///
/// In order of precedence: a choice set here, the selector's, that of the file NCCL_EP_TUNING_FILE, the library's own.
/// A choice that is impossible in a call is skipped there; if only its launch shape does not fit, its variant stays.
/// With NCCL_DEBUG=WARN one line of each kind says why. The choice is made in the operation's call, so replays of a
/// graph keep it.
///
/// LL variants change the last bits of results and must be the same on every rank; otherwise the operation fails on all
/// ranks, with a text. Whether one is possible depends only on what all ranks have in common. Everything else is up to
/// each rank, and changes no bit.
///
/// @param ep_group   the group
/// @param operation  an `ncclEpOperation_t`; one of the other algorithm has no effect
/// @param choice     NULL removes the choice
///
/// Returns `ncclInvalidArgument` for a dead group, an unknown operation, or a `choice->size` that is not the size of
/// the structure.
///
/// # Safety
/// `choice` is NULL or points to a structure whose first field is its size.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclEpSetChoice(
    ep_group: ncclEpGroup_t,
    operation: c_uint,
    choice: *const ncclEpChoice_t,
) -> ncclResult_t {
    on_group("ncclEpSetChoice", ep_group, |group| {
        let operation = operation_of(operation)?;
        // SAFETY: this function's contract.
        let choice = (!choice.is_null()).then(|| unsafe { read(choice) });
        group.session.set_choice(operation, choice.transpose()?);
        Ok(())
    })
}

/// Lets `select` choose for each operation of this rank that has no choice set. What it chooses counts as with
/// `ncclEpSetChoice`.
///
/// `select` runs in the call of the operation, on the caller's thread, and concurrently if threads call operations
/// concurrently. It may be asked about an operation that is then refused. It should take a fraction of a microsecond,
/// and must not wait for other ranks, throw, or call the library for this group. Do not replace it while another thread
/// is in an operation of the group, which may still call the old one.
///
/// @param ep_group  the group
/// @param select    NULL: no selector
/// @param user      is passed to `select`
///
/// Returns `ncclInvalidArgument` for a dead group.
///
/// # Safety
/// `select` has the documented type, and works with `user` until it is replaced.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclEpSetSelector(
    ep_group: ncclEpGroup_t,
    select: ncclEpSelect_t,
    user: *mut c_void,
) -> ncclResult_t {
    on_group("ncclEpSetSelector", ep_group, |group| {
        let user = user as usize;
        let selector = select.map(|select| -> Selector {
            Arc::new(move |query| {
                let query = query_in_c(query);
                let mut choice = ncclEpChoice_t { size: CHOICE_BYTES as c_uint, ..Default::default() };
                // SAFETY: the caller's function, which works with `user` (the exported function's contract); both
                // structures outlive the call.
                let chosen = unsafe { select(user as *mut c_void, &query, &mut choice) };
                (chosen != 0).then(|| request_of(&choice))
            })
        });
        group.session.set_selector(selector);
        Ok(())
    })
}

fn operation_of(number: c_uint) -> Result<Operation> {
    let index = (number as usize).checked_sub(1);
    let operation = index.and_then(|index| Operation::ALL.get(index));
    operation.copied().ok_or_else(|| {
        let known = format_args!("1 to {}", Operation::ALL.len());
        refuse::argument("operation", "must be a known operation").got(number, known)
    })
}

/// Copies `*choice`.
///
/// # Safety
/// `choice` points to a structure whose first field is its size.
unsafe fn read(choice: *const ncclEpChoice_t) -> Result<ChoiceRequest> {
    // SAFETY: this function's contract.
    let size = unsafe { (&raw const (*choice).size).read() };
    if size as usize != CHOICE_BYTES {
        let rule = "must be the size of the structure";
        return Err(refuse::argument("choice.size", rule).got(size, CHOICE_BYTES));
    }
    // SAFETY: it has that size.
    Ok(request_of(&unsafe { choice.read() }))
}

fn request_of(choice: &ncclEpChoice_t) -> ChoiceRequest {
    ChoiceRequest {
        variant: choice.variant,
        launch: Launch {
            blocks: choice.blocks,
            send_blocks: choice.send_blocks,
            threads: choice.threads,
            in_order: choice.in_order != 0,
        },
    }
}

fn query_in_c(query: &Query) -> ncclEpQuery_t {
    let number = |count| c_uint::try_from(count).unwrap_or(c_uint::MAX);
    ncclEpQuery_t {
        size: number(size_of::<ncclEpQuery_t>()),
        operation: 1 + query.operation as c_uint,
        tokens: number(query.about.tokens),
        top_k: number(query.about.top_k),
        row_bytes: number(query.about.row_bytes),
        ranks: number(query.ranks),
        sms: query.most_blocks.unwrap_or(0),
        symmetric: query.about.mapped.into(),
    }
}
