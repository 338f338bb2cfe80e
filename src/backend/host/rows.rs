//! Rows of a tensor as bytes.
#![forbid(unsafe_code)]

use crate::error::{Error, Result};

/// Row `index` of `rows`.
pub fn row(rows: &[u8], index: usize, row_bytes: usize) -> Result<&[u8]> {
    rows.get(index * row_bytes..(index + 1) * row_bytes)
        .ok_or_else(outside)
}

/// Copies `from` to row `index` of `rows`.
pub fn copy_row(rows: &mut [u8], index: usize, from: &[u8]) -> Result<()> {
    let bytes = from.len();
    rows.get_mut(index * bytes..(index + 1) * bytes)
        .ok_or_else(outside)?
        .copy_from_slice(from);
    Ok(())
}

fn outside() -> Error {
    Error::internal("a row outside its tensor")
}
