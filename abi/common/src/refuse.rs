//! Refusals that ABIs alone have: of pointers, numbers, tags and descriptors.

use nccl_ep_core::error::{Code, Error};
use std::fmt::Display;

/// The error that `argument` breaks `rule`.
#[cold]
pub fn argument(argument: impl Display, rule: impl Display) -> Error {
    Error::new(Code::InvalidArgument, format!("{argument}: {rule}"))
}
