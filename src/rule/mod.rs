//! Turns the plain data of a call into checked operations.
//!
//! All rules for arguments are here. A broken rule is data (`error::refusal`), not text. No pointer is dereferenced,
//! and nothing is stored.

pub mod argument;
pub mod group;
pub mod handle;
pub mod ht;
pub mod ll;
pub mod rows;

use crate::model::group::GroupFacts;
use crate::model::ops::RoutingCounters;
use crate::model::tensor::{Strides, Tensor};

/// The tensors of a dispatch, by their roles.
#[derive(Clone, Copy, Debug, Default)]
pub struct DispatchTensors<'a> {
    /// Rows of this rank's tokens.
    pub tokens: Option<&'a Tensor>,
    /// Their scales.
    pub scales: Option<&'a Tensor>,
    /// Strides of the scales; `None` if they are dense.
    pub scale_strides: Option<&'a Strides>,
    /// Ids of this rank's tokens; HT delivers them.
    pub ids: Option<&'a Tensor>,
    /// Weights of this rank's tokens; HT delivers them.
    pub weights: Option<&'a Tensor>,
    /// Gets the received rows.
    pub out_tokens: Option<&'a Tensor>,
    /// Gets the scales of received rows.
    pub out_scales: Option<&'a Tensor>,
    /// Strides of the scales; `None` if they are dense.
    pub out_scale_strides: Option<&'a Strides>,
    /// Gets the received tokens' ids.
    pub out_ids: Option<&'a Tensor>,
    /// Gets the received tokens' weights.
    pub out_weights: Option<&'a Tensor>,
    /// Gets the received tokens per local expert.
    pub counter: Option<&'a Tensor>,
    /// If not 0, the float32 scales of a cast are powers of two.
    pub round_scales: u32,
    /// Whether delivered ids are global rather than local to this rank.
    pub global_ids: bool,
    /// HT without zones: whether rows and scales that no token fills are left unchanged rather than zeroed.
    pub keeps_rest: bool,
    /// HT with zones: what the dispatch reports, as a routing does; checked by the ABI.
    pub counters: RoutingCounters,
}

impl DispatchTensors<'_> {
    /// The first local expert's number in the delivered ids.
    fn first_id(&self, facts: &GroupFacts) -> usize {
        if self.global_ids { facts.experts_of(facts.rank).start } else { 0 }
    }
}

/// The tensors of a combine, by their roles.
#[derive(Clone, Copy, Debug, Default)]
pub struct CombineTensors<'a> {
    /// Rows of the experts.
    pub tokens: Option<&'a Tensor>,
    /// Their scales.
    pub scales: Option<&'a Tensor>,
    /// HT: gradients of the weights, some for each row; LL: an alternative to `token_weights`.
    pub weights: Option<&'a Tensor>,
    /// Weights of this rank's tokens; LL applies them.
    pub token_weights: Option<&'a Tensor>,
    /// Gets the rows of this rank's tokens.
    pub out_tokens: Option<&'a Tensor>,
    /// Gets the scales of these rows.
    pub out_scales: Option<&'a Tensor>,
    /// Gets the gradients of the weights.
    pub out_weights: Option<&'a Tensor>,
    /// HT: whether rows and gradients may be more than came here, and either more than the other.
    pub keeps_rest: bool,
}
