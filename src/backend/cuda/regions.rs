//! Sizes for the kernels: regions within an allocation, and numbers in the kernels' integer type.

use crate::error::{Error, Result};
pub(super) use crate::model::regions::Regions;

/// `count` in the integer type of kernel parameters.
pub(super) fn to_u32(count: usize) -> Result<u32> {
    u32::try_from(count).map_err(|_| Error::internal(format!("{count} does not fit a kernel")))
}
