//! Sizes for the kernels: regions within an allocation, and numbers in the kernels' integer type.

use crate::error::{Error, Result};

/// Lays regions out one after the other, and yields their offsets and the total size.
pub(super) struct Regions {
    align: usize,
    end: usize,
}

impl Regions {
    /// Starts without regions; each will begin at a multiple of `align`.
    pub(super) fn new(align: usize) -> Self {
        Self { align, end: 0 }
    }

    /// Adds a region of `bytes` and returns its offset.
    pub(super) fn take(&mut self, bytes: usize) -> usize {
        let start = self.end;
        self.end = (start + bytes).next_multiple_of(self.align);
        start
    }

    /// Total size of the regions.
    pub(super) fn bytes(&self) -> usize {
        self.end
    }
}

/// `count` in the integer type of kernel parameters.
pub(super) fn to_u32(count: usize) -> Result<u32> {
    u32::try_from(count).map_err(|_| Error::internal(format!("{count} does not fit a kernel")))
}
