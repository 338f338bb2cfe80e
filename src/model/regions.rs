//! Lays out the regions of an allocation, one after the other.

/// Computes the offsets of regions, and their total size.
pub struct Regions {
    align: usize,
    end: usize,
}

impl Regions {
    /// No regions yet; each will begin at a multiple of `align`.
    pub fn new(align: usize) -> Self {
        Self { align, end: 0 }
    }

    /// Adds a region of `bytes` and returns its offset.
    pub fn take(&mut self, bytes: usize) -> usize {
        let start = self.end;
        self.end = (start + bytes).next_multiple_of(self.align);
        start
    }

    pub fn bytes(&self) -> usize {
        self.end
    }
}
