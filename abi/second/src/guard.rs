//! The guard around every exported function of this ABI: a panic marks the group that the call works on as failed.

use crate::objects::{self, Group};
use crate::texts;
pub use nccl_ep_abi::guard::{Guard, Subject, check_out, write_out};
use nccl_ep_core::session;
use std::sync::Arc;

/// Runs the body of each exported function.
pub const GUARD: Guard = Guard { words: texts::text, group_of };

fn group_of(subject: Subject) -> Option<Arc<session::group::Group>> {
    let group = match subject {
        Subject::Nothing => None,
        Subject::Group(number) => Group::resolve(number).ok(),
        Subject::Handle(number) => objects::handle(number).ok().map(|handle| Arc::clone(&handle.group)),
    };
    group.map(|group| Arc::clone(&group.session))
}
