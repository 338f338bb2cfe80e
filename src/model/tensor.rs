//! Tensor descriptors as the library keeps them: copied.
#![forbid(unsafe_code)]

use crate::model::dtype::DType;

/// An address in device memory, or its device alias for mapped host memory. Never dereferenced
/// outside a backend.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct DevPtr(pub usize);

impl DevPtr {
    /// Whether the caller passed NULL.
    pub fn is_null(self) -> bool {
        self.0 == 0
    }
}

/// Most dimensions of a tensor.
pub const MAX_DIMS: usize = 5;

/// A dense row-major tensor: a copy of the caller's descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tensor {
    /// First element.
    pub data: DevPtr,
    /// Element type; `None` if its number is not NCCL's.
    pub dtype: Option<DType>,
    // 32 bits, as in the kernels: an ABI with wider extents refuses those that do not fit.
    sizes: [u32; MAX_DIMS],
    dims: u32,
}

impl Tensor {
    /// A tensor of `sizes`; those beyond the first [`MAX_DIMS`] are ignored.
    pub fn new(data: DevPtr, dtype: Option<DType>, sizes: &[u32]) -> Self {
        let dims = sizes.len().min(MAX_DIMS);
        let mut kept = [0; MAX_DIMS];
        for (to, from) in kept.iter_mut().zip(sizes) {
            *to = *from;
        }
        Self {
            data,
            dtype,
            sizes: kept,
            dims: dims as u32,
        }
    }

    /// Extents, slowest first.
    pub fn sizes(&self) -> &[u32] {
        self.sizes.get(..self.dims as usize).unwrap_or_default()
    }
}

/// Strides of a tensor that is not dense. Apart from it, as only scales may have them and every call
/// copies tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Strides([u32; MAX_DIMS]);

impl Strides {
    /// Strides in elements, one for each dimension.
    pub fn new(strides: &[u32]) -> Self {
        let mut kept = [0; MAX_DIMS];
        for (to, from) in kept.iter_mut().zip(strides) {
            *to = *from;
        }
        Self(kept)
    }

    /// Those of the first `dims` dimensions.
    pub fn of(&self, dims: usize) -> &[u32] {
        self.0.get(..dims).unwrap_or_default()
    }
}
