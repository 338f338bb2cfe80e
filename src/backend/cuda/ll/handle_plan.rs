//! The plan of a handle's operations: their grids, and the chunks in which a row travels. One warp moves a chunk.
#![forbid(unsafe_code)]

use crate::backend::cuda::driver::function::LaunchShape;
use crate::backend::cuda::ll::grid::Grid;
use crate::backend::cuda::params::ll::{LL_CHUNK_VECS, LlShape};
use crate::model::group::ROW_ALIGN;
use crate::model::scales::WireRow;
use crate::model::tensor::RowType;

/// Most bytes of a chunk: what the lanes of a warp hold at once. Of a chunk with scales, most of either part.
pub const CHUNK_BYTES: usize = LL_CHUNK_VECS as usize * 32 * 16;

/// A line of memory.
const LINE_BYTES: usize = 128;

/// The grid of a dispatch, ready to be launched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DispatchGrid {
    pub grid: Grid,
    /// Receiving blocks that notify.
    pub notify_blocks: u32,
    pub launch: LaunchShape,
}

/// What is the same for all operations of one handle: its tokens and ids per token do not change.
#[derive(Clone, Copy, Debug)]
pub struct HandlePlan {
    pub dispatch: DispatchGrid,
    /// Of one that casts its rows.
    pub cast_dispatch: DispatchGrid,
    pub combine: Grid,
    pub combine_launch: LaunchShape,
    /// Of what runs in the background, over several nodes.
    pub relay_dispatch: DispatchGrid,
    pub relay_combine: Grid,
    /// 1 if combines sum in exact mode.
    pub exact: u32,
    /// Without what depends on the rows.
    pub shape_of_handle: LlShape,
}

impl HandlePlan {
    /// The sizes of an operation on rows of type `row`, which the group's limits bound.
    pub fn shape(&self, row: RowType) -> LlShape {
        self.of_chunks(row.bytes(), Chunks::of_row(row.bytes()))
    }

    /// The sizes of a dispatch of rows that travel as `row`, with scales, and the bytes of scales in a chunk.
    pub fn scaled_shape(&self, row: WireRow) -> (LlShape, u32) {
        let chunks = Chunks::of_wire(row);
        let shape = self.of_chunks(row.slot_bytes(), chunks);
        (shape, chunks.scales as u32)
    }

    fn of_chunks(&self, row_bytes: usize, chunks: Chunks) -> LlShape {
        LlShape {
            row_bytes: row_bytes as u32,
            slot_bytes: slot_bytes(row_bytes) as u32,
            chunk_bytes: chunks.payload as u32,
            chunks: chunks.count as u32,
            ..self.shape_of_handle
        }
    }
}

/// How a row is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chunks {
    /// How many there are.
    pub count: usize,
    /// Bytes of payload of each; the last may have less.
    pub payload: usize,
    /// Bytes of scales of each; the last has the rest.
    pub scales: usize,
}

impl Chunks {
    /// Of a row without scales.
    pub fn of_row(row_bytes: usize) -> Self {
        let count = chunks(row_bytes);
        Self {
            count,
            payload: row_bytes.div_ceil(count).next_multiple_of(ROW_ALIGN),
            scales: 0,
        }
    }

    /// Of a row with scales.
    ///
    /// Chunks are cut where the blocks of a cast end, and each has the scales of its own elements: with blocks of 128
    /// or 32 elements, a full chunk has a multiple of 16 bytes of them. Rows with many scales, which no cast makes,
    /// are cut evenly.
    pub fn of_wire(row: WireRow) -> Self {
        let payload = row.payload.bytes();
        let (scales, padded) = (row.scale_bytes(), row.slot_bytes() - payload);
        let count = chunks(payload);
        let per_chunk = scales * CHUNK_BYTES / payload.max(1) / ROW_ALIGN * ROW_ALIGN;
        let of_last = padded.saturating_sub((count - 1) * per_chunk);
        if of_last <= CHUNK_BYTES && (count == 1 || per_chunk <= CHUNK_BYTES) {
            return Self {
                count,
                payload: CHUNK_BYTES,
                scales: per_chunk.min(CHUNK_BYTES),
            };
        }
        let count = count.max(chunks(padded));
        Self {
            count,
            payload: payload.div_ceil(count).next_multiple_of(ROW_ALIGN),
            scales: padded.div_ceil(count).next_multiple_of(ROW_ALIGN),
        }
    }
}

