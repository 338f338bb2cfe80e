//! Refusals that only ABIs make: of pointers, numbers, tags and descriptors.

use nccl_ep_core::error::{Code, Error};
use std::fmt::Display;

/// The refusal of an `argument` that breaks `rule`.
#[cold]
pub fn argument(argument: impl Display, rule: impl Display) -> Error {
    Error::new(Code::InvalidArgument, format!("{argument}: {rule}"))
}
