//! Element types, with NCCL's numbers; rows of elements; and the library's copies of tensor descriptors.

crate::named! {
    /// An NCCL element type, by NCCL's numbers.
    DType:
    Int8 = 0, "int8";
    Uint8 = 1, "uint8";
    Int32 = 2, "int32";
    Uint32 = 3, "uint32";
    Int64 = 4, "int64";
    Uint64 = 5, "uint64";
    Float16 = 6, "float16";
    Float32 = 7, "float32";
    Float64 = 8, "float64";
    Bfloat16 = 9, "bfloat16";
    Float8E4M3 = 10, "float8e4m3";
    Float8E5M2 = 11, "float8e5m2";
}

impl DType {
    /// The type with the largest number.
    pub const LAST: DType = DType::Float8E5M2;

    pub fn size(self) -> usize {
        match self {
            DType::Int8 | DType::Uint8 | DType::Float8E4M3 | DType::Float8E5M2 => 1,
            DType::Float16 | DType::Bfloat16 => 2,
            DType::Int32 | DType::Uint32 | DType::Float32 => 4,
            DType::Int64 | DType::Uint64 | DType::Float64 => 8,
        }
    }

    /// Whether combines can sum, and casts can round, rows of this type: bf16, f16 and f32.
    pub fn is_summable(self) -> bool {
        matches!(self, DType::Bfloat16 | DType::Float16 | DType::Float32)
    }
}

/// One token row: `hidden` elements of `dtype`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowType {
    pub dtype: DType,
    /// Elements per row.
    pub hidden: usize,
}

impl RowType {
    pub fn bytes(self) -> usize {
        self.hidden * self.dtype.size()
    }
}

/// A device address, also of mapped host memory. Never dereferenced outside a backend.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct DevPtr(pub usize);

impl DevPtr {
    pub fn is_null(self) -> bool {
        self.0 == 0
    }
}

pub const MAX_DIMS: usize = 5;

/// The first of `numbers`, padded with zeros.
#[inline]
fn first(numbers: &[u32]) -> [u32; MAX_DIMS] {
    std::array::from_fn(|index| numbers.get(index).copied().unwrap_or(0))
}

/// A dense row-major tensor: a copy of the caller's descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tensor {
    pub data: DevPtr,
    /// Element type; `None` if the number is not NCCL's.
    pub dtype: Option<DType>,
    // 32 bits, as in kernels; ABIs with wider extents refuse larger numbers.
    sizes: [u32; MAX_DIMS],
    dims: u32,
}

impl Tensor {
    /// A tensor of `sizes`; those beyond the first [`MAX_DIMS`] are ignored.
    #[inline]
    pub fn new(data: DevPtr, dtype: Option<DType>, sizes: &[u32]) -> Self {
        Self { data, dtype, sizes: first(sizes), dims: sizes.len().min(MAX_DIMS) as u32 }
    }

    /// Extents, slowest dimension first.
    pub fn sizes(&self) -> &[u32] {
        self.sizes.get(..self.dims as usize).unwrap_or_default()
    }

    /// Bytes of the last dimension, if there is one.
    pub fn row_bytes(&self) -> Option<usize> {
        Some(*self.sizes().last()? as usize * self.dtype?.size())
    }
}

/// Strides of a tensor that is not dense. Separate from `Tensor`, which every call copies: only scales have strides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Strides([u32; MAX_DIMS]);

impl Strides {
    /// Strides in elements, one for each dimension.
    pub fn new(strides: &[u32]) -> Self {
        Self(first(strides))
    }

    /// The strides of the first `dims` dimensions.
    pub fn of(&self, dims: usize) -> &[u32] {
        self.0.get(..dims).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_nccls() {
        for dtype in DType::ALL {
            assert_eq!(DType::from_raw(dtype as u32), Some(dtype));
        }
        assert_eq!(DType::from_raw(9), Some(DType::Bfloat16));
        assert_eq!(DType::from_raw(4), Some(DType::Int64));
        assert_eq!(DType::from_raw(12), None);
    }
}
