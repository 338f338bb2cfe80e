//! Options that several calls have.

use crate::read::number;
use nccl_ep_abi::refuse;
use nccl_ep_core::error::{Code, Error, Result};
use nccl_ep_core::model::group::Algorithm;
use std::mem::MaybeUninit;

/// The rule of scales where rows travel as they are.
pub const NO_SCALES: &str = "must be NULL, as the recipe has no scales";

/// Refuses a number that no enumerator has.
pub fn known(name: &str, number: u32, last: u32) -> Result<()> {
    if number <= last {
        return Ok(());
    }
    let error = refuse::argument(name, "must be a value of its enum");
    Err(error.got(number, format_args!("0 to {last}")))
}

/// Whether an operation is of the backward pass, which LL has not.
pub fn is_backward<E: Copy>(algorithm: Algorithm, direction: Option<MaybeUninit<E>>) -> Result<bool> {
    let name = "config.pass_direction";
    let direction = direction.map_or(0, number);
    known(name, direction, 1)?;
    match (direction, algorithm) {
        (0, _) => Ok(false),
        (_, Algorithm::HighThroughput) => Ok(true),
        (_, Algorithm::LowLatency) => {
            let text = "config.pass_direction: must be NCCL_EP_FWD_PASS in low latency";
            Err(Error::new(Code::InvalidUsage, text))
        }
    }
}