/// Bytes of a slot for a row of `row_bytes`. Slots begin at whole lines of memory: stores over NVLink to parts of
/// lines take longer.
pub fn slot_bytes(row_bytes: usize) -> usize {
    row_bytes.next_multiple_of(LINE_BYTES)
}

/// Most chunks of a row of `row_bytes`, its scales included.
pub fn chunks(row_bytes: usize) -> usize {
    row_bytes.div_ceil(CHUNK_BYTES).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::scales::{Cast, ScaleType, cast_counts};
    use crate::model::tensor::{DType, RowType};

    fn wire(hidden: usize, dtype: DType, count: usize) -> WireRow {
        WireRow {
            payload: RowType {
                dtype: DType::Float8E4M3,
                hidden,
            },
            scales: Some(ScaleType { dtype, count }),
        }
    }

    fn rest(row: WireRow, chunks: Chunks) -> usize {
        let padded = row.slot_bytes() - row.payload.bytes();
        padded - padded.min((chunks.count - 1) * chunks.scales)
    }

    #[test]
    fn the_scales_of_a_cast_are_in_the_chunk_of_their_elements() {
        for hidden in (16..20_000).step_by(16) {
            for dtype in [DType::Float32, DType::Uint8, DType::Int32] {
                let (large, small) = cast_counts(dtype, hidden).unwrap();
                for count in [Some(large), small].into_iter().flatten() {
                    let row = wire(hidden, dtype, count);
                    let scales = row.scales.unwrap();
                    let cast = Cast::new(DType::Bfloat16, hidden, scales, false).unwrap();
                    let cut = Chunks::of_wire(row);
                    assert_eq!(cut.payload, CHUNK_BYTES);
                    if cut.count > 1 {
                        let of_block = match dtype {
                            DType::Float32 => 4,
                            _ => 1,
                        };
                        assert_eq!(cut.scales, CHUNK_BYTES / cast.block * of_block);
                    }
                    // The kernels keep them in one access of each lane.
                    assert!(rest(row, cut) <= 4 * ROW_ALIGN, "{hidden} {dtype} {count}");
                }
            }
        }
    }

    #[test]
    fn every_row_fits_its_chunks() {
        for hidden in [16, 32, 2048, 2064, 3584, 7168, 16_384] {
            for dtype in [DType::Uint8, DType::Float16, DType::Float32] {
                for count in [1, 3, 56, 57, 448, 1000, 5000] {
                    let row = wire(hidden, dtype, count);
                    let cut = Chunks::of_wire(row);
                    assert!(cut.count <= chunks(row.slot_bytes()));
                    assert!(cut.payload <= CHUNK_BYTES && cut.scales <= CHUNK_BYTES);
                    assert!(cut.count * cut.payload >= hidden);
                    assert!(rest(row, cut) <= CHUNK_BYTES);
                    assert_eq!((cut.payload % ROW_ALIGN, cut.scales % ROW_ALIGN), (0, 0));
                }
            }
        }
    }

    #[test]
    fn rows_without_scales_are_cut_evenly() {
        let cut = |bytes| {
            let Chunks { count, payload, .. } = Chunks::of_row(bytes);
            (count, payload)
        };
        assert_eq!(cut(14_336), (7, 2048));
        assert_eq!(cut(16), (1, 16));
        assert_eq!(cut(2064), (2, 1040));
    }
}
