//! The guard around every exported function: nothing unwinds into C, and every refusal leaves a
//! text.
#![allow(unsafe_code)]

use crate::objects::{self, Group};
use crate::types::ncclResult_t;
use crate::{refuse, texts};
use nccl_ep_core::error::{Error, Result};
use nccl_ep_core::{fork, log, nvtx};
use std::cell::RefCell;
use std::ffi::c_char;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Bytes for the text of a refusal and its NUL; longer texts are cut.
const TEXT_BYTES: usize = 1024;

thread_local! {
    // An array, which needs no drop: it works even in the thread's last destructors and in atexit,
    // and the address that callers hold stays valid.
    static LAST_ERROR: RefCell<[u8; TEXT_BYTES]> = const { RefCell::new([0; TEXT_BYTES]) };
}

/// The object that a call works on; a panic marks its group as failed.
#[derive(Clone, Copy)]
pub enum Subject {
    /// No group yet, or none at all.
    Nothing,
    /// The group with this number.
    Group(usize),
    /// The group of the handle with this number.
    Handle(usize),
}

/// Runs the body of the exported function `name`, as a range that profilers show. In a forked process the call is
/// refused.
pub fn guard(
    name: &'static str,
    subject: Subject,
    body: impl FnOnce() -> Result<()>,
) -> ncclResult_t {
    if fork::is_child() {
        return guard_unseen(name, Subject::Nothing, fork::check);
    }
    let _range = nvtx::range(name);
    guard_unseen(name, subject, body)
}

/// As [`guard`], for a function that destroys something: in a forked process it succeeds and does nothing, since all
/// is its parent's.
pub fn guard_destroy(name: &'static str, body: impl FnOnce() -> Result<()>) -> ncclResult_t {
    if fork::is_child() {
        return 0;
    }
    guard(name, Subject::Nothing, body)
}

/// The same without a range, for functions that only look at something.
pub fn guard_unseen(
    name: &'static str,
    subject: Subject,
    body: impl FnOnce() -> Result<()>,
) -> ncclResult_t {
    let outcome = catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|panic| {
        let text = panic
            .downcast_ref::<&str>()
            .map(|text| (*text).to_owned())
            .or_else(|| panic.downcast_ref::<String>().cloned())
            .unwrap_or_default();
        let error = Error::internal(format!("a panic in the library: {text}"));
        mark_failed(subject, &error);
        Err(error)
    });
    match outcome {
        Ok(()) => 0,
        Err(error) => {
            let error = error.within(name);
            let text = texts::text(&error);
            log::warn(&text);
            set_last_error(&text);
            error.code() as ncclResult_t
        }
    }
}

/// The text of this thread's last refusal; empty if there was none. The next refusal replaces it.
pub fn last_error() -> *const c_char {
    LAST_ERROR.with_borrow(|text| text.as_ptr().cast())
}

/// Makes `text` what [`last_error`] returns.
pub fn set_last_error(text: &str) {
    let kept = &text[..text.floor_char_boundary(TEXT_BYTES - 1)];
    LAST_ERROR.with_borrow_mut(|bytes| {
        bytes.fill(0);
        for (to, from) in bytes.iter_mut().zip(kept.bytes()) {
            *to = if from == 0 { b'?' } else { from };
        }
    });
}

fn mark_failed(subject: Subject, error: &Error) {
    match subject {
        Subject::Nothing => {}
        Subject::Group(number) => {
            if let Ok(group) = Group::resolve(number) {
                group.session.mark_failed(error.clone());
            }
        }
        Subject::Handle(number) => {
            if let Ok(handle) = objects::handle(number) {
                handle.group().mark_failed(error.clone());
            }
        }
    }
}

/// Writes `value` to `*out`.
///
/// # Safety
/// `out` is NULL or points to a writable `T`.
pub unsafe fn write_out<T>(name: &str, out: *mut T, value: T) -> Result<()> {
    check_out(name, out)?;
    // SAFETY: not NULL (checked), so by contract writable.
    unsafe { out.write(value) };
    Ok(())
}

/// Refuses a NULL result pointer.
pub fn check_out<T>(name: &str, out: *mut T) -> Result<()> {
    if out.is_null() {
        return Err(refuse::argument(name, "must not be NULL"));
    }
    Ok(())
}
