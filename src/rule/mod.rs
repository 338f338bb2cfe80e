//! Plain data of a call -> checked operations.
//!
//! Every rule that arguments must keep stands here once; what breaks one is data (`error::refusal`). Pure:
//! nothing is read through a pointer, nothing is remembered.
#![forbid(unsafe_code)]

pub mod argument;
pub mod group;
pub mod handle;
pub mod ht;
pub mod ll;

use crate::model::tensor::Tensor;

/// The tensors of a dispatch, each by the part that it plays.
#[derive(Clone, Copy, Debug, Default)]
pub struct DispatchTensors<'a> {
    /// Rows of this rank's tokens.
    pub tokens: Option<&'a Tensor>,
    /// Their scales.
    pub scales: Option<&'a Tensor>,
    /// Their ids, which HT delivers.
    pub ids: Option<&'a Tensor>,
    /// Their weights, which HT delivers.
    pub weights: Option<&'a Tensor>,
    /// Gets the received rows.
    pub out_tokens: Option<&'a Tensor>,
    /// Gets their scales.
    pub out_scales: Option<&'a Tensor>,
    /// Gets the received tokens' ids.
    pub out_ids: Option<&'a Tensor>,
    /// Gets the received tokens' weights.
    pub out_weights: Option<&'a Tensor>,
    /// Gets the received tokens per local expert.
    pub counter: Option<&'a Tensor>,
}

/// The tensors of a combine, each by the part that it plays.
#[derive(Clone, Copy, Debug, Default)]
pub struct CombineTensors<'a> {
    /// Rows of the experts.
    pub tokens: Option<&'a Tensor>,
    /// Their scales.
    pub scales: Option<&'a Tensor>,
    /// Weights beside the rows: in HT gradients, in LL another way to give `token_weights`.
    pub weights: Option<&'a Tensor>,
    /// Weights of this rank's tokens, which LL applies.
    pub token_weights: Option<&'a Tensor>,
    /// Gets the rows of this rank's tokens.
    pub out_tokens: Option<&'a Tensor>,
    /// Gets the gradients of their weights.
    pub out_weights: Option<&'a Tensor>,
}
