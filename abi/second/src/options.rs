//! Options that several calls have.

use crate::read::number;
use crate::texts::not_served;
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

/// Refuses other passes than forward.
pub fn forward<E: Copy>(algorithm: Algorithm, direction: Option<MaybeUninit<E>>) -> Result<()> {
    let name = "config.pass_direction";
    let direction = direction.map_or(0, number);
    known(name, direction, 1)?;
    match (direction, algorithm) {
        (0, _) => Ok(()),
        (_, Algorithm::HighThroughput) => Err(not_served(name, "NCCL_EP_BWD_PASS")),
        (_, Algorithm::LowLatency) => {
            let text = "config.pass_direction: must be NCCL_EP_FWD_PASS in low latency";
            Err(Error::new(Code::InvalidUsage, text))
        }
    }
}
