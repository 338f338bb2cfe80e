//! The guard around every exported function: nothing unwinds into C, and every refusal leaves a text.
#![allow(unsafe_code)]

use crate::refuse;
use crate::registry::Registry;
use nccl_ep_core::error::{Error, Formatter, Result};
use nccl_ep_core::session::group::Group;
use nccl_ep_core::{fork, log, nvtx};
use std::cell::RefCell;
use std::ffi::{c_char, c_int};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

/// Bytes for the text of a refusal and its NUL; longer texts are cut.
const TEXT_BYTES: usize = 1024;

thread_local! {
    // An array needs no drop: it works even in the thread's last destructors and in atexit, and the address that
    // callers hold stays valid.
    static LAST_ERROR: RefCell<[u8; TEXT_BYTES]> = const { RefCell::new([0; TEXT_BYTES]) };
}

/// Runs the exported functions of an ABI, which puts refusals into words.
pub struct Guard(pub Formatter);

impl Guard {
    /// Runs the body of function `name` as a range in profilers. In a forked process the call is refused.
    pub fn run(&self, name: &'static str, body: impl FnOnce() -> Result<()>) -> c_int {
        self.guarded(name, body, drop)
    }

    /// The same for a function that works on the object `number` of `live`, whose group then knows whether the caller
    /// has got its failure. A panic is one.
    pub fn on<T>(
        &self,
        name: &'static str,
        (live, number): (&Registry<T>, usize),
        group_of: fn(&T) -> &Group,
        body: impl FnOnce(Arc<T>) -> Result<()>,
    ) -> c_int {
        let fail = |panic| live.find(number).map_or((), |it| group_of(&it).mark_failed(panic));
        let body = || {
            let object = live.resolve(number)?;
            body(Arc::clone(&object)).inspect_err(|error| group_of(&object).mark_reported(error))
        };
        self.guarded(name, body, fail)
    }

    fn guarded(&self, name: &'static str, body: impl FnOnce() -> Result<()>, on_panic: impl FnOnce(Error)) -> c_int {
        if fork::is_child() {
            return self.look(name, fork::check);
        }
        let _range = nvtx::range(name);
        self.outcome(name, body, on_panic)
    }

    /// As [`Guard::run`], for a function that destroys something: in a forked process it does nothing and succeeds,
    /// since everything belongs to the parent.
    pub fn destroy(&self, name: &'static str, body: impl FnOnce() -> Result<()>) -> c_int {
        if fork::is_child() { 0 } else { self.run(name, body) }
    }

    /// Runs it without a range, for a function that only queries something.
    pub fn look(&self, name: &'static str, body: impl FnOnce() -> Result<()>) -> c_int {
        self.outcome(name, body, drop)
    }

    fn outcome(&self, name: &'static str, body: impl FnOnce() -> Result<()>, on_panic: impl FnOnce(Error)) -> c_int {
        let outcome = catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|panic| {
            let text = panic
                .downcast_ref::<&str>()
                .map(|text| (*text).to_owned())
                .or_else(|| panic.downcast_ref::<String>().cloned())
                .unwrap_or_default();
            let error = Error::internal(format!("a panic in the library: {text}"));
            on_panic(error.clone());
            Err(error)
        });
        match outcome {
            Ok(()) => 0,
            Err(error) => {
                let code = error.code();
                set_last_error(&self.warn(name, error));
                code as c_int
            }
        }
    }

    /// Logs the error as function `name` says it; returns that text.
    pub fn warn(&self, name: &'static str, error: Error) -> String {
        let text = (self.0)(&error.within(name));
        log::warn(&text);
        text
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
    if out.is_null() { Err(refuse::argument(name, "must not be NULL")) } else { Ok(()) }
}
