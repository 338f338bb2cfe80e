//! Refusals of what this ABI alone has: pointers, numbers, tags, descriptors.
#![forbid(unsafe_code)]

use nccl_ep_core::error::{Code, Error};
use std::fmt::Display;

/// `argument` breaks `rule`.
#[cold]
pub fn argument(argument: impl Display, rule: impl Display) -> Error {
    Error::new(Code::InvalidArgument, format!("{argument}: {rule}"))
}
