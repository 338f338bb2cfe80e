//! The guard around every exported function of this ABI: a panic marks the group that the call works on as failed.

use crate::objects::{self, Group};
use crate::texts;
use crate::types::ncclResult_t;
use nccl_ep_abi::guard::Function;
pub use nccl_ep_abi::guard::{check_out, write_out};
use nccl_ep_core::error::{Error, Result};

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

fn function(name: &'static str) -> Function {
    let words = texts::text;
    Function { name, words }
}

/// Runs the body of the exported function `name`.
pub fn guard(
    name: &'static str,
    subject: Subject,
    body: impl FnOnce() -> Result<()>,
) -> ncclResult_t {
    function(name).run(|error| mark_failed(subject, error), body)
}

/// As [`guard`], for a function that destroys something.
pub fn guard_destroy(name: &'static str, body: impl FnOnce() -> Result<()>) -> ncclResult_t {
    function(name).destroy(body)
}

/// As [`guard`], for a function that only looks at something.
pub fn guard_unseen(name: &'static str, body: impl FnOnce() -> Result<()>) -> ncclResult_t {
    function(name).run_unseen(|_| {}, body)
}

fn mark_failed(subject: Subject, error: &Error) {
    let group = match subject {
        Subject::Nothing => return,
        Subject::Group(number) => Group::resolve(number),
        Subject::Handle(number) => objects::handle(number).map(|handle| handle.group.clone()),
    };
    if let Ok(group) = group {
        group.session.mark_failed(error.clone());
    }
}
