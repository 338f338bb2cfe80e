//! The core's refusals in other words than the first ABI's: a few as sentences, the rest as data.

use nccl_ep_core::error::refusal::{Role, Subject};
use nccl_ep_core::error::{Cause, Error};

/// One line in this ABI's words.
pub fn text(error: &Error) -> String {
    match error.report().cause {
        Cause::Refused(subject, rule) => format!("{} breaks {rule:?}", name(subject)),
        Cause::Text(_) => error.text(),
    }
}

fn name(subject: Subject) -> String {
    match subject {
        Subject::Size(Role::TokensIn, index) => format!("extent {index} of the rows that are read"),
        Subject::Handle => "the route".to_owned(),
        other => format!("{other:?}"),
    }
}
