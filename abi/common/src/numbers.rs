//! Numbers that mean the same in every ABI.

use crate::refuse;
use nccl_ep_core::error::Result;
use nccl_ep_core::model::group::Algorithm;

/// The mode that `config.algorithm` selects.
pub fn algorithm(number: u32) -> Result<Algorithm> {
    match number {
        0 => Ok(Algorithm::LowLatency),
        1 => Ok(Algorithm::HighThroughput),
        other => Err(refuse::argument("config.algorithm", "must be a known algorithm")
            .got(other, "0 (low latency) or 1 (high throughput)")),
    }
}
