//! Tensor descriptors as the library keeps them: copied, with known tags, sorted by tag.
#![forbid(unsafe_code)]

use crate::model::dtype::DType;
use std::fmt;

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

/// What a tensor means in a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
#[allow(missing_docs)] // As in `nccl_ep.h`, where each is described.
pub enum Tag {
    Tokens = 1,
    TopkIdx = 2,
    TopkWeights = 3,
    Scales = 4,
    RecvExpertCounterDevice = 5,
    RecvExpertCounterHost = 6,
}

impl Tag {
    /// All tags that mean something to an operation, from 1 on.
    pub const ALL: [Tag; 6] = [
        Tag::Tokens,
        Tag::TopkIdx,
        Tag::TopkWeights,
        Tag::Scales,
        Tag::RecvExpertCounterDevice,
        Tag::RecvExpertCounterHost,
    ];

    /// The tag numbered `raw`; `None` for tags that no operation reads.
    pub fn from_raw(raw: u32) -> Option<Self> {
        Self::ALL.get((raw as usize).checked_sub(1)?).copied()
    }
}

impl fmt::Display for Tag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Tag::Tokens => "TOKENS",
            Tag::TopkIdx => "TOPK_IDX",
            Tag::TopkWeights => "TOPK_WEIGHTS",
            Tag::Scales => "SCALES",
            Tag::RecvExpertCounterDevice => "RECV_EXPERT_COUNTER_DEVICE",
            Tag::RecvExpertCounterHost => "RECV_EXPERT_COUNTER_HOST",
        })
    }
}

/// A dense row-major tensor: a copy of what the caller's descriptor said.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tensor {
    /// First element.
    pub data: DevPtr,
    /// Element type; `None` if its number is not NCCL's.
    pub dtype: Option<DType>,
    sizes: [u32; MAX_DIMS],
    dims: u32,
}

impl Tensor {
    /// A tensor of `sizes`, of which the first [`MAX_DIMS`] count.
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

/// The tensors of one argument list, at most one per tag: the first with that tag counts.
#[derive(Clone, Copy, Debug, Default)]
pub struct TensorSet {
    by_tag: [Option<Tensor>; Tag::ALL.len()],
}

impl TensorSet {
    /// The tensor tagged `tag`.
    pub fn get(&self, tag: Tag) -> Option<&Tensor> {
        self.by_tag.get(tag as usize - 1).and_then(Option::as_ref)
    }

    /// Adds `tensor` unless its tag is taken already.
    pub fn add(&mut self, tag: Tag, tensor: Tensor) {
        if let Some(place @ None) = self.by_tag.get_mut(tag as usize - 1) {
            *place = Some(tensor);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_tag_has_its_number() {
        for tag in Tag::ALL {
            assert_eq!(Tag::from_raw(tag as u32), Some(tag));
        }
        assert_eq!(Tag::from_raw(0), None);
        assert_eq!(Tag::from_raw(7), None);
    }

    #[test]
    fn the_first_tensor_of_a_tag_counts() {
        let mut set = TensorSet::default();
        set.add(
            Tag::Tokens,
            Tensor::new(DevPtr(16), Some(DType::Bfloat16), &[2, 8]),
        );
        set.add(
            Tag::Tokens,
            Tensor::new(DevPtr(32), Some(DType::Bfloat16), &[4, 8]),
        );
        assert_eq!(set.get(Tag::Tokens).map(|t| t.data), Some(DevPtr(16)));
        assert!(set.get(Tag::TopkIdx).is_none());
    }
}
