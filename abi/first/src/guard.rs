//! The guard around every exported function of this ABI: a panic marks the group that the call works on as failed.

use crate::objects::{self, Group};
use crate::texts;
pub use nccl_ep_abi::guard::{Guard, Subject, check_out, last_error, set_last_error, write_out};
use nccl_ep_core::error::Error;

/// Runs the body of each exported function.
pub const GUARD: Guard = Guard { words: texts::text, mark_failed };

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
