//! Rows of a tensor as bytes.

use crate::error::{Error, Result};
use std::ops::Range;

pub fn row(rows: &[u8], index: usize, row_bytes: usize) -> Result<&[u8]> {
    range(index, row_bytes).and_then(|range| rows.get(range)).ok_or_else(outside)
}

pub fn copy_row(rows: &mut [u8], index: usize, from: &[u8]) -> Result<()> {
    range(index, from.len()).and_then(|range| rows.get_mut(range)).ok_or_else(outside)?.copy_from_slice(from);
    Ok(())
}

/// The address of row `index`, if it does not overflow.
fn range(index: usize, row_bytes: usize) -> Option<Range<usize>> {
    let begin = index.checked_mul(row_bytes)?;
    Some(begin..begin.checked_add(row_bytes)?)
}

fn outside() -> Error {
    Error::internal("a row outside its tensor")
}
