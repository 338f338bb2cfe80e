//! Plain data of a call -> checked operations.
//!
//! Every rule that a caller's arguments must keep stands here once, with the text of its refusal
//! (listed in `docs/errors.md`). Pure: nothing is read through a pointer, nothing is remembered.
#![forbid(unsafe_code)]

pub mod argument;
pub mod group;
pub mod handle;
pub mod ht;
pub mod ll;

use crate::model::tensor::TensorSet;

/// The three tensor lists of a dispatch or combine.
#[derive(Clone, Copy, Debug, Default)]
pub struct OpTensors {
    /// What goes in.
    pub inputs: TensorSet,
    /// What comes out.
    pub outputs: TensorSet,
    /// What stays on this rank: counters, LL combine weights.
    pub locals: TensorSet,
}
