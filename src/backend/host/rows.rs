//! Rows of a tensor as bytes.
#![forbid(unsafe_code)]

use crate::backend::host::message::{Message, Reader};
use crate::error::{Error, Result};
use crate::model::dtype::DType;
use crate::model::ops::RowType;
use std::fmt;

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

/// Puts the type of rows into a message, for `same_rows_on_ranks`.
pub fn tell_rows(message: &mut Message, row: RowType) {
    message.number(row.dtype as usize);
    message.number(row.bytes());
}

/// Refuses rows from `source` of another type than this rank's.
pub fn same_rows_on_ranks(reader: &mut Reader<'_>, source: usize, row: RowType) -> Result<()> {
    let raw = reader.number()?;
    let dtype = u32::try_from(raw).ok().and_then(DType::from_raw);
    match dtype {
        Some(theirs) => same_on_ranks("data type", row.dtype, source, theirs)?,
        None => {
            return Err(Error::internal(format!(
                "rows of type {raw} from rank {source}"
            )));
        }
    }
    same_on_ranks("row bytes", row.bytes(), source, reader.number()?)
}

/// Refuses a fact from `source` that is not this rank's own.
pub fn same_on_ranks<T>(what: &str, mine: T, source: usize, theirs: T) -> Result<()>
where
    T: PartialEq + fmt::Display,
{
    if theirs == mine {
        return Ok(());
    }
    let rule = format!("must be the same on every rank, but rank {source} differs");
    Err(Error::usage(what, rule).got(mine, theirs))
}
