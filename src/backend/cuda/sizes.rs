//! Sizes on their way to the kernels: regions of a piece of memory, and numbers as kernels take them.
#![forbid(unsafe_code)]

use crate::error::{Error, Result};

/// Regions one after the other: the one builder that yields their offsets and the size of all.
pub(super) struct Regions {
    align: usize,
    end: usize,
}

impl Regions {
    /// No regions yet; each will begin at a multiple of `align`.
    pub(super) fn new(align: usize) -> Self {
        Self { align, end: 0 }
    }

    /// The start of a region of `bytes`.
    pub(super) fn take(&mut self, bytes: usize) -> usize {
        let start = self.end;
        self.end = (start + bytes).next_multiple_of(self.align);
        start
    }

    /// Size of all regions.
    pub(super) fn bytes(&self) -> usize {
        self.end
    }
}

/// `count` as kernels take it.
pub(super) fn number(count: usize) -> Result<u32> {
    u32::try_from(count).map_err(|_| Error::internal(format!("{count} does not fit a kernel")))
}
