//! The rows of an HT operation: their form on the wire, and how they pass through a warp's shared memory.

use crate::backend::cuda::params::ht::HT_STAMP_BYTES;
use crate::model::group::ROW_ALIGN;
use crate::model::ops::{HtDispatch, RowType};
use crate::model::scales::{Scaled, WireRow};
use crate::model::tensor::DType;

/// A warp moves rows in chunks of at most this many bytes.
const MOST_CHUNK_BYTES: usize = 16 << 10;
/// A cast's chunks are multiples of this many elements.
const CAST_STEP: usize = 512;

/// The rows that an operation moves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MovedRow {
    /// As they travel.
    pub wire: WireRow,
    /// The element type before the cast; `None` without a cast.
    pub cast: Option<DType>,
}

impl From<WireRow> for MovedRow {
    fn from(wire: WireRow) -> Self {
        Self { wire, cast: None }
    }
}

impl From<RowType> for MovedRow {
    fn from(row: RowType) -> Self {
        WireRow::from(row).into()
    }
}

impl From<&HtDispatch> for MovedRow {
    #[inline]
    fn from(op: &HtDispatch) -> Self {
        Self { wire: op.wire(), cast: op.scaled.as_ref().and_then(Scaled::cast).map(|cast| cast.from) }
    }
}

impl MovedRow {
    /// Bytes of a row in its slot: the payload, then for rows with scales the stamp and the scales.
    pub fn image_bytes(&self) -> usize {
        self.wire.payload.bytes() + self.bytes_behind_payload()
    }

    fn bytes_behind_payload(&self) -> usize {
        let stamp_bytes = HT_STAMP_BYTES as usize;
        let scaled = |bytes: usize| stamp_bytes + bytes.next_multiple_of(ROW_ALIGN);
        self.wire.scales.map_or(0, |scales| scaled(scales.bytes()))
    }

    /// How a warp stages these rows.
    pub fn staging(&self) -> RowStaging {
        let image_bytes = self.image_bytes();
        let Some(from) = self.cast else {
            let chunk_bytes = even_chunks(image_bytes, MOST_CHUNK_BYTES);
            return RowStaging { chunk_bytes, buffer_bytes: chunk_bytes, cast_chunk: 0 };
        };
        let hidden = self.wire.payload.hidden;
        let most = MOST_CHUNK_BYTES / from.size();
        let cast_chunk = even_chunks(hidden, most).next_multiple_of(CAST_STEP);
        let buffer_bytes = cast_chunk * from.size() + self.bytes_behind_payload();
        RowStaging { chunk_bytes: even_chunks(image_bytes, buffer_bytes), buffer_bytes, cast_chunk }
    }
}

/// The size of a chunk if `whole` is divided into the fewest of at most `most`: a multiple of 16, except the last.
fn even_chunks(whole: usize, most: usize) -> usize {
    whole.div_ceil(whole.div_ceil(most)).next_multiple_of(ROW_ALIGN)
}

/// The shared memory through which a warp moves rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowStaging {
    /// Bytes of an image that are loaded at a time.
    pub chunk_bytes: usize,
    /// Bytes before the tails.
    pub buffer_bytes: usize,
    /// Elements that are cast at a time; 0 without a cast.
    pub cast_chunk: usize,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::scales::ScaleType;

    fn moved(dtype: DType, hidden: usize, scales: ScaleType, cast: Option<DType>) -> MovedRow {
        let payload = RowType { dtype, hidden };
        let scales = Some(scales);
        MovedRow { wire: WireRow { payload, scales }, cast }
    }

    #[test]
    fn a_row_passes_in_one_chunk_where_it_can() {
        let dtype = DType::Bfloat16;
        let plain = MovedRow::from(RowType { dtype, hidden: 7168 });
        assert_eq!((plain.image_bytes(), plain.staging().chunk_bytes), (14_336, 14_336));
        let scales = ScaleType { dtype: DType::Float32, count: 56 };
        let forwarded = moved(DType::Float8E4M3, 7168, scales, None);
        assert_eq!(forwarded.image_bytes(), 7168 + 16 + 224);
        assert_eq!(forwarded.staging().chunk_bytes, 7408);
        let cast = moved(DType::Float8E4M3, 7168, scales, Some(dtype)).staging();
        assert_eq!((cast.cast_chunk, cast.chunk_bytes), (7168, 7408));
        assert_eq!(cast.buffer_bytes, 14_336 + 240);
        let wide = moved(DType::Float8E4M3, 7168, scales, Some(DType::Float32)).staging();
        assert_eq!((wide.cast_chunk, wide.chunk_bytes), (3584, 7408));
    }

    #[test]
    fn chunks_cover_every_row() {
        for count in [1, 3, 56, 10_000] {
            for hidden in [16, 144, 7168, 200_000] {
                for from in [None, Some(DType::Float16), Some(DType::Float32)] {
                    let dtype = DType::Uint8;
                    let row = moved(dtype, hidden, ScaleType { dtype, count }, from);
                    let staging = row.staging();
                    assert_eq!(row.image_bytes() % 16, 0);
                    assert_eq!((staging.chunk_bytes % 16, staging.buffer_bytes % 16), (0, 0));
                    assert!(staging.chunk_bytes <= staging.buffer_bytes);
                    assert_eq!(staging.cast_chunk % CAST_STEP, 0);
                    assert_eq!(staging.cast_chunk == 0, from.is_none());
                }
            }
        }
    }
}
