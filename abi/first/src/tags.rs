//! The tags of this ABI, and lists of tensors sorted by them.
#![forbid(unsafe_code)]

use nccl_ep_core::model::tensor::{Strides, Tensor};
use std::fmt;

/// The meaning of a tensor in a call.
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
    /// All tags that operations use, from 1 on.
    pub const ALL: [Tag; 6] = [
        Tag::Tokens,
        Tag::TopkIdx,
        Tag::TopkWeights,
        Tag::Scales,
        Tag::RecvExpertCounterDevice,
        Tag::RecvExpertCounterHost,
    ];

    /// The tag numbered `raw`; `None` for tags that no operation uses.
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

/// The tensors of one argument list, at most one per tag.
#[derive(Clone, Copy, Debug, Default)]
pub struct TensorSet {
    by_tag: [Option<Tensor>; Tag::ALL.len()],
    scale_strides: Option<Strides>,
}

impl TensorSet {
    /// The tensor tagged `tag`.
    pub fn get(&self, tag: Tag) -> Option<&Tensor> {
        self.by_tag.get(tag as usize - 1).and_then(Option::as_ref)
    }

    /// Adds `tensor`, which is the one with this tag from now on.
    pub fn add(&mut self, tag: Tag, tensor: Tensor) {
        if let Some(place) = self.by_tag.get_mut(tag as usize - 1) {
            *place = Some(tensor);
        }
    }

    /// The strides of the scales, unless they are dense.
    pub fn scale_strides(&self) -> Option<&Strides> {
        self.scale_strides.as_ref()
    }

    /// Sets these.
    pub fn set_scale_strides(&mut self, strides: Strides) {
        self.scale_strides = Some(strides);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nccl_ep_core::model::tensor::DType;
    use nccl_ep_core::model::tensor::DevPtr;

    #[test]
    fn every_tag_has_its_number() {
        for tag in Tag::ALL {
            assert_eq!(Tag::from_raw(tag as u32), Some(tag));
        }
        assert_eq!(Tag::from_raw(0), None);
        assert_eq!(Tag::from_raw(7), None);
    }

    #[test]
    fn tensors_are_found_by_tag() {
        let mut set = TensorSet::default();
        let tensor = Tensor::new(DevPtr(16), Some(DType::Bfloat16), &[2, 8]);
        set.add(Tag::Tokens, tensor);
        assert_eq!(set.get(Tag::Tokens).map(|t| t.data), Some(DevPtr(16)));
        assert!(set.get(Tag::TopkIdx).is_none());
    }
}
