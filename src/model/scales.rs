//! Rows with scales: how a cast makes scales, and the layout of scales in memory.
//!
//! A row travels as a *payload* and, optionally, *scales*, each for a block of its elements. A dispatch moves rows
//! unchanged (opaque), moves rows and scales unchanged (forward), or rounds rows to e4m3 and makes the scales (cast),
//! depending on the tensors of the call. A receiver cannot distinguish a cast from a forward of the same bytes.

use crate::model::group::ROW_ALIGN;
use crate::model::tensor::{DType, DevPtr, RowType};

/// Numbers of elements that share a scale: those of DeepSeek, and of MXFP8.
pub const BLOCKS: [usize; 2] = [128, 32];

/// How a cast stores the scale of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScaleForm {
    Float,
    /// As float32, rounded up to a power of two.
    PowerOfTwo,
    /// As the exponent byte of a power of two (UE8M0), one per element, or four in a 32-bit element with the first in
    /// the lowest byte.
    Exponent,
}

/// A cast of rows to e4m3.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cast {
    /// Type of the input rows: bf16, f16 or f32.
    pub from: DType,
    /// Elements that share a scale.
    pub block: usize,
    pub form: ScaleForm,
}

impl Cast {
    /// The cast of rows `[.., hidden]` of `from` that stores `scales`; `round` makes float32 scales powers of two.
    /// `None` if no cast stores such scales.
    pub fn new(from: DType, hidden: usize, scales: ScaleType, round: bool) -> Option<Self> {
        let (large, small) = cast_counts(scales.dtype, hidden)?;
        let [block, small_block] = BLOCKS;
        let block = match scales.count {
            count if count == large => block,
            count if Some(count) == small => small_block,
            _ => return None,
        };
        let form = match scales.dtype {
            DType::Float32 if round => ScaleForm::PowerOfTwo,
            DType::Float32 => ScaleForm::Float,
            _ => ScaleForm::Exponent,
        };
        Some(Self { from, block, form })
    }
}

/// The numbers of scales of type `dtype` that a cast makes per row of `hidden` elements: for blocks of 128, and of 32.
pub fn cast_counts(dtype: DType, hidden: usize) -> Option<(usize, Option<usize>)> {
    let [large, small] = BLOCKS;
    match dtype {
        DType::Float32 => Some((hidden.div_ceil(large), None)),
        DType::Uint8 => Some((hidden.div_ceil(large), Some(hidden.div_ceil(small)))),
        DType::Int32 | DType::Uint32 => {
            let words = |block: usize| hidden.div_ceil(4 * block);
            Some((words(large), Some(words(small))))
        }
        _ => None,
    }
}

/// The scales of one row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScaleType {
    /// Element type, of 1, 2 or 4 bytes.
    pub dtype: DType,
    /// Elements per row.
    pub count: usize,
}

impl ScaleType {
    pub fn bytes(self) -> usize {
        self.count * self.dtype.size()
    }
}

/// The form in which a row travels; the same on all ranks of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WireRow {
    pub payload: RowType,
    pub scales: Option<ScaleType>,
}

impl WireRow {
    pub fn scale_bytes(self) -> usize {
        self.scales.map_or(0, ScaleType::bytes)
    }

    /// Bytes of a slot for the row: the payload, then the scales padded to a multiple of [`ROW_ALIGN`].
    pub fn slot_bytes(self) -> usize {
        self.payload.bytes() + self.scale_bytes().next_multiple_of(ROW_ALIGN)
    }
}

/// The bytes of a row's payload and scales.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowBytes {
    pub payload: usize,
    /// 0 without scales.
    pub scales: usize,
}

impl RowBytes {
    /// The rows of two ranks, as texts; with both parts if either row has scales.
    pub fn in_words(mine: Self, theirs: Self) -> [String; 2] {
        let scaled = mine.scales + theirs.scales > 0;
        [mine, theirs].map(
            |row| {
                if scaled { format!("{} + {}", row.payload, row.scales) } else { row.payload.to_string() }
            },
        )
    }
}

impl From<WireRow> for RowBytes {
    fn from(row: WireRow) -> Self {
        Self { payload: row.payload.bytes(), scales: row.scale_bytes() }
    }
}

impl From<RowType> for WireRow {
    fn from(payload: RowType) -> Self {
        Self { payload, scales: None }
    }
}

/// Layout of a tensor of scales `[experts, rows, scales]`; in HT there is one "expert". Strides in elements:
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScaleLayout {
    /// from one expert to the next.
    pub expert: usize,
    /// From one row to the next.
    pub row: usize,
    /// From one scale of a row to the next.
    pub column: usize,
}

impl ScaleLayout {
    /// The layout for these extents and `strides`, by default dense row-major. `None` unless the strides are row-major
    /// or column-major with a pitch, so that no two scales share memory.
    pub fn new([experts, rows, columns]: [usize; 3], strides: Option<[usize; 3]>) -> Option<Self> {
        let dense = Self { expert: rows.saturating_mul(columns), row: columns, column: 1 };
        let Some([expert, row, column]) = strides else { return Some(dense) };
        if experts == 0 || rows == 0 || columns == 0 {
            return Some(dense);
        }
        // A dimension of extent 1 may have any stride.
        let (row, column) = match (rows, columns) {
            (1, 1) => (1, 1),
            (1, _) => (columns.saturating_mul(column), column),
            (_, 1) => (row, rows.saturating_mul(row)),
            _ => (row, column),
        };
        let row_major = (column == 1 || columns == 1) && row >= columns;
        let column_major = (row == 1 || rows == 1) && column >= rows;
        let of_expert = match (row_major, column_major) {
            (true, _) => rows.saturating_mul(row),
            (_, true) => columns.saturating_mul(column),
            _ => return None,
        };
        (experts == 1 || expert >= of_expert).then_some(Self { expert, row, column })
    }

    pub fn element(&self, expert: usize, row: usize, column: usize) -> usize {
        expert * self.expert + row * self.row + column * self.column
    }
}

/// A tensor of scales `[experts, rows, scales]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScaleTensor {
    pub data: DevPtr,
    /// Number of rows; in LL, of each expert.
    pub rows: usize,
    pub layout: ScaleLayout,
}

/// Where the scales that are sent come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScaleSource {
    Forward(ScaleTensor),
    Cast(Cast),
}

/// The scales of a dispatch; at least one per row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Scaled {
    /// Scales per row, as sent and received.
    pub scales: ScaleType,
    pub source: ScaleSource,
    pub out: ScaleTensor,
}

impl Scaled {
    pub fn cast(&self) -> Option<&Cast> {
        match &self.source {
            ScaleSource::Cast(cast) => Some(cast),
            ScaleSource::Forward(_) => None,
        }
    }
}

#[cfg(test)]
#[path = "scales_tests.rs"]
mod tests;
