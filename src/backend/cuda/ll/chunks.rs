//! The chunks in which rows travel, each moved by one warp.

use crate::backend::cuda::params::ll::LL_SCALED_CHUNK_VECS;
use crate::model::group::ROW_ALIGN;
use crate::model::scales::WireRow;

/// Bytes of every chunk but the last: 16 for each lane of a warp.
pub const CHUNK_BYTES: usize = 32 * 16;
/// Most bytes of payload in a chunk of a row with scales, and most bytes of scales.
const SCALED_CHUNK_BYTES: usize = LL_SCALED_CHUNK_VECS as usize * CHUNK_BYTES;

/// A cache line.
const LINE_BYTES: usize = 128;

/// The size of the chunks of a row with scales. Ranks may differ in it, as the data that travels is the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChunkSize {
    /// For few tokens: more chunks, as there are enough warps for all.
    Small,
    Large,
}

/// A row's division into chunks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chunks {
    /// Number of chunks.
    pub count: usize,
    /// Number of the row's flags; does not depend on the chunk size.
    pub flags: usize,
    /// Bytes of payload per chunk; the last may have less.
    pub payload: usize,
    /// Bytes of scales per chunk; the last has the rest.
    pub scales: usize,
    /// Most 16-byte accesses of a lane to a chunk's payload, and to its scales.
    pub accesses: u32,
}

impl Chunks {
    /// The chunks of a row that travels as `row`.
    #[inline]
    pub fn of(row: WireRow, size: ChunkSize) -> Self {
        match row.scales {
            None => Self::without_scales(row.payload.bytes()),
            Some(_) => Self::with_scales(row, size),
        }
    }

    #[inline]
    fn without_scales(row_bytes: usize) -> Self {
        let count = chunks(row_bytes);
        Self { count, flags: count, payload: CHUNK_BYTES, scales: 0, accesses: 1 }
    }

    /// The chunks of a row with scales. With unusually many, which no cast makes, it is divided evenly.
    fn with_scales(row: WireRow, size: ChunkSize) -> Self {
        let Some(large) = Self::at_blocks(row, LL_SCALED_CHUNK_VECS) else {
            return Self::evenly(row);
        };
        // Flags must have the same positions in small and large chunks, also those of the scales, of which a lane's
        // first are flagged. And with less than 16 bytes of scales per small chunk, a block's scale would be in another
        // chunk than the block.
        let of_last = row.slot_bytes() - row.payload.bytes() - (large.count - 1) * large.scales;
        let suits = |small: &Self| {
            let is_part = small.scales * LL_SCALED_CHUNK_VECS as usize == large.scales;
            small.count == 1 || (small.scales > 0 && is_part && large.scales.max(of_last) <= CHUNK_BYTES)
        };
        let small = Self::at_blocks(row, 1).filter(|small| size == ChunkSize::Small && suits(small));
        small.map_or(large, |small| Self { flags: large.flags, ..small })
    }

    /// Chunks that end at the ends of a cast's blocks, each with the scales of its own elements: with blocks of 128 or
    /// 32 elements, a full chunk with the most accesses has a multiple of 16 bytes of scales.
    fn at_blocks(row: WireRow, accesses: u32) -> Option<Self> {
        let most = accesses as usize * CHUNK_BYTES;
        let payload = row.payload.bytes();
        let (scales, padded) = (row.scale_bytes(), row.slot_bytes() - payload);
        let count = payload.div_ceil(most).max(1);
        let per_chunk = scales * most / payload.max(1) / ROW_ALIGN * ROW_ALIGN;
        let of_last = padded.saturating_sub((count - 1) * per_chunk);
        let fits = of_last <= most && (count == 1 || per_chunk <= most);
        let flags = count * accesses as usize;
        fits.then(|| Self { count, flags, payload: most, scales: per_chunk.min(most), accesses })
    }

    fn evenly(row: WireRow) -> Self {
        let payload = row.payload.bytes();
        let padded = row.slot_bytes() - payload;
        let count = payload.max(padded).div_ceil(SCALED_CHUNK_BYTES).max(1);
        Self {
            count,
            flags: count * LL_SCALED_CHUNK_VECS as usize,
            payload: payload.div_ceil(count).next_multiple_of(ROW_ALIGN),
            scales: padded.div_ceil(count).next_multiple_of(ROW_ALIGN),
            accesses: LL_SCALED_CHUNK_VECS,
        }
    }
}

/// Bytes of a slot for a row of `row_bytes`: whole cache lines, as NVLink stores to parts of lines take longer.
pub fn slot_bytes(row_bytes: usize) -> usize {
    row_bytes.next_multiple_of(LINE_BYTES)
}

/// The most chunks of a row of `row_bytes`, including its scales.
pub fn chunks(row_bytes: usize) -> usize {
    row_bytes.div_ceil(CHUNK_BYTES).max(1)
}

/// The most flags of a row of `row_bytes`, including its scales.
pub fn most_flags(row_bytes: usize) -> usize {
    chunks(row_bytes).next_multiple_of(LL_SCALED_CHUNK_VECS as usize)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::scales::{Cast, ScaleType, cast_counts};
    use crate::model::tensor::{DType, RowType};

    fn wire(hidden: usize, dtype: DType, count: usize) -> WireRow {
        WireRow { payload: RowType { dtype: DType::Float8E4M3, hidden }, scales: Some(ScaleType { dtype, count }) }
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
                    let of_block = match dtype {
                        DType::Float32 => 4,
                        _ => 1,
                    };
                    for size in [ChunkSize::Small, ChunkSize::Large] {
                        let divided = Chunks::of(row, size);
                        assert_eq!(divided.payload, divided.accesses as usize * CHUNK_BYTES);
                        if divided.count > 1 {
                            assert_eq!(divided.scales, divided.payload / cast.block * of_block);
                        }
                        // The kernels move the last chunk's scales with one access per lane.
                        assert!(rest(row, divided) <= 4 * ROW_ALIGN, "{hidden} {dtype} {count}");
                    }
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
                    let flags = Chunks::of(row, ChunkSize::Large).flags;
                    assert!(flags <= most_flags(row.slot_bytes()));
                    for size in [ChunkSize::Small, ChunkSize::Large] {
                        let divided = Chunks::of(row, size);
                        assert!(divided.flags == flags && divided.count * divided.accesses as usize <= flags);
                        let most = divided.accesses as usize * CHUNK_BYTES;
                        assert!(divided.count <= chunks(row.slot_bytes()));
                        assert!(divided.payload <= most && divided.scales <= most && rest(row, divided) <= most);
                        assert!(divided.count * divided.payload >= hidden);
                        assert_eq!((divided.payload % ROW_ALIGN, divided.scales % ROW_ALIGN), (0, 0));
                    }
                }
            }
        }
    }

    #[test]
    fn rows_without_scales_are_cut_into_accesses_of_a_warp() {
        let count = |bytes| Chunks::without_scales(bytes).count;
        assert_eq!([16, 512, 528, 14_336].map(count), [1, 1, 2, 28]);
    }
}
