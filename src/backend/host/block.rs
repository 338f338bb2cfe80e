//! A handle's block in a caller's memory: its header and sections as bytes.
#![allow(unsafe_code)]

use crate::backend::check_header;
use crate::backend::host::device::bytes_mut;
use crate::backend::host::numeric;
use crate::error::{Error, Result};
use crate::model::handle_state::{CallerBlock, HEADER_WORDS};
use std::ops::Range;

/// A block of `size` bytes, as an operation on its stream sees it.
pub struct Block<'a>(&'a mut [u8]);

impl<'a> Block<'a> {
    /// The one at `CallerBlock`.
    ///
    /// # Safety
    /// `rule` has checked address and size; the caller leaves the block to the operations of the handle, which run one
    /// after the other.
    pub unsafe fn new(CallerBlock(data): CallerBlock, size: usize) -> Self {
        // SAFETY: this function's contract.
        Self(unsafe { bytes_mut(data, size) })
    }

    /// Stores `header` once the sections are complete.
    pub fn set_header(&mut self, header: &[u32; HEADER_WORDS]) -> Result<()> {
        self.set(0, header.iter().flat_map(|word| word.to_ne_bytes()))
    }

    /// The words of the header, if it begins like `expected`.
    pub fn header(&self, expected: &[u32; HEADER_WORDS]) -> Result<Vec<u32>> {
        let words: Vec<u32> = numeric::u32s(self.section(0, HEADER_WORDS * 4)?).collect();
        check_header(&words, expected)?;
        Ok(words)
    }

    /// Stores `from` at `offset`.
    pub fn set(&mut self, offset: usize, from: impl IntoIterator<Item = u8>) -> Result<()> {
        let mut to = self.0.get_mut(offset..).ok_or_else(outside)?.iter_mut();
        from.into_iter().try_for_each(|byte| to.next().map(|to| *to = byte).ok_or_else(outside))
    }

    /// `bytes` at `offset`.
    pub fn section(&self, offset: usize, bytes: usize) -> Result<&[u8]> {
        let range: Range<usize> = offset..offset + bytes;
        self.0.get(range).ok_or_else(outside)
    }
}

fn outside() -> Error {
    Error::internal("a section outside its block")
}
