//! The shape word: what ranks must agree on in an HT operation. It travels with every row.
//!
//! The kernels only compare it and need not know its fields.
#![forbid(unsafe_code)]

use crate::backend::cuda::ht::grid::HtKind;
use crate::backend::cuda::params::ht::HT_MAX_TOP_K;
use crate::backend::cuda::sizes::number;
use crate::error::{Error, Result};
use crate::model::dtype::DType;
use crate::model::group::ROW_ALIGN;
use crate::model::ops::RowType;

/// Fields from the lowest bit: units of a row; low bits of the handle's number; the rows' element
/// type; columns of gradients per row (combine), or 1 if ids and weights travel too (dispatch);
/// whether it is a combine.
const UNITS_BITS: u32 = 17;
const HANDLE_SHIFT: u32 = UNITS_BITS;
const HANDLE_BITS: u32 = 5;
const TYPE_SHIFT: u32 = HANDLE_SHIFT + HANDLE_BITS;
const TYPE_BITS: u32 = 3;
const COLUMNS_SHIFT: u32 = TYPE_SHIFT + TYPE_BITS;
const COLUMNS_BITS: u32 = 6;
const COMBINE_SHIFT: u32 = COLUMNS_SHIFT + COLUMNS_BITS;

/// Types of rows, by their numbers in the word.
const TYPES: [DType; 3] = [DType::Bfloat16, DType::Float16, DType::Float32];

const _: () = assert!(COMBINE_SHIFT == u32::BITS - 1);
const _: () = assert!(HT_MAX_TOP_K < 1 << COLUMNS_BITS);
const _: () = assert!(TYPES.len() <= 1 << TYPE_BITS);

/// The longest rows that the word can distinguish.
pub const MOST_ROW_BYTES: usize = ((1 << UNITS_BITS) - 1) * ROW_ALIGN;

/// The word of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShapeWord(pub u32);

impl ShapeWord {
    /// The word of an operation of `kind` on rows of type `row`, at most `MOST_ROW_BYTES` long,
    /// without a handle.
    pub fn new(kind: HtKind, row: RowType) -> Result<Self> {
        let units = number(row.bytes() / ROW_ALIGN)?;
        let dtype = TYPES.iter().position(|dtype| *dtype == row.dtype);
        let dtype = number(dtype.unwrap_or(usize::MAX))?;
        let (combine, columns) = match kind {
            HtKind::Dispatch { forward } => (0, u32::from(forward)),
            HtKind::Combine { columns } => (1, number(columns)?),
        };
        if units >> UNITS_BITS != 0 || columns >> COLUMNS_BITS != 0 {
            return Err(Error::internal(format!(
                "{kind:?} on {row:?} does not fit a shape word"
            )));
        }
        Ok(Self(
            combine << COMBINE_SHIFT | columns << COLUMNS_SHIFT | dtype << TYPE_SHIFT | units,
        ))
    }

    /// The same word with the handle number `handle` of the group.
    pub fn of_handle(self, handle: u32) -> Self {
        let bits = handle % (1 << HANDLE_BITS);
        Self(self.0 | bits << HANDLE_SHIFT)
    }

    /// The low bits of the handle's number.
    pub fn handle(self) -> u32 {
        self.0 >> HANDLE_SHIFT & ((1 << HANDLE_BITS) - 1)
    }

    /// Whether the operation is a combine.
    pub fn is_combine(self) -> bool {
        self.0 >> COMBINE_SHIFT != 0
    }

    /// Columns of gradients, or 1 if ids and weights travel.
    pub fn columns(self) -> u32 {
        self.0 >> COLUMNS_SHIFT & ((1 << COLUMNS_BITS) - 1)
    }

    /// The rows' element type; a peer's word may have any bits.
    pub fn type_name(self) -> String {
        let number = self.0 >> TYPE_SHIFT & ((1 << TYPE_BITS) - 1);
        match TYPES.get(number as usize) {
            Some(dtype) => dtype.to_string(),
            None => format!("type {number}"),
        }
    }

    /// Bytes of a row.
    pub fn row_bytes(self) -> usize {
        (self.0 & ((1 << UNITS_BITS) - 1)) as usize * ROW_ALIGN
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KINDS: [HtKind; 4] = [
        HtKind::Dispatch { forward: true },
        HtKind::Dispatch { forward: false },
        HtKind::Combine { columns: 0 },
        HtKind::Combine { columns: 32 },
    ];

    fn word(kind: HtKind, dtype: DType, bytes: usize) -> Result<ShapeWord> {
        let hidden = bytes / dtype.size();
        ShapeWord::new(kind, RowType { dtype, hidden })
    }

    #[test]
    fn operations_that_differ_have_different_words() {
        let mut words = Vec::new();
        for kind in KINDS {
            for dtype in TYPES {
                for bytes in [16, 32, 14_336, MOST_ROW_BYTES - 16, MOST_ROW_BYTES] {
                    let word = word(kind, dtype, bytes).unwrap();
                    assert!(!words.contains(&word), "{kind:?} {dtype} {bytes}");
                    words.push(word);
                    let (is_combine, columns) = match kind {
                        HtKind::Dispatch { forward } => (false, u32::from(forward)),
                        HtKind::Combine { columns } => (true, u32::try_from(columns).unwrap()),
                    };
                    assert_eq!(word.is_combine(), is_combine);
                    assert_eq!(word.columns(), columns);
                    assert_eq!(word.type_name(), dtype.to_string());
                    assert_eq!(word.row_bytes(), bytes);
                    let other = word.of_handle(33);
                    assert_eq!((word.handle(), other.handle()), (0, 1));
                    assert_eq!(other.row_bytes(), bytes);
                }
            }
        }
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        for kind in KINDS {
            assert!(word(kind, DType::Bfloat16, MOST_ROW_BYTES + 16).is_err());
            assert!(word(kind, DType::Int64, 16).is_err());
        }
        let columns = 1 << COLUMNS_BITS;
        assert!(word(HtKind::Combine { columns }, DType::Bfloat16, 16).is_err());
        assert_eq!(ShapeWord(u32::MAX).type_name(), "type 7");
    }
}
