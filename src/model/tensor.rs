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

/// A tensor: a copy of the caller's descriptor. It is dense and row-major unless it has strides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tensor {
    /// First element.
    pub data: DevPtr,
    /// Element type; `None` if its number is not NCCL's.
    pub dtype: Option<DType>,
    // 32 bits, as in the kernels: an ABI with wider extents refuses those that do not fit.
    sizes: [u32; MAX_DIMS],
    dims: u32,
    strides: Option<[u32; MAX_DIMS]>,
}

impl Tensor {
    /// A dense tensor of `sizes`; those beyond the first [`MAX_DIMS`] are ignored.
    pub fn new(data: DevPtr, dtype: Option<DType>, sizes: &[u32]) -> Self {
        let dims = sizes.len().min(MAX_DIMS);
        Self {
            data,
            dtype,
            sizes: kept(sizes),
            dims: dims as u32,
            strides: None,
        }
    }

    /// The same tensor with `strides` in elements, one for each dimension.
    pub fn with_strides(mut self, strides: &[u32]) -> Self {
        self.strides = Some(kept(strides));
        self
    }

    /// Extents, slowest first.
    pub fn sizes(&self) -> &[u32] {
        self.sizes.get(..self.dims as usize).unwrap_or_default()
    }

    /// Strides in elements; `None` if the tensor is dense.
    pub fn strides(&self) -> Option<&[u32]> {
        self.strides.as_ref()?.get(..self.dims as usize)
    }
}

fn kept(numbers: &[u32]) -> [u32; MAX_DIMS] {
    let mut kept = [0; MAX_DIMS];
    for (to, from) in kept.iter_mut().zip(numbers) {
        *to = *from;
    }
    kept
}
